"""Who serves together, epoch by epoch: the front's decisions, as a machine without clock, wires or placements.

The front is the leader. It is the single point of failure anyway, so ranks need no consensus: what it orders, they
follow, the newest order first. An event comes in with the time it happened at; what is to be done about it comes out.

An epoch's members are the ranks that are attached; a rank that goes or comes begins the next epoch. A rank whose steps
broke off says so (a fault): mostly another one is gone, whose stream ends a moment later, so the order waits for that.
A fault that is final means that the rank cannot hold what it would take over: then nothing helps but a rank more.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

FAULT_GRACE_S = 1.0  # after a fault, for the stream's end that explains it
REGROUP_TIMEOUT_S = 30.0  # from an order that a rank leaves unanswered until it is given up
RETURN_S = 10.0  # for ranks to come back to a front that was started again; they ask several times a second
FOLLOW_S = (
    2.0  # after the first of them, for the others: one that died with the front takes as long as its start
)
MAX_FAULTS, FAULTS_S = 5, 60.0  # epochs that faults may end within that time, until a rank is given up for it


class Phase(Enum):
    """How far the service is."""

    STARTING = "starting"  # not all ranks have attached once
    SERVING = "serving"
    REGROUPING = "regrouping"  # requests are taken, and wait until members have met
    WAITING = "waiting"  # for a rank to come back: nobody is left, or those left cannot hold all experts


class Absence(NamedTuple):
    """A rank that is away."""

    reason: str
    since_s: float


class Epoch(NamedTuple):
    """Its number, and the ranks that are to meet in it."""

    number: int
    members: tuple[int, ...]  # ascending


class GivenUp(NamedTuple):
    """A rank whose stream is to be closed, and why."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What is to be done."""

    order: Epoch | None = None  # tell its members
    given_up: tuple[GivenUp, ...] = ()
    failure: str | None = None  # the service ends


class _Fault(NamedTuple):
    rank: int
    reason: str
    at_s: float
    is_final: bool


_NOTHING = Effects()


