"""Heartbeats: how a rank whose step is stuck is told from ranks that only wait for it.

Ranks of an epoch make the same exchanges in the same order (headers before steps, dispatches and combines within), so
how many of them a rank has begun and ended is its position on a common walk. A rank that computes stands between two
exchanges; one that waits for others stands in one. Whoever is stuck lets all others come to a stop in the next exchange.

A thread of its own reads the position, which the step loop writes, and makes a heartbeat of it, whatever the step loop
does. The front keeps the heartbeats of all members in a `Watch`. It suspects a rank that computes without moving for
longer than its patience (by the rank's own clock), if another member confirms it: that one waits in an exchange which
the suspect has not begun. Time in which the heart's thread got nowhere either (no processor, swapped out, behind the
interpreter's lock) is not the step's; and one that uses the processor has more patience than one that sleeps.

What this does not see is found otherwise: a process that does not run at all (its supervisor looks), a link that is cut
(`scheduler.epochs.connections`), and a lone rank that is stuck, which nobody confirms.
Knows no torch, no wire format and no clock but the one that it is given.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

BEATS_PER_TIMEOUT = 8
LOOK_EVERY_S = 1.0
PATIENCE = 5  # times the longest time between two moves so far; a slow machine is no stuck one
COMPUTING = 5  # times the patience, for a step that uses the processor: work of a kind that has not been seen may come
LEAST_USED_S = 0.01  # of processor time within half a patience
LATE = 2  # times the time between two heartbeats; what is above is not the step's
MOVES_TO_LEARN = 20  # heartbeats that saw a move, before the longest time between two is believed


class Heartbeat(NamedTuple):
    """Where a rank is."""

    rank: int
    epoch: int
    step: int
    position: int  # exchanges of this epoch that were begun, plus those that ended; it only grows
    is_idle: bool  # asleep, or between epochs
    is_waiting: bool  # in an exchange
    stalled_s: float  # since the position last changed, by this rank's clock, less what the whole process stood still
    patience_s: float  # how long it may compute without moving


class StepProgress:
    """Where the step loop is. It alone writes; plain numbers, so that any thread may read them."""

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self.is_idle = True
        self._begun = self._ended = 0
        self._read_exchanges: Callable[[], tuple[int, int]] = _no_exchanges

    def begin_epoch(self, epoch: int, read_exchanges: Callable[[], tuple[int, int]]) -> None:
        """Count anew; `read_exchanges`: the epoch's dispatcher's, begun and ended, from any thread."""
        self._begun = self._ended = 0
        self.epoch, self._read_exchanges = epoch, read_exchanges

    def end_epoch(self) -> None:
        """No epoch serves."""
        self.is_idle, self._read_exchanges = True, _no_exchanges

    def begin_exchange(self) -> None:
        """Note that this rank waits for the others' headers from now on."""
        self.is_idle = False
        self._begun += 1

    def end_exchange(self, step: int) -> None:
        """Note that they came."""
        self._ended += 1
        self.step = step

    @property
    def exchanges(self) -> tuple[int, int]:
        """How many exchanges of this epoch were begun, and how many have ended."""
        begun, ended = self._read_exchanges()
        return self._begun + begun, self._ended + ended


