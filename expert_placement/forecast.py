"""How long a step's experts take under a placement: from loads and measured seconds, for each kind of step by itself.

A rank reads the weights of the experts that got any token, or multiplies, whichever takes longer (a roofline); the
slowest rank decides for a layer. In decode with few tokens the weights decide, and levelling tokens saves nothing
(METRO, 2512.09277): a sum of tokens would promise a gain that is not there. Whether an expert gets a token at all is
taken as Poisson.

Steps with prompts in them and decode-only steps ask for different experts, and a placement changes their time
differently, so loads are kept apart, and kinds count by their share of the steps.

Calibration: the roofline says how a rank's time depends on what it carries, in proportion; what ranks really took in
the window, on average, says how long that is on this machine. A kind of which fewer than ENOUGH_STEPS were measured
borrows the other's factor; where nothing was measured, the rates of one core of the CPUs we know stand as they are.
Rejected: fitting both rates of the roofline to the two kinds, which one odd window can turn to nonsense.

Legend: L layers, E experts, R ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from expert_placement.load import LoadWindow
from expert_placement.placement import Placement, slot_load

PREFILL, DECODE = "prefill", "decode"  # kinds of steps: with parts of prompts on some rank, and without
ENOUGH_STEPS = 20
MEMORY_BYTES_PER_S = 20e9  # weights streamed by one Zen 3 core (docs/LOG.md)
FLOPS_PER_S = 84e9  # products of many rows there, float32 (docs/LOG.md)
FLOPS_PER_BYTE = 0.5  # a multiplication and an addition for each float32 weight
_UNITS = 1e6  # that a layer's load adds up to; loads to plan by have no unit


class StepKind(NamedTuple):
    """An average step of one kind."""

    name: str
    load_LE: np.ndarray  # choices of all ranks' tokens
    share: float  # of all steps
    experts_s: float  # that a rank's experts took, mean over ranks; 0: too few steps to say


class KindSeconds(NamedTuple):
    """What a step of one kind costs: experts of the slowest rank, layer by layer."""

    name: str
    share: float
    seconds: float


def step_kinds(window: LoadWindow) -> tuple[StepKind, ...]:
    """Tell an average step of each kind from a window; a kind without steps is left out."""
    figures = window.figures
    steps = float(figures.steps.max(initial=0.0))
    if steps <= 0:
        return ()
    with_prompts = min(steps, float(figures.prefill_steps.max()))
    decode_LE = (
        window.expert_tokens(DECODE if with_prompts else None) / steps
    )  # None: prompts that nobody announced
    prompts_LE = window.expert_tokens(PREFILL) / max(with_prompts, 1.0)
    of_prefill_s = float(figures.prefill_experts_s.mean())
    of_decode_s = float(figures.experts_s.mean()) - of_prefill_s
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
    """Says seconds of a step for any placement of a service."""

    kinds: tuple[StepKind, ...]
    expert_bytes: int  # of one expert of one layer
    factors: tuple[float, ...]  # measured over roofline, of each kind

    def layer_seconds_of(self, kind: StepKind, factor: float, placement: Placement) -> np.ndarray:
        """What a step of one kind costs in each layer under a placement: [L] float64; ranks wait for the slowest."""
        seconds_L: np.ndarray = rank_seconds(placement, kind.load_LE, self.expert_bytes).max(axis=1)
        return factor * seconds_L

    def seconds(self, placement: Placement) -> tuple[KindSeconds, ...]:
        """What steps of each kind cost under a placement."""
        return tuple(
            KindSeconds(kind.name, kind.share, float(self.layer_seconds_of(kind, factor, placement).sum()))
            for kind, factor in zip(self.kinds, self.factors, strict=True)
        )

    def step_s(self, placement: Placement) -> float:
        """What the average step's experts cost under a placement."""
        return sum(kind.share * kind.seconds for kind in self.seconds(placement))

    def layer_seconds(self, placement: Placement) -> np.ndarray:
        """What the average step's experts cost in each layer under a placement: [L] float64."""
        total_L: np.ndarray = np.zeros(placement.num_layers)
        for kind, factor in zip(self.kinds, self.factors, strict=True):
            total_L += kind.share * self.layer_seconds_of(kind, factor, placement)
        return total_L

    def loads(self, placement: Placement) -> tuple[np.ndarray, ...]:
        """Loads to plan by, each [L, E]; the cheapest plan is to be taken.

        Returns:
            The blend, kinds counting by the seconds that they cost under a placement; then every kind by itself.
        """
        blended: np.ndarray = np.zeros((placement.num_layers, placement.num_experts))
        costs = [kind.share * kind.seconds for kind in self.seconds(placement)]
        alone = tuple(_in_units(kind.load_LE) for kind in self.kinds)
        for load_LE, cost in zip(alone, costs, strict=True):
            blended += cost / max(sum(costs), 1e-300) * load_LE
        return (blended, *(alone if len(alone) > 1 else ()))


def calibrated(kinds: tuple[StepKind, ...], current: Placement, expert_bytes: int) -> Forecast:
    """Fit the roofline to what was measured.

    Args:
        current: the placement under which `kinds` were measured.
        expert_bytes: of one expert of one layer.
    """
    found = []
    for kind in kinds:
        said_s = float(rank_seconds(current, kind.load_LE, expert_bytes).sum(axis=0).mean())
        found.append(kind.experts_s / said_s if said_s > 0 else 0.0)  # 0: nothing was measured
    other = next((factor for factor in found if factor), 1.0)
    return Forecast(
        kinds=kinds, expert_bytes=expert_bytes, factors=tuple(factor or other for factor in found)
    )


def rank_seconds(placement: Placement, load_LE: np.ndarray, expert_bytes: int) -> np.ndarray:
    """Return the seconds that each rank takes in each layer, by the roofline: [L, R] float64.

    Args:
        load_LE: choices of a step, of all ranks' tokens. The fullest layer's sum counts for all: they are asked alike.
    """
    total_L1 = load_LE.sum(axis=1, keepdims=True)
    part_LE = np.divide(load_LE, total_L1, out=np.zeros(load_LE.shape), where=total_L1 > 0)
    tokens = placement.by_rank(slot_load(placement, part_LE) * float(total_L1.max(initial=0.0)))
    reading = (-np.expm1(-tokens)).sum(axis=2) * (expert_bytes / MEMORY_BYTES_PER_S)
    multiplying = tokens.sum(axis=2) * (FLOPS_PER_BYTE * expert_bytes / FLOPS_PER_S)
    result: np.ndarray = np.maximum(reading, multiplying)
    return result


def _in_units(load_LE: np.ndarray) -> np.ndarray:
    """Every layer's load adds up to the same."""
    total = load_LE.sum(axis=1, keepdims=True)
    result: np.ndarray = np.divide(_UNITS * load_LE, total, out=np.zeros(load_LE.shape), where=total > 0)
    return result
