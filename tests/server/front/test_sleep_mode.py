"""The front's part in sleep mode: open requests, orders to ranks, and when requests are accepted again."""

import asyncio
from collections.abc import Collection

import pytest

from scheduler.policy.request import FinishReason, MemoryOrder
from server.front.errors import ApiError
from server.front.journal import Journal
from server.front.routing.loads import MoveCause
from server.front.sleep_mode import KV_CACHE, TAGS, WEIGHTS, SleepMode, SleepWay
from tests.support.clock import Clock
from tests.support.requests.desk import Desk, in_loop

TIMEOUT_S = 10.0
LIGHT = MemoryOrder(1, has_cache=False)


class Service:
    """Sleep mode over accepted requests. Ranks follow orders at once, unless `follows` is False."""

    def __init__(self, *names: str, follows: bool = True) -> None:
        self.desk = Desk()
        self.answer = self.desk.open(*names) if names else None
        self.members: Collection[int] | None = (0, 1)
        self.is_moving = False
        self.clock = Clock()
        self.mode = SleepMode(
            self.desk.requests,
            self.desk.ranks,  # type: ignore[arg-type]
            members=lambda: self.members,
            is_moving=lambda: self.is_moving,
            on_level=self.desk.metrics.note_sleep,
            clock=self.clock,
        )
        self._num_followed, self._follows = 0, follows

    @property
    def orders(self) -> list[MemoryOrder]:
        """The orders of rank 0."""
        return [order for rank, order in self.desk.ranks.memory_orders if rank == 0]

    def follow(self, *ranks: int) -> None:
        """Let ranks follow the newest order."""
        for rank in ranks:
            self.mode.take_switched(rank, self.orders[-1].number)

    async def during(self, call: "asyncio.Task[None]") -> None:
        """Let a call run until it ends or waits for something that this does not do."""
        for _ in range(6):
            await asyncio.sleep(0.01)
            if self._follows and len(self.orders) > self._num_followed:
                self._num_followed = len(self.orders)
                self.follow(0, 1)
            if call.done():
                return

    async def sleep(self, level: int = 1, way: SleepWay = SleepWay.ABORT) -> "asyncio.Task[None]":
        call = asyncio.create_task(self.mode.sleep(level, way, TIMEOUT_S))
        await self.during(call)
        return call

    async def wake(self, *tags: str) -> "asyncio.Task[None]":
        call = asyncio.create_task(self.mode.wake_up(tags or TAGS, TIMEOUT_S))
        await self.during(call)
        return call

    async def time_out(self, call: "asyncio.Task[None]") -> None:
        """Let the time of a call pass."""
        self.clock.now_s += TIMEOUT_S
        await asyncio.wait([call])


@in_loop
async def test_a_service_without_requests_sleeps_and_wakes() -> None:
    service = Service()
    (await service.sleep()).result()
    assert service.orders == [LIGHT]
    assert service.mode.why_not_ready() == "it sleeps (level 1); POST /wake_up wakes it"
    assert service.mode.state[:2] == (1, False)
    (await service.wake()).result()
    assert service.orders == [LIGHT, MemoryOrder(2)]
    assert service.mode.why_not_ready() is None and service.mode.state == (0, False, 0.0)


@in_loop
async def test_repeated_calls_send_no_order_and_a_deeper_sleep_sends_one() -> None:
    service = Service()
    (await service.wake()).result()
    for level in (1, 1, 2, 1):
        (await service.sleep(level)).result()
    assert service.orders == [LIGHT, MemoryOrder(2, has_cache=False, has_experts=False)]
    assert service.mode.state.level == 2
    for _ in range(2):
        (await service.wake()).result()
    assert [order.number for order in service.orders] == [1, 2, 3]


@in_loop
async def test_open_requests_end_as_aborted() -> None:
    service = Service("a", "b")
    service.desk.deliver("a", "x")
    (await service.sleep()).result()
    assert service.desk.reasons() == [FinishReason.ABORT] * 2
    assert {name for _, name in service.desk.ranks.aborted} == {"a", "b"} and service.orders == [LIGHT]


