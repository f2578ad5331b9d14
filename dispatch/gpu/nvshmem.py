# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"
"""NVSHMEM: memory that ranks on other hosts reach by puts, and the device functions for puts in kernels.

NVSHMEM is started once per process, for the processes of the first group, and runs until they end. Its processes are
fixed: a restarted process cannot join the running ones, and freeing memory waits for all of them. Hence:
- opening begins with an exchange of each process's NVSHMEM state. If the states differ, all ranks get the same
  error, and no rank waits for one that does something else;
- closing is local. Memory is not freed but kept, for the next opening by the same processes.
A process uses no other provider, because every kernel that writes to peers is then linked with NVSHMEM's device
library and initialised when it is loaded. Device functions have the names of libnvshmem_device.bc (nvidia-nvshmem 3.x).
Addresses are this rank's own symmetric ones; NVSHMEM computes the peer's. The interpreter has no external functions:
HAS_REMOTE is False there. Written against nvshmem4py 0.4; tested with a stand-in, compiled, never run.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor
from triton.language import core

from dispatch.errors import WireUnavailable
from dispatch.gathered import gather_values

LINKED = ("send_rows", "send_answers", "post_flags", "post_refusal")  # the kernels that call NVSHMEM


class _Running(NamedTuple):
    """State of NVSHMEM in a process."""

    unique_id: bytes  # of the processes that were started together
    ranks: tuple[int, ...]
    kept_bytes: tuple[int, ...]  # sizes of closed memory, in the order of closing


class _Process:
    """NVSHMEM in this process. There is one instance."""

    def __init__(self) -> None:
        self.unique_id, self.ranks = b"", ()
        self.kept: list[Any] = []

    def running(self) -> _Running | None:
        """Return the state of NVSHMEM, or None if it was not started."""
        sizes = tuple(int(_bytes_of(buffer).numel()) for buffer in self.kept)
        return _Running(self.unique_id, self.ranks, sizes) if self.ranks else None

    ranks: tuple[int, ...]


_PROCESS = _Process()


class NvshmemMemory:
    """`SymmetricMemory` of NVSHMEM. Opening is collective over `group`, closing is local.

    Args:
        group: Distributes NVSHMEM's unique id to all ranks.
        num_bytes: Size per rank, on NVSHMEM's symmetric heap (NVSHMEM_SYMMETRIC_SIZE).
        nvshmem: The module nvshmem.core or a stand-in (default: import it).
        process: State of NVSHMEM, for tests.

    Raises:
        WireUnavailable: A package is missing, or NVSHMEM runs with other processes; on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
        nvshmem: Any = None,
        process: _Process = _PROCESS,
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._nvshmem, self._process = nvshmem or _load(), process
        kept_bytes = _start(self._nvshmem, group, device, process)
        found = next((at for at, size in enumerate(kept_bytes) if size >= num_bytes), None)
        self._buffer = self._nvshmem.buffer(num_bytes) if found is None else process.kept.pop(found)
        self.memory: Tensor = _bytes_of(self._buffer)[:num_bytes].zero_()
        self.base = self.memory.data_ptr()
        addresses = [self._address_of(peer) for peer in range(self.world_size)]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.reach: dict[str, Any] = {"HAS_REMOTE": 0 in addresses}
        if 0 in addresses:
            self.reach["extern_libs"] = {"libnvshmem_device": find_device_library()}
            _initialise_loaded_kernels(self._nvshmem)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank may write before every rank's memory is zero

    def close(self) -> None:
        """Keep the memory for the next opening. Freeing it would wait for every process, even for one that has died."""
        if self._buffer is not None:
            self._process.kept.append(self._buffer)
            self.memory, self._buffer = torch.empty(0, dtype=torch.uint8), None

    def _address_of(self, peer: int) -> int:
        """Return a peer's base address, or 0 if it cannot be addressed from here."""
        if peer == self.rank:
            return self.base
        try:
            return int(self._nvshmem.get_peer_buffer(self._buffer, peer).handle)
        except self._nvshmem.NvshmemError:
            return 0


