"""Does a child process still run? Judged by two observers: the child itself, which beats, and the kernel.

A process that has been stopped, or that sleeps with the interpreter's lock held, says nothing any more and never ends by itself; its
connections stay open, so that nobody else can tell it from a slow one. A beat comes from a thread of its own, whatever the step loop
does. Silence alone proves little on a machine that has too few cores: only when the kernel says as well that the process is
stopped, or has used no processor, is it hung. One that computes without a word, waits for a processor or for a disk has more time.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_STOPPED, _BUSY = (
    "Tt",
    "RD",
)  # states in /proc/PID/stat: stopped or traced; on a processor's queue, or waiting for a disk
PATIENCE = 15.0  # times the time-out, for a process that is silent and not still


class Account(NamedTuple):
    """What the kernel says of a process."""

    state: str  # a letter of /proc/PID/stat: of a thread that is busy, if one is
    ticks: int  # of processor time, all its threads


def account_of(pid: int) -> Account:
    """Ask the kernel about a process that has not been reaped.

    Raises:
        OSError: there is none.
    """
    process = Path(f"/proc/{pid}")
    fields = _fields(process)
    state = next((each for each in _thread_states(process) if each in _BUSY), fields[0])
    return Account(state, int(fields[11]) + int(fields[12]))  # the third field on; utime and stime


def _thread_states(process: Path) -> Iterator[str]:
    """Yield the threads' states; the process' own is its first thread's, which mostly waits for the others."""
    for thread in process.glob("task/*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield _fields(thread)[0]


def _fields(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()


class Watchdog:
    """Watches one child from its first beat on."""

    def __init__(
        self,
        pid: int,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        account: Callable[[int], Account] = account_of,
    ) -> None:
        """Args: timeout_s: how long a child may be silent; 0: for ever."""
        self._pid, self._timeout_s, self._clock, self._account = pid, timeout_s, clock, account
        self._beat_s: float | None = None
        self._before: Account | None = None  # taken halfway through a silence

    def beat(self) -> None:
        """Note that the child has said something."""
        self._beat_s, self._before = self._clock(), None

    def left_s(self) -> float | None:
        """Seconds until `why_hung` is to be asked; None: nothing is to be asked."""
        if self._beat_s is None or not self._timeout_s:
            return None
        silent_s = self._clock() - self._beat_s
        coming_s = (due_s - silent_s for due_s in (self._timeout_s / 2, self._timeout_s))
        return min((left_s for left_s in coming_s if left_s > 0), default=self._timeout_s / 4)

    def why_hung(self) -> str | None:
        """Say why the child is hung; None: it is not, as far as can be said now."""
        if self._beat_s is None or not self._timeout_s:
            return None
        silent_s = self._clock() - self._beat_s
        if silent_s < self._timeout_s / 2:
            return None
        now = self._account(self._pid)
        before, self._before = self._before, self._before or now
        if before is None or silent_s < self._timeout_s:
            return None
        if now.state in _STOPPED:
            return f"it is stopped, and has said nothing for {silent_s:.1f} s"
        if silent_s >= self._timeout_s * PATIENCE:
            return f"it has said nothing for {silent_s:.1f} s"
        if now.ticks > before.ticks or now.state in _BUSY:
            return None
        return f"it stands still, and has said nothing for {silent_s:.1f} s"