@in_loop
async def test_open_requests_end_before_ranks_sleep() -> None:
    service = Service("a", "b")
    call = await service.sleep(way=SleepWay.WAIT)
    assert not call.done() and service.orders == [] and service.mode.why_not_ready() is not None
    service.desk.deliver("a", "x", FinishReason.STOP)
    await service.during(call)
    assert not call.done() and service.orders == []
    service.desk.deliver("b", "y", FinishReason.LENGTH)
    await service.during(call)
    call.result()
    assert service.orders == [LIGHT]
    assert service.desk.reasons() == [FinishReason.STOP, FinishReason.LENGTH]


@in_loop
async def test_if_the_time_is_up_while_requests_are_open_the_service_stays_awake() -> None:
    service = Service("a")
    call = await service.sleep(way=SleepWay.WAIT)
    await service.time_out(call)
    with pytest.raises(
        ApiError, match=r"still open after 10 s \(1\), so the service does not sleep"
    ) as caught:
        call.result()
    assert caught.value.status == 504 and service.orders == [] and service.mode.why_not_ready() is None
    service.desk.deliver("a", "x", FinishReason.STOP)
    assert service.desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_ranks_sleep_when_a_change_of_the_placement_has_ended() -> None:
    service = Service()
    service.is_moving = True
    call = await service.sleep(level=2)
    assert not call.done() and service.orders == [] and service.mode.why_not_ready() is not None
    service.is_moving = False
    await service.during(call)
    call.result()
    assert service.orders == [LIGHT._replace(has_experts=False)]


@in_loop
async def test_if_the_time_is_up_while_experts_move_the_service_stays_awake() -> None:
    service = Service()
    service.is_moving = True
    call = await service.sleep(level=2)
    await service.time_out(call)
    with pytest.raises(
        ApiError, match="Experts still move after 10 s, so the service does not sleep"
    ) as caught:
        call.result()
    assert caught.value.status == 504 and service.orders == [] and service.mode.why_not_ready() is None


@in_loop
async def test_kept_requests_continue_after_waking_with_their_tokens() -> None:
    service = Service("begun", "waits")
    desk = service.desk
    desk.deliver("begun", "ab")
    call = await service.sleep(way=SleepWay.KEEP)
    assert not call.done() and service.orders == []
    assert {each.request_id for each in desk.ranks.withdrawals} == {"begun", "waits"}
    assert all(each.even_if_begun for each in desk.ranks.withdrawals)
    desk.deliver("begun", "c")  # from a step before the withdrawal
    for name in ("begun", "waits"):
        desk.deliver(name, is_returned=True)
    await service.during(call)
    call.result()
    assert service.orders == [LIGHT] and desk.requests.num_at_ranks == 0 and desk.requests.num_open == 2
    num_before = len(desk.ranks.submitted)
    (await service.wake()).result()
    again = {request.request_id: request for _, request in desk.ranks.submitted[num_before:]}
    assert bytes(again["begun"].replayed_ids) == b"abc" and again["waits"].replayed_ids == ()
    for name in again:
        desk.deliver(name, "d", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP] * 2
    assert desk.journal.num_moved == {MoveCause.SLEEP: 2}


@in_loop
async def test_a_rank_that_is_lost_while_it_gives_requests_back_loses_none() -> None:
    service = Service("a", "b")
    desk = service.desk
    call = await service.sleep(way=SleepWay.KEEP)
    lost = desk.rank_of("a")
    desk.deliver("b", is_returned=True)
    service.members = (1 - lost,)
    desk.requests.leave([lost])
    await service.during(call)
    call.result()
    desk.requests.enter(lost)  # it is back: nothing is submitted to it now
    assert desk.requests.num_at_ranks == 0
    (await service.wake()).result()
    assert desk.requests.num_at_ranks == 2


@in_loop
async def test_waking_before_the_ranks_sleep_takes_requests_again() -> None:
    service = Service("a")
    call = await service.sleep(way=SleepWay.KEEP)
    (await service.wake()).result()
    await service.during(call)
    with pytest.raises(ApiError, match="woken up meanwhile") as caught:
        call.result()
    assert caught.value.status == 409 and service.orders == []
    service.desk.deliver("a", is_returned=True)
    assert service.desk.requests.num_at_ranks == 1, "it goes to a rank at once"


