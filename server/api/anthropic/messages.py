"""POST /v1/messages and /v1/messages/count_tokens."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.anthropic.answers import MessageDraft
from server.api.anthropic.request import chat_request, prompt_request
from server.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from server.api.chat_turn import ChatTurn
from server.api.drafts import DraftChunks, DraftStream, complete, json_response
from server.api.tokenize import count_tokens as count_prompt_tokens
from server.api.usage import usage_of
from server.front.generations import Answer
from server.front.requests import Requests
from server.front.served import ServedModel
from server.http.described import STREAM_RESPONSE


def messages_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoints' routes."""
    router = APIRouter()

    @router.post("/v1/messages", response_model=None, responses=STREAM_RESPONSE)
    async def create_message(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer."""
        name = model.check_name(body.model)
        request_id = f"msg_{uuid.uuid4().hex}"
        turn = await ChatTurn.open(
            chat_request(body), model, requests, request_id=request_id, cut_to_fit=True
        )
        answer = turn.answer
        draft = MessageDraft(
            answer.request_id,
            name,
            usage=lambda: _usage(answer),
            context_ends=answer.generations[0].ask.request.params.max_tokens < body.max_tokens,
        )
        chunks = DraftChunks(turn.parser(0), draft)
        if body.stream:
            return DraftStream(answer, chunks)
        await complete(answer, chunks, http)
        return json_response(draft.message)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the tokens of the prompt that a request would make."""
        model.check_name(body.model)
        return {"input_tokens": await count_prompt_tokens(prompt_request(body), model)}

    return router


def _usage(answer: Answer) -> dict[str, int]:
    """Count as Anthropic does: input_tokens are those that were not read from the cache."""
    counted = usage_of(answer.generations, 1)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
