"""Accepted requests against stub ranks: each gets exactly one outcome under any fault."""

import asyncio
import random

import pytest

from scheduler.policy.request import FinishReason, Logprobs, Request, RequestOutput, SamplingParams
from scheduler.structure.stop_pattern import compile_all
from server.front import generations, waiting
from server.front.errors import ApiError
from server.front.generations import NOBODY, Answer, Ask, Asker, ClientGone
from tests.support.requests.desk import Desk, in_loop


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
async def test_one_more_than_may_be_open_is_refused_until_one_has_ended_but_a_probe_is_not() -> None:
    desk = Desk(most_open=2)
    desk.open("a", "b")
    with pytest.raises(ApiError) as caught:
        desk.open("c")
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "30")
    probe = Request(request_id="p", prompt_ids=(65,), params=SamplingParams(max_tokens=1), arrival_s=0.0)
    desk.requests.open("probe", [Ask(request=probe)], is_probe=True)
    desk.deliver("a", "x", FinishReason.STOP)
    desk.deliver("p", "x", FinishReason.LENGTH)
    desk.open("d")
    for name in "bd":
        desk.deliver(name, "x", FinishReason.STOP)
    assert len(desk.reasons()) == 4 and desk.requests.num_refused == 1


def given(desk: Desk) -> str:
    """Return the names of the choices that ranks received, in order."""
    return "".join(request.request_id for _, request in desk.ranks.submitted)


@in_loop
async def test_choices_beyond_the_bound_of_who_asks_follow_as_others_end() -> None:
    desk = Desk()
    desk.asker = Asker(most_choices=2)
    answer = desk.open(*"abcde")
    assert given(desk) == "ab" and desk.requests.num_open == 5 and desk.requests.num_unbounded == 0
    assert desk.requests.num_parked == 0
    desk.asker = NOBODY
    desk.open(*"xyz").close()
    assert given(desk) == "abxyz", "clients without a limit do not wait"
    desk.deliver("b", "x", FinishReason.STOP)
    assert given(desk) == "abxyzc"
    desk.deliver("c", "x", FinishReason.STOP)
    desk.deliver("a", "x", FinishReason.STOP)
    assert given(desk) == "abxyzcde"
    for name in "de":
        desk.deliver(name, "x", FinishReason.STOP)
    pieces = dict(await answer.next())
    assert [pieces[index].finish_reason for index in range(5)] == [FinishReason.STOP] * 5
    assert len(desk.reasons()) == 8


@pytest.mark.parametrize("way", ["left", "failed", "refused"])
def test_choices_that_are_held_end_with_their_answer_and_reach_no_rank(way: str) -> None:
    async def run() -> None:
        desk = Desk()
        desk.asker = Asker(most_choices=2)
        answer = desk.open(*"abcde")
        if way == "left":
            answer.close()
        elif way == "failed":
            desk.requests.fail_all(ApiError(503, "It ends."))
        else:
            desk.requests.leave([0, 1])
            assert desk.requests.num_parked == 2
            answer.close()
        assert given(desk) == "ab"
        assert sorted(name for _, name in desk.ranks.aborted) == ([] if way == "refused" else ["a", "b"])
        assert len(desk.reasons()) == 5

    asyncio.run(run())


@in_loop
async def test_choices_that_are_held_outlive_a_lost_rank() -> None:
    desk = Desk()
    desk.asker = Asker(most_choices=1)
    desk.open(*"ab")
    lost = desk.rank_of("a")
    desk.requests.leave([lost])
    assert given(desk) == "aa" and desk.rank_of("a") != lost
    desk.requests.enter(lost)
    assert given(desk) == "aa", "held choices do not wait for a rank"
    desk.deliver("a", "x", FinishReason.STOP)
    assert given(desk) == "aab"
    desk.deliver("b", "x", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP] * 2


@in_loop
async def test_a_regex_that_is_too_much_work_ends_its_own_choice_with_a_400() -> None:
    desk = Desk()
    answer = desk.open("a", patterns=compile_all(["[ab]*a[ab]{12}x"]))
    other = desk.open("b")
    desk.deliver("a", "".join(random.Random(1).choices("ab", k=9000)))
    with pytest.raises(ApiError, match="stop_regex: it takes too much work") as caught:
        await answer.next()
    assert (caught.value.status, caught.value.param) == (400, "stop_regex")
    assert desk.ranks.aborted == [(desk.rank_of("a"), "a")]
    desk.deliver("b", "x", FinishReason.STOP)
    assert await other.next() and desk.reasons() == [FinishReason.ERROR, FinishReason.STOP]


