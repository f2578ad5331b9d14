"""WideEP in the place of DeepEP (version 2.1's names), for whoever put this directory on their path.

Importing it patches the process where there is no CUDA; `dispatch.deep_ep_shim.redirect` says what and why. All
interfaces are WideEP's `dispatch`; `deep_ep.utils` is written anew, as far as DeepEP's own tests need it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("dispatch") is None:
    sys.path.append(str(Path(__file__).resolve().parents[4]))  # WideEP runs from its source tree

import dispatch
from dispatch.deep_ep_shim.redirect import redirect_cuda

is_wideep_shim = True
"""Tells this package from the real one."""
__version__ = "2.1.0+wideep"
topk_idx_t = torch.int64

redirect_cuda()

_FORWARDED = frozenset(dispatch.__all__)
_FROM_UTILS = ("get_physical_domain_size", "get_logical_domain_size")
__all__ = [*dispatch.__all__, *_FROM_UTILS, "topk_idx_t"]


def __getattr__(name: str) -> Any:
    if name in _FORWARDED:
        return getattr(dispatch, name)
    if name in _FROM_UTILS:
        return getattr(importlib.import_module("deep_ep.utils.envs"), name)
    raise AttributeError(f"module 'deep_ep' (WideEP's shim) has no attribute {name!r}")