def _bytes_of(buffer: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(buffer).view(torch.uint8)


def _load() -> Any:
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as error:
        raise WireUnavailable(
            f"nvshmem needs the package nvshmem4py-cu13 ({error}); pip install 'wideep[gpu]'"
        ) from error


def _start(
    nvshmem: Any, group: dist.ProcessGroup, device: torch.device, process: _Process
) -> tuple[int, ...]:
    """Start NVSHMEM on the ranks of the group, or check that it runs on them. Return the sizes of kept memory."""
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    running = [_read_running(each) for each in gather_values(_say_running(process.running()), group)]
    first = running[0]
    if any(each != first for each in running) or (first is not None and first.ranks != ranks):
        others = sorted({each.ranks for each in running if each is not None})
        new = [rank for rank, each in zip(ranks, running, strict=True) if each is None]
        raise WireUnavailable(
            f"NVSHMEM runs with ranks {', '.join(str(list(each)) for each in others)} and cannot change them"
            + (f"; ranks {new} were started later" if new else f" to {list(ranks)}")
        )
    if first is not None:
        return first.kept_bytes
    unique_id = nvshmem.get_unique_id(empty=rank != 0)
    content = unique_id._data.view(np.uint8)
    first_id = bytes.fromhex(gather_values(content.tobytes().hex(), group)[0])
    content[...] = np.frombuffer(first_id, dtype=np.uint8).reshape(content.shape)
    nvshmem.init(
        device=_device_of(device), uid=unique_id, rank=rank, nranks=len(ranks), initializer_method="uid"
    )
    process.unique_id, process.ranks = first_id, ranks
    return ()


def _say_running(running: _Running | None) -> list[Any] | None:
    return None if running is None else [running.unique_id.hex(), running.ranks, running.kept_bytes]


def _read_running(said: list[Any] | None) -> _Running | None:
    return None if said is None else _Running(bytes.fromhex(said[0]), tuple(said[1]), tuple(said[2]))


def _device_of(device: torch.device) -> Any:
    """Return cuda.core's object for the device and make it current. Returns None for other devices (stand-ins)."""
    if device.type != "cuda":
        return None
    found = importlib.import_module("cuda.core").Device(device.index)
    found.set_current()
    return found


def _initialise_loaded_kernels(nvshmem: Any) -> None:
    """Make NVSHMEM initialise each kernel that calls it, after Triton has loaded the kernel."""
    knobs = importlib.import_module("triton").knobs

    def initialise(module: int, _function: int, name: str, *_: Any) -> None:
        if name in LINKED:
            nvshmem.module_init(nvshmem.NvshmemKernelObject.from_handle(module))

    knobs.runtime.kernel_load_end_hook.add(initialise)


def find_device_library() -> str:
    """Return the path of NVSHMEM's bitcode in the wheel nvidia-nvshmem-cu13 or -cu12.

    Raises:
        FileNotFoundError: The wheel is not installed.
    """
    wheels = find_spec("nvidia")  # a namespace package of optional wheels
    for folder in [] if wheels is None else wheels.submodule_search_locations or []:
        found = Path(folder) / "nvshmem" / "lib" / "libnvshmem_device.bc"
        if found.exists():
            return str(found)
    raise FileNotFoundError("libnvshmem_device.bc is not installed; pip install nvidia-nvshmem-cu13")


@core.extern
def put_block(target, source, num_bytes, peer, _semantic=None):
    """Put bytes to the peer with the whole program. `quiet` completes it."""
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
    """Write an int64 to the peer."""
    arguments = [
        tl.cast(flag, tl.int64, _semantic=_semantic),
        tl.cast(number, tl.int64, _semantic=_semantic),
        tl.cast(peer, tl.int32, _semantic=_semantic),
    ]
    signature = (tl.int64, tl.int64, tl.int32)
    known = {signature: ("nvshmem_long_p", tl.int32)}
    return core.extern_elementwise("", "", arguments, known, is_pure=False, _semantic=_semantic)
