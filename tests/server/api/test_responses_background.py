"""The bounds of what runs in the background and is remembered of it."""

import asyncio

import pytest

from server.api.blocks import DraftChunks
from server.api.chat_turn import MessageParser, ReasoningCount
from server.api.parsers.deltas import PlainParser
from server.api.responses.answer import ResponseDraft
from server.api.responses.kept import BackgroundRun, BackgroundRuns
from server.api.responses.request import ResponsesRequest
from server.errors import ApiError
from server.front.generations import Answer


def run_of(response_id: str, answer: Answer) -> BackgroundRun:
    draft = ResponseDraft(
        response_id,
        ResponsesRequest.model_validate({"input": "hi", "background": True}),
        "tiny",
        temperature=1.0,
        top_p=1.0,
        word_logprobs=lambda _: [],
        usage=lambda _: {},
        reasoning=ReasoningCount(len),
    )
    parser = MessageParser(PlainParser(), ReasoningCount(len), max_calls=None, shows_reasoning=True)
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
            runs.check_room()
        assert (caught.value.status, caught.value.param) == (429, "background")
        await run.cancel()
        await asyncio.sleep(0)  # the task's callbacks
        runs.check_room()
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