@in_loop
async def test_many_tokens_of_prompts_get_to_ranks_in_several_turns() -> None:
    desk = Desk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "TOKENS_AT_ONCE", 1)
        answer = desk.open(*"abcdefg")
        assert [request.request_id for _, request in desk.ranks.submitted] == ["a", "b"]
        assert desk.requests.num_parked == 0, "they do not wait for a rank to return"
        await asyncio.sleep(0)
        assert [request.request_id for _, request in desk.ranks.submitted] == ["a", "b", "c", "d"]
        left = desk.open(*"xyz")
        left.close()
        assert sorted(name for _, name in desk.ranks.aborted) == ["x", "y"], "z was at no rank"
        while len(desk.ranks.submitted) < 9:
            await asyncio.sleep(0)
    assert [request.request_id for _, request in desk.ranks.submitted] == list("abcdxyefg")
    for name in "abcdefg":
        desk.deliver(name, "x", FinishReason.STOP)
    assert len(await answer.next()) == 7


@in_loop
async def test_a_slow_reader_gets_merged_pieces() -> None:
    desk = Desk()
    answer = desk.open("a")
    for letter in "hello":
        desk.deliver("a", letter)
    [(_, piece)] = await answer.next()
    assert (piece.text, piece.token_ids) == ("hello", list(b"hello"))


@in_loop
async def test_a_client_that_leaves_logprobs_unread_loses_its_answer() -> None:
    desk = Desk()
    answer = desk.open("a", "b")
    logprobs = [Logprobs(120, -1.0, [], [])] * 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generations, "UNREAD_S", -1.0)
        for name in "aba":
            desk.deliver(name, "x" * 1000, logprobs=logprobs)
    with pytest.raises(ApiError) as caught:
        await answer.next()
    assert caught.value.status == 408 and "unread" in caught.value.message
    assert [request_id for _, request_id in desk.ranks.aborted] == ["a"]
    answer.close()


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
async def test_a_rank_that_is_lost_by_an_abort_leaves_that_request_to_no_other_rank() -> None:
    """A rank that does not read its messages is lost when it gets one."""
    desk = Desk()
    answer = desk.open("a")
    desk.ranks.post = lambda rank, _message: desk.requests.leave([rank])  # type: ignore[method-assign, assignment]
    answer.close()
    assert len(desk.ranks.submitted) == 1
    assert desk.reasons() == [FinishReason.ABORT]


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
async def test_an_error_in_making_one_answer_ends_that_one_alone() -> None:
    desk = Desk()
    broken, whole = desk.open("a"), desk.open("b")
    broken.generations[0].push = lambda _output: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    desk.deliver("a", "x")
    desk.deliver("b", "x", FinishReason.STOP)
    with pytest.raises(ApiError, match="ZeroDivisionError") as caught:
        await broken.next()
    assert caught.value.status == 500
    assert [name for _, name in desk.ranks.aborted] == ["a"]
    assert [piece.text for _, piece in await whole.next()] == ["x"]
    assert desk.reasons() == [FinishReason.ERROR, FinishReason.STOP]


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
    timer._callback(*timer._args)  # type: ignore[attr-defined]  # runs the timer without waiting
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
async def test_nothing_is_accepted_while_nobody_can_serve() -> None:
    desk = Desk()
    desk.why_not_ready = "waiting for rank 1 of 2"
    with pytest.raises(ApiError, match="rank 1") as caught:
        desk.open("a")
    assert caught.value.status == 503 and "Retry-After" in caught.value.headers
    assert desk.journal.num_accepted == 0


@in_loop
async def test_the_tokens_of_a_step_are_counted_over_all_its_choices() -> None:
    desk = Desk(num_ranks=1)
    desk.open("a", "b")
    for texts in ("x", "y"), ("zz", ""), ("", "z"):
        outputs = [
            RequestOutput(request_id=name, token_ids=list(text.encode()))
            for name, text in zip("ab", texts, strict=True)
        ]
        desk.requests.deliver(0, outputs)
    told = (await desk.metrics.text()).decode()
    for name, count in (("generation_tokens_total", 5.0), ("inter_token_latency_seconds_count", 3.0)):
        assert f'vllm:{name}{{engine="0",model_name="m"}} {count}\n' in told


async def _drain(answer: Answer) -> None:
    while await answer.next():
        pass


@in_loop
async def test_choices_whose_sibling_cannot_be_started_are_ended_with_it() -> None:
    desk = Desk()
    submit = desk.ranks.submit

    def fail_at_the_second(rank: int, request: Request, *, now_s: float) -> None:
        if request.request_id == "b":
            raise ValueError("no such message")
        submit(rank, request, now_s=now_s)

    desk.ranks.submit = fail_at_the_second  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such message"):
        desk.open("a", "b")
    assert desk.requests.num_open == 0 and desk.requests.num_answers == 0
    assert ("a" in [name for _, name in desk.ranks.aborted]) and len(desk.reasons()) == 2
