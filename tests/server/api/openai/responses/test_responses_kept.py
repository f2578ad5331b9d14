"""Stored responses: which are kept, which are evicted, and background runs without a service."""

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.policy.request import FinishReason, RequestOutput
from server.api.blocks import DraftChunks
from server.api.chat_turn import MessageParser, ReasoningCount
from server.api.openai.responses.answer import ResponseDraft
from server.api.openai.responses.kept import BackgroundRun, BackgroundRuns, ResponseStore
from server.api.openai.responses.request import ResponsesRequest
from server.api.openai.responses.text_logprobs import TextLogprobs
from server.api.parsers.deltas import Delta, PlainParser
from server.front.errors import ApiError
from server.front.generations import Answer
from tests.support.requests.answers import ByteDecoder, ask_of


def response(number: int, text: str = "") -> dict[str, str]:
    return {"id": f"resp_{number}", "status": "completed", "text": text}


def missing(store: ResponseStore, *numbers: int) -> bool:
    for number in numbers:
        with pytest.raises(ApiError, match=r"Response with id .* not found") as caught:
            store.get(f"resp_{number}", "me", "previous_response_id")
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    return True


def test_what_was_put_is_found_with_its_conversation() -> None:
    store = ResponseStore()
    store.put(response(1), [{"role": "user", "content": "u"}], "me")
    stored = store.get("resp_1", "me", "response_id")
    assert stored.response == response(1) and stored.messages == ({"role": "user", "content": "u"},)
    assert missing(store, 2)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    for number in (1, 2):
        store.put(response(number), [], "me")
    store.get("resp_1", "me", "response_id")
    store.put(response(3), [], "me")
    assert missing(store, 2) and store.get("resp_1", "me", "x") and store.get("resp_3", "me", "x")


def test_the_size_is_bounded_whatever_the_number() -> None:
    store = ResponseStore(max_chars=1000)
    for number in range(10):
        store.put(response(number, "x" * 300), [{"role": "user", "content": "y" * 100}], "me")
    assert missing(store, *range(8)) and store.get("resp_9", "me", "x")
    store.put(response(10, "x" * 2000), [], "me")
    assert missing(store, 10) and store.get("resp_9", "me", "x"), "a response that never fits evicts nothing"


@pytest.mark.parametrize("bounds", [{"max_responses": 2}, {"max_chars": 1000}])
def test_a_running_response_stays_until_its_end(bounds: dict[str, int]) -> None:
    store = ResponseStore(**bounds)
    background = response(0, "x" * 1200) | {"status": "queued"}
    store.put(background, [], "me")
    for number in range(1, 6):
        store.put(response(number, "x" * 300), [], "me")
    assert store.is_running("resp_0") and missing(store, 1, 2, 3)
    assert store.get("resp_4", "me", "x") and store.get("resp_5", "me", "x"), "it takes no room"
    background |= {"status": "completed", "text": "short"}
    store.put(background, [], "me")
    for number in range(6, 11):
        store.put(response(number, "x" * 300), [], "me")
    assert missing(store, 0), "it has ended and is the oldest"


def test_a_deleted_response_is_gone_and_its_room_is_free() -> None:
    store = ResponseStore(max_chars=500)
    for number in range(50):
        store.put(response(number, "x" * 300), [], "me")
        store.delete(f"resp_{number}", "me")
        assert missing(store, number)
    with pytest.raises(ApiError):
        store.delete("resp_0", "me")


def test_a_response_is_its_owner_s_alone() -> None:
    store = ResponseStore()
    store.put(response(1), [], "me")
    for look in (lambda: store.get("resp_1", "you", "response_id"), lambda: store.delete("resp_1", "you")):
        with pytest.raises(ApiError, match="not found") as caught:
            look()
        assert caught.value.status == 404
    assert store.get("resp_1", "me", "response_id")


@pytest.mark.parametrize("bounds", [{"max_responses": 20}, {"max_chars": 20 * 70}])
def test_a_flood_of_one_owner_s_pushes_out_none_of_who_keeps_less(bounds: dict[str, int]) -> None:
    store = ResponseStore(**bounds)
    for number in range(3):
        store.put(response(number), [], "me")
    for number in range(100, 1140):
        store.put(response(number), [], "flood")
    for number in range(3):
        assert store.get(f"resp_{number}", "me", "response_id")
    assert store.get("resp_1139", "flood", "response_id") and not store.has("resp_1100")


def test_background_runs_of_one_owner_leave_places_for_others() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns(max_running=16, are_several=lambda: True)

        def begin_all(owner: str) -> int:
            for number in range(17):
                try:
                    with runs.room(owner):
                        runs.start(run_of(f"resp_{owner}{number}", endless(), owner=owner), lambda: None)
                except ApiError as refused:
                    assert refused.status == 429
                    return number
            raise AssertionError("the owner was never refused")

        assert [begin_all(owner) for owner in ("a", "b", "c")] == [8, 4, 2]
        for number in range(2):
            await runs.delete(f"resp_a{number}")
        await asyncio.sleep(0)  # run the task's callbacks
        with runs.room("c"):
            pass
        for task in runs._tasks:
            task.cancel()

    asyncio.run(scenario())


