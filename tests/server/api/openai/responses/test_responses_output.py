"""/v1/responses: the order of a stream's events, and that the events add up to the whole answer."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from scheduler.policy.request import FinishReason
from server.api.chat_turn import ReasoningCount
from server.api.openai.responses.answer import ResponseDraft
from server.api.openai.responses.request import ResponsesRequest
from server.api.openai.responses.text_logprobs import TextLogprobs
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.front.generations import Piece

USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 7,
}
ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def draft_of(**fields: Any) -> ResponseDraft:
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return ResponseDraft(
        "resp_1",
        body,
        "tiny",
        temperature=1.0,
        top_p=0.5,
        logprobs=TextLogprobs(lambda entries: []),
        usage=lambda: dict(USAGE),
    )


def stream(
    draft: ResponseDraft, *steps: Delta, reason: FinishReason = FinishReason.STOP
) -> list[dict[str, Any]]:
    events = draft.begin()
    for step in steps:
        events += draft.push([step], Piece(token_ids=[7]))
    return events + draft.finish(Piece(finish_reason=reason))


CALL = [
    ToolCallDelta(0, "", "call_9", "add"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(0, "1}"),
]


def test_events_come_in_the_documented_order_and_numbered() -> None:
    events = stream(draft_of(), ReasoningDelta("hm"), ContentDelta("a"), ContentDelta("b"), *CALL)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        ANY_EVENT.validate_python(event)


def test_an_item_s_events_carry_its_id_and_place() -> None:
    events = stream(draft_of(), ReasoningDelta("hm"), ContentDelta("a"), *CALL)
    current: dict[str, Any] = {}
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            current = event
            assert event["item"]["status"] == "in_progress"
        if event["type"] == "response.content_part.added":
            assert event["part"]["text"] == "", "the text follows as deltas"
        assert event["output_index"] == current["output_index"]
        assert event.get("item_id", current["item"]["id"]) == current["item"]["id"]
        if event["type"] == "response.output_item.done":
            assert event["item"]["id"] == current["item"]["id"] and event["item"]["status"] == "completed"
    prefixes = [item["id"].split("_")[0] for item in events[-1]["response"]["output"]]
    assert prefixes == ["rs", "msg", "fc"]


def test_the_completed_response_holds_every_item_and_the_usage() -> None:
    draft = draft_of(instructions="be brief", store=False)
    assert draft.begin()[0]["response"]["usage"] is None
    stream(draft, ReasoningDelta("hm"), ContentDelta("a"), ContentDelta("b"), *CALL)
    response = Response.model_validate(draft.response)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.output_text, response.instructions, response.top_p) == ("ab", "be brief", 0.5)
    assert draft.response["store"] is False and response.error is None and response.incomplete_details is None


def test_a_call_cut_short_is_not_among_the_items() -> None:
    draft = draft_of()
    events = stream(draft, ReasoningDelta("hm"), *CALL[:2], reason=FinishReason.LENGTH)
    assert [item["type"] for item in draft.response["output"]] == ["reasoning"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert done[-1]["item"]["status"] == "incomplete"


def test_the_tokens_of_reasoning_are_counted_with_their_markup() -> None:
    count = ReasoningCount(len)
    count.note([], 1)  # <think>
    count.note([ReasoningDelta("ab")], 2)
    assert count.num_tokens == 3
    count.note([ReasoningDelta("c"), ContentDelta("de")], 4)
    assert count.num_tokens == 4, "in a mixed piece, only the reasoning's text counts"
    count.note([ReasoningDelta("f" * 100), ContentDelta("g")], 5)
    assert count.num_tokens == 9, "never more than the piece's tokens"
    count.note([], 1)
    count.note([ContentDelta("h")], 1)
    assert count.num_tokens == 9


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_empty_answer_is_a_response_without_items(reason: FinishReason) -> None:
    draft = draft_of()
    events = stream(draft, reason=reason)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert len(events) == 3 and draft.response["output"] == [] and json.dumps(draft.response)
