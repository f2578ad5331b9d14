"""A paused service: what becomes of open requests, and of new ones."""

import asyncio

import pytest

from scheduler.policy.request import FinishReason, Request, SamplingParams
from server.front.errors import ApiError
from server.front.generations import Ask
from server.front.pausing import Pausing
from server.front.sleep_mode import SleepWay
from server.options.pools import Role
from tests.server.front.routing.test_moves import stats_of
from tests.support.clock import Clock
from tests.support.requests.desk import Desk, in_loop

TIMEOUT_S = 10.0


def desk_ask(name: str) -> Ask:
    params = SamplingParams(max_tokens=9)
    return Ask(request=Request(request_id=name, prompt_ids=(65,), params=params, arrival_s=0.0))


class Service:
    """Pauses over accepted requests."""

    def __init__(self, *names: str) -> None:
        self.desk, self.clock = Desk(), Clock()
        if names:
            self.desk.open(*names)
        self.pausing = Pausing(self.desk.requests, clock=self.clock)

    async def pause(self, way: SleepWay) -> "asyncio.Task[None]":
        call = asyncio.create_task(self.pausing.pause(way, TIMEOUT_S))
        await asyncio.sleep(0.05)
        return call


@in_loop
async def test_open_requests_end_and_new_ones_wait_for_the_end_of_the_pause() -> None:
    service = Service("a")
    desk = service.desk
    (await service.pause(SleepWay.ABORT)).result()
    assert desk.reasons() == [FinishReason.ABORT] and service.pausing.is_paused
    num_before = len(desk.ranks.submitted)
    desk.requests.open("later", [desk_ask("b")])
    assert len(desk.ranks.submitted) == num_before and desk.requests.num_open == 1
    service.pausing.resume()
    assert [request.request_id for _, request in desk.ranks.submitted[num_before:]] == ["b"]
    desk.deliver("b", "x", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.ABORT, FinishReason.STOP]


@in_loop
async def test_open_requests_end_in_their_own_time() -> None:
    service = Service("a")
    call = await service.pause(SleepWay.WAIT)
    assert not call.done() and service.desk.ranks.withdrawals == []
    service.desk.deliver("a", "x", FinishReason.STOP)
    await call
    assert service.desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_kept_requests_continue_with_their_tokens() -> None:
    service = Service("a")
    desk = service.desk
    desk.deliver("a", "ab")
    call = await service.pause(SleepWay.KEEP)
    assert not call.done() and [each.request_id for each in desk.ranks.withdrawals] == ["a"]
    desk.deliver("a", is_returned=True)
    await call
    assert desk.requests.num_at_ranks == 0
    service.pausing.resume()
    _, again = desk.ranks.submitted[-1]
    assert bytes(again.replayed_ids) == b"ab"
    desk.deliver("a", "c", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_if_the_time_is_up_the_service_goes_on() -> None:
    service = Service("a")
    call = await service.pause(SleepWay.WAIT)
    service.clock.now_s += TIMEOUT_S
    with pytest.raises(ApiError, match=r"still have requests after 10 s \(1\)") as caught:
        await call
    assert caught.value.status == 504 and not service.pausing.is_paused
    service.desk.requests.open("later", [desk_ask("b")])
    assert service.desk.requests.num_at_ranks == 2


@in_loop
async def test_a_pause_that_is_resumed_meanwhile_says_so() -> None:
    service = Service("a")
    call = await service.pause(SleepWay.WAIT)
    service.pausing.resume()
    with pytest.raises(ApiError, match="resumed meanwhile") as caught:
        await call
    assert caught.value.status == 409


@in_loop
async def test_waking_from_sleep_does_not_end_a_pause_and_the_reverse() -> None:
    service = Service()
    requests = service.desk.requests
    (await service.pause(SleepWay.KEEP)).result()
    requests.pause()
    requests.resume()
    service.desk.requests.open("later", [desk_ask("b")])
    assert requests.num_at_ranks == 0
    requests.pause()
    service.pausing.resume()
    assert requests.num_at_ranks == 0
    requests.resume()
    assert requests.num_at_ranks == 1


@in_loop
async def test_requests_that_move_during_a_pause_end_before_it_returns_and_new_ones_wait() -> None:
    service = Service("drains", "stays")
    desk = service.desk
    desk.deliver("drains", "a")
    call = await service.pause(SleepWay.WAIT)
    rank = desk.rank_of("drains")
    desk.moves.drain(rank)
    desk.requests.open("later", [desk_ask("new")])
    desk.deliver("drains", is_returned=True)
    assert desk.rank_of("drains") == 1 - rank and desk.requests.num_parked == 1
    desk.deliver("stays", "x", FinishReason.STOP)
    await asyncio.sleep(0.05)
    assert not call.done()
    desk.deliver("drains", "b", FinishReason.STOP)
    await call
    service.pausing.resume()
    desk.deliver("new", "c", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP] * 3


@in_loop
async def test_a_prefill_rank_hands_over_its_requests_during_a_pause() -> None:
    service = Service()
    desk = service.desk
    for rank, role in enumerate((Role.PREFILL, Role.DECODE)):
        desk.router.set_role(rank, role)
        desk.router.note_size(rank, seats=4, block_tokens=16)
        desk.router.note_stats(stats_of(rank))
    desk.open("a", prompt_ids=(65,) * 640)
    assert desk.rank_of("a") == 0
    call = await service.pause(SleepWay.WAIT)
    desk.deliver("a", "x", is_returned=True)
    assert desk.rank_of("a") == 1
    await asyncio.sleep(0.05)
    assert not call.done()
    desk.deliver("a", "y", FinishReason.STOP)
    await call
    assert desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_a_pause_waits_for_requests_without_a_rank_and_ends_if_the_client_leaves() -> None:
    service = Service("a", "b")
    desk = service.desk
    desk.deliver("a", "x")
    call = await service.pause(SleepWay.WAIT)
    desk.requests.leave([0, 1])
    assert desk.requests.num_parked == desk.requests.num_at_ranks == 2
    desk.requests.enter(0)
    assert desk.requests.num_parked == 0
    desk.deliver("a", "y", FinishReason.STOP)
    await asyncio.sleep(0.05)
    assert not call.done()
    desk.requests.abort_all()
    await call
    assert desk.requests.num_at_ranks == 0


@in_loop
async def test_a_pause_that_keeps_requests_takes_back_those_that_another_one_waits_for() -> None:
    service = Service("a")
    desk = service.desk
    waiting = await service.pause(SleepWay.WAIT)
    keeping = await service.pause(SleepWay.KEEP)
    assert [each.request_id for each in desk.ranks.withdrawals] == ["a"] and not waiting.done()
    desk.deliver("a", is_returned=True)
    await waiting
    await keeping
    (await service.pause(SleepWay.WAIT)).result()
    assert desk.requests.num_parked == 1, "it stays kept"
    service.pausing.resume()
    desk.deliver("a", "x", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP]
