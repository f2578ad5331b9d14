"""An order that arrives while another is followed: no rank waits for one that the new order leaves out."""

from unittest.mock import Mock

import pytest

from dispatch.errors import DispatchError, PeerLost
from expert_placement.placement import linear_placement
from scheduler.engine import Engine
from scheduler.epochs.follower import EpochFollower
from scheduler.epochs.orders import Order
from scheduler.policy.request import ForgetPrefixes
from scheduler.step.lockstep import Decision

PLACEMENT = linear_placement(1, 2, 1)


class Links:
    """A dispatcher and a lock-step of an epoch with a silent member: only an interruption ends the wait."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.step = epoch, 0
        self.interruption: DispatchError | None = None
        self.post = Mock()

    def interrupt(self, error: DispatchError) -> None:
        self.interruption = error

    def agree(self) -> Mock:
        if self.interruption is not None:
            raise self.interruption
        assert self.epoch != 1, "this rank would wait for the silent member"
        return Mock(decision=Decision.STOP, switch_to=None, weights_number=None)


@pytest.mark.parametrize("moment", ["while it meets", "as it begins to serve", "while it serves"])
@pytest.mark.parametrize(
    "newer",
    [Order(2, (0,), PLACEMENT), Order(2, (0, 1), PLACEMENT, stopped=(1,))],
    ids=["left out", "stopped"],
)
def test_a_rank_that_an_order_leaves_out_or_that_has_stopped_is_not_waited_for(
    newer: Order, moment: str
) -> None:
    links = {epoch: Links(epoch) for epoch in (1, 2)}
    regrouping = Mock(members=(0, 1))
    epochs = EpochFollower(regrouping, timeout_s=30.0)
    runner = Mock()
    engine = Engine(0, Mock(), runner, None, Mock(), Mock(), Mock(), Mock(), epochs, memory=Mock())

    def follow(order: Order, *_: object) -> Links:
        regrouping.members, runner.dispatcher = order.members, links[order.epoch]
        if order.epoch == 1 and moment == "while it meets":
            engine.regroup(newer)
        return links[order.epoch]

    def on_regrouped(epoch: int) -> None:
        if epoch == 1 and moment == "as it begins to serve":
            engine.regroup(newer)

    def post(**_: object) -> None:
        if moment == "while it serves":
            engine.regroup(newer)

    regrouping.follow = follow
    links[1].post = Mock(side_effect=post)
    engine.tell_membership(lambda *_, **__: None, on_regrouped)
    engine.regroup(Order(1, (0, 1), PLACEMENT))
    engine.run(Mock())
    assert isinstance(links[1].interruption, PeerLost) and links[1].interruption.rank == 1
    assert links[2].interruption is None, "an order must not interrupt its own epoch"


def test_an_order_to_forget_prefixes_that_comes_again_is_not_followed_again() -> None:
    engine = Engine(0, Mock(), Mock(), Mock(), Mock(), Mock(), Mock(), Mock(), memory=Mock())
    for generation in (5, 5, 4, 6):
        engine.forget_prefixes(generation)
    assert [*engine._inbox] == [ForgetPrefixes(5), ForgetPrefixes(6)] and engine.forgotten == 6
