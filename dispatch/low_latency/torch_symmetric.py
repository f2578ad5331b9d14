"""`SymmetricMemory` between GPUs that can address each other, by torch's symmetric memory.

A module of its own because its import is heavy and only GPUs need it. Written against torch 2.13; not run on a GPU yet.
"""

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from dispatch.errors import TransportUnavailable


class TorchSymmetricMemory:
    """See `SymmetricMemory`. Opening is collective over `group`. Several ranks on one GPU need
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.

    Raises:
        TransportUnavailable: there is no CUDA device.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise TransportUnavailable(
                "torch's symmetric memory needs a CUDA device and this machine has none; use shm or gloo"
            )
        self.rank, self.world_size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        self._handle = symm_mem.rendezvous(self._memory, group)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before everybody's memory is zero
        self.peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.base = int(self._handle.buffer_ptrs[self.rank])

    def close(self) -> None:
        """See `SymmetricMemory`."""
        del self._handle, self._memory
