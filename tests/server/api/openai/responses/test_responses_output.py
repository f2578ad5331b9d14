"""/v1/responses: the order of a stream's events, and that the events add up to the whole answer."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from benchmarks.serving.paced_rank import logprobs_of
from scheduler.policy.request import FinishReason
from server.api.blocks import DraftChunks, named_events
from server.api.chat_turn import MessageParser, ReasoningCount
from server.api.openai.responses.answer import ResponseDraft, ResponseStream
from server.api.openai.responses.request import ResponsesRequest
from server.api.openai.responses.text_logprobs import TextLogprobs
from server.api.parsers.deltas import ContentDelta, Delta, PlainParser, ReasoningDelta, ToolCallDelta
from server.api.streaming import EventSender
from server.front.generations import Answer, Piece

USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 7,
}
ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def draft_of(logprobs: TextLogprobs | None = None, **fields: Any) -> ResponseDraft:
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return ResponseDraft(
        "resp_1",
        body,
        "tiny",
        temperature=1.0,
        top_p=0.5,
        logprobs=logprobs or TextLogprobs(lambda entries: []),
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


class ThreadCount:
    """A model that counts its long work."""

    num_long = 0

    async def run(self, work: Callable[[], Any], *, is_long: bool) -> Any:
        self.num_long += is_long
        return work()


def test_long_events_are_encoded_in_a_thread_and_sent_in_pieces() -> None:
    num_tokens, num_spelled, sent = 400, 0, list[bytes]()

    def spell(entries: Any) -> list[dict[str, Any]]:
        nonlocal num_spelled
        num_spelled += len(entries)
        top = [{"token": "x", "logprob": -1.5, "bytes": [120]}] * 20
        return [{"token": "a", "bytes": [97], "top_logprobs": top} for _ in entries]

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def scenario() -> None:
        draft, model = draft_of(TextLogprobs(spell), top_logprobs=20), ThreadCount()
        chunks = DraftChunks(MessageParser(PlainParser(), ReasoningCount(len)), draft)
        stream = ResponseStream(Answer("resp_1", lambda _: None), chunks, draft, model)  # type: ignore[arg-type]
        assert stream.is_short()
        with EventSender(send, 15.0) as sender:
            for number in range(num_tokens):
                is_last = number == num_tokens - 1
                piece = Piece("a", [97], [logprobs_of(97, 0)], FinishReason.STOP if is_last else None)
                assert model.num_long == 0
                await stream.send_pieces([(0, piece)], sender)
        assert model.num_long == 1 and not stream.is_short()

    asyncio.run(scenario())
    assert num_spelled == num_tokens and max(map(len, sent)) < 1 << 19
    events = [json.loads(each.split(b"data: ")[1]) for each in b"".join(sent).split(b"\n\n")[:-1]]
    assert b"".join(sent) == named_events(events)
    text, part, item, whole = events[-4:]
    entries = text["logprobs"]
    assert len(entries) == num_tokens and len(entries[0]["top_logprobs"]) == 20
    assert entries == part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"]
    assert item["item"] == whole["response"]["output"][0]
