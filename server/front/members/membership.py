"""The members of each epoch of a pool: the front's decisions, as a state machine without clock, network or placements.

The front is the leader. It is the single point of failure anyway, so ranks need no consensus: they follow its newest
order. Each event is a call with its time, and returns the effects to carry out.

An epoch's members are the attached ranks. A rank that leaves or returns begins the next epoch. A rank with failed steps
reports a fault. Usually another rank was lost, and its stream ends a moment later, so the order waits for that. A final fault
means that the rank cannot hold the experts it would take over: the service then needs another rank.

If the members of a pool have not met after a second and another pool serves, requests leave its ranks. They may return when the
members have met.

A resize is an epoch with another number of ranks. New ranks attach beforehand and wait. If the members of that epoch do not all
meet, the next order has the former number of ranks again, and those that were to leave stay.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

FAULT_GRACE_S = 0.5  # after a fault, for the end of the stream that explains it
RELEASE_S = 1.0  # after the end of an epoch: until the members meet, or their requests move to other pools
REGROUP_TIMEOUT_S = 30.0  # for a rank's answer to an order, until its stream is closed
RETURN_S = 10.0  # for ranks to return to a restarted front; they try several times a second
# After the first of them, for the others. A rank that died with the front needs the time of its start.
FOLLOW_S = 2.0
MAX_FAULTS, FAULTS_S = 5, 60.0  # faults may end this many epochs in this time; then a rank is dropped


class Phase(Enum):
    """The state of a pool."""

    STARTING = "starting"  # some ranks have not attached yet
    SERVING = "serving"
    REGROUPING = "regrouping"  # requests are accepted, and wait until the members have met
    WAITING = "waiting"  # for a rank to return: no rank is left, or those left cannot hold all experts


class Absence(NamedTuple):
    """A rank that is away."""

    reason: str
    since_s: float


class Epoch(NamedTuple):
    """An epoch's number, and the ranks that meet in it."""

    number: int
    members: tuple[int, ...]  # ascending
    leaving: tuple[int, ...] = ()  # ranks that a resize lets go
    stopped: tuple[int, ...] = ()  # members with failed steps in the last epoch


class GivenUp(NamedTuple):
    """A rank to disconnect by closing its stream."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What the caller must do."""

    order: Epoch | None = None  # send it to its members
    given_up: tuple[GivenUp, ...] = ()
    failure: str | None = None  # if set, the pool cannot serve


class _Fault(NamedTuple):
    rank: int
    reason: str
    at_s: float
    is_final: bool


_NOTHING = Effects()