@in_loop
async def test_sleeping_again_while_the_ranks_wake_is_followed_last() -> None:
    service = Service(follows=False)
    sleeping = await service.sleep()
    service.follow(0, 1)
    await service.during(sleeping)
    waking = await service.wake()
    assert service.mode.why_not_ready() == "it is waking up"
    again = await service.sleep()
    await service.during(waking)
    with pytest.raises(ApiError, match="put to sleep meanwhile"):
        waking.result()
    service.follow(0, 1)
    await service.during(again)
    again.result()
    assert [order.has_cache for order in service.orders] == [False, True, False]
    assert service.mode.state[:2] == (1, False)


@in_loop
async def test_a_slow_rank_is_named_and_the_service_wakes_when_it_is_ready() -> None:
    service = Service(follows=False)
    call = await service.sleep(2)
    service.follow(0)
    await service.time_out(call)
    with pytest.raises(ApiError, match=r"ranks 1 have not released the memory yet\. They continue") as caught:
        call.result()
    assert caught.value.status == 504 and service.mode.state.level == 2
    service.follow(1)
    (await service.sleep(2)).result()
    call = await service.wake()
    service.follow(1)
    await service.time_out(call)
    with pytest.raises(ApiError, match=r"ranks 0 have not brought back"):
        call.result()
    assert service.mode.why_not_ready() == "it is waking up"
    service.follow(0)
    assert service.mode.why_not_ready() is None


@in_loop
async def test_parts_wake_one_after_the_other() -> None:
    service = Service()
    (await service.sleep(2)).result()
    (await service.wake(WEIGHTS)).result()
    assert service.orders[-1] == MemoryOrder(2, has_cache=False) and service.mode.state.level == 2
    (await service.wake(KV_CACHE)).result()
    assert service.orders[-1] == MemoryOrder(3) and service.mode.state.level == 0


@in_loop
async def test_a_rank_that_attaches_gets_the_present_order() -> None:
    service = Service()
    service.mode.note_rank(0, None)
    assert service.orders == []
    (await service.sleep()).result()
    service.mode.note_rank(1, None)
    assert service.desk.ranks.memory_orders[-1] == (1, LIGHT)
    call = await service.wake()
    assert call.done(), "ranks that follow the newest order do not need the one before"


@in_loop
async def test_a_lost_rank_is_not_waited_for() -> None:
    service = Service(follows=False)
    sleeping = await service.sleep()
    service.follow(0, 1)
    await service.during(sleeping)
    waking = await service.wake()
    service.follow(0)
    service.members = None  # the others meet
    await service.during(waking)
    assert not waking.done() and service.mode.why_not_ready() == "it is waking up"
    service.members = (0,)
    assert service.mode.why_not_ready() is None
    await service.during(waking)
    waking.result()


@pytest.mark.parametrize(
    ("memory", "level", "is_waking"),
    [(MemoryOrder(5, False), 1, False), (MemoryOrder(5, False, False), 2, False), (MemoryOrder(6), 1, True)],
)
def test_a_restarted_front_learns_the_state_from_its_ranks(
    memory: MemoryOrder, level: int, is_waking: bool
) -> None:
    async def test() -> None:
        service = Service()
        service.mode.note_rank(1, None)  # a restarted rank, which is awake
        service.mode.note_rank(0, memory)
        assert service.mode.state[:2] == (level, is_waking)
        assert service.desk.ranks.memory_orders == [(0, memory), (1, memory)]
        service.follow(0, 1)
        if is_waking:
            assert service.mode.state.level == 0
            return
        (await service.wake()).result()
        assert service.orders[-1] == MemoryOrder(6) and service.mode.state.level == 0

    asyncio.run(test())


@in_loop
async def test_what_cannot_sleep_says_so() -> None:
    service = Service()
    service.members = None
    with pytest.raises(ApiError, match="its ranks do not serve together now") as caught:
        await service.mode.sleep(1, SleepWay.ABORT, TIMEOUT_S)
    assert caught.value.status == 503 and service.mode.state.level == 0
    desk = Desk()
    mode = SleepMode(desk.requests, desk.ranks, members=lambda: (0,), why_impossible="no")  # type: ignore[arg-type]
    for call in (mode.sleep(1, SleepWay.ABORT, TIMEOUT_S), mode.wake_up(TAGS, TIMEOUT_S)):
        with pytest.raises(ApiError, match="no") as caught:
            await call
        assert caught.value.status == 501


def test_moves_for_a_sleep_are_counted_apart() -> None:
    journal = Journal()
    assert set(journal.num_moved) <= set(MoveCause) and MoveCause("sleep") is MoveCause.SLEEP
