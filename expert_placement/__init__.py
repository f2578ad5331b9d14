"""Where experts live: see the load, plan, measure. No torch."""

from expert_placement.eplb import rebalance_experts

__all__ = ["rebalance_experts"]
