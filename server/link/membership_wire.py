"""Between orders, what ranks answer to them, and the messages of ranks.proto: pure functions, both ways."""

from typing import NamedTuple

from scheduler.epochs.orders import Order
from server.link import placement_wire
from server.link import ranks_pb2 as pb


class FaultWord(NamedTuple):
    """A rank's steps broke off; it waits for an order."""

    rank: int
    epoch: int  # whose steps, or whose order it cannot follow
    reason: str
    is_final: bool  # it cannot follow that order: only another one helps


def order_to_wire(order: Order) -> pb.Regroup:
    """Encode an order."""
    content = placement_wire.placement_to_wire(order.placement)
    return pb.Regroup(epoch=order.epoch, members=order.members, placement=content)


def order_from(wire: pb.Regroup) -> Order:
    """Decode an order; its placement's digest is checked."""
    return Order(wire.epoch, tuple(wire.members), placement_wire.placement_from(wire.placement))


def fault_to_wire(epoch: int, reason: str, *, is_final: bool) -> pb.Fault:
    """Encode a fault; the stream says whose it is."""
    return pb.Fault(epoch=epoch, reason=reason, is_final=is_final)


def fault_from(rank: int, wire: pb.Fault) -> FaultWord:
    """Decode a rank's fault."""
    return FaultWord(rank, wire.epoch, wire.reason, wire.is_final)
