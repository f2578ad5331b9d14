"""Build Ollama's answers: JSON objects, one per line, while text arrives, and a last one with counts and the finish reason.

Each call is sent complete, in a separate object. A call that was cut off is left out. A stream that is silent for long sends an
object without text instead of a comment: clients parse every line as JSON and would fail at a comment or an empty line.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from server.api.blocks import (
    Block,
    BlockEvent,
    BlockKind,
    Blocks,
    Closed,
    DraftChunks,
    DraftStream,
    Event,
    Grew,
)
from server.api.chat_turn import MessageParser
from server.api.parsers.deltas import Delta
from server.front.errors import ApiError
from server.front.generations import Answer, Generation, Piece
from server.front.timing import timing_of
from server.http.json_writer import json_bytes

LINES = "application/x-ndjson"


class TurnDraft:
    """A growing answer. `whole` is the complete answer once it has ended."""

    def __init__(self, model_name: str, answer: Answer, *, is_chat: bool) -> None:
        """Args: is_chat puts the content into a message (/api/chat) instead of a response (/api/generate)."""
        self.whole: Event = {}
        self._model_name, self._answer, self._is_chat = model_name, answer, is_chat
        self._blocks = Blocks()

    def begin(self) -> list[Event]:
        """Return nothing: the first object has text."""
        return []

    def push(self, deltas: Sequence[Delta], piece: Piece) -> list[Event]:
        return self._events(self._blocks.push(deltas))

    def finish(self, piece: Piece, *, cuts_call: bool = False) -> list[Event]:
        closed = self._blocks.finish()
        events = [] if cuts_call else self._events(closed)
        is_cut = piece.finish_reason is not None and piece.finish_reason.is_cut
        reason = "length" if is_cut else "stop"
        end = {"done": True, "done_reason": reason, **counts_of(self._answer.generations[0])}
        blocks = self._blocks.all[:-1] if cuts_call else self._blocks.all
        said = self._said(
            _text(blocks, BlockKind.TEXT),
            _text(blocks, BlockKind.REASONING),
            [block for block in blocks if block.kind is BlockKind.CALL],
        )
        self.whole = self._head() | said | end
        return [*events, self._head() | self._said() | end]

    def fail(self, failure: ApiError) -> list[Event]:
        return [failure.ollama_body()]

    def silent(self) -> Event:
        """Return an object without text."""
        return self._head() | self._said() | {"done": False}

    def _events(self, happened: Sequence[BlockEvent]) -> list[Event]:
        said = []
        for each in happened:
            if isinstance(each, Grew) and each.block.kind is BlockKind.TEXT:
                said.append(self._said(each.text))
            elif isinstance(each, Grew) and each.block.kind is BlockKind.REASONING:
                said.append(self._said("", each.text))
            elif isinstance(each, Closed) and each.block.kind is BlockKind.CALL:
                said.append(self._said("", "", [each.block]))
        return [self._head() | each | {"done": False} for each in said]

    def _head(self) -> Event:
        return _head(self._model_name)

    def _said(self, text: str = "", thinking: str = "", calls: Sequence[Block] = ()) -> Event:
        more: Event = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = [_call(block) for block in calls]
        return _said(text, more, is_chat=self._is_chat)


class LineChunks(DraftChunks):
    """Feed a draft, and encode its objects as lines."""

    def encode(self, events: Sequence[Event]) -> bytes:
        return b"".join(json_bytes(each) + b"\n" for each in events)


class LineStream(DraftStream):
    """Stream a draft's objects."""

    content_type = LINES.encode()

    def __init__(self, answer: Answer, parser: MessageParser, draft: TurnDraft) -> None:
        chunks = LineChunks(parser, draft)
        super().__init__(answer, chunks)
        self._silence = chunks.encode([draft.silent()])

    def comment(self) -> bytes:
        return self._silence


def loaded(model_name: str, *, is_chat: bool) -> Event:
    """Return the answer to a request that only loads the model."""
    return _head(model_name) | _said("", {}, is_chat=is_chat) | {"done": True, "done_reason": "load"}


def counts_of(generation: Generation) -> dict[str, int]:
    """Return token counts and durations in nanoseconds. The load duration is 0; evaluation ends with the answer."""
    now_s = time.monotonic()
    timing = timing_of(generation, now_s=now_s)
    since_first_s = timing.e2e_s - timing.first_token_s if timing.first_token_s is not None else 0.0
    return {
        "total_duration": _ns(timing.e2e_s),
        "load_duration": 0,
        "prompt_eval_count": len(generation.ask.request.prompt_ids),
        "prompt_eval_duration": _ns(timing.prefill_s),
        "eval_count": generation.num_tokens,
        "eval_duration": _ns(since_first_s),
    }


def timestamp(moment: datetime) -> str:
    """Return a moment in Ollama's format, in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _head(model_name: str) -> Event:
    return {"model": model_name, "created_at": timestamp(datetime.now(UTC))}


def _said(text: str, more: Event, *, is_chat: bool) -> Event:
    if is_chat:
        return {"message": {"role": "assistant", "content": text, **more}}
    return {"response": text, **more}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _text(blocks: Sequence[Block], kind: BlockKind) -> str:
    return "".join(block.text for block in blocks if block.kind is kind)


def _call(block: Block) -> dict[str, Any]:
    function = {"index": block.call_index, "name": block.name, "arguments": block.arguments()}
    return {"id": block.call_id, "function": function}
