"""Memory with the same layout on every rank that other ranks write to: its layout, and its providers.

A provider gives this rank its memory, zeroed, and the base address of every rank's memory. Kernels need nothing else.
CPU ranks of one host use shared memory. On GPUs, torch's symmetric memory gives the same table, and in NVSHMEM's table
(`nvshmem`) peers on other hosts have no address.
A provider belongs to one membership epoch: a late rank has another epoch's memory and cannot write here.

The memory has two halves, which calls of any shape use in turn. A call writes to a peer's half only after that peer has
finished the call before the last, so it never overwrites data that is still read. A half holds flags int64 [R], texts of
refusals [R, TEXT_BYTES], and the contents of one call.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import WireUnavailable
from dispatch.low_latency.calls import ROW_ALIGNMENT, LowLatencyShape, aligned
from dispatch.wires.segment import SharedSegment

TEXT_BYTES = 1024  # a power of two, above `MAX_REFUSAL_BYTES`
_LINE_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class SymmetricLayout:
    """Offsets in a half, which begins with the flags. The call with number n uses half n % 2."""

    world_size: int
    total_bytes: int

    @staticmethod
    def bytes_for(world_size: int, content_bytes: int) -> int:
        """Return the size of memory for calls of `content_bytes`."""
        return 2 * (
            SymmetricLayout(world_size=world_size, total_bytes=0)._head_bytes
            + aligned(content_bytes, _LINE_BYTES)
        )

    @property
    def _head_bytes(self) -> int:
        return self.texts_at + self.world_size * TEXT_BYTES

    @property
    def content_bytes(self) -> int:
        """Most bytes that one call may write."""
        return self.half_bytes - self._head_bytes

    @property
    def half_bytes(self) -> int:
        """Size of a half, and offset of the second."""
        return self.total_bytes // 2 // _LINE_BYTES * _LINE_BYTES

    @property
    def texts_at(self) -> int:
        """Offset of the refusals."""
        return aligned(8 * self.world_size, _LINE_BYTES)

    @property
    def contents_at(self) -> int:
        """Offset of a call's contents."""
        return self._head_bytes


@dataclass(frozen=True, kw_only=True)
class DispatchContents:
    """Contents of a dispatch: entries int32 [R, M, K], rows [R, M, row_bytes] and, if peers are reached by puts,
    staging memory for the puts."""

    shape: LowLatencyShape
    has_remote: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire, padded."""
        return aligned(self.shape.row_bytes, ROW_ALIGNMENT)

    @property
    def _entries_bytes(self) -> int:
        return aligned(4 * self.shape.rows_per_expert * self.shape.choices, _LINE_BYTES)

    @property
    def rows_at(self) -> int:
        """Offset of the rows, after the entries."""
        return self._entries_bytes

    @property
    def staging_at(self) -> int:
        """Offset of the staging memory."""
        return self.rows_at + aligned(self.shape.rows_per_expert * self.row_bytes, _LINE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Size of all contents."""
        staged = self.shape.max_tokens * self.row_bytes + self._entries_bytes if self.has_remote else 0
        return self.staging_at + aligned(staged, _LINE_BYTES)


@dataclass(frozen=True, kw_only=True)
class CombineContents:
    """Contents of a combine: answers [M, K, answer_bytes] of a type, and staging as in `DispatchContents`."""

    shape: LowLatencyShape
    dtype: torch.dtype
    has_remote: bool = False

    @property
    def answer_bytes(self) -> int:
        """Bytes of an answer, padded."""
        return aligned(self.shape.hidden * self.dtype.itemsize, ROW_ALIGNMENT)

    @property
    def staging_at(self) -> int:
        """Offset of the staging memory."""
        return aligned(self.shape.max_tokens * self.shape.choices * self.answer_bytes, _LINE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Size of all contents."""
        num_rows = self.shape.choices * self.shape.rows_per_expert if self.has_remote else 0
        return self.staging_at + aligned(num_rows * self.answer_bytes, _LINE_BYTES)


class SymmetricMemory(Protocol):
    """One rank's view of the memory.

    Attributes:
        rank, world_size: This rank and the number of ranks of the group.
        device: Device of the memory.
        memory: uint8, this rank's own.
        peers: int64 [R] on that device, every rank's base address; 0 if a peer cannot be addressed.
        base: This rank's own address.
        reach: Launch options of kernels that write to peers: HAS_REMOTE if a peer has no address, and libraries to link.
    """

    rank: int
    world_size: int
    device: torch.device
    memory: Tensor
    peers: Tensor
    base: int
    reach: dict[str, Any]

    def close(self) -> None:
        """Release the memory. Its addresses are invalid afterwards."""


OpenMemory = Callable[[int], SymmetricMemory]
"""Provides memory of the given size in bytes, zeroed. Collective; all ranks request the same size."""


class SharedMemory:
    """Memory between CPU ranks of one host. Opening is collective over `group`.

    Raises:
        WireUnavailable: The ranks are on several hosts, or the memory is not available; on every rank.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.reach: dict[str, Any] = {"HAS_REMOTE": False}
        self._segment = SharedSegment(group, self.world_size * num_bytes, timeout_s=timeout_s)
        self.peers = torch.tensor([self._segment.start + rank * num_bytes for rank in range(self.world_size)])
        self.base = int(self.peers[self.rank])
        own_at = self.base - self._segment.base
        self.memory = self._segment.memory[own_at : own_at + num_bytes]

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._segment.close()


class TorchSymmetricMemory:
    """Memory between GPUs that can address each other, by torch's symmetric memory. Opening is collective over `group`.

    Written against torch 2.13. Without a GPU, only the import and the refusals were tested; it was never run.
    Several ranks on one GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.

    Args:
        group: Its store is used; no device collective runs on it.

    Raises:
        WireUnavailable: There is no CUDA device, or a peer cannot be addressed.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise WireUnavailable(
                "torch's symmetric memory needs a CUDA device and this machine has none; use shm or gloo"
            )
        self.rank, self.world_size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self.reach: dict[str, Any] = {"HAS_REMOTE": False}
        # Imported here because it is heavy and only GPUs need it.
        symm_mem = importlib.import_module("torch.distributed._symmetric_memory")
        self.memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        self._handle = symm_mem.rendezvous(self.memory, group)
        addresses = self._handle.buffer_ptrs
        torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank may write before every rank's memory is zero
        check_addresses(addresses)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.base = int(addresses[self.rank])

    def close(self) -> None:
        del self._handle, self.memory


def check_addresses(addresses: list[int]) -> None:
    """Raise WireUnavailable if a peer has no address: only NVSHMEM reaches such a peer."""
    missing = [rank for rank, address in enumerate(addresses) if not address]
    if missing:
        raise WireUnavailable(
            f"the memory of ranks {missing} cannot be addressed from here (no NVLink or another host); "
            "open the buffer with backend='nvshmem', which reaches them by puts"
        )


def open_memory_for(
    provider: str, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float
) -> OpenMemory:
    """Return a provider of symmetric memory.

    Args:
        provider: "shared" between CPU ranks of one host; between GPUs "CUDA" or "NVSHMEM", see `open_low_latency`.

    Raises:
        WireUnavailable: A package is missing.
    """
    if provider == "shared":
        return partial(SharedMemory, group, timeout_s=timeout_s)
    if provider == "CUDA":
        return partial(TorchSymmetricMemory, group, device=device)
    # Imported here because it needs Triton, and imports this module's protocol.
    nvshmem = importlib.import_module("dispatch.gpu.nvshmem")
    return partial(nvshmem.NvshmemMemory, group, device=device)