class Heart:
    """Makes heartbeats of one rank's progress, in a thread of its own.

    Attributes:
        progress: what the step loop writes.
        on_heartbeat: what is called with each.
    """

    def __init__(
        self,
        rank: int,
        *,
        timeout_s: float,
        most_patience_s: float,
        look: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            timeout_s: the least patience; BEATS_PER_TIMEOUT heartbeats are made in that time. 0: none are made.
            most_patience_s: the most, and the patience until the machine's own pace is known.
            look: called by the thread about once a second, for what else is to be looked at all the time.
            processor: seconds of processor time that the step loop has used; None: those of the thread that starts.
        """
        self._rank, self.progress, self._clock = rank, StepProgress(), clock
        self._timeout_s, self._most_patience_s = timeout_s, most_patience_s
        self._look = look
        self._seen = (-1, -1)  # epoch and position
        self._moved_s = self._beat_s = clock()
        self._late_s = 0.0  # since it moved, in which the thread got nowhere
        self._used_halfway_s: float | None = None
        self._processor = processor
        self._longest_s = 0.0
        self._num_moves = 0
        self.on_heartbeat: Callable[[Heartbeat], None] = _forget
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the thread calls `on_heartbeat`, which must not block. To be called by the step loop's thread."""
        if self._timeout_s > 0 and self._thread is None:
            if self._processor is None:
                walker = time.pthread_getcpuclockid(threading.get_ident())
                self._processor = partial(time.clock_gettime, walker)
            self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. May be called twice."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self) -> Heartbeat:
        """Say where the rank is now."""
        now_s, progress = self._clock(), self.progress
        self._late_s += max(0.0, now_s - self._beat_s - LATE * self._timeout_s / BEATS_PER_TIMEOUT)
        self._beat_s = now_s
        is_idle = progress.is_idle
        begun, ended = progress.exchanges
        seen = (progress.epoch, begun + ended)
        if is_idle or seen != self._seen:
            if not is_idle and seen[0] == self._seen[0]:
                self._longest_s = max(self._longest_s, now_s - self._moved_s)
                self._num_moves += 1
            self._seen, self._moved_s = seen, now_s
            self._late_s, self._used_halfway_s = 0.0, None
        stalled_s = now_s - self._moved_s - self._late_s
        return Heartbeat(
            rank=self._rank,
            epoch=seen[0],
            step=progress.step,
            position=seen[1],
            is_idle=is_idle,
            is_waiting=begun > ended,
            stalled_s=stalled_s,
            patience_s=self._patience_s(stalled_s),
        )

    def used_s(self) -> float:
        """Seconds of processor time that the step loop has used; 0 before the start."""
        return 0.0 if self._processor is None else self._processor()

    def _patience_s(self, stalled_s: float) -> float:
        if self._num_moves < MOVES_TO_LEARN:
            return self._most_patience_s
        patience_s = max(self._timeout_s, PATIENCE * self._longest_s)
        if stalled_s >= patience_s / 2:
            used_s = self.used_s()
            if self._used_halfway_s is None:
                self._used_halfway_s = used_s
            if used_s - self._used_halfway_s >= LEAST_USED_S:
                patience_s *= COMPUTING
        return min(self._most_patience_s, patience_s)

    def _run(self) -> None:
        looked_s = self._clock()
        while not self._is_stopped.wait(self._timeout_s / BEATS_PER_TIMEOUT):
            # No descriptor is free, say: the next heartbeat may do better. Other errors are bugs, which end the thread with a
            # traceback, and the process with it, as its supervisor hears no more of it.
            with contextlib.suppress(OSError):
                self.on_heartbeat(self.beat())
                if self._clock() - looked_s >= LOOK_EVERY_S:
                    looked_s = self._clock()
                    self._look()


class Suspect(NamedTuple):
    """A rank that is stuck, and how that is known."""

    rank: int
    reason: str


class Watch:
    """The heartbeats of an epoch's members, and who of them is stuck. The front's; times are of its clock."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a heartbeat counts, and the least time that the others must have waited."""
        self._timeout_s = timeout_s
        self._epoch = 0
        self._members: tuple[int, ...] = ()
        self._beats: dict[int, tuple[Heartbeat, float]] = {}  # by rank: the newest, and when it came

    def begin_epoch(self, epoch: int, members: Sequence[int]) -> None:
        """Look after these ranks from now on; heartbeats of other epochs do not count."""
        self._epoch, self._members = epoch, tuple(members)
        self._beats.clear()

    def take(self, beat: Heartbeat, now_s: float) -> None:
        """Take a rank's heartbeat."""
        if beat.epoch == self._epoch and beat.rank in self._members:
            self._beats[beat.rank] = beat, now_s

    def suspects(self, now_s: float) -> list[Suspect]:
        """Return the members that are stuck; to be asked after every heartbeat."""
        fresh = [beat for beat, came_s in self._beats.values() if now_s - came_s <= self._timeout_s]
        waiting = [
            beat
            for beat in fresh
            if beat.is_waiting and not beat.is_idle and beat.stalled_s >= self._timeout_s
        ]
        found = []
        for beat in fresh:
            is_stuck = not beat.is_idle and not beat.is_waiting and beat.stalled_s > beat.patience_s
            witnesses = [other.rank for other in waiting if other.position > beat.position]
            if is_stuck and witnesses:
                reason = (
                    f"its step {beat.step} has not moved for {beat.stalled_s:.1f} s, "
                    f"and {_ranks(witnesses)} for it"
                )
                found.append(Suspect(beat.rank, reason))
        return found


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, sorted(ranks)))} wait"


def _no_exchanges() -> tuple[int, int]:
    return 0, 0


def _forget(beat: Heartbeat) -> None:
    """Stand for who is told of heartbeats."""
