"""Memory that every rank has alike and others write into: where things lie in it, and who provides it.

A provider gives this rank its memory, zeroed, and the base address of every rank's: that is all that the kernels need.
Shared memory stands for it between CPU ranks of one host. On GPUs torch's symmetric memory gives the same table
(`torch_symmetric`); nvshmem4py would give a third (`get_peer_tensor`), with 0 for peers that are not mapped, but without
a device to run it on it is left out.
A provider belongs to one membership epoch: a rank that comes late has another epoch's memory and cannot write here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.low_latency.shape import ROW_ALIGNMENT, LowLatencyShape, aligned
from dispatch.transports.segment import SharedSegment

_LINE_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class SymmetricLayout:
    """Offsets within a rank's memory: two phases, each with the parts below.

    flags int32 [R] and answer flags int32 [R]; entries int32 [R, M, K]; rows [R, M, row_bytes]; answers
    [M, K, answer_bytes]; and, for peers that are reached by a put, room to put from.
    """

    shape: LowLatencyShape
    has_remote: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a travelling row, padded."""
        return aligned(self.shape.row_bytes, ROW_ALIGNMENT)

    @property
    def answer_bytes(self) -> int:
        """Bytes of an answer, padded."""
        return aligned(self.shape.answer_bytes, ROW_ALIGNMENT)

    @property
    def _flags_bytes(self) -> int:
        return aligned(4 * self.shape.world_size, _LINE_BYTES)

    @property
    def _entries_bytes(self) -> int:
        shape = self.shape
        return aligned(4 * shape.rows_per_expert * shape.choices, _LINE_BYTES)

    @property
    def _rows_bytes(self) -> int:
        return aligned(self.shape.rows_per_expert * self.row_bytes, _LINE_BYTES)

    @property
    def _answers_bytes(self) -> int:
        return aligned(self.shape.max_tokens * self.shape.choices * self.answer_bytes, _LINE_BYTES)

    @property
    def _staging_bytes(self) -> int:
        if not self.has_remote:
            return 0
        shape = self.shape
        sent = shape.max_tokens * self.row_bytes + self._entries_bytes
        return aligned(
            max(sent, shape.experts_per_rank * shape.rows_per_expert * self.answer_bytes), _LINE_BYTES
        )

    @property
    def phase_bytes(self) -> int:
        """Bytes of a phase."""
        parts = self._entries_bytes + self._rows_bytes + self._answers_bytes + self._staging_bytes
        return 2 * self._flags_bytes + parts

    @property
    def total_bytes(self) -> int:
        """Bytes of a rank's memory."""
        return 2 * self.phase_bytes

    def flags_at(self, number: int) -> int:
        """Where a call's flags are, of dispatch and combine alike: they have different numbers."""
        return (number & 1) * self.phase_bytes

    def entries_at(self, number: int) -> int:
        """Where entries are."""
        return self.flags_at(number) + 2 * self._flags_bytes

    def rows_at(self, number: int) -> int:
        """Where rows are."""
        return self.entries_at(number) + self._entries_bytes

    def answers_at(self, number: int) -> int:
        """Where answers are."""
        return self.rows_at(number) + self._rows_bytes

    def staging_at(self, number: int) -> int:
        """Where puts start from."""
        return self.answers_at(number) + self._answers_bytes


class SymmetricMemory(Protocol):
    """One rank's view.

    Attributes:
        rank, world_size: within the group.
        device: where the memory is.
        peers: int64 [R] on that device, every rank's base address; 0 where a peer cannot be addressed.
        base: this rank's own address.
    """

    rank: int
    world_size: int
    device: torch.device
    peers: Tensor
    base: int

    def close(self) -> None:
        """Release it. Addresses are dead afterwards."""
        ...


class SharedMemory:
    """Between CPU ranks of one host. Opening is collective over `group`.

    Raises:
        TransportUnavailable: not one host, or the memory cannot be had; on every rank alike.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._segment = SharedSegment(group, self.world_size * num_bytes, timeout_s=timeout_s)
        self.peers = torch.tensor([self._segment.start + rank * num_bytes for rank in range(self.world_size)])
        self.base = int(self.peers[self.rank])

    def close(self) -> None:
        """See `SymmetricMemory`."""
        self._segment.close()
