"""Expert placement: observe the load, plan, measure. Does not use torch.

`rebalance_experts` is imported on first use, because it needs a compiler. Command lines and supervisors that only read
a configuration from this package must not wait for that.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert_placement.tools.eplb import rebalance_experts

__all__ = ["rebalance_experts"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("expert_placement.tools.eplb"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
