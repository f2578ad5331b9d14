"""Forecasts how long a step's experts take under a placement, from loads and measured seconds, for each kind of step.

A rank either reads the weights of all experts with tokens or multiplies, whichever takes longer (a roofline). The
slowest rank determines a layer's time. In decode with few tokens, reading dominates and levelling tokens saves nothing
(METRO, 2512.09277); a sum of tokens would predict a gain that does not exist. Whether an expert gets any token is
modelled as Poisson.

Steps with prompts and decode-only steps use different experts, and a placement changes their times differently. So
their loads are kept apart, and kinds are weighted by their share of the steps.

Calibration: the roofline gives the relative time of a rank for its load; the measured mean over ranks in the window
scales it to this machine. A kind with fewer than ENOUGH_STEPS measured steps borrows the other kind's factor. Without
measurements, the rates of one core of a known CPU are used unscaled. Rejected: fitting both rates of the roofline to
the two kinds, because one odd window can make the result useless.

Legend: L layers, E experts, R ranks.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from expert_placement.load import LoadWindow
from expert_placement.placement import Placement, slot_load

PREFILL, DECODE = "prefill", "decode"  # kinds of steps: with and without prompt tokens on some rank
ENOUGH_STEPS = 20
MEMORY_BYTES_PER_S = 20e9  # weights streamed by one Zen 3 core (docs/LOG.md)
FLOPS_PER_S = 84e9  # products of many rows on that core, float32 (docs/LOG.md)
FLOPS_PER_BYTE = 0.5  # a multiplication and an addition per float32 weight
_UNITS = 1e6  # sum of a layer's load; loads for planning have no unit


class StepKind(NamedTuple):
    """An average step of one kind."""

    name: str
    load_LE: np.ndarray  # choices of all ranks' tokens
    share: float  # of all steps
    experts_s: float  # of a rank's experts, mean over ranks; 0 if too few steps were measured


class KindSeconds(NamedTuple):
    """Cost of a step of one kind: seconds of the slowest rank's experts, summed over layers."""

    name: str
    share: float
    seconds: float


def step_kinds(window: LoadWindow) -> tuple[StepKind, ...]:
    """Return an average step of each kind in a window. Kinds without steps are left out."""
    figures = window.figures
    steps = float(max(each.steps for each in figures))
    if steps <= 0:
        return ()
    with_prompts = min(steps, max(each.prefill_steps for each in figures))
    # Without announced prompts, all tokens count as decode.
    decode_LE = window.expert_tokens(DECODE if with_prompts else None) / steps
    prompts_LE = window.expert_tokens(PREFILL) / max(with_prompts, 1.0)
    of_prefill_s = fmean(each.prefill_experts_s for each in figures)
    of_decode_s = fmean(each.experts_s for each in figures) - of_prefill_s
    found = (
        (PREFILL, decode_LE + prompts_LE, with_prompts, of_prefill_s),
        (DECODE, decode_LE, steps - with_prompts, of_decode_s),
    )
    return tuple(
        StepKind(name, load_LE, count / steps, max(0.0, seconds) / count if count >= ENOUGH_STEPS else 0.0)
        for name, load_LE, count, seconds in found
        if count > 0
    )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicts seconds of a step under any placement of a service."""

    kinds: tuple[StepKind, ...]
    expert_bytes: int  # of one expert of one layer
    factors: tuple[float, ...]  # measured over roofline, by kind

    def layer_seconds_of(self, kind: StepKind, factor: float, placement: Placement) -> np.ndarray:
        """Return the cost of each layer in a step of one kind: [L] float64. Ranks wait for the slowest."""
        seconds_L: np.ndarray = rank_seconds(placement, kind.load_LE, self.expert_bytes).max(axis=1)
        return factor * seconds_L

    def seconds(self, placement: Placement) -> tuple[KindSeconds, ...]:
        """Return the cost of a step of each kind under a placement."""
        return tuple(
            KindSeconds(kind.name, kind.share, float(self.layer_seconds_of(kind, factor, placement).sum()))
            for kind, factor in zip(self.kinds, self.factors, strict=True)
        )

    def step_s(self, placement: Placement) -> float:
        """Return the cost of the average step's experts under a placement."""
        return sum(kind.share * kind.seconds for kind in self.seconds(placement))

    def layer_seconds(self, placement: Placement) -> np.ndarray:
        """Return the cost of each layer in the average step: [L] float64."""
        total_L: np.ndarray = np.zeros(placement.num_layers)
        for kind, factor in zip(self.kinds, self.factors, strict=True):
            total_L += kind.share * self.layer_seconds_of(kind, factor, placement)
        return total_L

    def loads(self, placement: Placement) -> tuple[np.ndarray, ...]:
        """Return the loads to plan for, each [L, E]. The caller takes the cheapest plan.

        Returns:
            The blend of the kinds, weighted by their seconds under a placement; then every kind separately.
        """
        blended: np.ndarray = np.zeros((placement.num_layers, placement.num_experts))
        costs = [kind.share * kind.seconds for kind in self.seconds(placement)]
        alone = tuple(_in_units(kind.load_LE) for kind in self.kinds)
        for load_LE, cost in zip(alone, costs, strict=True):
            blended += cost / max(sum(costs), 1e-300) * load_LE
        return (blended, *(alone if len(alone) > 1 else ()))


def calibrated(kinds: tuple[StepKind, ...], current: Placement, expert_bytes: int) -> Forecast:
    """Fit the roofline to the measured seconds.

    Args:
        current: The placement under which `kinds` were measured.
        expert_bytes: Bytes of one expert of one layer.
    """
    found = []
    for kind in kinds:
        said_s = float(rank_seconds(current, kind.load_LE, expert_bytes).sum(axis=0).mean())
        found.append(kind.experts_s / said_s if said_s > 0 else 0.0)  # 0: not measured
    other = next((factor for factor in found if factor), 1.0)
    return Forecast(
        kinds=kinds, expert_bytes=expert_bytes, factors=tuple(factor or other for factor in found)
    )


def rank_seconds(placement: Placement, load_LE: np.ndarray, expert_bytes: int) -> np.ndarray:
    """Return the seconds of each rank in each layer, by the roofline: [L, R] float64.

    Args:
        load_LE: Choices in a step by all ranks' tokens. All layers get the largest layer's sum: tokens visit every layer.
    """
    total_L1 = load_LE.sum(axis=1, keepdims=True)
    part_LE = np.divide(load_LE, total_L1, out=np.zeros(load_LE.shape), where=total_L1 > 0)
    tokens = placement.by_rank(slot_load(placement, part_LE) * float(total_L1.max(initial=0.0)))
    reading = (-np.expm1(-tokens)).sum(axis=2) * (expert_bytes / MEMORY_BYTES_PER_S)
    multiplying = tokens.sum(axis=2) * (FLOPS_PER_BYTE * expert_bytes / FLOPS_PER_S)
    result: np.ndarray = np.maximum(reading, multiplying)
    return result


def _in_units(load_LE: np.ndarray) -> np.ndarray:
    """Scale every layer's load to the same sum."""
    total = load_LE.sum(axis=1, keepdims=True)
    result: np.ndarray = np.divide(_UNITS * load_LE, total, out=np.zeros(load_LE.shape), where=total > 0)
    return result