class Epochs:
    """The membership of one service. Times are of one clock that only goes forward."""

    def __init__(
        self,
        num_ranks: int,
        *,
        recovery_timeout_s: float,
        fault_grace_s: float = FAULT_GRACE_S,
        regroup_timeout_s: float = REGROUP_TIMEOUT_S,
    ) -> None:
        """Args: recovery_timeout_s: how long nobody may serve until the service gives up."""
        self.num_ranks = num_ranks
        self.number = 0
        self.members: tuple[int, ...] = ()
        self.phase = Phase.STARTING
        self.missing: dict[int, Absence] = {}  # ranks that were members and are away
        self.num_losses = [0] * num_ranks  # counters by rank
        self._recovery_timeout_s = recovery_timeout_s
        self._fault_grace_s, self._regroup_timeout_s = fault_grace_s, regroup_timeout_s
        self._attached: set[int] = set()
        self._settled: set[int] = set()  # have served since they attached
        self._met: set[int] = set()  # members that serve in this epoch
        self._faults: dict[int, _Fault] = {}  # of this epoch
        self._given_up: set[int] = set()  # whose streams have not ended yet
        self._silent: dict[int, float] = {}  # members that owe an answer to an order: when they are given up
        self._waiting_s = 0.0  # since when, in that phase
        self._ended_by_faults: deque[float] = deque(maxlen=MAX_FAULTS)  # when epochs were
        self._resumed_until_s: float | None = None  # while ranks come back to a front that was started again

    @property
    def settled(self) -> frozenset[int]:
        """Ranks that can be given requests: they serve, or will again when all have met."""
        return frozenset(self._settled)

    @property
    def absent(self) -> list[int]:
        """Ranks that are not attached."""
        return [rank for rank in range(self.num_ranks) if rank not in self._attached]

    @property
    def faults(self) -> dict[int, str]:
        """By rank, why its steps in this epoch broke off."""
        return {fault.rank: fault.reason for fault in self._faults.values()}

    @property
    def is_resuming(self) -> bool:
        """Whether ranks come back to a front that was started again."""
        return self._resumed_until_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether all ranks serve together."""
        return self.phase is Phase.SERVING and len(self.members) == self.num_ranks

    def resume(self, now_s: float) -> None:
        """Begin where a front was that is gone: the ranks come back to this one, and meet when all have or time is up."""
        self._resumed_until_s = now_s + RETURN_S

    def attach(self, rank: int, now_s: float, *, epoch: int = 0) -> Effects:
        """Take a rank that is ready to serve.

        Args:
            epoch: the newest that it was ordered to, by this front or the one before.
        """
        self._attached.add(rank)
        self.number = max(self.number, epoch)
        if self._resumed_until_s is not None:
            self._resumed_until_s = min(self._resumed_until_s, now_s + FOLLOW_S)
            return self._order(now_s) if len(self._attached) == self.num_ranks else _NOTHING
        if self.phase is not Phase.STARTING:
            self.missing.pop(rank, None)
            return self._order(now_s)
        if len(self._attached) == self.num_ranks:  # they have met by themselves
            self.members = tuple(range(self.num_ranks))
            self._met, self._settled = set(self.members), set(self.members)
            self.phase = Phase.SERVING
        return _NOTHING

    def lose(self, rank: int, reason: str, now_s: float) -> Effects:
        """Take the end of a rank's stream."""
        for ranks in (self._attached, self._settled, self._met, self._given_up):
            ranks.discard(rank)
        self._silent.pop(rank, None)
        self.num_losses[rank] += 1
        if self._resumed_until_s is not None:
            return _NOTHING
        if self.phase is Phase.STARTING:
            return Effects(failure=f"rank {rank} is lost: {reason}")
        self.missing[rank] = Absence(reason, now_s)
        self._faults.pop(rank, None)
        if self._attached and not any(fault.is_final for fault in self._faults.values()):
            return self._order(now_s)
        self.members = tuple(sorted(self._attached))
        self._wait(now_s)
        return _NOTHING

    def grant(self, extra_s: float) -> None:
        """Let the members that owe an answer take longer: there is much to read."""
        for rank in self._silent:
            self._silent[rank] += extra_s

    def take_regrouped(self, rank: int, number: int, now_s: float) -> None:
        """Take that a rank serves in an epoch; another one than the present is over."""
        self._hear(rank, number, now_s)
        if number != self.number or rank not in self.members or rank in self._faults:
            return
        self._met.add(rank)
        self._settled.add(rank)
        if self._met == set(self.members):
            self.phase = Phase.SERVING

    def take_fault(self, rank: int, number: int, reason: str, *, is_final: bool, now_s: float) -> Effects:
        """Take that a rank's steps in an epoch broke off; in another one than the present they are over anyway."""
        if self._resumed_until_s is not None:
            return _NOTHING  # an epoch of the front before; an order comes
        if self.phase is Phase.STARTING:
            return Effects(failure=f"rank {rank} cannot serve: {reason}")
        self._hear(rank, number, now_s)
        if number != self.number or rank not in self.members:
            return _NOTHING
        self._met.discard(rank)
        self._faults.setdefault(rank, _Fault(rank, reason, now_s, is_final))
        if is_final:
            self._faults[rank] = self._faults[rank]._replace(is_final=True, reason=reason)
        if is_final and not self.missing:  # nobody can come to its help but it itself, started anew
            return self._give_up([rank], reason)
        if is_final:
            self._wait(now_s)
        elif self.phase is Phase.SERVING:
            self.phase = Phase.REGROUPING
        return _NOTHING

    def tick(self, now_s: float) -> Effects:
        """See what the time has brought; to be called when `next_due_s` has come."""
        due_s = self.next_due_s()
        if due_s is None or now_s < due_s:
            return _NOTHING
        if self._resumed_until_s is not None:
            return self._go_on_without(now_s)
        if self.phase is Phase.WAITING:
            return Effects(failure=f"no rank came back for {self._recovery_timeout_s:g} s: {self.describe()}")
        late = sorted(rank for rank, at_s in self._silent.items() if at_s <= now_s)
        if late:
            return self._give_up(late, f"it did not answer the order of epoch {self.number} in time")
        return self._end_by_faults(now_s)

    def next_due_s(self) -> float | None:
        """When the time will bring something, if nothing happens before."""
        if self._resumed_until_s is not None:
            return self._resumed_until_s
        if self.phase is Phase.WAITING:
            return self._waiting_s + self._recovery_timeout_s
        if self.phase is not Phase.REGROUPING:
            return None
        due = list(self._silent.values())
        if self._faults and not self._given_up:  # a stream that is being closed will explain the fault
            due.append(min(fault.at_s for fault in self._faults.values()) + self._fault_grace_s)
        return min(due, default=None)

    def describe(self) -> str:
        """Say who is away and why, and whose steps broke off for good."""
        away = [f"rank {rank} is lost: {absence.reason}" for rank, absence in sorted(self.missing.items())]
        final = [fault for fault in self._faults.values() if fault.is_final]
        return "; ".join(
            [*away, *(f"rank {fault.rank} cannot go on without it: {fault.reason}" for fault in final)]
        )

    def _order(self, now_s: float, *, is_retry: bool = False) -> Effects:
        """Begin the next epoch with all that are attached; a retry gives nobody more time to answer."""
        if not is_retry:
            self._silent.clear()
        self._resumed_until_s = None
        self.number += 1
        self.members = tuple(sorted(self._attached))
        self.phase = Phase.REGROUPING
        self._met.clear()
        self._faults.clear()
        for rank in self.members:
            self._silent.setdefault(rank, now_s + self._regroup_timeout_s)
        return Effects(order=Epoch(self.number, self.members))

    def _go_on_without(self, now_s: float) -> Effects:
        """Let those meet that came back; the others have been lost, and may still come."""
        self._resumed_until_s = None
        for rank in self.absent:
            self.missing[rank] = Absence("it did not come back to the front", now_s)
        if self._attached:
            return self._order(now_s)
        self._wait(now_s)
        return _NOTHING

    def _end_by_faults(self, now_s: float) -> Effects:
        """Let the same members try again; when that has not helped often enough, without the one that broke off first,
        if no other one is so slow to answer that it explains it."""
        often = len(self._ended_by_faults) == MAX_FAULTS and now_s - self._ended_by_faults[0] < FAULTS_S
        if often and not self._silent:
            first = min(self._faults.values(), key=lambda fault: (fault.at_s, fault.rank))
            self._ended_by_faults.clear()
            return self._give_up([first.rank], f"steps broke off {MAX_FAULTS + 1} times: {first.reason}")
        self._ended_by_faults.append(now_s)
        return self._order(now_s, is_retry=True)

    def _hear(self, rank: int, number: int, now_s: float) -> None:
        """Note that a rank answers; to an older order: it owes an answer to the present one, but is alive."""
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
