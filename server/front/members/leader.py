"""Carry out the decisions of `Epochs`: order a pool's ranks, move requests of lost ranks, set the members' placement.

Runs in the front's event loop, with one timer. If a rank is lost before its pool began to serve, the service ends:
usually the rank cannot start (a wrong flag, too little memory), and no request waits for an answer yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from expert_placement.placement import EMPTY, Placement
from scheduler.epochs.orders import Order
from server.front.events import EventLog
from server.front.members.membership import Effects, Epoch, Epochs, Phase
from server.link.messages import Fault

_LOG = logging.getLogger("wideep.front")
READ_BYTES_PER_S = 50e6  # from a slow disk

_Experts = set[tuple[int, int]]  # layers and experts


class RankOrders(Protocol):
    """Messages to ranks, implemented by `server.link.ranks.Ranks`."""

    def regroup(self, order: Order) -> None:
        """Send an order to its members."""

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream, so that the rank is lost."""


class FollowingRequests(Protocol):
    """Requests that follow the ranks, implemented by `server.front.requests.Requests`."""

    def enter(self, rank: int) -> None:
        """Route requests to a rank from now on."""

    def leave(self, ranks: Collection[int]) -> None:
        """Move the requests of lost ranks to other ranks."""


class PlacementHome(Protocol):
    """The state of expert placements, implemented by `server.experts.control.PlacementControl`."""

    home: Placement | None
    current: Placement | None  # over the members of the last order
    expert_bytes: int  # of one expert of one layer

    @property
    def is_changing(self) -> bool:
        """Whether a change of the placement is in progress."""

    def resize(self, home: Placement) -> None:
        """Change the number of ranks. `home` is the placement over all of them."""

    def next_version(self) -> int:
        """Return an unused version number for a placement."""

    def regroup(self, order: Order, reason: str) -> None:
        """Record that the members of an order meet with its placement."""