class Epochs:
    """The membership of one pool. Times come from one monotonic clock."""

    def __init__(
        self,
        num_ranks: int,
        *,
        recovery_timeout_s: float,
        first_rank: int = 0,
        fault_grace_s: float = FAULT_GRACE_S,
        regroup_timeout_s: float = REGROUP_TIMEOUT_S,
        others_serve: Callable[[], bool] | None = None,
    ) -> None:
        """Args: recovery_timeout_s is the time without a serving rank after which the pool has failed.

        first_rank is the number of the pool's first rank in the service; its ranks are consecutive. others_serve returns whether
        another pool serves; None if there is none.
        """
        self.num_ranks = num_ranks
        self.ranks = range(first_rank, first_rank + num_ranks)
        self.number = 0
        self.members: tuple[int, ...] = ()
        self.phase = Phase.STARTING
        self.missing: dict[int, Absence] = {}  # former members that are away
        self.num_losses = dict.fromkeys(self.ranks, 0)  # counters by rank
        self._recovery_timeout_s = recovery_timeout_s
        self._fault_grace_s, self._regroup_timeout_s = fault_grace_s, regroup_timeout_s
        self._attached: set[int] = set()
        self._settled: set[int] = set()  # ranks that have served since they attached
        self._released: set[int] = set()  # settled ranks, until their requests moved to other pools
        self._met: set[int] = set()  # members that serve in this epoch
        self._faults: dict[int, _Fault] = {}  # of this epoch
        self._given_up: set[int] = set()  # ranks with a closed stream that has not ended yet
        self._silent: dict[int, float] = {}  # by member that has not answered an order: its time limit
        self._granted: dict[int, float] = {}  # by such a member: seconds that its limit has been extended by
        self._others_serve = others_serve
        self._release_s: float | None = (
            None  # time at which requests leave the ranks, unless the members meet before
        )
        self._waiting_s = 0.0  # start of the WAITING phase
        self._ended_by_faults: deque[float] = deque(maxlen=MAX_FAULTS)  # times when faults ended epochs
        self._coming = range(0)  # new ranks, which may attach and become no members yet
        self._came: set[int] = set()  # those that have
        self._former_num: int | None = None  # of ranks, until the members of a resize have met
        self._leaving: dict[int, Absence | None] = {}  # ranks that it lets go; those that are lost meanwhile
        self._resumed_until_s: float | None = None  # set while ranks return to a restarted front
        self._awaited = frozenset(self.ranks)  # those that may return
        self.is_gathering = False  # whether the pool is new to a running service, and has not met yet

    @property
    def settled(self) -> frozenset[int]:
        """Ranks that requests may be routed to: they serve, or will soon again when all members have met."""
        return frozenset(self._settled)

    @property
    def released(self) -> frozenset[int]:
        """Attached ranks that have not met again in time, so that their requests move to other pools."""
        return frozenset(self._released)

    @property
    def in_epoch(self) -> frozenset[int]:
        """Ranks that may run steps without a further order, or with the steps of which this order ends an epoch."""
        if self.phase is Phase.STARTING:  # they meet without an order, or return to a restarted front
            return frozenset(self.ranks)
        # Also while they wait for a rank: they keep requests, which go on in the next epoch with the adapters that they have.
        return frozenset((*self.members, *self._leaving))

    @property
    def absent(self) -> list[int]:
        """Ranks that are not attached."""
        return [rank for rank in self.ranks if rank not in self._attached]

    @property
    def faults(self) -> dict[int, str]:
        """The reason of each rank's fault in this epoch."""
        return {fault.rank: fault.reason for fault in self._faults.values()}

    @property
    def is_resuming(self) -> bool:
        """Whether the first order is still to come: ranks return to a restarted front, or those of a new pool join."""
        return self._resumed_until_s is not None or self.is_gathering

    @property
    def is_whole(self) -> bool:
        """Whether all ranks serve together."""
        return self.phase is Phase.SERVING and len(self.members) == self.num_ranks

    @property
    def came(self) -> frozenset[int]:
        """New ranks that wait for a resize."""
        return frozenset(self._came)

    @property
    def is_resizing(self) -> bool:
        """Whether the members of a resize have yet to meet."""
        return self._former_num is not None

    def expect(self, num_ranks: int) -> None:
        """Let the ranks attach that a resize to `num_ranks` adds. They do not serve before `resize`.

        A number that is not larger than the present one withdraws this.
        """
        self._coming = range(self.ranks.stop, self.ranks.start + num_ranks)
        self._came.intersection_update(self._coming)

    def resize(self, num_ranks: int, now_s: float) -> Effects:
        """Begin an epoch with another number of ranks. All ranks serve, and the new ones have attached."""
        assert self.is_whole, "a resize begins with all ranks"
        self._former_num = self.num_ranks
        self._attached |= self._came
        self.expect(0)
        self._set_size(num_ranks)
        self._leaving = dict.fromkeys(sorted(self._attached - {*self.ranks}))
        for ranks in (self._attached, self._settled):
            ranks.difference_update(self._leaving)
        return self._order(now_s)

    def _set_size(self, num_ranks: int) -> None:
        self.num_ranks, self.ranks = num_ranks, range(self.ranks.start, self.ranks.start + num_ranks)
        for rank in self.ranks:
            self.num_losses.setdefault(rank, 0)

    def _undo_resize(self) -> None:
        """Return to the former ranks. New ones are no longer known here."""
        if self._former_num is None:
            return
        self._set_size(self._former_num)
        for ranks in (self._attached, self._settled):
            ranks.intersection_update(self.ranks)
        for rank, absence in self._leaving.items():
            if absence is None:
                self._attached.add(rank)
            else:
                self.missing[rank] = absence
        self._former_num, self._leaving = None, {}

    def resume(self, now_s: float, lost: Collection[int] = ()) -> None:
        """Take over from an earlier front. The ranks return, and meet when all are back or the time is up.

        Args:
            lost: Ranks that were lost with that front, for which the others need not wait.
        """
        self._resumed_until_s = now_s + RETURN_S
        self._awaited = frozenset(self.ranks) - frozenset(lost)

    def gather(self, now_s: float) -> None:
        """Wait until all ranks of a pool that joins a running service have attached. They meet by an order."""
        self.is_gathering = True
        self.phase, self._waiting_s = Phase.WAITING, now_s
        self.missing = {rank: Absence("it has not joined yet", now_s) for rank in self.ranks}

    def attach(self, rank: int, now_s: float, *, epoch: int = 0) -> Effects:
        """Attach a rank that is ready to serve.

        Args:
            epoch: The newest epoch that it was ordered to, or that its pool had before it started.
        """
        if rank in self._coming:
            self._came.add(rank)
            return _NOTHING
        if rank in self._leaving:  # its connection broke
            self._leaving[rank] = None
            return _NOTHING
        if rank not in self.ranks:  # a resize that has ended started it, or let it go
            return Effects(given_up=(GivenUp(rank, "the service has no such rank"),))
        self._attached.add(rank)
        self.number = max(self.number, epoch)
        if self._resumed_until_s is not None:
            self._resumed_until_s = min(self._resumed_until_s, now_s + FOLLOW_S)
            return self._go_on_without(now_s) if self._attached >= self._awaited else _NOTHING
        if self.is_gathering:
            self.missing.pop(rank, None)
            return self._order(now_s) if len(self._attached) == self.num_ranks else _NOTHING
        if self.phase is not Phase.STARTING:
            self.missing.pop(rank, None)
            return self._order(now_s)
        if len(self._attached) == self.num_ranks:  # they have met without an order
            self.members = tuple(self.ranks)
            self._met, self._settled = set(self.members), set(self.members)
            self.phase = Phase.SERVING
        return _NOTHING

    def lose(self, rank: int, reason: str, now_s: float) -> Effects:
        """Handle the end of a rank's stream."""
        for ranks in (
            self._attached, self._settled, self._released, self._met, self._given_up, self._came,
        ):  # fmt: skip
            ranks.discard(rank)
        self._silent.pop(rank, None)
        if rank in self._leaving:
            self._leaving[rank] = Absence(reason, now_s)
        if rank not in self.ranks:
            return _NOTHING
        self._undo_resize()
        if rank not in self.ranks:  # a new one
            return self._order(now_s)
        self.num_losses[rank] += 1
        if self._resumed_until_s is not None:
            return _NOTHING
        if self.phase is Phase.STARTING:
            return Effects(failure=f"rank {rank} is lost: {reason}")
        self.missing[rank] = Absence(reason, now_s)
        if self.is_gathering:
            return _NOTHING
        self._faults.pop(rank, None)
        if self._attached and not any(fault.is_final for fault in self._faults.values()):
            return self._order(now_s)
        self.members = tuple(sorted(self._attached))
        self._wait(now_s)
        return _NOTHING

    def grant(self, extra_s: float) -> None:
        """Extend the time limit of members that have not answered yet, because they have much to read.

        Retries extend it once: what was read before is not read again.
        """
        for rank in self._silent:
            granted_s = self._granted.get(rank, 0.0)
            self._granted[rank] = max(granted_s, extra_s)
            self._silent[rank] += self._granted[rank] - granted_s

    def take_regrouped(self, rank: int, number: int, now_s: float) -> None:
        """Record that a rank serves in an epoch. Ignored if the epoch is over."""
        self._hear(rank, number, now_s)
        if number != self.number or rank not in self.members or rank in self._faults:
            return
        self._met.add(rank)
        if not self._settled:
            self._release_s = now_s + RELEASE_S
        self._settled.add(rank)
        self._released.discard(rank)
        if self._met == set(self.members):
            self.phase, self._release_s = Phase.SERVING, None
            self._former_num, self._leaving = None, {}

    def take_fault(self, rank: int, number: int, reason: str, *, is_final: bool, now_s: float) -> Effects:
        """Handle a rank's fault in an epoch. Ignored if the epoch is over."""
        if self._resumed_until_s is not None:
            return _NOTHING  # an epoch of the earlier front; an order follows
        if self.phase is Phase.STARTING:
            return Effects(failure=f"rank {rank} cannot serve: {reason}")
        self._hear(rank, number, now_s)
        if number != self.number or rank not in self.members:
            return _NOTHING
        self._met.discard(rank)
        self._faults.setdefault(rank, _Fault(rank, reason, now_s, is_final))
        if self.is_resizing:
            self._undo_resize()
            return self._order(now_s)
        if is_final:
            self._faults[rank] = self._faults[rank]._replace(is_final=True, reason=reason)
        if is_final and not self.missing:  # no missing rank can return to help, so restart this one
            return self._give_up([rank], reason)
        if is_final:
            self._wait(now_s)
        elif self.phase is Phase.SERVING:
            self._regroup(now_s)
        return _NOTHING

    def tick(self, now_s: float) -> Effects:
        """Return the effects of elapsed time. Call it at `next_due_s`."""
        due_s = self.next_due_s()
        if due_s is None or now_s < due_s:
            return _NOTHING
        if self._resumed_until_s is not None:
            return self._go_on_without(now_s)
        if self._may_release and self._release_s is not None and now_s >= self._release_s:
            return self._release(now_s)
        if self.phase is Phase.WAITING:
            return Effects(failure=f"no rank came back for {self._recovery_timeout_s:g} s: {self.describe()}")
        late = sorted(rank for rank, at_s in self._silent.items() if at_s <= now_s)
        if late:
            return self._give_up(late, f"it did not answer the order of epoch {self.number} in time")
        return self._end_by_faults(now_s)

    def next_due_s(self) -> float | None:
        """Return the time of the next `tick`, or None if no timeout runs."""
        if self._resumed_until_s is not None:
            return self._resumed_until_s
        if self.is_gathering or self.phase not in (Phase.REGROUPING, Phase.WAITING):
            return None
        due = [self._release_s] if self._may_release and self._release_s is not None else []
        if self.phase is Phase.WAITING:
            return min([*due, self._waiting_s + self._recovery_timeout_s])
        due += self._silent.values()
        if self._faults and not self._given_up:  # a stream that is being closed will explain the fault
            due.append(min(fault.at_s for fault in self._faults.values()) + self._fault_grace_s)
        return min(due, default=None)

    def describe(self) -> str:
        """Return the missing ranks and the final faults, with their reasons."""
        away = [f"rank {rank} is lost: {absence.reason}" for rank, absence in sorted(self.missing.items())]
        final = [fault for fault in self._faults.values() if fault.is_final]
        return "; ".join(
            [*away, *(f"rank {fault.rank} cannot continue without it: {fault.reason}" for fault in final)]
        )

    def _order(self, now_s: float, *, is_retry: bool = False) -> Effects:
        """Begin the next epoch with all attached ranks. A retry does not extend the time limits."""
        if not is_retry:
            self._silent.clear()
            self._granted.clear()
        self._resumed_until_s, self.is_gathering = None, False
        self.number += 1
        self.members = tuple(sorted(self._attached))
        self._regroup(now_s)
        self._met.clear()
        stopped = tuple(rank for rank in self.members if rank in self._faults)
        self._faults.clear()
        for rank in self.members:
            if rank not in self._silent:
                self._silent[rank] = now_s + self._regroup_timeout_s
                self._granted.pop(rank, None)
        return Effects(order=Epoch(self.number, self.members, tuple(self._leaving), stopped))

    @property
    def _may_release(self) -> bool:
        return bool(self._others_serve is not None and self._settled)

    def _regroup(self, now_s: float) -> None:
        if self.phase is not Phase.REGROUPING:
            self._release_s = now_s + RELEASE_S
        self.phase = Phase.REGROUPING

    def _release(self, now_s: float) -> Effects:
        """Let the requests move to other pools. If none serves, check again later."""
        assert self._others_serve is not None, "requests have somewhere to go"
        self._release_s = now_s + RELEASE_S
        if self._others_serve():
            self._released |= self._settled
            self._settled.clear()
        return _NOTHING

    def _go_on_without(self, now_s: float) -> Effects:
        """Let the returned ranks meet. The others count as lost, but may still return."""
        self._resumed_until_s = None
        for rank in self.absent:
            self.missing[rank] = Absence("it did not come back to the front", now_s)
        if self._attached:
            return self._order(now_s)
        self._wait(now_s)
        return _NOTHING

    def _end_by_faults(self, now_s: float) -> Effects:
        """Let the same members try again. After too many tries, close the stream of the rank that failed first, unless
        another rank that has not answered explains the faults."""
        often = len(self._ended_by_faults) == MAX_FAULTS and now_s - self._ended_by_faults[0] < FAULTS_S
        if often and not self._silent:
            first = min(self._faults.values(), key=lambda fault: (fault.at_s, fault.rank))
            self._ended_by_faults.clear()
            return self._give_up([first.rank], f"steps failed {MAX_FAULTS + 1} times: {first.reason}")
        self._ended_by_faults.append(now_s)
        return self._order(now_s, is_retry=True)

    def _hear(self, rank: int, number: int, now_s: float) -> None:
        """Record an answer. A rank that answers an older order still owes one to the present order, but is alive."""
        if rank in self._silent and number == self.number:
            del self._silent[rank]
        elif rank in self._silent:
            self._silent[rank] = max(self._silent[rank], now_s + self._regroup_timeout_s)

    def _give_up(self, ranks: Iterable[int], reason: str) -> Effects:
        given_up = tuple(GivenUp(rank, reason) for rank in ranks)
        self._given_up.update(each.rank for each in given_up)
        for rank, _ in given_up:
            self._silent.pop(rank, None)
        return Effects(given_up=given_up)

    def _wait(self, now_s: float) -> None:
        if self.phase is not Phase.WAITING:
            self.phase, self._waiting_s = Phase.WAITING, now_s
            self._release_s = self._release_s or now_s + RELEASE_S
