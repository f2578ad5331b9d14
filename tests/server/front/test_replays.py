"""Requests of a lost rank continue elsewhere: no token is repeated, lost or counted twice, and each has one outcome."""

from unittest.mock import Mock

import pytest

from scheduler.policy.request import FinishReason, Logprobs, RequestOutput, SamplingParams
from server.front.errors import ApiError
from server.front.generations import Answer
from server.front.journal import MAX_INCIDENTS
from tests.support.requests.desk import Desk, in_loop


async def text_of(answer: Answer) -> dict[int, str]:
    """Read an answer to its end."""
    text: dict[int, str] = {}
    while pieces := await answer.next():
        for index, piece in pieces:
            text[index] = text.get(index, "") + piece.text
    answer.close()
    return text


def lose(desk: Desk, rank: int) -> None:
    desk.requests.leave([rank])


@in_loop
async def test_a_stream_goes_on_where_it_broke_off() -> None:
    desk = Desk()
    answer = desk.open("a")
    first = desk.rank_of("a")
    desk.deliver("a", "hel")
    lose(desk, first)
    (rank, request) = desk.ranks.submitted[-1]
    assert rank == 1 - first
    assert request.replayed_ids == tuple(b"hel") and request.prompt_ids == (65,)
    assert request.params == SamplingParams(max_tokens=9), "with the same seed"
    desk.deliver("a", "XX", rank=first)  # was already in transit
    desk.deliver("a", "lo")
    desk.deliver("a", "", FinishReason.STOP)
    assert await text_of(answer) == {0: "hello"}
    assert desk.reasons() == [FinishReason.STOP]
    assert desk.journal.outcomes[0].rank == rank and desk.journal.outcomes[0].num_output_tokens == 5
    assert desk.journal.num_replayed == 1


@in_loop
async def test_a_request_leaves_a_living_rank_and_returns_to_it_without_its_old_tokens() -> None:
    desk = Desk()
    answer = desk.open("a")
    first = desk.rank_of("a")
    desk.deliver("a", "h")
    desk.ranks.attached = {0, 1}
    lose(desk, first)
    assert desk.rank_of("a") == 1 - first
    assert desk.ranks.aborted == [(first, "a")]
    desk.deliver("a", "e")
    desk.requests.enter(first)
    desk.ranks.attached.remove(1 - first)
    lose(desk, 1 - first)
    assert desk.rank_of("a") == first and desk.ranks.submitted[-1][1].replayed_ids == tuple(b"he")
    desk.deliver("a", "XX", rank=first)  # of its first visit: the rank has not taken the abort yet
    desk.deliver("a", "", FinishReason.ABORT, rank=first)
    desk.deliver("a", "llo", FinishReason.STOP, rank=first)
    assert await text_of(answer) == {0: "hello"}
    assert desk.ranks.aborted == [(first, "a")], "the second rank is lost"


@in_loop
async def test_a_living_rank_that_returned_or_restarted_has_no_old_tokens() -> None:
    desk = Desk()
    desk.open("a")
    first = desk.rank_of("a")
    desk.ranks.attached = {0, 1}
    for end in ("released", "restarted"):
        lose(desk, first)
        if end == "released":
            desk.deliver("a", "X", rank=first, is_returned=True)
        else:
            desk.requests.note_rank(
                Mock(
                    rank=first,
                    max_num_seqs=9,
                    block_tokens=16,
                    max_num_batched_tokens=64,
                    host="",
                    kv_peer=None,
                )
            )
        desk.requests.enter(first)
        lose(desk, 1 - first)
        desk.requests.enter(1 - first)
        assert desk.rank_of("a") == first
        desk.deliver("a", "y", rank=first)
    lose(desk, first)
    assert desk.ranks.submitted[-1][1].replayed_ids == tuple(b"yy")


@in_loop
async def test_a_request_that_loses_rank_after_rank_is_given_up() -> None:
    desk = Desk()
    answer = desk.open("a")
    desk.journal.open_entries["a"].num_incidents = MAX_INCIDENTS
    lose(desk, desk.rank_of("a"))
    with pytest.raises(ApiError, match=f"its rank was lost {MAX_INCIDENTS + 1} times") as refused:
        await answer.next()
    assert refused.value.status == 500 and desk.reasons() == [FinishReason.ERROR]


@in_loop
async def test_a_character_that_a_rank_left_half_is_whole() -> None:
    desk = Desk()
    answer = desk.open("a")
    euro = "€".encode()
    desk.requests.deliver(desk.rank_of("a"), [_tokens("a", euro[:2])])
    lose(desk, desk.rank_of("a"))
    assert desk.ranks.submitted[-1][1].replayed_ids == tuple(euro[:2])
    desk.requests.deliver(desk.rank_of("a"), [_tokens("a", euro[2:], FinishReason.LENGTH)])
    assert await text_of(answer) == {0: "€"}


@in_loop
async def test_only_the_open_choices_of_the_lost_rank_are_replayed() -> None:
    desk = Desk()
    answer = desk.open("a", "b", "c", "d", stops=("!",))
    by_rank = {rank: [n for n in "abcd" if desk.rank_of(n) == rank] for rank in (0, 1)}
    assert [len(names) for names in by_rank.values()] == [2, 2]
    stopped, going = by_rank[0]
    desk.deliver(stopped, "x!y")  # ended here by its stop string, unknown to its rank
    lose(desk, 0)
    assert [request.request_id for _, request in desk.ranks.submitted[4:]] == [going]
    for name in (going, *by_rank[1]):
        desk.deliver(name, name, FinishReason.LENGTH)
    text = await text_of(answer)
    assert sorted(text.values()) == sorted(["x", going, *by_rank[1]])
    assert len(desk.reasons()) == 4


