"""Running requests move: from ranks that are short of blocks, and from draining ranks. Streams stay whole under any fault."""

import asyncio
from typing import NamedTuple

import pytest

from scheduler.policy.request import FinishReason, RequestOutput, SamplingParams
from server.front.errors import ApiError
from server.front.generations import Answer, Asker
from server.front.routing.loads import MoveCause
from server.front.routing.move_plans import MAX_MOVES
from server.front.routing.router import Router
from server.front.routing.routers import RoundRobin
from tests.server.front.routing.test_moves import BLOCK_TOKENS, stats_of, text_of
from tests.support.requests.desk import Desk, in_loop

SEATS = 8


class Begun(NamedTuple):
    """A router with requests that run on rank 0, and their prompts."""

    router: Router
    prompts: dict[str, list[int]]

    def preempt(self, *, waiting: int = 1) -> None:
        """Report that rank 0 has preempted a request, which waits."""
        running = len(self.prompts) - 1
        self.router.note_stats(stats_of(0, running=running + 1, free_blocks=50))
        self.router.note_stats(
            stats_of(0, running=running, waiting=waiting, free_blocks=50, num_preemptions=1)
        )

    def relief(self) -> dict[str, int]:
        return self.router.plan_relief(self.prompts.__getitem__)


def begun(
    num_running: int, *, prompt_tokens: int = 100, max_tokens: int = 256, router: Router | None = None
) -> Begun:
    """Return two ranks: one runs requests, the other one is idle."""
    router, prompts = router or Router(2), dict[str, list[int]]()
    for rank in (0, 1):
        router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS)
    for number in range(num_running):
        name = f"r{number}"
        prompts[name] = [number] * prompt_tokens
        router.admit(name, 0, prompts[name], max_tokens)
        router.begin(name)
    router.note_stats(stats_of(0, running=num_running, free_blocks=50))
    router.note_stats(stats_of(1))
    return Begun(router, prompts)


def test_a_rank_that_preempted_gives_its_newest_request_and_one_at_a_time() -> None:
    case = begun(3)
    assert case.relief() == {}, "it has blocks"
    case.preempt()
    assert case.relief() == {"r2": 0}
    assert case.relief() == {}, "the first one is on its way"
    case.router.progress("r2", 5)
    case.router.begin("r2")  # its last tokens come before it is released
    released = case.router.take_back("r2", case.prompts["r2"])
    assert released == (MoveCause.MEMORY, 1)
    case.router.admit("r2", 1, case.prompts["r2"], 251, num_moves=1, is_resumed=True)
    assert case.relief() == {"r1": 0}, "its queue is as long as before"


def test_requests_that_wait_for_a_seat_are_no_reason_after_the_preempted_ones_have_begun_again() -> None:
    case = begun(3)
    case.router.admit("waits", 0, [9] * 50, 100)
    case.preempt(waiting=1)
    assert case.relief() == {}, "the one that waits has not begun"
    case.router.note_stats(stats_of(0, running=3, waiting=2, free_blocks=50, num_preemptions=1))
    assert case.relief() == {"r2": 0}


def test_a_prefix_that_was_computed_stays_known_after_a_move() -> None:
    case = begun(2, prompt_tokens=640)
    case.preempt()
    assert case.relief() == {"r1": 0}
    case.router.take_back("r1", case.prompts["r1"])
    assert case.router._prefixes.held_tokens(case.prompts["r1"]) == {0: 640}


def test_the_least_urgent_request_moves_first() -> None:
    case = begun(2)
    case.prompts["later"] = [7] * 100
    case.router.admit("later", 0, case.prompts["later"], 256, priority=-1)
    case.router.begin("later")
    case.preempt()
    assert case.relief() == {"r1": 0}


def test_before_a_preemption_only_requests_move_that_cost_less_than_a_place() -> None:
    def relieved(num_running: int, prompt_tokens: int) -> dict[str, int]:
        case = begun(num_running, prompt_tokens=prompt_tokens)
        case.router.note_stats(stats_of(0, running=num_running, free_blocks=num_running - 1))
        return case.relief()

    assert relieved(8, 100) == {"r7": 0}
    assert relieved(8, 600) == {}, "a place becomes free before 600 tokens are computed again"
    assert relieved(2, 600) == {"r1": 0}


def test_a_prefix_at_the_other_rank_makes_a_move_cheap() -> None:
    case = begun(8, prompt_tokens=640)
    case.router.note_stats(stats_of(0, running=8, free_blocks=7))
    assert case.relief() == {}
    case.router.admit("same", 1, case.prompts["r3"], 1)
    case.router.retire("same")
    assert case.relief() == {"r3": 0}


def test_a_request_that_waits_for_blocks_makes_room_where_a_seat_is_free() -> None:
    case = begun(4)
    case.router.admit("waits", 0, [9] * 700, 100)
    for free_blocks, expected in ((60, {}), (40, {"r3": 0})):
        case.router.note_stats(stats_of(0, running=4, waiting=1, free_blocks=free_blocks))
        assert case.relief() == expected


