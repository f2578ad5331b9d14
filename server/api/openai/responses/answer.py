"""Build a response while it grows: its output items and its events.

`ResponseDraft` serves both streams and whole answers, which ignore the events. The order of events follows
https://platform.openai.com/docs/api-reference/responses-streaming: created, in_progress, then for each item added, the
events of its content, and done; finally completed, incomplete or failed.

The last four events of a text repeat all of its log-probabilities: 48 MB for 8,000 tokens with 20 each. So these are encoded once, and
a thread encodes the events.
"""

import time
import uuid
from collections.abc import Callable, Sequence
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
    Opened,
    event_pieces,
    named_events,
)
from server.api.openai.responses.request import ResponsesRequest
from server.api.openai.responses.text_logprobs import TextEntries, TextLogprobs
from server.api.parsers.deltas import Delta
from server.api.served import ServedModel
from server.api.streaming import EventSender
from server.front.errors import ApiError
from server.front.generations import Answer, Piece, Pieces
from server.http.json_writer import LONG_CHARS, EncodedList, is_larger

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_PARTS = {BlockKind.REASONING: "reasoning_text", BlockKind.TEXT: "output_text"}
_DELTAS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseDraft:
    """The response object and its stream events."""

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        model: str,
        *,
        temperature: float,
        top_p: float,
        logprobs: TextLogprobs,
        usage: Callable[[], dict[str, Any]],
        prompt: str = "",
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Args: logprobs finds the output text's log-probabilities; usage is called at the end; prompt is shown if the
        client requested it."""
        self.response = _head(response_id, body, model, temperature=temperature, top_p=top_p)
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        self._logprobs: dict[int, TextEntries] = {}  # by the index of a text block
        self._of_text = logprobs
        self._usage = usage
        self._number = 0
        self._is_queued = bool(body.background)
        self._shows_progress = bool(body.stream)
        self._raw: list[Piece] | None = [] if body.enable_response_messages else None
        if self._raw is not None:
            self.response["input_messages"] = [_raw_message(prompt, prompt_ids)]
            self.response["output_messages"] = []

    @property
    def is_long(self) -> bool:
        """Whether the events at the end of a text have many log-probabilities."""
        return any(each.num_chars > LONG_CHARS for each in self._logprobs.values())

    def begin(self) -> list[Event]:
        """Return the first events. A background response begins as queued."""
        second = "response.queued" if self._is_queued else "response.in_progress"
        return [
            self._event("response.created", response=dict(self.response)),
            self._event(second, response=dict(self.response)),
        ]

    def push(self, deltas: Sequence[Delta], piece: Piece) -> list[Event]:
        begun = self._leave_queue()
        if self._raw is not None:
            self._raw.append(piece)
        happened = self._blocks.push(deltas)
        self._of_text.push(piece.logprobs)
        events = [*begun, *(event for each in happened for event in self._events_of(each))]
        if any(isinstance(each, Grew) for each in happened) and not any(map(_is_text, happened)):
            self._of_text.drop()  # reasoning and calls show no log-probabilities
        return events

    def finish(self, piece: Piece, *, cuts_call: bool = False) -> list[Event]:
        """Return the last events, and complete the response. A truncated one is `incomplete`."""
        cut = piece.finish_reason is not None and piece.finish_reason.is_cut
        happened = self._blocks.finish()
        last = self._blocks.all[-1] if (cut or cuts_call) and self._blocks.all else None
        events = [event for each in happened for event in self._events_of(each, cut=cut or cuts_call)]
        self.response["output"] = self._output(last)
        if self._raw is not None:
            text = "".join(each.text for each in self._raw)
            token_ids = [token_id for each in self._raw for token_id in each.token_ids]
            self.response["output_messages"] = [_raw_message(text, token_ids)]
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = self._usage()
        return [*events, self._event(f"response.{self.response['status']}", response=self.response)]

    def cancel(self) -> list[Event]:
        """Return the events of a cancelled response and keep its output. OpenAI documents no other event for this."""
        events = [event for each in self._blocks.finish() for event in self._events_of(each, cut=True)]
        self.response["output"] = self._output(self._blocks.all[-1] if self._blocks.all else None)
        self.response["status"] = "cancelled"
        return [*events, self._event("response.incomplete", response=self.response)]

    def fail(self, failure: ApiError) -> list[Event]:
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": failure.message}
        return [self._event("response.failed", response=self.response)]

    def _output(self, cut: Block | None) -> list[dict[str, Any]]:
        """Return all items except a truncated call: its arguments are not valid JSON, and clients that process the
        calls would fail."""
        kept = [block for block in self._blocks.all if block is not cut or block.kind is not BlockKind.CALL]
        return [self._item(block, cut=block is cut) for block in kept]

    def _leave_queue(self) -> list[Event]:
        """Return the event of the first token. Polling shows "queued" until the end, as in vLLM; streams show all."""
        if not self._is_queued:
            return []
        self._is_queued = False
        if self._shows_progress:
            self.response["status"] = "in_progress"
        return [self._event("response.in_progress", response=self.response | {"status": "in_progress"})]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _events_of(self, happened: BlockEvent, *, cut: bool = False) -> list[Event]:
        block = happened.block
        if isinstance(happened, Opened):
            self._ids[block.index] = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"
            return self._opening_events(block)
        if isinstance(happened, Grew):
            about = self._place(block)
            if block.kind is BlockKind.TEXT:
                whole = self._logprobs.setdefault(block.index, TextEntries())
                about["logprobs"] = _encoded(self._of_text.take(happened.text, whole))
            return [self._event(f"{_DELTAS[block.kind]}.delta", **about, delta=happened.text)]
        assert isinstance(happened, Closed), happened
        return self._closing_events(block, cut=cut)

    def _opening_events(self, block: Block) -> list[Event]:
        item = self._item(block, opening=True)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind in _PARTS:
            part = self._part(block, opening=True)
            events.append(self._event("response.content_part.added", **self._place(block), part=part))
        return events

    def _closing_events(self, block: Block, *, cut: bool) -> list[Event]:
        about, text, item = self._place(block), block.text, self._item(block, cut=cut)
        if block.kind is BlockKind.CALL:
            events = [self._event(f"{_DELTAS[block.kind]}.done", **about, name=block.name, arguments=text)]
        else:
            part = self._part(block)
            logprobs = {"logprobs": part["logprobs"]} if block.kind is BlockKind.TEXT else {}
            events = [
                self._event(f"{_DELTAS[block.kind]}.done", **about, **logprobs, text=text),
                self._event("response.content_part.done", **about, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index}
        return place | ({"content_index": 0} if block.kind in _PARTS else {})

    def _part(self, block: Block, *, opening: bool = False) -> dict[str, Any]:
        """Return a block's content. An opening block is empty; its text follows as deltas."""
        part: dict[str, Any] = {"type": _PARTS[block.kind], "text": "" if opening else block.text}
        if block.kind is BlockKind.TEXT:
            whole = None if opening else self._logprobs.get(block.index)
            part |= {"annotations": [], "logprobs": [] if whole is None else _encoded(whole.encoded)}
        return part

    def _item(self, block: Block, *, opening: bool = False, cut: bool = False) -> dict[str, Any]:
        status = "in_progress" if opening else "incomplete" if cut else "completed"
        item: dict[str, Any] = {"id": self._ids[block.index], "status": status}
        content = [] if opening or block.kind is BlockKind.CALL else [self._part(block)]
        if block.kind is BlockKind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        if block.kind is BlockKind.TEXT:
            return item | {"type": "message", "role": "assistant", "content": content}
        call = {"type": "function_call", "call_id": block.call_id, "name": block.name}
        return item | call | {"arguments": "" if opening else block.text}


