"""Kept responses: what is remembered, what is forgotten, and runs in the background without a service."""

import asyncio

import pytest

from scheduler.policy.request import FinishReason
from server.api.blocks import DraftChunks
from server.api.chat_turn import MessageParser, ReasoningCount
from server.api.parsers.deltas import Delta, PlainParser
from server.api.responses.answer import ResponseDraft
from server.api.responses.kept import BackgroundRun, BackgroundRuns, ResponseStore
from server.api.responses.request import ResponsesRequest
from server.api.responses.text_logprobs import TextLogprobs
from server.errors import ApiError
from server.front.generations import Answer
from tests.support.requests.answers import ByteDecoder, ask_of


def response(number: int, text: str = "") -> dict[str, str]:
    return {"id": f"resp_{number}", "text": text}


def missing(store: ResponseStore, *numbers: int) -> bool:
    for number in numbers:
        with pytest.raises(ApiError, match=r"Response with id .* not found") as caught:
            store.get(f"resp_{number}", "previous_response_id")
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    return True


def test_what_was_put_is_found_with_its_conversation() -> None:
    store = ResponseStore()
    store.put(response(1), [{"role": "user", "content": "u"}])
    stored = store.get("resp_1", "response_id")
    assert stored.response == response(1) and stored.messages == ({"role": "user", "content": "u"},)
    assert missing(store, 2)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    for number in (1, 2):
        store.put(response(number), [])
    store.get("resp_1", "response_id")
    store.put(response(3), [])
    assert missing(store, 2) and store.get("resp_1", "x") and store.get("resp_3", "x")


def test_the_size_is_bounded_whatever_the_number() -> None:
    store = ResponseStore(max_chars=1000)
    for number in range(10):
        store.put(response(number, "x" * 300), [{"role": "user", "content": "y" * 100}])
    assert missing(store, *range(8)) and store.get("resp_9", "x")
    store.put(response(10, "x" * 2000), [])
    assert missing(store, 10) and store.get("resp_9", "x"), "one that never fits pushes nothing out"


def test_a_deleted_response_is_gone_and_its_room_is_free() -> None:
    store = ResponseStore(max_chars=500)
    for number in range(50):
        store.put(response(number, "x" * 300), [])
        store.delete(f"resp_{number}")
        assert missing(store, number)
    with pytest.raises(ApiError):
        store.delete("resp_0")


def run_of(response_id: str, answer: Answer, text_parser: PlainParser | None = None) -> BackgroundRun:
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
    return BackgroundRun(answer, DraftChunks(parser, draft), draft)


def endless() -> Answer:
    """An answer with a choice that never comes."""
    answer = Answer("a", lambda _answer: None)
    answer._num_open = 1
    return answer


def test_one_run_too_many_is_refused_until_one_has_ended() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns(max_running=1)
        run = run_of("resp_1", endless())
        ends: list[str] = []
        runs.start(run, lambda: ends.append("resp_1"))
        with pytest.raises(ApiError, match="1 background responses are being made") as caught:
            runs.room().__enter__()
        assert (caught.value.status, caught.value.param) == (429, "background")
        await run.cancel()
        await asyncio.sleep(0)  # the task's callbacks
        with runs.room(), pytest.raises(ApiError, match="1 background"), runs.room():
            pytest.fail("two that are prepared at once have both got the last place")
        with runs.room():
            pass
        assert ends == ["resp_1"] and run.draft.response["status"] == "cancelled"

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
        assert runs.find("resp_0") is going, "one that goes on is kept"
        assert runs.find("resp_1") is runs.find("resp_2") is None
        with pytest.raises(ApiError, match="background=true"):
            runs.follow("resp_1", -1)
        await runs.delete("resp_0")
        assert going.is_ended and runs.find("resp_0") is None

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
            while not run.is_ended:
                await run.events_from(100)
        assert run.draft.response["status"] == "failed"
        assert "ZeroDivisionError" in run.draft.response["error"]["message"]

    asyncio.run(scenario())
