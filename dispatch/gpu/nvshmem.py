# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""NVSHMEM's device functions for Triton kernels: for peers whose memory cannot be addressed. Compiled, never run here.

Names and signatures are those of libnvshmem_device.bc (nvidia-nvshmem 3.x, device/nvshmem_defines.h and
nvshmemx_defines.h). Addresses are this rank's own symmetric ones; NVSHMEM finds the peer's. A kernel that uses them
needs the library linked (`extern_libs={"libnvshmem_device": path}`) and the module initialised by NVSHMEM's host
library; `find_device_library` finds it. The interpreter knows no external functions: HAS_REMOTE is False there.
"""

from importlib.util import find_spec
from pathlib import Path

import triton.language as tl
from triton.language import core


def find_device_library() -> str:
    """Return where the wheel nvidia-nvshmem-cu13 or -cu12 has put NVSHMEM's bitcode.

    Raises:
        FileNotFoundError: it is not installed.
    """
    wheels = find_spec("nvidia")  # a namespace package of optional wheels
    for folder in [] if wheels is None else wheels.submodule_search_locations or []:
        found = Path(folder) / "nvshmem" / "lib" / "libnvshmem_device.bc"
        if found.exists():
            return str(found)
    raise FileNotFoundError("libnvshmem_device.bc is not installed; pip install nvidia-nvshmem-cu13")


@core.extern
def put_block(target, source, num_bytes, peer, _semantic=None):
    """Put bytes to the peer with the whole program; `quiet` completes it."""
    arguments = [
        tl.cast(target, tl.int64, _semantic=_semantic),
        tl.cast(source, tl.int64, _semantic=_semantic),
        tl.cast(num_bytes, tl.int64, _semantic=_semantic),
        tl.cast(peer, tl.int32, _semantic=_semantic),
    ]
    signature = (tl.int64, tl.int64, tl.int64, tl.int32)
    known = {signature: ("nvshmemx_putmem_nbi_block", tl.int32)}
    return core.extern_elementwise("", "", arguments, known, is_pure=False, _semantic=_semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until every put of this rank is complete."""
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_quiet", tl.int32)}, is_pure=False, _semantic=_semantic
    )


@core.extern
def set_flag(flag, number, peer, _semantic=None):
    """Write an int64 at the peer."""
    arguments = [
        tl.cast(flag, tl.int64, _semantic=_semantic),
        tl.cast(number, tl.int64, _semantic=_semantic),
        tl.cast(peer, tl.int32, _semantic=_semantic),
    ]
    signature = (tl.int64, tl.int64, tl.int32)
    known = {signature: ("nvshmem_long_p", tl.int32)}
    return core.extern_elementwise("", "", arguments, known, is_pure=False, _semantic=_semantic)