@pytest.mark.parametrize("why", ["blocks", "growth", "seats", "queue", "draining", "away", "moves"])
def test_a_request_stays_if_no_other_rank_has_room(why: str) -> None:
    case = begun(3)
    router, need = case.router, -(-(100 + 256) // BLOCK_TOKENS)  # its tokens and those to come
    if why == "growth":
        router.admit("there", 1, [5] * 10, 256)
        router.begin("there")
    case.preempt()
    if why == "moves":
        router.retire("r2")
        router.admit("r2", 0, case.prompts["r2"], 256, num_moves=MAX_MOVES)
        router.begin("r2")
        assert case.relief() == {"r1": 0}
        return
    running = {"growth": 1, "seats": SEATS}.get(why, 0)
    free_blocks = {"blocks": need, "growth": need + 2 + 256 // BLOCK_TOKENS - 1}.get(why, 200)
    router.note_stats(stats_of(1, running=running, waiting=int(why == "queue"), free_blocks=free_blocks))
    if why == "draining":
        router.drain(1)
    if why == "away":
        router.leave(1)
    assert case.relief() == {}
    if why in ("blocks", "growth"):
        router.note_stats(stats_of(1, running=running, free_blocks=free_blocks + 1))
        assert case.relief() == {"r2": 0}, "one more block is enough"


@pytest.mark.parametrize("kind", [Router, RoundRobin])
def test_a_draining_rank_gets_nothing_and_gives_all_that_other_ranks_have_room_for(
    kind: type[Router],
) -> None:
    case = begun(3, router=kind(2))
    router = case.router
    router.admit("waits", 0, [4] * 40, 10, "s")
    router.note_stats(stats_of(1, running=SEATS - 2))
    router.drain(0)
    assert router.is_draining(0) and not router.is_draining(1)
    assert {router.pick([each] * 100, "s") for each in range(4)} == {1}
    assert router.plan_drains() == {"r0": 0, "r1": 0, "waits": 0}, "two seats are free"
    assert router.plan_drains() == {}
    assert router.take_back("r0", case.prompts["r0"]) == (MoveCause.DRAIN, 1)
    assert router.take_back("waits", [4] * 40) == (MoveCause.DRAIN, None)
    router.admit("r0", 1, case.prompts["r0"], 256, is_resumed=True)
    router.note_stats(stats_of(1, running=SEATS - 2, waiting=3))
    assert router.plan_drains() == {}, "the seats are reserved"
    router.note_stats(stats_of(1, running=SEATS - 4, waiting=3))
    assert router.plan_drains() == {"r2": 0}, "it precedes those that wait there"
    assert (router.num_open(0), router.num_open(1)) == (2, 1)
    router.undrain(0)
    assert router.is_receiver(0) and not router.is_draining(0)


def test_a_rank_gets_as_many_running_requests_at_a_time_as_it_computes_in_a_step() -> None:
    case = begun(5)
    router = case.router
    router.note_size(1, seats=SEATS, block_tokens=BLOCK_TOKENS, step_tokens=250)
    router.drain(0)
    assert router.plan_drains() == {"r0": 0, "r1": 0}
    assert router.take_back("r0", case.prompts["r0"]).target == 1
    router.admit("r0", 1, case.prompts["r0"], 256, is_resumed=True)
    assert router.plan_drains() == {}
    router.begin("r0")
    assert router.plan_drains() == {"r2": 0}
    router.note_size(1, seats=SEATS, block_tokens=BLOCK_TOKENS, step_tokens=50)
    for name in ("r1", "r2"):
        router.retire(name)
    assert router.plan_drains() == {"r3": 0}, "a longer one moves alone"


def test_the_last_rank_takes_requests_even_if_it_is_draining() -> None:
    case = begun(1)
    assert case.router.can_spare(0)
    case.router.drain(0)
    assert not case.router.can_spare(1)
    case.router.leave(1)
    assert case.router.pick([1, 2, 3]) == 0 and case.router.plan_drains() == {}
    case.router.leave(0)
    case.router.enter(0)
    assert not case.router.is_draining(0), "a rank that returns is not draining"


def open_begun(*names: str) -> tuple[Desk, Answer, int]:
    """Return a desk with requests that have sent "ab" from one rank, and that rank."""
    desk = Desk()
    desk.asker = Asker(session="s")
    answer = desk.open(*names, params=SamplingParams(max_tokens=100))
    for rank in (0, 1):
        desk.router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS)
        desk.requests.note_stats(stats_of(rank))
    home = desk.rank_of(names[0])
    assert {desk.rank_of(name) for name in names} == {home}
    for name in names:
        desk.deliver(name, "ab")
    return desk, answer, home


def release(desk: Desk, name: str, rank: int) -> None:
    desk.requests.deliver(rank, [RequestOutput(request_id=name, token_ids=[], is_returned=True)])


@in_loop
async def test_a_running_request_goes_on_elsewhere_with_the_tokens_that_came_until_it_was_released() -> None:
    desk, answer, home = open_begun("a")
    desk.moves.drain(home)
    [withdrawal] = desk.ranks.withdrawals
    assert desk.ranks.withdrawn == [(home, "a")] and withdrawal.even_if_begun
    desk.deliver("a", "c")  # sampled before the rank read the withdrawal
    desk.moves.look(is_urgent=True)
    assert len(desk.ranks.withdrawn) == 1, "it is on its way"
    release(desk, "a", home)
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.replayed_ids) == (1 - home, tuple(b"abc"))
    desk.deliver("a", "X", rank=home)  # never sent by a rank that released it
    desk.deliver("a", "de")
    desk.deliver("a", "f", FinishReason.LENGTH)
    assert await text_of(answer) == "abcdef"
    assert desk.reasons() == [FinishReason.LENGTH]
    assert desk.journal.num_moved == {MoveCause.DRAIN: 1} and desk.journal.num_replayed == 0
    assert desk.journal.outcomes[0].rank == 1 - home and desk.journal.outcomes[0].num_output_tokens == 6
    text = (await desk.metrics.text()).decode()
    assert f'wideep:request_move_pause_seconds_count{{engine="{1 - home}",model_name="m"}} 1.0' in text
    assert f'wideep:request_move_pause_seconds_count{{engine="{home}",model_name="m"}} 0.0' in text


