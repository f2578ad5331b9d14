"""POST /v1/messages and /v1/messages/count_tokens: the endpoints, and the message object while it grows.

The order of events follows https://docs.anthropic.com/en/api/messages-streaming: message_start; for each block its start,
deltas and stop; message_delta with the stop reason and the usage; message_stop.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from scheduler.policy.request import FinishReason
from server.api.anthropic.request import (
    OWN_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    prompt_request,
)
from server.api.blocks import (
    Block,
    BlockEvent,
    BlockKind,
    Blocks,
    Closed,
    DraftChunks,
    DraftStream,
    Grew,
    Opened,
    complete,
)
from server.api.chat_turn import ChatTurn
from server.api.media import refuse_other_fields
from server.api.parsers.deltas import Delta
from server.api.schemas import refuse_foreign
from server.api.served import ServedModel
from server.api.tokenize import count_tokens as count_prompt_tokens
from server.front.errors import ApiError, named_by
from server.front.generations import Piece
from server.front.requests import Requests
from server.http.json_writer import json_response
from server.http.routes import STREAM_RESPONSE, new_router

Event = dict[str, Any]

_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageDraft:
    """The message object and its stream events."""

    def __init__(
        self, message_id: str, model: str, *, usage: Callable[[], dict[str, int]], context_ends: bool
    ) -> None:
        """Args: usage returns the token counts so far; context_ends is whether the context leaves less than max_tokens."""
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._blocks = Blocks()
        self._signatures: dict[int, str] = {}
        self._usage = usage
        self._context_ends = context_ends

    def begin(self) -> list[Event]:
        message = self.message | {"usage": self._usage() | {"output_tokens": 0}}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, deltas: Sequence[Delta], piece: Piece) -> list[Event]:
        return [event for each in self._blocks.push(deltas) for event in self._events_of(each)]

    def finish(self, piece: Piece, *, cuts_call: bool = False) -> list[Event]:
        events = [event for each in self._blocks.finish() for event in self._events_of(each)]
        reason = self._stop_reason(piece, cuts_call=cuts_call)
        stop = {"stop_reason": reason, "stop_sequence": _stop_sequence(piece)}
        usage = self._usage()
        # Clients expect a call to be incomplete after max_tokens, but not after a stop sequence.
        hides_call = cuts_call and piece.finish_reason is FinishReason.STOP
        blocks = self._blocks.all[:-1] if hides_call else self._blocks.all
        content = [self._content(block) for block in blocks]
        self.message |= {"content": content, "usage": usage, **stop}
        return [*events, {"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]

    def fail(self, failure: ApiError) -> list[Event]:
        return [failure.anthropic_body()]

    def _events_of(self, happened: BlockEvent) -> list[Event]:
        block = happened.block
        if isinstance(happened, Opened):
            return [{"type": "content_block_start", "index": block.index, "content_block": _beginning(block)}]
        if isinstance(happened, Grew):
            kind, field = _DELTAS[block.kind]
            return [_delta(block, {"type": kind, field: happened.text})]
        assert isinstance(happened, Closed), happened
        events = [{"type": "content_block_stop", "index": block.index}]
        if block.kind is BlockKind.REASONING:
            signature = {"type": "signature_delta", "signature": self._signature(block)}
            events.insert(0, _delta(block, signature))
        return events

    def _content(self, block: Block) -> dict[str, Any]:
        """Return a complete block."""
        if block.kind is BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": self._signature(block)}
        if block.kind is BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments()}

    def _signature(self, block: Block) -> str:
        """Return a random signature: clients drop thinking without one. It is not checked when clients send it back."""
        return self._signatures.setdefault(block.index, uuid.uuid4().hex)

    def _stop_reason(self, piece: Piece, *, cuts_call: bool) -> str:
        if piece.finish_reason is not None and piece.finish_reason.is_cut:
            return "model_context_window_exceeded" if self._context_ends else "max_tokens"
        if self._blocks.has_calls and not cuts_call:
            return "tool_use"
        return "end_turn" if _stop_sequence(piece) is None else "stop_sequence"


def _beginning(block: Block) -> dict[str, Any]:
    """Return a block without content; its content follows as deltas."""
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, delta: dict[str, str]) -> Event:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _stop_sequence(piece: Piece) -> str | None:
    return piece.stop_reason if isinstance(piece.stop_reason, str) else None


def messages_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoints' routes."""
    router = new_router()

    @router.post("/v1/messages", response_model=None, responses=STREAM_RESPONSE)
    async def create_message(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer a conversation in Anthropic's format."""
        name = model.check_name(body.model)
        refuse_other_fields(body.model_extra)
        refuse_foreign(body.model_extra, form="output_config.format", stop="stop_sequences")
        request_id = f"msg_{uuid.uuid4().hex}"
        with named_by(OWN_NAMES):
            turn = await ChatTurn.open(
                chat_request(body), model, requests, request_id=request_id, cut_to_fit=True
            )
        answer = turn.answer
        draft = MessageDraft(
            answer.request_id,
            name,
            usage=lambda: _usage(turn),
            context_ends=answer.generations[0].ask.request.params.max_tokens < body.max_tokens,
        )
        chunks = DraftChunks(turn.parser(0), draft)
        if body.stream:
            return DraftStream(answer, chunks)
        await complete(answer, chunks, http)
        return json_response(draft.message)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the prompt tokens of a request without running it."""
        model.check_name(body.model)
        return {"input_tokens": await count_prompt_tokens(prompt_request(body), model)}

    return router


def _usage(turn: ChatTurn) -> dict[str, int]:
    """Return the counts in Anthropic's form: input_tokens excludes cached tokens."""
    counted = turn.usage()
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
