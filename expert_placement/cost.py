"""What a placement costs in seconds, from the machine's rates: a roofline for each rank, the slowest rank for a layer.

A rank reads the weights of the experts that got any token, or multiplies, whichever takes longer; then its tokens have
to travel. In decode with few tokens the weights decide, and levelling tokens saves nothing (METRO, 2512.09277): a sum of
tokens would promise a gain that is not there. Whether an expert gets a token at all is taken as Poisson.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from expert_placement.measure import slot_load
from expert_placement.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Rates of one rank and sizes of one expert."""

    slot_bytes: float  # weights of one expert
    token_flops: float  # operations of one token in one expert
    memory_bytes_per_s: float
    flops_per_s: float
    token_bytes: float = 0.0  # of one token's way to an expert and back
    link_bytes_per_s: float = math.inf  # at which a rank sends and receives

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a rate is not above 0, or a size below 0.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            is_rate = field.name.endswith("_per_s")
            if not (value > 0 if is_rate else value >= 0):
                raise ValueError(
                    f"{field.name} is {value}; it must be {'above 0' if is_rate else '0 or more'}"
                )

    def rank_seconds(self, placement: Placement, load: np.ndarray, choices: float) -> np.ndarray:
        """Seconds that each rank takes in each layer: [layers, ranks] float64.

        Args:
            load: [layers, experts]; only its proportions within a layer count.
            choices: tokens of a step over all ranks, times the experts that each goes to.
        """
        total = load.sum(axis=1, keepdims=True)
        carried = slot_load(
            placement, np.divide(load, total, out=np.zeros_like(load, dtype=float), where=total > 0)
        )
        shape = (placement.num_layers, placement.num_ranks, placement.slots_per_rank)
        tokens = (carried * choices).reshape(shape)
        reading = (-np.expm1(-tokens)).sum(axis=2) * (self.slot_bytes / self.memory_bytes_per_s)
        multiplying = tokens.sum(axis=2) * (self.token_flops / self.flops_per_s)
        travelling = tokens.sum(axis=2) * (self.token_bytes / self.link_bytes_per_s)
        result: np.ndarray = np.maximum(reading, multiplying) + travelling
        return result

    def layer_seconds(self, placement: Placement, load: np.ndarray, choices: float) -> np.ndarray:
        """Seconds of one step in each MoE layer, [layers] float64: ranks wait for the slowest."""
        result: np.ndarray = self.rank_seconds(placement, load, choices).max(axis=1)
        return result

    def step_seconds(self, placement: Placement, load: np.ndarray, choices: float) -> float:
        """Seconds of one step in all its MoE layers."""
        return float(self.layer_seconds(placement, load, choices).sum())

    def move_seconds(self, num_slots: int) -> float:
        """Seconds that one link takes for so many experts' weights."""
        return num_slots * self.slot_bytes / self.link_bytes_per_s
