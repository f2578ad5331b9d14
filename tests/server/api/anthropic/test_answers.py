"""/v1/messages: the order of a stream's events, stop reasons, and that the events add up to the whole answer."""

from typing import Any

import pytest

from scheduler.policy.request import FinishReason
from server.api.anthropic.messages import MessageDraft
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.front.errors import ApiError
from server.front.generations import Piece

USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 1,
    "output_tokens": 4,
}
STOP = Piece(finish_reason=FinishReason.STOP)
LENGTH = Piece(finish_reason=FinishReason.LENGTH)
CALL = [
    ToolCallDelta(0, "", "call_9", "add"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(0, '"x"}'),
]


def draft_of(*, context_ends: bool = False) -> MessageDraft:
    return MessageDraft("msg_1", "tiny", usage=lambda: dict(USAGE), context_ends=context_ends)


def stream(draft: MessageDraft, *steps: Delta, last: Piece = STOP) -> list[dict[str, Any]]:
    events = draft.begin()
    for step in steps:
        events += draft.push([step], Piece())
    return events + draft.finish(last)


def test_events_come_in_the_documented_order() -> None:
    events = stream(draft_of(), ReasoningDelta("hm"), ContentDelta("a"), ContentDelta("b"), *CALL)
    said = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    assert said == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[6]["content_block"] == {"type": "text", "text": ""}, "the text follows as deltas"
    assert events[10]["content_block"] == {"type": "tool_use", "id": "call_9", "name": "add", "input": {}}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == USAGE


@pytest.mark.parametrize(
    ("last", "context_ends", "reason", "sequence"),
    [
        (STOP, False, "end_turn", None),
        (Piece(finish_reason=FinishReason.STOP, stop_reason="END"), False, "stop_sequence", "END"),
        (Piece(finish_reason=FinishReason.STOP, stop_reason=77), False, "end_turn", None),
        (LENGTH, False, "max_tokens", None),
        (LENGTH, True, "model_context_window_exceeded", None),
        (STOP, True, "end_turn", None),
    ],
)
def test_stop_reasons_are_anthropic_s(
    last: Piece, context_ends: bool, reason: str, sequence: str | None
) -> None:
    draft = draft_of(context_ends=context_ends)
    stream(draft, ContentDelta("a"), last=last)
    assert (draft.message["stop_reason"], draft.message["stop_sequence"]) == (reason, sequence)


def test_arguments_cut_short_show_what_came() -> None:
    draft = draft_of()
    stream(draft, ToolCallDelta(0, '{"a": [1, 2], "b": "hel', "c", "f"), last=LENGTH)
    assert draft.message["content"][0]["input"] == {"a": [1, 2], "b": "hel"}
    assert draft.message["stop_reason"] == "max_tokens"
    nonsense = draft_of()
    stream(nonsense, ToolCallDelta(0, "}{", "c", "f"))
    assert nonsense.message["content"][0]["input"] == {}


def test_an_empty_answer_has_no_blocks() -> None:
    draft = draft_of()
    assert [event["type"] for event in stream(draft)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    assert draft.message["content"] == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropic_s_names(status: int, kind: str) -> None:
    failure = ApiError(status, "why")
    assert failure.anthropic_body() == {"type": "error", "error": {"type": kind, "message": "why"}}
    assert draft_of().fail(failure) == [failure.anthropic_body()]
