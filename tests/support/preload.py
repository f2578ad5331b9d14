"""Modules that the fork server of the ranks imports once, so that ranks need not load them."""

import fcntl
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import numba
import numpy
import torch
import torch.distributed

from dispatch import cpu_kernels
from dispatch.compiled.native import compile_all
from dispatch.cpu_kernels import fp8
from dispatch.wires import gloo_parts as parts
from dispatch.wires import shm_regions as regions
from dispatch.wires import signals

__all__ = ["numba", "numpy", "torch"]


def lock_file(name: str) -> Path:
    """Return the file of the locks of a list of functions. All checkouts of a user share it."""
    return Path(gettempdir()) / f"wideep-tests-{os.getuid()}-{name}"


def compile_in_turns(file: Path, compilations: Sequence[Callable[[], object]]) -> None:
    """Compile functions, or read them from the cache, next to other processes that do the same with the same file of locks.

    The fork servers of all test processes start together. In a fresh checkout, each function is compiled by one of them, and
    the others read it from the cache.
    """
    with file.open("w") as locks:  # a byte for each function
        left = list(range(len(compilations)))
        for waits in (False, True):
            for number in list(left):
                try:
                    fcntl.lockf(locks, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, number)
                except BlockingIOError:  # another process compiles it now
                    continue
                compilations[number]()
                fcntl.lockf(locks, fcntl.LOCK_UN, 1, number)
                left.remove(number)


KERNELS = (*cpu_kernels.KERNELS, *fp8.KERNELS, *signals.KERNELS, *parts.KERNELS, *regions.KERNELS)
compile_in_turns(lock_file("dispatch"), [partial(compile_all, each) for each in KERNELS])
