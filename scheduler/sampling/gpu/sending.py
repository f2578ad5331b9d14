"""Several arrays of the host copied to a device at once, without waiting."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; wide enough for every type, and what loads of vectors want


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to a device: views of one buffer, by the same names, of the same types and shapes.

    For a GPU the copy starts from pinned memory, which lives until the copy is done (torch's allocator sees to it).
    """
    ends = np.cumsum([-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in arrays.values()])
    starts = [0, *ends[:-1].tolist()]
    packed = np.zeros(int(ends[-1]), np.uint8)
    for start, array in zip(starts, arrays.values(), strict=True):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    staged = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer = staged.copy_(torch.from_numpy(packed)).to(device, non_blocking=True)
    return {
        name: buffer[start : start + array.nbytes].view(_type_of(array)).view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }


def _type_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
