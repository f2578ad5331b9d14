"""Heartbeats: distinguish a rank with a stuck step from ranks that only wait for it.

Ranks of an epoch make the same exchanges in the same order (headers before steps, dispatches and combines within). The
number of exchanges that a rank has begun and ended is its position on this common sequence. A computing rank is between
two exchanges; a waiting rank is in one. A stuck rank stops all others in the next exchange.

The step loop writes the position. A separate thread reads it and sends heartbeats, whatever the step loop does. The
front keeps the heartbeats of all members in a `Watch`. It suspects a rank that computes without moving for longer than
its patience (by the rank's own clock) if another member confirms this by waiting in an exchange that the suspect has
not begun. Time in which the heartbeat thread did not run either (no processor, swapped out, interpreter lock held) does
not count. A rank that uses the processor gets more patience than one that sleeps.

Other failures are detected elsewhere: a process that does not run at all (by its supervisor), and a cut link
(`scheduler.epochs.connections`). A single rank that is stuck is not detected, because no other rank can confirm it.
Does not use torch or a wire format; the clock is passed in.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

BEATS_PER_TIMEOUT = 8
LOOK_EVERY_S = 0.5
PATIENCE = 5  # times the longest time between two moves so far; a slow machine is not a stuck one
COMPUTING = 5  # times the patience, for a step that uses the processor: it may be a new kind of work
LEAST_USED_S = 0.01  # of processor time within half a patience
LATE = 2  # times the heartbeat interval; a longer gap means that the whole process did not run
MOVES_TO_LEARN = 20  # heartbeats that saw a move, before the longest time between two is used


class Heartbeat(NamedTuple):
    """The position of a rank."""

    rank: int
    epoch: int
    step: int
    position: int  # exchanges begun plus exchanges ended in this epoch; only grows
    is_idle: bool  # asleep, or between epochs
    is_waiting: bool  # in an exchange
    stalled_s: float  # since the position last changed, by this rank's clock, without time in which the process did not run
    patience_s: float  # how long it may compute without moving


class StepProgress:
    """The position of the step loop. Only the loop writes; any thread may read these plain numbers."""

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self.is_idle = True
        self._begun = self._ended = 0
        self._read_exchanges: Callable[[], tuple[int, int]] = _no_exchanges

    def begin_epoch(self, epoch: int, read_exchanges: Callable[[], tuple[int, int]]) -> None:
        """Reset the counts. `read_exchanges`: returns the dispatcher's begun and ended exchanges, from any thread."""
        self._begun = self._ended = 0
        self.epoch, self._read_exchanges = epoch, read_exchanges

    def end_epoch(self) -> None:
        """Note that no epoch serves."""
        self.is_idle, self._read_exchanges = True, _no_exchanges

    def begin_exchange(self) -> None:
        """Note that this rank now waits for the others' headers."""
        self.is_idle = False
        self._begun += 1

    def end_exchange(self, step: int) -> None:
        """Note that the headers arrived."""
        self._ended += 1
        self.step = step

    @property
    def exchanges(self) -> tuple[int, int]:
        """Exchanges of this epoch: begun and ended."""
        begun, ended = self._read_exchanges()
        return self._begun + begun, self._ended + ended


class Heart:
    """Sends heartbeats with one rank's progress from a separate thread.

    Attributes:
        progress: Written by the step loop.
        on_heartbeat: Called with each heartbeat.
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
        """Prepare; `start` starts the thread.

        Args:
            timeout_s: The least patience; BEATS_PER_TIMEOUT heartbeats are sent in that time. 0 disables them.
            most_patience_s: The most patience, used until the machine's pace is known.
            look: Called by the thread about twice a second, for other periodic checks.
            processor: Returns the seconds of processor time of the step loop. Default: of the thread that calls `start`.
        """
        self._rank, self.progress, self._clock = rank, StepProgress(), clock
        self._timeout_s, self._most_patience_s = timeout_s, most_patience_s
        self._look = look
        self._seen = (-1, -1)  # epoch and position
        self._moved_s = self._beat_s = clock()
        self._late_s = 0.0  # since the last move, in which the thread did not run
        self._used_halfway_s: float | None = None
        self._processor = processor
        self._longest_s = 0.0
        self._num_moves = 0
        self.on_heartbeat: Callable[[Heartbeat], None] = _forget
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Call this from the step loop's thread. `on_heartbeat` must not block."""
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
        """Return the rank's present position."""
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
        """Return the seconds of processor time that the step loop has used. 0 before the start."""
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
            # An OSError (such as no free descriptor) may pass by the next heartbeat. Other errors are bugs: they end the
            # thread with a traceback, and then the process, because its supervisor gets no more heartbeats.
            with contextlib.suppress(OSError):
                self.on_heartbeat(self.beat())
                if self._clock() - looked_s >= LOOK_EVERY_S:
                    looked_s = self._clock()
                    self._look()


class Suspect(NamedTuple):
    """A stuck rank, and the evidence."""

    rank: int
    reason: str


class Watch:
    """The heartbeats of an epoch's members, and which members are stuck. Runs in the front, on its clock."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a heartbeat is valid, and the least time that the others must have waited."""
        self._timeout_s = timeout_s
        self._epoch = 0
        self._members: tuple[int, ...] = ()
        self._beats: dict[int, tuple[Heartbeat, float]] = {}  # by rank: the newest, and its time of arrival

    def begin_epoch(self, epoch: int, members: Sequence[int]) -> None:
        """Watch these ranks from now on. Heartbeats of other epochs are ignored."""
        self._epoch, self._members = epoch, tuple(members)
        self._beats.clear()

    def take(self, beat: Heartbeat, now_s: float) -> None:
        """Store a rank's heartbeat."""
        if beat.epoch == self._epoch and beat.rank in self._members:
            self._beats[beat.rank] = beat, now_s

    def suspects(self, now_s: float) -> list[Suspect]:
        """Return the members that are stuck. Call this after every heartbeat."""
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
    """Default for `on_heartbeat`."""
