"""Detect a hung child process from two sources: its own heartbeats and the kernel.

A process that is stopped, or that sleeps while holding the interpreter lock, sends nothing and never ends by itself. Its
connections stay open, so its peers cannot distinguish it from a slow one. A dedicated thread sends the beats, independently of the step
loop. On a machine with too few cores, silence alone proves little: the child counts as hung only if the kernel also reports
that it is stopped or used no CPU time. A silent child that computes, or waits for a CPU or a disk, gets more time.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# States in /proc/PID/stat: stopped or traced; runnable, or waiting for a disk.
_STOPPED, _BUSY = ("Tt", "RD")
PATIENCE = 15.0  # multiple of the timeout, for a silent process that is not idle


class Account(NamedTuple):
    """The kernel's view of a process."""

    state: str  # a letter of /proc/PID/stat; of a busy thread, if there is one
    ticks: int  # CPU time of all threads


def account_of(pid: int) -> Account:
    """Read the kernel's view of a process that has not been reaped.

    Raises:
        OSError: The process does not exist.
    """
    process = Path(f"/proc/{pid}")
    fields = _fields(process)
    state = next((each for each in _thread_states(process) if each in _BUSY), fields[0])
    return Account(state, int(fields[11]) + int(fields[12]))  # utime and stime; fields[0] is the third field


def _thread_states(process: Path) -> Iterator[str]:
    """Yield the states of all threads. The process's own state is its first thread's, which mostly waits for the others."""
    for thread in process.glob("task/*"):
        with contextlib.suppress(OSError):  # the thread has ended
            yield _fields(thread)[0]


def _fields(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()


class Watchdog:
    """Watches one child, starting with the first call of `beat`."""

    def __init__(
        self,
        pid: int,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        account: Callable[[int], Account] = account_of,
    ) -> None:
        """Allow a silence of at most `timeout_s`; 0 disables the watchdog."""
        self._pid, self._timeout_s, self._clock, self._account = pid, timeout_s, clock, account
        self._beat_s: float | None = None
        self._before: Account | None = None  # taken halfway to the timeout

    def beat(self) -> None:
        """Record a heartbeat."""
        self._beat_s, self._before = self._clock(), None

    def left_s(self) -> float | None:
        """Return the seconds until the next call of `why_hung`, or None if none is needed."""
        if self._beat_s is None or not self._timeout_s:
            return None
        silent_s = self._clock() - self._beat_s
        coming_s = (due_s - silent_s for due_s in (self._timeout_s / 2, self._timeout_s))
        return min((left_s for left_s in coming_s if left_s > 0), default=self._timeout_s / 4)

    def why_hung(self) -> str | None:
        """Return why the child counts as hung, or None if it does not."""
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
            return f"it is stopped and sent no heartbeat for {silent_s:.1f} s"
        if silent_s >= self._timeout_s * PATIENCE:
            return f"it sent no heartbeat for {silent_s:.1f} s"
        if now.ticks > before.ticks or now.state in _BUSY:
            return None
        return f"it uses no CPU time and sent no heartbeat for {silent_s:.1f} s"
