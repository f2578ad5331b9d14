"""Orders from any thread, followed by one: the newest counts, and nobody waits for what is over."""

import threading

import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs.orders import MembershipError, Order, Orders

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
    assert came in ([order(1), None], [None, None])  # the end, too, may have come first
    assert orders.is_over(1), "there is no use in it any more"


def test_a_rank_that_nobody_orders_says_so_and_ends() -> None:
    orders = Orders()
    orders.give(order(3))
    with pytest.raises(
        MembershipError, match=r"epoch 3 ended and the front has ordered no other within 0\.01 s"
    ):
        orders.wait(3, 0.01)
