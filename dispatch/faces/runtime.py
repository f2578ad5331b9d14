"""Small things that callers ask of DeepEP's C++ runtime, and which here need no wire. All local."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Runtime(NamedTuple):
    """`Buffer.runtime`: a rank's place in the grid of nodes. No device or stream is behind it."""

    rank: int
    num_nodes: int
    node_size: int

    def is_available(self) -> bool:
        """Whether ranks have met: they have when a Buffer exists."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self.num_nodes

    def get_rdma_rank(self) -> int:
        """Return this rank's node."""
        return self.rank // self.node_size


def check_group(group: dist.ProcessGroup | None, comm: object) -> dist.ProcessGroup:
    """Return the group, or raise ValueError for what cannot take its place."""
    if comm is not None:
        raise ValueError(
            f"comm is {type(comm).__module__}.{type(comm).__name__}; ranks meet over torch.distributed here, "
            "pass a process group as group= and leave comm out"
        )
    if group is None:
        raise ValueError("group is None; it must be a torch.distributed process group over all ranks")
    return group


def scratch_like(
    dtype: torch.dtype, size: torch.Size | None, offset: int, *, name: str, num_bytes: int
) -> Tensor:
    """Return new memory shaped as a slice of a buffer of `num_bytes`, which the caller calls `name`.

    Raises:
        ValueError: the slice does not lie within the buffer.
    """
    elements = num_bytes // dtype.itemsize
    wanted = elements - offset if size is None else torch.Size(size).numel()
    if offset < 0 or not 0 <= wanted <= elements - offset:
        raise ValueError(
            f"size is {size} at offset {offset}; {name} is {num_bytes}, which is {elements} of {dtype}"
        )
    return torch.empty((wanted,) if size is None else size, dtype=dtype)