def run_of(
    response_id: str, answer: Answer, text_parser: PlainParser | None = None, owner: str = "me", **how: Any
) -> BackgroundRun:
    draft = ResponseDraft(
        response_id,
        ResponsesRequest.model_validate({"input": "hi", "background": True}),
        "tiny",
        temperature=1.0,
        top_p=1.0,
        logprobs=TextLogprobs(lambda _: []),
        usage=dict,
    )
    parser = MessageParser(
        text_parser or PlainParser(), ReasoningCount(len), max_calls=None, shows_reasoning=True
    )
    return BackgroundRun(answer, DraftChunks(parser, draft), draft, owner, **how)


def endless() -> Answer:
    """An answer with a choice that never ends."""
    answer = Answer("a", lambda _answer: None)
    answer._num_open = 1
    return answer


def test_one_run_too_many_is_refused_until_one_has_ended() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns(max_running=1)
        run = run_of("resp_1", endless())
        ends: list[str] = []
        runs.start(run, lambda: ends.append("resp_1"))
        with pytest.raises(ApiError, match="1 background responses are running") as caught:
            runs.room("me").__enter__()
        assert (caught.value.status, caught.value.param) == (429, "background")
        await run.cancel()
        await asyncio.sleep(0)  # run the task's callbacks
        with runs.room("me"), pytest.raises(ApiError, match="1 background"), runs.room("me"):
            pytest.fail("two runs prepared at once both got the last place")
        with runs.room("me"):
            pass
        assert ends == ["resp_1"] and b'"status":"cancelled"' in run.events.content

    asyncio.run(scenario())


def test_events_of_ended_runs_are_forgotten_oldest_first() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns(max_bytes=1)
        going = run_of("resp_0", endless())
        runs.start(going, lambda: None)
        for number in (1, 2):
            run = run_of(f"resp_{number}", endless())
            runs.start(run, lambda: None)
            await run.cancel()
            await asyncio.sleep(0)
        assert runs.find("resp_0") is going, "a run that has not ended is kept"
        assert runs.find("resp_1") is runs.find("resp_2") is None
        with pytest.raises(ApiError, match="background=true"):
            runs.follow("resp_1", -1)
        await runs.delete("resp_0")
        assert going.events.has_ended and runs.find("resp_0") is None

    asyncio.run(scenario())


def test_an_ended_run_frees_its_answer_and_goes_with_its_response() -> None:
    async def scenario() -> None:
        runs, store = BackgroundRuns(), ResponseStore(max_responses=1)
        store.on_dropped = runs.forget
        answer = endless()
        run, answer_of = run_of("resp_1", answer), weakref.ref(answer)
        runs.start(run, lambda: store.put(response(1), [], "me"))
        del answer
        await run.cancel()
        await run.cancel()
        await asyncio.sleep(0)  # run the task's callbacks
        gc.collect()
        assert answer_of() is None and runs.find("resp_1") is run
        store.put(response(2), [], "me")
        assert runs.find("resp_1") is None
        runs.start(run_of("resp_2", endless()), lambda: None)
        store.discard("resp_2")
        assert runs.find("resp_2"), "a run that has not ended can still be cancelled"
        await runs.delete("resp_2")

    asyncio.run(scenario())


def test_events_are_forgotten_of_the_owner_that_has_most() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns()
        for number, owner in enumerate(("me", "flood", "flood", "flood", "flood")):
            run = run_of(f"resp_{number}", endless(), owner=owner)
            runs.start(run, lambda: None)
            await run.cancel()
            runs._max_bytes = 7 * run.events.num_bytes // 2  # three runs fit
            await asyncio.sleep(0)
        assert [bool(runs.find(f"resp_{number}")) for number in range(5)] == [True, False, False, True, True]

    asyncio.run(scenario())


def test_a_cancellation_while_the_last_events_are_encoded_changes_nothing() -> None:
    async def scenario() -> None:
        has_begun, goes_on = asyncio.Event(), asyncio.Event()

        async def run_long(work: Callable[[], list[bytes]]) -> list[bytes]:
            has_begun.set()
            await goes_on.wait()
            return work()

        answer = Answer("resp_1", lambda _answer: None)
        generation = answer.add(ask_of(), 0, ByteDecoder())
        run = run_of("resp_1", answer, run_long=run_long)
        BackgroundRuns().start(run, lambda: None)
        output = RequestOutput(request_id="r", token_ids=[97] * 70_000, finish_reason=FinishReason.STOP)
        reason = generation.push(output)
        assert reason is not None
        generation.end(reason)
        async with asyncio.timeout(10):
            await has_begun.wait()
            cancelling = asyncio.create_task(run.cancel())
            await asyncio.sleep(0)
            goes_on.set()
            await cancelling
        events = [json.loads(each.partition(b"data: ")[2]) for each in run.events.content.split(b"\n\n")[:-1]]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a" * 70_000

    asyncio.run(scenario())


def test_a_run_that_meets_an_error_of_ours_has_failed_and_says_so() -> None:
    class Broken(PlainParser):
        def push(self, text: str) -> list[Delta]:
            raise ZeroDivisionError

    async def scenario() -> None:
        answer = endless()
        run = run_of("resp_1", answer, Broken())
        answer.add(ask_of(), 0, ByteDecoder()).end(FinishReason.STOP)
        runs = BackgroundRuns()
        runs.start(run, lambda: None)
        async with asyncio.timeout(10):
            await run.events.wait_until_ended()
        assert b'"status":"failed"' in run.events.content and b"ZeroDivisionError" in run.events.content

    asyncio.run(scenario())