class Leader:
    """Keeps a pool together while ranks are lost and return."""

    def __init__(
        self,
        epochs: Epochs,
        ranks: RankOrders,
        requests: FollowingRequests,
        placement: PlacementHome,
        *,
        surviving: Callable[[Placement, Sequence[int]], Placement],
        on_order: Callable[[Order], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        on_no_home: Callable[[], None] = lambda: None,
        events: EventLog | None = None,
        pool: str = "",
        weights: Callable[[], int] = lambda: 0,
    ) -> None:
        """Args: surviving returns the placement over the members' places, given the home placement.

        on_order is called with every order before the ranks get it, on_failure with the reason if the pool cannot serve.
        on_no_home is called before the first order if no rank has returned with a home placement; it may set another one.
        pool is the pool's name in messages; "" if it is the only one. weights returns the version of the base weights that
        members serve.
        """
        self.epochs, self._weights = epochs, weights
        self._of_pool = f" of pool {pool}" if pool else ""
        self._events = events or EventLog()
        self._ranks, self._surviving, self._clock = ranks, surviving, clock
        self._on_order, self._on_failure, self._on_no_home = on_order, on_failure, on_no_home
        self._requests, self._placement = requests, placement
        self._entered: set[int] = set(epochs.ranks)  # ranks that requests are routed to
        self._timer: asyncio.TimerHandle | None = None
        self._said_phase = Phase.STARTING
        self._begun_s = 0.0  # of the current regrouping
        self._former_home: Placement | None = None  # before the last resize
        self._members: tuple[int, ...] = ()  # of the last order
        self._met: set[int] = set()  # members that have met since then, so they hold their experts
        # Of the others: what they held before, and no order took from them.
        self._kept: dict[int, _Experts] = {}

    def resume(self, lost: Collection[int] = ()) -> None:
        """Lead a pool after a restart of its front. Its ranks get requests when they serve again.

        Args:
            lost: Ranks that were lost with that front.
        """
        self.epochs.resume(self._clock(), lost)
        self._requests.leave(self._entered)
        self._entered = set()
        self._set_timer()

    def gather(self) -> None:
        """Lead a pool that joins a running service. Its ranks get requests when they have met."""
        self.epochs.gather(self._clock())
        self._entered = set()

    def attach(self, rank: int, *, epoch: int = 0) -> None:
        """Attach a rank that is ready; `epoch` is as for `Epochs.attach`."""
        if (
            rank in self.epochs.ranks
            and self.epochs.phase is not Phase.STARTING
            and not self.epochs.is_gathering
        ):
            _LOG.warning("rank %d%s is back", rank, self._of_pool)
            absence = self.epochs.missing.get(rank)
            away_s = None if absence is None else self._clock() - absence.since_s
            self._events.note("rank_back", f"rank {rank}{self._of_pool} is back", rank=rank, seconds=away_s)
        self._carry_out(self.epochs.attach(rank, self._clock(), epoch=epoch))
        if not self._members and self.epochs.phase is Phase.SERVING:  # they met without an order
            self._members, self._met = self.epochs.members, {*self.epochs.members}

    def lose(self, rank: int, reason: str) -> None:
        """Handle the loss of a rank."""
        if self._placement.home is None and not self.epochs.is_resuming:
            self._on_failure(f"rank {rank} is lost: {reason}")
            return
        if rank in self.epochs.ranks and self.epochs.phase is not Phase.STARTING:
            _LOG.warning("rank %d%s is lost: %s", rank, self._of_pool, reason)
            self._events.note("rank_lost", f"rank {rank}{self._of_pool} is lost: {reason}", rank=rank)
        self._met.discard(rank)
        self._kept.pop(rank, None)
        self._carry_out(self.epochs.lose(rank, reason, self._clock()))

    def take_regrouped(self, rank: int, number: int) -> None:
        """Record that a rank serves in an epoch."""
        if number == self.epochs.number and rank in self._members:
            self._met.add(rank)
        self.epochs.take_regrouped(rank, number, self._clock())
        self._carry_out(Effects())

    def take_fault(self, rank: int, fault: Fault) -> None:
        """Handle a rank's report that its steps failed."""
        epoch, reason, is_final = fault
        if epoch == self.epochs.number and (is_final or not self.epochs.faults):  # other ranks report it too
            _LOG.warning("rank %d%s stopped in epoch %d: %s", rank, self._of_pool, epoch, reason)
            said = f"rank {rank}{self._of_pool} stopped in epoch {epoch}: {reason}"
            self._events.note("stopped", said, rank=rank)
        self._carry_out(self.epochs.take_fault(rank, epoch, reason, is_final=is_final, now_s=self._clock()))

    def resize(self, home: Placement) -> None:
        """Let the ranks of `home` meet in the next epoch: new ones that have attached, and no ranks beyond its number.

        If they do not all meet, the next epoch has the former ranks and their placement.
        """
        self._former_home = self._placement.home
        self._placement.resize(home)
        self._carry_out(self.epochs.resize(home.num_ranks, self._clock()))

    def close(self) -> None:
        """Cancel the timer, so that nothing more is decided."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._carry_out(self.epochs.tick(self._clock()))

    def _carry_out(self, effects: Effects) -> None:
        if effects.failure is not None:
            self._on_failure(effects.failure)
            return
        self._follow_size()
        if effects.order is not None:
            self._order(effects.order)
        for rank, reason in effects.given_up:
            self._ranks.give_up(rank, reason)  # which calls `lose`
        self._share_requests()
        self._say()
        self._set_timer()

    def _follow_size(self) -> None:
        """Return to the former placement if a resize was undone, also if no rank is left that could get an order."""
        home, former = self._placement.home, self._former_home
        if home is not None and former is not None and home.num_ranks != self.epochs.num_ranks:
            self._placement.resize(former)

    def _order(self, epoch: Epoch) -> None:
        if self._placement.home is None:
            self._on_no_home()
        if self._placement.home is None:
            self._on_failure("no rank that returned to the front has the home placement of the experts")
            return
        places = [self.epochs.ranks.index(rank) for rank in epoch.members]
        placement = self._surviving(self._placement.home, places)
        placement = placement.with_version(self._placement.next_version())
        sizes = self._weights(), self.epochs.num_ranks
        order = Order(epoch.number, epoch.members, placement, *sizes, epoch.leaving, epoch.stopped)
        self.epochs.grant(self._read_s(placement, epoch.members))
        self._begun_s = self._clock()
        self._placement.regroup(order, self.epochs.describe())
        self._on_order(order)
        self._ranks.regroup(order)

    def _read_s(self, placement: Placement, members: tuple[int, ...]) -> float:
        """Return the seconds that a member may take to read its additional experts, and note what members keep."""
        assert self._placement.home is not None, "an order has a placement"
        # A rank that has just attached holds its part of the home placement.
        most = (placement.slots_per_rank - self._placement.home.slots_per_rank) * placement.num_layers
        kept: dict[int, _Experts] = {}
        for place, rank in enumerate(members):
            held, wanted = self._held_by(rank), _experts_of(placement, place)
            if held is None:
                continue
            kept[rank] = held & wanted
            if not self.epochs.is_resizing:  # otherwise the rank has read them ahead
                most = max(most, len(wanted - held))
        if self._placement.is_changing:  # some ranks may have switched to a stage that does not count
            most += placement.slots_per_rank
        self._members, self._kept = members, kept
        self._met.clear()
        return most * self._placement.expert_bytes / READ_BYTES_PER_S

    def _held_by(self, rank: int) -> _Experts | None:
        """Return experts that a rank holds for certain; None if it has just attached."""
        current = self._placement.current
        if rank not in self._met or current is None:
            return self._kept.get(rank)
        return _experts_of(current, self._members.index(rank))

    def _share_requests(self) -> None:
        """Route requests to ranks that have settled, and take them from ranks that have not."""
        if self.epochs.phase is Phase.STARTING:
            return
        settled = self.epochs.settled
        left, entered = self._entered - settled, settled - self._entered
        self._entered = set(settled)
        if moved := left & {*self.epochs.members}:
            ranks = " ".join(map(str, sorted(moved)))
            _LOG.warning(
                "ranks %s%s have not regrouped: their requests move to other pools", ranks, self._of_pool
            )
        if left:
            self._requests.leave(left)
        for rank in sorted(entered):
            self._requests.enter(rank)

    def _say(self) -> None:
        """Log a change of phase."""
        epochs, said = self.epochs, self._said_phase
        self._said_phase = epochs.phase
        if epochs.phase is said or said is Phase.STARTING:
            return
        if epochs.phase is Phase.WAITING:
            _LOG.warning("waiting for a rank%s to come back: %s", self._of_pool, epochs.describe())
            self._events.note("waiting", f"no rank{self._of_pool} is serving: {epochs.describe()}")
        elif epochs.phase is Phase.SERVING:
            members = " ".join(map(str, epochs.members))
            seconds = self._clock() - self._begun_s
            text = f"epoch {epochs.number}{self._of_pool}: ranks {members} serve"
            _LOG.warning("%s after %.2f s", text, seconds)
            self._events.note("regrouped", text, seconds=seconds)

    def _set_timer(self) -> None:
        self.close()
        due_s = self.epochs.next_due_s()
        if due_s is not None:
            left_s = max(0.0, due_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)


def _experts_of(placement: Placement, place: int) -> _Experts:
    """Return the experts at a place of a placement."""
    rows = enumerate(placement.local(place).tolist())
    return {(layer, expert) for layer, row in rows for expert in row if expert != EMPTY}