@in_loop
async def test_the_next_rank_expects_what_a_draining_rank_releases_until_it_comes_or_ends() -> None:
    desk, _, home = open_begun("a", "b", "c")
    desk.moves.drain(home)
    assert desk.ranks.expected == [(1 - home, name, True) for name in "abc"]
    release(desk, "a", home)
    desk.deliver("b", "c", FinishReason.STOP)
    desk.requests.leave([home])
    assert desk.rank_of("c") == 1 - home
    assert desk.ranks.expected[3:] == [(1 - home, "b", False)], "the others have come"


@in_loop
async def test_only_ranks_of_a_pool_agree_on_the_step_of_a_move() -> None:
    for pools, in_step in ((("p", "p"), True), (("p", "q"), False)):
        desk, _, home = open_begun("a")
        for rank, pool in enumerate(pools):
            desk.router.set_pool(rank, pool)
        desk.moves.drain(home)
        assert [each.in_step for each in desk.ranks.withdrawals] == desk.ranks.in_step == [in_step]


@in_loop
async def test_no_rank_expects_a_request_that_its_present_one_may_keep() -> None:
    desk, _, home = open_begun("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk.router, "plan_moves", lambda _prompt_of: {"a": home})
        patch.setattr(desk.router, "target_of", lambda _request_id: 1 - home)
        desk.moves.look(is_urgent=True)
    [withdrawal] = desk.ranks.withdrawals
    assert not withdrawal.even_if_begun and not desk.ranks.expected


@in_loop
async def test_a_rank_of_another_host_does_not_expect_what_a_draining_rank_releases() -> None:
    desk, _, home = open_begun("a")
    desk.router.note_size(1 - home, seats=SEATS, block_tokens=BLOCK_TOKENS, host="other")
    desk.moves.drain(home)
    assert desk.ranks.withdrawn == [(home, "a")] and not desk.ranks.expected


@in_loop
async def test_refused_drains_name_the_reason() -> None:
    desk = Desk()
    for rank in (-1, 2):
        with pytest.raises(ApiError, match=f"Rank {rank} does not exist; the ranks are 0 to 1") as refused:
            desk.moves.drain(rank)
        assert refused.value.status == 400
    desk.moves.drain(0)
    desk.moves.drain(0)
    with pytest.raises(ApiError, match="Rank 1 is the last rank that takes requests") as refused:
        desk.moves.drain(1)
    assert refused.value.status == 409
    desk.requests.leave([1])
    with pytest.raises(ApiError, match="Rank 1 is away"):
        desk.moves.drain(1)
    assert [each[:2] for each in desk.moves.drains()] == [(0, 0)]
    desk.moves.undo(0)
    desk.moves.undo(0)
    assert desk.moves.drains() == []


@in_loop
async def test_a_wait_for_a_drain_ends_with_its_last_request_its_time_or_its_rank() -> None:
    desk, _answer, home = open_begun("a", "b")
    desk.moves.drain(home)
    await asyncio.wait_for(desk.moves.wait(home, 0.05), 5)
    assert [each[:2] for each in desk.moves.drains()] == [(home, 2)]
    waiting = asyncio.create_task(desk.moves.wait(home, 60.0))
    for name in "ab":
        assert not waiting.done()
        release(desk, name, home)
    await asyncio.wait_for(waiting, 5)
    desk.requests.leave([home])
    await asyncio.wait_for(desk.moves.wait(home, 60.0), 5)
    assert desk.moves.drains() == []
    for name in "ab":
        desk.deliver(name, "", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP] * 2
