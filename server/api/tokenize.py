"""POST /tokenize and /detokenize, with vLLM's fields: convert a prompt or a chat to token ids, and ids to text."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from server.api.prompts import LONG_TEXT, check_unicode, encode, render_chat
from server.api.schemas import MAX_MESSAGES, ChatRequest
from server.api.served import ServedModel
from server.front.errors import bad_request
from server.http.json_writer import json_response
from server.http.routes import new_router, validated

_MAX_CHARS = 1 << 20  # tokenizing takes up to two hundred times the memory of a text
_MANY_TOKENS = LONG_TEXT // 4  # decoding more takes milliseconds, so a thread does it
_PROMPT_ONLY = {"prompt", "add_special_tokens", "return_token_strs"}


class TokenizeRequest(BaseModel):
    """POST /tokenize: either prompt or messages."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None  # default: true for a prompt; templates write their own tokens
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


async def count_tokens(body: ChatRequest, model: ServedModel) -> int:
    """Return the number of tokens in a chat's prompt.

    Raises:
        ApiError: 400 if a message is invalid or the template refuses it.
    """
    return len(
        await encode(await render_chat(body, model), model, add_special_tokens=False, param="messages")
    )


def tokenize_routes(model: ServedModel) -> APIRouter:
    """Return the endpoints' routes."""
    router = new_router()

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a prompt or a chat. An image is one token here."""
        model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Send either prompt or messages.", "prompt")
        if body.messages is None:
            text, special, param = body.prompt or "", body.add_special_tokens is not False, "prompt"
        else:
            text, special, param = await _chat_text(body, model), bool(body.add_special_tokens), "messages"
        check_unicode(text, param)
        if len(text) > _MAX_CHARS:
            raise bad_request(f"{param} has {len(text)} characters; the maximum is {_MAX_CHARS}.", param)
        is_long = len(text) >= LONG_TEXT
        tokenize_text = partial(model.tokenizer.encode, text, add_special_tokens=special)
        token_ids = await model.run(tokenize_text, is_long=is_long)
        spell = partial(model.tokenizer.token_strings, token_ids)
        answer = {
            "count": len(token_ids),
            "max_model_len": model.max_len(),
            "tokens": token_ids,
            "token_strs": await model.run(spell, is_long=is_long) if body.return_token_strs else None,
        }
        return json_response(answer)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids, including special tokens."""
        model.check_name(body.model)
        is_long = len(body.tokens) >= _MANY_TOKENS
        return {"prompt": await model.run(partial(_text_of, body.tokens, model), is_long=is_long)}

    return router


def _text_of(tokens: list[int], model: ServedModel) -> str:
    highest = model.tokenizer.num_spelled - 1
    wrong = next((token_id for token_id in tokens if not 0 <= token_id <= highest), None)
    if wrong is not None:
        raise bad_request(f"tokens has {wrong}; token ids are 0 to {highest}.", "tokens")
    return model.tokenizer.decode(tokens, skip_special_tokens=False)


async def _chat_text(body: TokenizeRequest, model: ServedModel) -> str:
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "add_generation_prompt and continue_final_message cannot both be true.", "add_generation_prompt"
        )
    fields = body.model_dump(exclude=_PROMPT_ONLY, exclude_unset=True)
    return await render_chat(validated(ChatRequest.model_validate, fields), model, takes_images=True)
