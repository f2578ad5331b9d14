"""Shared parts of the tests of node-limited dispatch."""

from typing import Any

import torch.distributed as dist

from dispatch.hierarchical import HierarchicalDispatcher, open_hierarchical

S = 3


def open_here(name: str, node_size: int, **options: Any) -> HierarchicalDispatcher:
    """Open a dispatcher over all ranks of a pool."""
    return open_hierarchical(
        name, dist.group.WORLD, node_size=node_size, slots_per_rank=S, timeout_s=20.0, **options
    )
