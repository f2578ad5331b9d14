"""Memory and CPU of a tree of processes, from /proc, and the CPU used by other processes meanwhile.

Memory is PSS, in which a page shared by n processes counts 1/n for each, so a sum over processes is the memory that the
service takes from the machine. A sum of RSS counts shared libraries once per process. CPU used by other processes shows which
measurements to distrust: two threads that synchronise in every layer lose far more than the core that was taken.
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 1.0  # walking the page tables of 2 GB takes some 10 ms, so sampling much more often is costly
QUIET_CORES = 0.1  # a row with more CPU used by other processes is noisy


def tree(root: int) -> list[int]:
    """Return a process and all its living descendants."""
    pids = [root]
    for pid in pids:  # grows while it is walked
        pids += _children(pid)
    return pids


def pss_bytes(pid: int) -> int:
    """Return a process's proportional set size, or 0 if it has ended."""
    return _kib(PROC / str(pid) / "smaps_rollup", "Pss")


def peak_rss_bytes(pid: int) -> int:
    """Return a process's peak resident memory, or 0 if it has ended."""
    return _kib(PROC / str(pid) / "status", "VmHWM")


def command_of(pid: int) -> list[str]:
    """Return a process's command line, or [] if it has ended."""
    return _read(PROC / str(pid) / "cmdline").split("\0")[:-1]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of the children it has reaped, or 0 if it has ended."""
    fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S if fields else 0.0


def exact_cpu_s(pid: int) -> float:
    """Return the CPU time of a process's living threads, which the kernel counts in nanoseconds, or 0 if it has ended."""
    try:
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:  # it has ended
        return 0.0
    counts = [_read(PROC / str(pid) / "task" / thread / "schedstat").split() for thread in threads]
    return sum(int(count[0]) for count in counts if count) / 1e9


def busy_s() -> float:
    """Return the CPU time of the whole machine, including time stolen by the hypervisor."""
    fields = (PROC / "stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory and CPU that a tree used between two moments."""

    peak_pss_bytes: int
    own_cores: float  # CPU seconds per second, including the benchmark's own process
    other_cores: float  # CPU seconds per second of all other processes, kernel and hypervisor

    @property
    def is_noisy(self) -> bool:
        """Whether other processes used too much CPU for the row to count."""
        return self.other_cores > QUIET_CORES


class CpuWatch:
    """A context that measures the cores that a tree with this process, and all other processes, use until it ends."""

    own_cores: float
    other_cores: float

    def __init__(self, root: int) -> None:
        self._root = root

    def __enter__(self) -> Self:
        self._before = time.monotonic(), busy_s(), self._own_s()
        return self

    def __exit__(self, *_: object) -> None:
        now = time.monotonic(), busy_s(), self._own_s()
        wall_s, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        self.own_cores, self.other_cores = round(own / wall_s, 2), round(max(0.0, busy - own) / wall_s, 2)

    def _own_s(self) -> float:
        return sum(map(cpu_s, {*tree(self._root), os.getpid()}))


class ProcessWatch:
    """A context that samples a tree's memory from a thread; `usage` is set when it ends."""

    usage: Usage

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu = CpuWatch(root)
        self._peak_pss_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._cpu.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu.__exit__()
        self._stop.set()
        self._thread.join()
        self.usage = Usage(
            peak_pss_bytes=self._peak_pss_bytes,
            own_cores=self._cpu.own_cores,
            other_cores=self._cpu.other_cores,
        )

    def _sample(self) -> None:
        while True:
            total = sum(map(pss_bytes, tree(self._root)))
            self._peak_pss_bytes = max(self._peak_pss_bytes, total)
            if self._stop.wait(SAMPLE_S):
                return


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:  # it has ended
        return
    for thread in threads:  # a child belongs to the thread that started it
        yield from map(int, _read(PROC / str(pid) / "task" / thread / "children").split())


def _kib(path: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", _read(path), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
