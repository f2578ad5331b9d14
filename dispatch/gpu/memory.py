"""Memory on a device for results whose size changes from call to call, and how kernels see floating types.

What a CUDA graph has captured keeps its address, so memory that a larger call outgrows is kept, not given back: the
smaller graph may be replayed later. Capture begins after a call of the same shape, hence nothing grows in a graph.
"""

import torch
from torch import Tensor

STORED = {torch.bfloat16: torch.int16, torch.float16: torch.float16, torch.float32: torch.float32}
"""The floating types that kernels take, and as what: bfloat16 is bits (see `casts`)."""


def as_stored(x: Tensor) -> Tensor:
    """See a tensor as kernels do."""
    return x.view(STORED[x.dtype])


class DeviceRoom:
    """Room for tensors of one type that are overwritten by the next ones.

    Args:
        dtype, device: of the tensors.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._rooms = [torch.zeros(0, dtype=dtype, device=device)]  # the last one is the largest

    def take(self, *shape: int) -> Tensor:
        """Return the room's beginning as a contiguous tensor of this shape, with what the last call left there."""
        size = 1
        for length in shape:
            size *= length
        room = self._rooms[-1]
        if size > room.numel():
            room = torch.zeros(size, dtype=room.dtype, device=room.device)
            self._rooms.append(room)
        return room[:size].view(shape)
