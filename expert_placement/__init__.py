"""Where experts live: see the load, plan, measure. No torch.

`rebalance_experts` is looked up when it is first used, because it brings a compiler, which command lines and
supervisors that only read a configuration from this package must not wait for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert_placement.eplb import rebalance_experts

__all__ = ["rebalance_experts"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("expert_placement.eplb"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
