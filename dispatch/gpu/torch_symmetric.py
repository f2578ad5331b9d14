"""`SymmetricMemory` between GPUs that can address each other, by torch's symmetric memory.

A module of its own because its import is heavy and only GPUs need it. Written against torch 2.13; without a GPU at hand
it was imported and its refusals tested, never run.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from dispatch.errors import WireUnavailable


class TorchSymmetricMemory:
    """See `SymmetricMemory`. Opening is collective over `group`. Several ranks on one GPU need
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.

    Args:
        group: its store is used; no collective of a device runs on it.

    Raises:
        WireUnavailable: there is no CUDA device, or a peer cannot be addressed.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise WireUnavailable(
                "torch's symmetric memory needs a CUDA device and this machine has none; use shm or gloo"
            )
        self.rank, self.world_size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self.reach: dict[str, Any] = {"HAS_REMOTE": False}
        self.memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        self._handle = symm_mem.rendezvous(self.memory, group)
        addresses = self._handle.buffer_ptrs
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before everybody's memory is zero
        check_addresses(addresses)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.base = int(addresses[self.rank])

    def close(self) -> None:
        """See `SymmetricMemory`."""
        del self._handle, self.memory


def check_addresses(addresses: list[int]) -> None:
    """Raise WireUnavailable if a peer has none: only NVSHMEM reaches such a one."""
    missing = [rank for rank, address in enumerate(addresses) if not address]
    if missing:
        raise WireUnavailable(
            f"the memory of ranks {missing} cannot be addressed from here (no NVLink or another host); "
            "open the buffer with backend='nvshmem', which reaches them by puts"
        )