class ResponseStream(DraftStream):
    """Stream a response's events."""

    def __init__(self, answer: Answer, chunks: DraftChunks, draft: ResponseDraft, model: ServedModel) -> None:
        super().__init__(answer, chunks)
        self._draft, self._model = draft, model

    def is_short(self) -> bool:
        return not self._draft.is_long

    async def send_pieces(self, pieces: Pieces, sender: EventSender) -> None:
        """Send the events of pieces. If they are long, a thread encodes them."""
        events = [event for _, piece in pieces for event in self.draft_chunks.events(piece)]
        if is_larger(events, LONG_CHARS):
            encoded = await self._model.run(lambda: [*event_pieces(events)], is_long=True)
            await sender.send_long(encoded)
        elif events:
            await sender.send(named_events(events))


def _is_text(happened: BlockEvent) -> bool:
    return isinstance(happened, Grew) and happened.block.kind is BlockKind.TEXT


def _encoded(entries: Sequence[str]) -> EncodedList | list[str]:
    """Return a list for an event. An empty one is plain, so that the events of most streams are encoded at once."""
    return EncodedList([*entries]) if entries else []


def _raw_message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return a message in the form that vLLM uses for models without the harmony format."""
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def _head(
    response_id: str, body: ResponsesRequest, model: str, *, temperature: float, top_p: float
) -> dict[str, Any]:
    """Return a response that has just begun, with every field: clients' types require them."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
