"""Balance of expert tokens over ranks in simulated time, under a placement that may change during operation.

The load of experts consists of windows, either recorded or generated (lognormal over experts, drawn for every layer,
drifting by a lognormal factor from window to window). A step's tokens are drawn from its window (multinomial, once for each
power of two of tokens), because a batch of few tokens is uneven even under the best placement.

Placements change as in a service: every `step_interval` steps the last window is evaluated by `expert_placement.control`
("repair"), or a new plan with even shares is made, as by DeepSeek's EPLB ("even"). Moves take time, and the placement
switches at their end. "linear" has no redundant experts and never changes. Rejected: drawing every step's tokens, 1 ms a step.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from expert_placement.config import EplbConfig
from expert_placement.control import Situation, decide, move_seconds
from expert_placement.files import read_loads
from expert_placement.forecast import calibrated, step_kinds
from expert_placement.load import LoadFigures, LoadWindow
from expert_placement.moves import align, transfers_between
from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import Placement, rank_load
from expert_placement.plan import plan
from scheduler.moves.start_placement import start_placement
from server.tools.simulate.flags import PLACEMENT_NAMES
from server.tools.size.costs.step_times import StepCost

GENERATED_LAYERS = 8  # represent all layers of a model
_HOST = "host"  # of all ranks: nodes are not simulated


class ExpertModel(NamedTuple):
    """The properties of a model that affect expert placement."""

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int  # of one expert of one layer


class ExpertLoads(NamedTuple):
    """The load of experts: a sequence of windows, repeated from the beginning."""

    windows: np.ndarray  # [windows, layers, experts] float64; the sum over the experts of a layer is 1
    window_s: float

    def at(self, now_s: float) -> int:
        """Return the index of the window at a time."""
        return int(now_s / self.window_s) % len(self.windows)


def recorded_loads(paths: Sequence[Path], window_s: float) -> ExpertLoads:
    """Read recorded loads from files.

    Raises:
        LoadFileError: A file is invalid; the message names it and the reason.
    """
    return ExpertLoads(_normed(read_loads(paths).load), window_s)


def generated_loads(
    num_layers: int,
    num_experts: int,
    *,
    skew: float,
    drift: float,
    num_windows: int,
    window_s: float,
    seed: int,
) -> ExpertLoads:
    """Generate lognormal loads.

    Args:
        skew: Sigma over the experts of a layer; 0 makes them equal. At 0.7 the hottest of 256 gets 6 times the mean load,
            as in DeepSeek-V3 under SGLang (sgl-project/sglang, issue 6017: 5.6 to 8.1 times, sigma 0.56 to 0.86).
        drift: Sigma of the lognormal factor from window to window; 0.07 to 0.30 in the same source.
    """
    draw = np.random.default_rng(seed)
    load = np.exp(skew * draw.standard_normal((num_layers, num_experts)))
    steps = drift * draw.standard_normal((num_windows, num_layers, num_experts))
    steps[0] = 0.0
    return ExpertLoads(_normed(load * np.exp(np.cumsum(steps, axis=0))), window_s)


def _normed(load: np.ndarray) -> np.ndarray:
    total = load.sum(axis=2, keepdims=True)
    result: np.ndarray = np.divide(load, total, out=np.full(load.shape, 1 / load.shape[2]), where=total > 0)
    return result


class ExpertBalance:
    """The current placement, and its balance at a time."""

    def __init__(
        self,
        policy: str,
        model: ExpertModel,
        loads: ExpertLoads,
        num_ranks: int,
        config: EplbConfig,
        *,
        seed: int = 0,
    ) -> None:
        """Place experts as a service does at startup, without a known load.

        Args:
            policy: One of `PLACEMENT_NAMES`.
            config: Settings of the placement; `linear` ignores the number of redundant experts.

        Raises:
            ConfigError: There are more redundant experts than the ranks can use.
        """
        assert policy in PLACEMENT_NAMES, "the command line checks the name"
        self._policy, self._model, self._loads, self._seed = policy, model, loads, seed
        self._num_ranks, self._hosts = num_ranks, (_HOST,) * num_ranks
        self._config = replace(config, num_redundant_experts=0) if policy == "linear" else config
        layers, experts = loads.windows.shape[1:]
        self.placement = start_placement(
            layers, experts, num_ranks, eplb=self._config, hosts=self._hosts, file=None
        )
        self.num_moves = 0
        self.last_reason = ""  # the last decision of "repair", with its numbers
        # A simulated layer represents several.
        self._expert_bytes = model.expert_bytes * max(1, model.num_layers) // layers
        self._drawn: dict[tuple[int, int], float] = {}  # balance of this placement, by window and tokens
        self._step = 0
        self._seen = LoadFigures()  # of all ranks together, since the last evaluation
        self._coming: tuple[float, Placement] | None = None  # time and placement of the next switch

    def balancedness(self, now_s: float, num_tokens: int) -> float:
        """Return mean over max of the ranks' expert rows, over all layers, in a step with this number of tokens."""
        if self._coming is not None and self._coming[0] <= now_s:
            self.placement, self._coming = self._coming[1], None
            self._drawn.clear()
            self._seen = LoadFigures()
        key = self._loads.at(now_s), max(1, num_tokens).bit_length()
        if key not in self._drawn:
            self._drawn[key] = self._draw(*key)
        return self._drawn[key]

    def _draw(self, window: int, bits: int) -> float:
        draw = np.random.default_rng((self._seed, window, bits))
        choices = min((3 << bits) // 4 * self._model.top_k or 1, 1 << 40)  # the middle of the range
        counts = draw.multinomial(choices, self._loads.windows[window]).astype(np.float64)
        ranks = rank_load(self.placement, counts)
        return float(ranks.mean(axis=1).sum() / ranks.max(axis=1).sum())

    def note_step(self, prefill: int, decode: int, cost: StepCost, balancedness: float, now_s: float) -> None:
        """Record a step, and decide about the placement after every `step_interval` steps."""
        self._step += 1
        config = self._config
        if self._policy == "linear" or self._num_ranks == 1:
            return
        into = self._step % config.step_interval
        if into >= config.step_interval - config.window_size or into == 0:
            experts_s, has_prefill = cost.experts_s * balancedness, int(prefill > 0)
            figures = LoadFigures(
                steps=1,
                prefill_steps=has_prefill,
                prefill_tokens=prefill,
                decode_tokens=decode,
                experts_s=experts_s,
                prefill_experts_s=has_prefill * experts_s,
                step_s=cost.total_s,
            )
            self._seen = self._seen.plus(figures)
        if into == 0:
            if self._coming is None and self._seen.steps >= config.window_size:
                self._decide(now_s)
            self._seen = LoadFigures()

    def _decide(self, now_s: float) -> None:
        situation = self._situation(self._loads.windows[self._loads.at(now_s)])
        if self._policy == "repair":
            decision = decide(situation, self._config)
            self.last_reason = decision.reason
            target = None if decision.proposal is None else decision.proposal.target
        else:
            rules = Rules(cluster=Cluster(num_ranks=self._num_ranks), even=True)
            load = situation.forecast.loads(self.placement)[0]
            target = align(plan(load, self.placement.slots_per_rank, rules).placement, self.placement)
        if target is not None:
            transfers = transfers_between(self.placement, target)
            self.num_moves += len(transfers)
            self._coming = now_s + move_seconds(transfers, situation, self._config), target

    def _situation(self, load: np.ndarray) -> Situation:
        """Return the figures that a service would get from its ranks' reports."""
        seen, num_ranks = self._seen, self._num_ranks
        window = LoadWindow(load.shape[0], load.shape[1], num_ranks, self._config.window_size)
        counts = np.zeros((len(load), 2, load.shape[1] + num_ranks), dtype=np.int64)
        tokens = np.array([seen.prefill_tokens, seen.decode_tokens], dtype=np.float64)
        choices = load[:, None] * (tokens * self._model.top_k)[None, :, None]
        counts[:, :, : load.shape[1]] = np.rint(choices)
        window.add(0, counts, dict.fromkeys(range(num_ranks), seen))
        return Situation(
            forecast=calibrated(step_kinds(window), self.placement, self._expert_bytes),
            current=self.placement,
            num_steps=seen.steps,
            step_s=seen.step_s / seen.steps,
            expert_bytes=self._expert_bytes,
            hosts=self._hosts,
        )
