"""The Triton kernels in the interpreter, over shared memory between the ranks of a pool.

The kernels' module is imported in here: the interpreter must be chosen before, and only in these processes.
"""

from typing import Any

import torch.distributed as dist

from dispatch.gpu.symmetric import SharedMemory


def open_interpreted(num_bytes: int = 1 << 18, **kwargs: Any) -> Any:
    """An exchange whose kernels are interpreted. Opening is collective."""
    from dispatch.gpu.exchange import LowLatencyBlocks  # noqa: PLC0415

    def open_memory(size: int) -> SharedMemory:
        return SharedMemory(dist.group.WORLD, size, timeout_s=20.0)

    options = {"timeout_s": 20.0, **kwargs}
    return LowLatencyBlocks(open_memory, dist.get_world_size(), num_bytes=num_bytes, **options)
