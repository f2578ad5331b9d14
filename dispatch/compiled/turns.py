"""Compile each kernel in one of the processes that start together on a machine.

The ranks of a machine need the same kernels, and its first start finds none in numba's cache on disk. A kernel is locked while
a process compiles it or reads it. Processes that find it locked compile others first, and read it from the cache afterwards.
So ranks share the work without a plan.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir

PATIENCE_S = 60.0  # a lock that is held for longer belongs to a stopped process
_POLL_S = 0.002


@cache
def _locks() -> int | None:
    """Open the file of this user's locks, a byte for each kernel. None without a writable folder for temporary files.

    It stays open, because closing a file releases the process's locks on it. They are not inherited by forks.
    """
    try:
        path = Path(gettempdir()) / f"wideep-kernels-{os.getuid()}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _is_taken(locks: int, place: int) -> bool:
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:  # held by another process, or the file system has no locks
        return False
    return True


def compile_in_turn(name: str, compilation: Callable[[], object], *, waits: bool = True) -> bool:
    """Compile a kernel, or read it from the cache, while no other process of this user does the same.

    Args:
        name: Name of the kernel, which is the same in all processes.
        waits: Whether to wait for a process that does it now, at most `PATIENCE_S`.

    Returns:
        Whether the kernel was compiled or read. False only if another process holds its lock and `waits` is false.
    """
    locks = _locks()
    if locks is None:
        compilation()
        return True
    place = zlib.crc32(name.encode())
    give_up_s = time.monotonic() + PATIENCE_S
    while not _is_taken(locks, place):
        if not waits:
            return False
        if time.monotonic() > give_up_s:
            break
        time.sleep(_POLL_S)  # lockf has no timeout
    try:
        compilation()
    finally:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)
    return True


def compile_in_turns(
    compilations: Mapping[str, Callable[[], object]], report: Callable[[int], None] | None = None
) -> None:
    """Compile kernels by name, next to other processes that do the same. `report` takes the number that are done."""
    left = dict(compilations)
    for waits in (False, True):
        for name, compilation in compilations.items():
            if name in left and compile_in_turn(name, compilation, waits=waits):
                del left[name]
                if report is not None:
                    report(len(compilations) - len(left))
