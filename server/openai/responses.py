"""/v1/responses: create, retrieve, delete, cancel, and count a prompt's tokens."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import ApiError, bad_request
from server.openai.chat_turn import ChatTurn
from server.openai.drafts import DraftChunks, DraftStream, complete, json_response
from server.openai.logprobs import chat_logprobs
from server.openai.reasoning_tokens import ReasoningCount
from server.openai.responses_chat import chat_request
from server.openai.responses_input import ChatMessage, items_to_messages, messages_of
from server.openai.responses_output import ResponseDraft
from server.openai.responses_schemas import ResponsesRequest, refuse_unserved_responses
from server.openai.responses_store import ResponseStore
from server.openai.tokenize import count_tokens
from server.openai.usage import usage_of
from server.request_life.generations import Answer
from server.request_life.requests import Requests
from server.request_life.served import ServedModel
from server.web.described import STREAM_RESPONSE


def responses_routes(model: ServedModel, requests: Requests, store: ResponseStore) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=None, responses=STREAM_RESPONSE)
    async def create_response(body: ResponsesRequest, http: HttpRequest) -> Response:
        """Answer, and keep the response unless store is false."""
        name = model.check_name(body.model)
        refuse_unserved_responses(body)
        history = _history(body, store)
        with _naming_input():
            turn = await ChatTurn.open(
                chat_request(body, history),
                model,
                requests,
                request_id=f"resp_{uuid.uuid4().hex}",
                cut_to_fit=True,
            )
        draft = _draft(body, name, model, turn.answer)

        def keep() -> None:
            if body.store is not False:
                store.put(draft.response, [*history, *items_to_messages(draft.response["output"])])

        chunks = DraftChunks(turn.parser(0), draft, on_end=keep)
        if body.stream:
            return DraftStream(turn.answer, chunks)
        await complete(turn.answer, chunks, http)
        return json_response(draft.response)

    @router.post("/v1/responses/input_tokens", response_model=None)
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        """Count the tokens of the prompt that a request would make."""
        model.check_name(body.model)
        refuse_unserved_responses(body)
        with _naming_input():
            num_tokens = await count_tokens(chat_request(body, _history(body, store)), model)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @router.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve_response(response_id: str, stream: bool = False) -> Response:
        """Show a stored response."""
        if stream:
            raise bad_request("stream is not supported here: responses are stored whole.", "stream")
        return json_response(store.get(response_id, "response_id").response)

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel_response(response_id: str) -> None:
        """Refuse: there are no background responses."""
        store.get(response_id, "response_id")
        raise bad_request("Cannot cancel a synchronous response.", "response_id")

    return router


def _history(body: ResponsesRequest, store: ResponseStore) -> list[ChatMessage]:
    """Return the conversation that a request goes on with, its own input last."""
    given = messages_of(body.input)
    if body.previous_response_id is None:
        return given
    return [*store.get(body.previous_response_id, "previous_response_id").messages, *given]


def _draft(body: ResponsesRequest, name: str, model: ServedModel, answer: Answer) -> ResponseDraft:
    params = answer.generations[0].ask.request.params
    tokenizer = model.tokenizer
    return ResponseDraft(
        answer.request_id,
        body,
        name,
        temperature=params.temperature,
        top_p=params.top_p,
        word_logprobs=lambda entries: chat_logprobs(entries, tokenizer, body.top_logprobs or 0)["content"],
        usage=lambda num_reasoning: _usage(answer, num_reasoning),
        reasoning=ReasoningCount(lambda text: len(tokenizer.encode(text, add_special_tokens=False))),
    )


def _usage(answer: Answer, num_reasoning: int) -> dict[str, Any]:
    counted = usage_of(answer.generations, 1)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": counted["total_tokens"],
    }


@contextlib.contextmanager
def _naming_input() -> Iterator[None]:
    """Let errors about the chat's messages name what the client sent: input."""
    try:
        yield
    except ApiError as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        raise ApiError(error.status, error.message, param="input", headers=error.headers) from error
