"""Carries out what `epochs` decides: orders to ranks, requests of a lost rank to others, placements of the members.

Lives in the front's event loop, with the one timer that the decisions need. A rank that is lost before the service has
begun to serve ends it: mostly it cannot start (a wrong flag, no memory), and nobody waits for an answer yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from server.front.events import EventLog
from server.front.membership import Effects, Epoch, Epochs, Phase
from server.link.messages import Fault

_LOG = logging.getLogger("wideep.front")
READ_BYTES_PER_S = 50e6  # from a slow disk


class RankStreams(Protocol):
    """What is said to ranks; `server.link.ranks.Ranks` says it."""

    def regroup(self, order: Order) -> None:
        """Tell an order to its members."""

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream, which loses it."""


class OpenRequests(Protocol):
    """What is asked of `server.front.requests.Requests`."""

    def enter(self, rank: int) -> None:
        """Let a rank be given requests."""

    def leave(self, ranks: Collection[int]) -> None:
        """Give the requests of lost ranks to others."""


class PlacementHome(Protocol):
    """What is asked of `server.experts.control.PlacementControl`."""

    home: Placement | None
    expert_bytes: int  # of one expert of one layer

    def next_version(self) -> int:
        """A placement's version that was not used."""

    def regroup(self, order: Order, reason: str) -> None:
        """Take that other ranks meet with another placement."""


class Leader:
    """Keeps a service together that loses ranks and gets them back."""

    def __init__(
        self,
        epochs: Epochs,
        ranks: RankStreams,
        requests: OpenRequests,
        placement: PlacementHome,
        *,
        surviving: Callable[[Placement, Sequence[int]], Placement],
        on_order: Callable[[Order], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | None = None,
    ) -> None:
        """Args: surviving: the placement at home, over those of its ranks that are members.

        on_order is told of every order before the ranks are; on_failure that the service must end, and why.
        """
        self.epochs = epochs
        self._events = events or EventLog()
        self._ranks, self._surviving, self._clock = ranks, surviving, clock
        self._on_order, self._on_failure = on_order, on_failure
        self._requests, self._placement = requests, placement
        self._entered: set[int] = set(range(epochs.num_ranks))  # ranks that are given requests
        self._timer: asyncio.TimerHandle | None = None
        self._said_phase = Phase.STARTING
        self._begun_s = 0.0  # of the regrouping under way

    def resume(self) -> None:
        """Lead a service whose front was started again."""
        self.epochs.resume(self._clock())
        self._set_timer()

    def attach(self, rank: int, *, epoch: int = 0) -> None:
        """Take a rank that is ready, and was ordered to an epoch before."""
        if self.epochs.phase is not Phase.STARTING:
            _LOG.warning("rank %d is back", rank)
            absence = self.epochs.missing.get(rank)
            away_s = None if absence is None else self._clock() - absence.since_s
            self._events.note("rank_back", f"rank {rank} is back", rank=rank, seconds=away_s)
        self._carry_out(self.epochs.attach(rank, self._clock(), epoch=epoch))

    def lose(self, rank: int, reason: str) -> None:
        """Take that a rank is gone."""
        if self._placement.home is None and not self.epochs.is_resuming:
            self._on_failure(f"rank {rank} is lost: {reason}")
            return
        if self.epochs.phase is not Phase.STARTING:
            _LOG.warning("rank %d is lost: %s", rank, reason)
            self._events.note("rank_lost", f"rank {rank} is lost: {reason}", rank=rank)
        self._carry_out(self.epochs.lose(rank, reason, self._clock()))

    def take_regrouped(self, rank: int, number: int) -> None:
        """Take that a rank serves in an epoch."""
        self.epochs.take_regrouped(rank, number, self._clock())
        self._carry_out(Effects())

    def take_fault(self, rank: int, fault: Fault) -> None:
        """Take that a rank's steps broke off."""
        epoch, reason, is_final = fault
        if epoch == self.epochs.number and (is_final or not self.epochs.faults):  # others follow suit
            _LOG.warning("rank %d stopped in epoch %d: %s", rank, epoch, reason)
            self._events.note("stopped", f"rank {rank} stopped in epoch {epoch}: {reason}", rank=rank)
        self._carry_out(self.epochs.take_fault(rank, epoch, reason, is_final=is_final, now_s=self._clock()))

    def close(self) -> None:
        """Decide no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._carry_out(self.epochs.tick(self._clock()))

    def _carry_out(self, effects: Effects) -> None:
        if effects.failure is not None:
            self._on_failure(effects.failure)
            return
        if effects.order is not None:
            self._order(effects.order)
        for rank, reason in effects.given_up:
            self._ranks.give_up(rank, reason)  # which comes back here as a loss
        self._share_requests()
        self._say()
        self._set_timer()

    def _order(self, epoch: Epoch) -> None:
        if self._placement.home is None:
            self._on_failure("no rank that came back to the front knows where all experts belong")
            return
        placement = self._surviving(self._placement.home, epoch.members)
        order = Order(epoch.number, epoch.members, placement.with_version(self._placement.next_version()))
        self.epochs.grant(self._read_s(placement))
        self._begun_s = self._clock()
        self._placement.regroup(order, self.epochs.describe())
        self._on_order(order)
        self._ranks.regroup(order)

    def _read_s(self, placement: Placement) -> float:
        """How long a member may take to read what it takes over."""
        assert self._placement.home is not None, "an order has a placement"
        num_slots = placement.slots_per_rank - self._placement.home.slots_per_rank
        return num_slots * placement.num_layers * self._placement.expert_bytes / READ_BYTES_PER_S

    def _share_requests(self) -> None:
        """Give requests to the ranks that can be given them, and take them from those that cannot any more."""
        if self.epochs.phase is Phase.STARTING:
            return
        settled = self.epochs.settled
        left, entered = self._entered - settled, settled - self._entered
        self._entered = set(settled)
        if left:
            self._requests.leave(left)
        for rank in sorted(entered):
            self._requests.enter(rank)

    def _say(self) -> None:
        """Write a line when the phase has changed."""
        epochs, said = self.epochs, self._said_phase
        self._said_phase = epochs.phase
        if epochs.phase is said or said is Phase.STARTING:
            return
        if epochs.phase is Phase.WAITING:
            _LOG.warning("waiting for a rank to come back: %s", epochs.describe())
            self._events.note("waiting", f"no rank serves: {epochs.describe()}")
        elif epochs.phase is Phase.SERVING:
            members = " ".join(map(str, epochs.members))
            seconds = self._clock() - self._begun_s
            _LOG.warning("epoch %d: ranks %s serve after %.2f s", epochs.number, members, seconds)
            self._events.note("regrouped", f"epoch {epochs.number}: ranks {members} serve", seconds=seconds)

    def _set_timer(self) -> None:
        self.close()
        due_s = self.epochs.next_due_s()
        if due_s is not None:
            left_s = max(0.0, due_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)
