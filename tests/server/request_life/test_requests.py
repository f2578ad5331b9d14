"""Accepted requests against stub ranks: each gets exactly one outcome, whatever happens (I3)."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from scheduler.request import FinishReason, Request, RequestOutput, SamplingParams
from server.errors import ApiError
from server.observability.metrics import Metrics
from server.request_life.generations import Answer, Ask, ClientGone
from server.request_life.journal import Journal
from server.request_life.requests import Requests
from server.request_life.router import Router


class Bytes:
    """Token i is byte i."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


class StubRanks:
    """What `Requests` needs of `Ranks`, remembering what it is told."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, Request]] = []
        self.aborted: list[tuple[int, str]] = []
        self.absent: list[int] = []

    def missing(self) -> list[int]:
        return self.absent

    def submit(self, rank: int, request: Request, *, now_s: float) -> None:
        self.submitted.append((rank, request))

    def abort(self, rank: int, request_id: str) -> None:
        self.aborted.append((rank, request_id))


class Desk:
    """`Requests` with everything around it within reach."""

    def __init__(self, timeout_s: float = 0.0) -> None:
        self.ranks, self.journal, self.router = StubRanks(), Journal(), Router(2)
        self.requests = Requests(
            decoder=Bytes(),
            ranks=self.ranks,  # type: ignore[arg-type]
            router=self.router,
            journal=self.journal,
            metrics=Metrics("m", 2),
            timeout_s=timeout_s,
        )

    def open(self, *names: str, **how: Any) -> Answer:
        asks = [
            Ask(
                request=Request(
                    request_id=name, prompt_ids=(65,), params=SamplingParams(max_tokens=9), arrival_s=0.0
                ),
                **how,
            )
            for name in names
        ]
        return self.requests.open("answer", asks)

    def deliver(self, name: str, text: str = "", finish: FinishReason | None = None, error: str = "") -> None:
        rank = next(rank for rank, request in self.ranks.submitted if request.request_id == name)
        output = RequestOutput(
            request_id=name, token_ids=list(text.encode()), finish_reason=finish, error=error
        )
        self.requests.deliver(rank, [output])

    def reasons(self) -> list[FinishReason]:
        """The outcomes so far, with nothing left open anywhere."""
        assert not self.journal.open_entries and self.router.outstanding_tokens == (0, 0)
        assert self.journal.num_ended.total() == self.journal.num_accepted
        return [outcome.reason for outcome in self.journal.outcomes]


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


@in_loop
async def test_an_answer_ends_when_every_choice_has() -> None:
    desk = Desk()
    answer = desk.open("a", "b")
    assert sorted(rank for rank, _ in desk.ranks.submitted) == [0, 1], "choices spread over the ranks"
    desk.deliver("a", "x")
    assert [(index, piece.text) for index, piece in await answer.next()] == [(0, "x")]
    desk.deliver("b", "yz", FinishReason.LENGTH)
    desk.deliver("a", "", FinishReason.STOP)
    pieces = dict(await answer.next())
    assert (pieces[0].finish_reason, pieces[1].finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert await answer.next() == []
    answer.close()
    assert desk.reasons() == [FinishReason.LENGTH, FinishReason.STOP]
    assert desk.ranks.aborted == []


@in_loop
async def test_a_slow_reader_gets_merged_pieces() -> None:
    desk = Desk()
    answer = desk.open("a")
    for letter in "hello":
        desk.deliver("a", letter)
    [(_, piece)] = await answer.next()
    assert (piece.text, piece.token_ids) == ("hello", list(b"hello"))


@in_loop
async def test_the_journal_knows_what_was_delivered() -> None:
    desk = Desk()
    desk.open("a")
    desk.deliver("a", "hi")
    entry = desk.journal.open_entries["a"]
    assert (entry.delivered_ids, entry.request.prompt_ids) == ([104, 105], (65,))


@in_loop
async def test_a_client_that_leaves_ends_what_is_open_and_late_words_are_passed_over() -> None:
    desk = Desk()
    answer = desk.open("a", "b")
    desk.deliver("a", "x", FinishReason.STOP)
    waiting = asyncio.create_task(_drain(answer))
    await asyncio.sleep(0)
    answer.close()
    answer.close()
    with pytest.raises(ClientGone):
        await waiting
    assert [name for _, name in desk.ranks.aborted] == ["b"]
    desk.deliver("b", "late", FinishReason.ABORT)
    assert desk.reasons() == [FinishReason.STOP, FinishReason.ABORT]


@in_loop
async def test_a_stop_string_is_an_outcome_of_its_own_and_the_rank_s_is_passed_over() -> None:
    desk = Desk()
    answer = desk.open("a", stops=("!",))
    desk.deliver("a", "x!y")
    [(_, piece)] = await answer.next()
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("x", FinishReason.STOP, "!")
    assert [name for _, name in desk.ranks.aborted] == ["a"]
    desk.deliver("a", "", FinishReason.ABORT)
    assert desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_a_failure_of_one_choice_is_the_answer_s() -> None:
    desk = Desk()
    answer = desk.open("a", "b")
    desk.deliver("a", "", FinishReason.ERROR, "bad luck")
    with pytest.raises(ApiError, match="bad luck"):
        await answer.next()
    answer.close()
    assert desk.reasons() == [FinishReason.ERROR, FinishReason.ABORT]
    assert desk.journal.outcomes[0].error == "bad luck"


@in_loop
async def test_a_deadline_is_a_504_from_the_rank_or_else_from_the_front() -> None:
    desk = Desk(timeout_s=1000)
    answer = desk.open("a", "b")
    request = desk.ranks.submitted[0][1]
    assert request.deadline_s == request.arrival_s + 1000
    desk.deliver("a", "x", FinishReason.DEADLINE)
    with pytest.raises(ApiError) as caught:
        await answer.next()
    assert caught.value.status == 504
    timer = desk.requests._timers["b"]
    assert timer._args is not None
    timer._callback(*timer._args)  # type: ignore[misc]  # the clock, without waiting
    assert desk.reasons() == [FinishReason.DEADLINE, FinishReason.DEADLINE]
    answer.close()


@in_loop
async def test_when_the_service_ends_everything_open_fails_once_and_nothing_new_is_taken() -> None:
    desk = Desk()
    answers = [desk.open(name) for name in "abc"]
    desk.deliver("c", "x", FinishReason.STOP)
    desk.requests.fail_all(ApiError(503, "ending"))
    for answer in answers[:2]:
        with pytest.raises(ApiError, match="ending"):
            await answer.next()
    assert (await answers[2].next())[0][1].text == "x"
    with pytest.raises(ApiError, match="ending"):
        desk.open("d")
    assert desk.reasons() == [FinishReason.STOP, FinishReason.ERROR, FinishReason.ERROR]


@in_loop
async def test_nothing_is_accepted_before_every_rank_is_there() -> None:
    desk = Desk()
    desk.ranks.absent = [1]
    with pytest.raises(ApiError, match="rank 1") as caught:
        desk.open("a")
    assert caught.value.status == 503 and "Retry-After" in caught.value.headers
    assert desk.journal.num_accepted == 0


async def _drain(answer: Answer) -> None:
    while await answer.next():
        pass
