"""Compilation of this package's kernels: with numba, without the GIL, cached on disk.

Numba's cache only checks the file of the cached function, so it would miss a change of a callee in another file. Entry
points therefore carry the checksum of the whole package in their names. The functions that they call are compiled into
them and not cached separately.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CHECKSUM = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
inner: Callable[[_Function], _Function] = njit(nogil=True, error_model="numpy")
"""Compile for use in an entry point."""


def entry(function: _Function) -> _Function:
    """Compile for use from Python. Other threads may run meanwhile."""
    function.__name__ += f"_{_CHECKSUM:08x}"
    function.__qualname__ = function.__name__
    compiled: _Function = njit(nogil=True, error_model="numpy", cache=True)(function)
    return compiled