@in_loop
async def test_a_stop_string_may_lie_across_the_break() -> None:
    desk = Desk()
    answer = desk.open("a", stops=("END",))
    desk.deliver("a", "xEN")
    lose(desk, desk.rank_of("a"))
    desk.deliver("a", "Dy")
    assert await text_of(answer) == {0: "x"}
    assert desk.ranks.aborted == [(desk.rank_of("a"), "a")]


@in_loop
async def test_what_comes_with_the_first_token_is_taken_once() -> None:
    desk = Desk()
    answer = desk.open("a", params=SamplingParams(max_tokens=9, num_prompt_logprobs=0))
    scores = [Logprobs(65, -0.5, [], [])]
    desk.deliver("a", "x", prompt_logprobs=scores, num_cached_tokens=0, queued_s=0.5)
    lose(desk, desk.rank_of("a"))
    desk.deliver("a", "y", FinishReason.LENGTH, prompt_logprobs=scores, num_cached_tokens=1, queued_s=9.0)
    generation = answer.generations[0]
    assert (generation.prompt_logprobs, generation.num_cached_tokens) == (scores, 0)
    assert generation.queued_s == pytest.approx(0.5)
    text = (await desk.metrics.text()).decode()
    assert sum(_values(text, "vllm:time_to_first_token_seconds_count")) == 1
    assert sum(_values(text, "vllm:prompt_tokens_total")) == 1
    assert sum(_values(text, "vllm:generation_tokens_total")) == 2
    assert sum(_values(text, "vllm:request_success_total")) == 1


@in_loop
async def test_time_at_a_rank_that_was_lost_before_the_first_token_is_time_in_the_queue() -> None:
    desk = Desk()
    answer = desk.open("a")
    generation = answer.generations[0]
    lose(desk, desk.rank_of("a"))
    waited_s = generation.submitted_s - generation.ask.request.arrival_s
    assert waited_s > 0
    desk.deliver("a", "x", FinishReason.LENGTH, num_cached_tokens=1, num_disk_tokens=16, queued_s=2.0)
    assert generation.queued_s == waited_s + 2.0
    assert (generation.num_cached_tokens, generation.num_host_tokens, generation.num_disk_tokens) == (
        1,
        0,
        16,
    )
    lines = (await desk.metrics.text()).decode().splitlines()
    sources = {
        line.split('source="')[1].split('"')[0]
        for line in lines
        if "tokens_by_source_total{" in line and not line.endswith(" 0.0")
    }
    assert sources == {"external_kv_transfer"}, "not more than were cached, and none twice"


@in_loop
async def test_the_router_is_charged_for_what_is_left() -> None:
    desk = Desk()
    desk.open("a", params=SamplingParams(max_tokens=100))
    first = desk.rank_of("a")
    desk.deliver("a", "four")
    lose(desk, first)
    charged = [0, 0]
    charged[1 - first] = 1 + 4 + 96
    assert desk.router.outstanding_tokens == tuple(charged)


@in_loop
async def test_with_nobody_left_requests_wait_and_go_on_with_whoever_comes_back() -> None:
    desk = Desk()
    answer = desk.open("a", "b")
    desk.deliver("a", "he")
    desk.requests.leave([0, 1])
    assert desk.requests.num_parked == 2 and len(desk.ranks.submitted) == 2
    desk.deliver("a", "XX")
    desk.requests.leave([0])  # it came back and was lost again before it served
    desk.requests.enter(1)
    assert desk.requests.num_parked == 0
    assert [(rank, r.request_id, r.replayed_ids) for rank, r in desk.ranks.submitted[2:]] == [
        (1, "a", tuple(b"he")),
        (1, "b", ()),
    ]
    desk.deliver("a", "y", FinishReason.LENGTH)
    desk.deliver("b", "you", FinishReason.LENGTH)
    assert await text_of(answer) == {0: "hey", 1: "you"}
    assert desk.reasons() == [FinishReason.LENGTH, FinishReason.LENGTH]
    assert desk.journal.num_replayed == 2


@in_loop
async def test_a_deadline_holds_while_a_request_waits() -> None:
    desk = Desk(timeout_s=1000)
    answer = desk.open("a")
    desk.requests.leave([0, 1])
    timer = desk.requests._timers["a"]
    assert timer._args is not None
    timer._callback(*timer._args)  # type: ignore[attr-defined]  # runs the timer without waiting
    with pytest.raises(ApiError, match="1000 s"):
        await answer.next()
    answer.close()
    desk.requests.enter(0)
    assert desk.reasons() == [FinishReason.DEADLINE] and len(desk.ranks.submitted) == 1


@in_loop
async def test_a_replay_has_the_time_that_is_left() -> None:
    desk = Desk(timeout_s=1000)
    desk.open("a")
    lose(desk, desk.rank_of("a"))
    first, again = (request for _, request in desk.ranks.submitted)
    assert first.deadline_s == again.deadline_s


@in_loop
async def test_when_the_service_gives_up_those_that_wait_fail() -> None:
    desk = Desk()
    answer = desk.open("a")
    desk.requests.leave([0, 1])
    desk.requests.fail_all(ApiError(503, "no rank came back"))
    with pytest.raises(ApiError, match="no rank came back"):
        await answer.next()
    assert desk.reasons() == [FinishReason.ERROR]


def _tokens(name: str, token_ids: bytes, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=list(token_ids), finish_reason=finish)


def _values(text: str, name: str) -> list[float]:
    """Return the values of a metric's series."""
    return [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{")]
