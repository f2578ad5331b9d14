"""Loads over time: how often experts were chosen in the last steps, how evenly that fell on ranks, and why steps wait.

A window of steps, not of seconds: an idle service keeps showing what it did last. Reports are differences between
counters; each goes into the part of the window that its step falls in, so reports of different ranks about the same
steps meet, whenever they arrive. Memory is PARTS parts, whatever the length of the window.

Balancedness is mean over ranks / max over ranks of each layer, and only then aggregated over layers: ranks wait for
one another in every layer, and layers have different slowest ranks. Rejected: vLLM's sum over layers first.

Why do steps take as long as they do: a slow rank, a slow link, or a hot expert? Ranks meet twice in every MoE layer, so
their steps last equally long, and who waits least is who the others wait for. From what each rank did in a window:
- a hot expert: some rank's experts got more tokens than the mean, at the cost per token that all ranks have;
- a slow rank: some rank took longer than the mean for the same tokens, in its experts or outside of them;
- a slow link: exchanges take this long even when nobody is late (`dispatch.exchange_clock` bounds it from below);
- uneven ranks: what else even the rank that waits least spends in exchanges. Now one rank is late and now another, as
  on a machine that has other work; or wires, where their part is not known.
The largest is named if it is worth FLOOR of the steps' time.

Legend: L layers, E experts, R ranks, P phases (prefill, decode).
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PHASES = ("prefill", "decode")
PARTS = 16  # of a window: it slides by a sixteenth of its length
WAIT_CAUSES = ("prefill", "decodes", "contexts", "experts", "other")  # see `RankFigures.wait_causes_s`
FLOOR = 0.05  # of the steps' time, for a cause of waiting that is named


class RankFigures(NamedTuple):
    """What ranks did in a window, one entry per rank. Times are seconds."""

    steps: np.ndarray  # [R]
    tokens: np.ndarray  # [R, P] of the rank's own requests
    dispatch_wait_s: np.ndarray
    combine_wait_s: np.ndarray
    wire_s: np.ndarray  # of both waits, at least so much for wires
    experts_s: np.ndarray
    step_s: np.ndarray  # [R] all of the steps
    between_steps_s: np.ndarray  # from one to the next: headers, planning, delivery; not sleep
    prefill_steps: np.ndarray  # of `steps`, those with parts of prompts on some rank; as are the next two
    prefill_experts_s: np.ndarray
    prefill_step_s: np.ndarray
    draft_tokens: np.ndarray  # of the decodes' tokens, those that were tried
    wait_causes_s: (
        np.ndarray
    )  # [R, WAIT_CAUSES] of both waits, by what another rank had more of than this one
    dispatch_bytes: np.ndarray  # [R, R] from, to
    combine_bytes: np.ndarray


def no_figures(num_ranks: int) -> RankFigures:
    """Figures of nothing."""
    flat, square = (num_ranks,), (num_ranks, num_ranks)
    causes = (num_ranks, len(WAIT_CAUSES))
    shapes = (flat, (num_ranks, len(PHASES)), *(flat,) * 10, causes, square, square)
    return RankFigures(*(np.zeros(shape) for shape in shapes))


class _Part(NamedTuple):
    number: int
    counts: np.ndarray  # [L, P, E + R]
    figures: RankFigures


class LoadWindow:
    """The last steps' load, of all ranks together."""

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, num_steps: int = 1000) -> None:
        """`num_steps` is the window's length, as vLLM's `window_size`; at least 1.

        Raises:
            ValueError: a length below 1.
        """
        if num_steps < 1:
            raise ValueError(f"a window of {num_steps} steps; it must have at least 1")
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self._part_steps = -(-num_steps // PARTS)
        self._counts = np.zeros((num_layers, len(PHASES), num_experts + num_ranks), dtype=np.int64)
        self._figures = no_figures(num_ranks)
        self._parts: deque[_Part] = deque()

    def add(self, step: int, counts: np.ndarray, figures: RankFigures) -> None:
        """Add what was counted up to a step.

        Args:
            step: the last one that was counted; what is older than the window is left out.
            counts: [L, P, E + R] choices of each expert, then of a slot of each rank.
            figures: of the ranks that reported, zeros for the others.
        """
        number = step // self._part_steps
        if self._parts and number <= self._parts[-1].number - PARTS:
            return
        part = self._part(number)
        for total in (self._counts, part.counts):
            total += counts
        for field, total, of_part in zip(figures, self._figures, part.figures, strict=True):
            total += field
            of_part += field

    def _part(self, number: int) -> _Part:
        """The part with this number; a new newest one ends the parts that fall out of the window."""
        for part in self._parts:
            if part.number == number:
                return part
        made = _Part(number, np.zeros_like(self._counts), no_figures(self.num_ranks))
        self._parts.append(made)
        if len(self._parts) > 1 and number < self._parts[-2].number:
            self._parts = deque(sorted(self._parts, key=lambda part: part.number))
        while self._parts[0].number <= self._parts[-1].number - PARTS:
            self._drop(self._parts.popleft())
        return made

    def _drop(self, part: _Part) -> None:
        self._counts -= part.counts
        for total, of_part in zip(self._figures, part.figures, strict=True):
            total -= of_part
            np.maximum(total, 0.0, out=total)  # sums of seconds may leave a rounding error below 0

    def expert_tokens(self, phase: str | None = None) -> np.ndarray:
        """Choices of each expert, of one phase or both: [L, E] int64."""
        return self._of(phase)[:, : self.num_experts]

    def rank_tokens(self, phase: str | None = None) -> np.ndarray:
        """Choices that fell on each rank's slots, of one phase or both: [L, R] int64."""
        return self._of(phase)[:, self.num_experts :]

    def _of(self, phase: str | None) -> np.ndarray:
        if phase is None:
            total: np.ndarray = self._counts.sum(axis=1)
            return total
        return self._counts[:, PHASES.index(phase)].copy()

    @property
    def figures(self) -> RankFigures:
        """What ranks did."""
        return RankFigures(*(field.copy() for field in self._figures))


def measured_balancedness(rank_tokens: np.ndarray) -> np.ndarray:
    """Mean over max of the ranks' tokens, layer by layer.

    Args:
        rank_tokens: [L, R]; axis 1 is ranks.

    Returns:
        [L] float64, from 1 / R to 1 (even); nan where a layer has no tokens.
    """
    most, mean = rank_tokens.max(axis=1), rank_tokens.mean(axis=1)
    result: np.ndarray = np.divide(mean, most, out=np.full(len(most), np.nan), where=most > 0)
    return result


def over_layers(even: np.ndarray) -> dict[str, float | None]:
    """Aggregate balancedness [L] over the layers that have tokens: mean, median and worst; None where none has."""
    known = even[~np.isnan(even)]
    if not len(known):
        return dict.fromkeys(("mean", "median", "worst"))
    return {"mean": float(known.mean()), "median": float(np.median(known)), "worst": float(known.min())}


class Slowness(NamedTuple):
    """The largest cause of waiting, in parts of the steps' time."""

    kind: str  # "hot expert", "slow rank", "slow link", "uneven ranks" or "none"
    rank: int | None  # that the others wait for
    share: float  # of the steps' time
    sentence: str


def explain(figures: RankFigures, rank_tokens: np.ndarray, names: Sequence[int] | None = None) -> Slowness:
    """Name what ranks wait for most.

    Args:
        figures: of a window.
        rank_tokens: [ranks] tokens that each rank's experts got in it.
        names: [ranks] what the ranks are called where some are away; by default 0 and on.
    """
    names = range(len(rank_tokens)) if names is None else names
    step_s = float(figures.step_s.max(initial=0.0))
    if step_s <= 0 or len(rank_tokens) < 2:
        return Slowness("none", None, 0.0, "there is nobody to wait for" if step_s else "no step has run yet")
    tokens = rank_tokens.astype(np.float64)
    expected_s = tokens * figures.experts_s.sum() / max(tokens.sum(), 1.0)
    own_s = figures.step_s - figures.dispatch_wait_s - figures.combine_wait_s - expected_s
    wire_s = float(figures.wire_s.min())
    uneven_s = max(0.0, float(figures.dispatch_wait_s.min() + figures.combine_wait_s.min()) - wire_s)
    hot, slow = int(expected_s.argmax()), int(own_s.argmax())
    causes = (
        _hot(names[hot], _excess(expected_s) / step_s, tokens[hot] / max(tokens.mean(), 1.0)),
        _slow(names[slow], _excess(own_s) / step_s),
        Slowness("slow link", None, wire_s / step_s, _busiest(figures, names)),
        Slowness("uneven ranks", None, uneven_s / step_s, "now one rank is late and now another"),
    )
    worst = max(causes, key=lambda cause: cause.share)
    if worst.share < FLOOR:
        return Slowness("none", None, worst.share, f"nothing costs {FLOOR:.0%} of the steps' time")
    return worst._replace(sentence=f"{worst.sentence}: {worst.share:.0%} of the steps' time")


def _excess(seconds: np.ndarray) -> float:
    return float(seconds.max() - seconds.mean())


def _slow(rank: int, share: float) -> Slowness:
    return Slowness("slow rank", rank, share, f"rank {rank} takes longest for the same work")


def _hot(rank: int, share: float, ratio: float) -> Slowness:
    return Slowness("hot expert", rank, share, f"rank {rank}'s experts get {ratio:.2f} times the mean tokens")


def _busiest(figures: RankFigures, names: Sequence[int]) -> str:
    sent = figures.dispatch_bytes + figures.combine_bytes
    source, to = divmod(int(sent.argmax()), len(sent))
    return f"all ranks wait for wires (most bytes go from rank {names[source]} to rank {names[to]})"
