"""Orders from any thread with one follower. Members wait for each other in the store only while their order is current."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, PrefixStore

from dispatch.errors import WireUnavailable
from expert_placement.placement import linear_placement
from scheduler.epochs import meeting
from scheduler.epochs.meeting import ARRIVAL_TIMEOUT_S, MeetingStore, meet
from scheduler.epochs.orders import MembershipError, Order, Orders, OvertakenError
from tests.support.clock import Clock

PLACEMENT = linear_placement(1, 4, 2)


def order(epoch: int) -> Order:
    return Order(epoch, (0, 1), PLACEMENT)


def test_the_newest_order_counts_and_older_ones_are_not_taken() -> None:
    orders = Orders()
    assert orders.newest_epoch(0) == 0
    assert orders.give(order(2)) and not orders.give(order(2)) and not orders.give(order(1))
    assert orders.newest_epoch(0) == 2 and orders.newest_epoch(5) == 5
    assert orders.wait(0, 30.0) == order(2)


def test_an_order_is_over_once_a_newer_one_has_come() -> None:
    orders = Orders()
    orders.give(order(1))
    assert not orders.is_over(1) and not orders.is_over(1, 0.001)
    orders.give(order(2))
    assert orders.is_over(1) and not orders.is_over(2)


def test_who_waits_is_woken_by_an_order_and_by_the_end() -> None:
    orders, came = Orders(), list[Order | None]()
    waiting = threading.Thread(target=lambda: came.extend([orders.wait(0, 30.0), orders.wait(1, 30.0)]))
    waiting.start()
    orders.give(order(1))
    orders.stop()
    waiting.join(30)
    assert came in ([order(1), None], [None, None])  # the end may also have come first
    assert orders.is_over(1), "an order is over after the end"


def test_a_rank_that_nobody_orders_says_so_and_ends() -> None:
    orders = Orders()
    orders.give(order(3))
    with pytest.raises(MembershipError, match=r"epoch 3 ended and the front ordered no other within 0\.01 s"):
        orders.wait(3, 0.01)


class OrderClock(Clock):
    """A clock that moves by the time waited for an order, and the time at which the order is over."""

    def __init__(self, over_at_s: float = float("inf")) -> None:
        super().__init__(0.0)
        self._over_at_s = over_at_s

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Advance the clock."""
        self.now_s += wait_s
        return self.now_s >= self._over_at_s


def test_one_member_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it met another member"))
    meet(HashStore(), 3, (2,), 2, OrderClock().is_over)


def test_who_waits_in_vain_names_those_that_did_not_come() -> None:
    store, clock = HashStore(), OrderClock()
    PrefixStore("epoch/4", store).set("here/2", "1")
    with pytest.raises(WireUnavailable, match=r"ranks \[3, 5\] did not join epoch 4 within 29\.5 s"):
        meet(store, 4, (0, 2, 3, 5), 0, clock.is_over, clock=clock)
    assert ARRIVAL_TIMEOUT_S <= clock.now_s < ARRIVAL_TIMEOUT_S + 0.1
    assert store.check(["epoch/4/here/0"])
    with pytest.raises(OvertakenError):  # otherwise it would meet a member that has left
        meet(store, 4, (0, 2), 2, OrderClock().is_over)


def test_an_order_that_is_over_is_given_up_at_once_also_when_all_came() -> None:
    store, clock = HashStore(), OrderClock(over_at_s=1.0)
    with pytest.raises(OvertakenError):
        meet(store, 4, (0, 1), 0, clock.is_over, clock=clock)
    assert clock.now_s < 1.1
    PrefixStore("epoch/5", store).set("here/1", "1")
    with pytest.raises(OvertakenError):
        meet(store, 5, (0, 1), 0, clock.is_over, clock=clock)


def test_members_do_the_same_when_an_order_comes_to_some_before_and_to_others_after_they_saw_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[int] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, rank, **__: met.append(rank))
    store = HashStore()
    for epoch in (4, 5):
        for rank in (0, 1):
            PrefixStore(f"epoch/{epoch}", store).set(f"here/{rank}", "1")
    meet(store, 4, (0, 1), 0, OrderClock().is_over)
    meet(store, 4, (0, 1), 1, OrderClock(over_at_s=0.0).is_over)
    assert met == [0, 1], "the member that entered first would wait for its timeout"
    for rank, over_at_s in ((0, 0.0), (1, float("inf"))):
        with pytest.raises(OvertakenError):
            meet(store, 5, (0, 1), rank, OrderClock(over_at_s=over_at_s).is_over)
    assert met == [0, 1]


def test_who_came_to_another_epoch_did_not_come_to_this_one() -> None:
    store, clock = HashStore(), OrderClock()
    PrefixStore("epoch/4", store).set("here/1", "1")
    with pytest.raises(WireUnavailable, match=r"ranks \[1\] did not join epoch 5"):
        meet(store, 5, (0, 1), 0, clock.is_over, clock=clock)


def test_a_wait_in_the_store_ends_with_the_value_the_order_or_the_timeout() -> None:
    clock = OrderClock(over_at_s=5.0)
    inner = HashStore()
    store = MeetingStore(inner, clock=clock)
    store.is_over = clock.is_over
    own = PrefixStore("group", store)
    inner.set("group/address", "here")
    assert own.get("address") == b"here"
    with pytest.raises(DistStoreError, match="no rank has written group/other"):
        store.wait(["group/other"], timedelta(seconds=3.0))
    assert clock.now_s < 3.1
    with pytest.raises(OvertakenError):
        own.get("other")
    assert clock.now_s < 5.1


def test_a_group_with_a_collective_that_does_not_end_is_left_to_end_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    class StuckGroup:
        def __del__(self) -> None:
            may_end.wait(30.0)
            has_ended.set()

    world = SimpleNamespace(pg_map={StuckGroup(): None}, group_count=3)
    monkeypatch.setattr(meeting, "PART_S", 0.01)
    monkeypatch.setattr(meeting, "distributed_c10d", SimpleNamespace(_world=world))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", world.pg_map.clear)
    meeting.part()
    assert world.group_count == 0 and not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(30.0)
