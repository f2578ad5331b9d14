"""WideEP in the place of DeepEP (names of version 2.1), for programs with this directory on their path.

Importing it on a machine without CUDA patches the process; see `dispatch.deep_ep_shim.redirect`. All interfaces are
those of WideEP's `dispatch`.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if importlib.util.find_spec("dispatch") is None:
    sys.path.append(str(Path(__file__).resolve().parents[4]))  # WideEP runs from its source tree

from dispatch.deep_ep_shim.redirect import redirect_cuda

is_wideep_shim = True
"""Distinguishes this package from the real one."""
__version__ = "2.1.0+wideep"
topk_idx_t = torch.int64

redirect_cuda()

_ours: Any = importlib.import_module("dispatch")
_NODE_SIZE = 8
__all__ = [*_ours.__all__, "get_logical_domain_size", "get_physical_domain_size", "topk_idx_t"]


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node, for nodes of up to eight ranks."""
    num_ranks = dist.get_world_size(group)
    return max(1, num_ranks // _NODE_SIZE), min(num_ranks, _NODE_SIZE)


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the size of a hierarchical exchange's domains. Without hybrid mode there is one domain."""
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, dist.get_world_size(group))


def __getattr__(name: str) -> Any:
    if name in _ours.__all__:
        return getattr(_ours, name)
    raise AttributeError(f"module 'deep_ep' (WideEP's shim) has no attribute {name!r}")
