"""Loads over time: how often experts were chosen in recent steps, how evenly over ranks, and why steps wait.

The window is measured in steps, not seconds, so an idle service keeps showing its last load. Reports are differences
between counters. Each is added to the part of the window with its step, so reports of different ranks about the same
steps meet whenever they arrive. Memory is PARTS parts for a window of any length.

Balancedness is mean over ranks / max over ranks of each layer, and only then aggregated over layers, because ranks wait
for each other in every layer and layers have different slowest ranks. Rejected: vLLM's sum over layers first.

Why do steps take so long: a slow rank, a slow link, or a hot expert? Ranks meet twice in every MoE layer, so their steps
take equally long, and the rank that waits least is the one that the others wait for. The causes, from a window:
- hot expert: the experts of some rank got more tokens than the mean, at the cost per token that all ranks have;
- slow rank: some rank took longer than the mean for the same tokens, in its experts or outside of them;
- slow link: the time that exchanges take even if no rank is late (`dispatch.exchange.ExchangeClock` estimates it);
- uneven ranks: the remaining time in exchanges, even of the rank that waits least. Different ranks are late in turn, as
  on a machine with other work, or it is wire time that is not known.
The largest cause is named if it takes at least FLOOR of the steps' time.

Legend: L layers, E experts, R ranks, P phases (prefill, decode).
"""

import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

PHASES = ("prefill", "decode")
PARTS = 16  # of a window: it slides by a sixteenth of its length
WAIT_CAUSES = ("prefill", "decodes", "contexts", "experts", "other")  # see `LoadFigures.wait_causes_s`
FLOOR = 0.05  # least part of the steps' time for a cause to be named
BY_PEER = ("dispatch_bytes", "combine_bytes")  # figures with an entry for each rank
_ZERO = np.zeros((), dtype=np.int64)  # adds to arrays of any shape


class LoadFigures(NamedTuple):
    """What one rank did, from its step to the window and the totals since the start. Times are in seconds.

    To add a figure, add its field, measure it in `scheduler.step.runner` or `scheduler.moves.telemetry`, and name its
    counter in `server.experts.metrics`. Reports, windows and GET /experts/load have all fields.
    """

    steps: int = 0  # that ran the model
    prefill_steps: int = 0  # with prompt tokens on some rank; the others are decode-only
    prefill_tokens: int = 0  # of the rank's requests, as the next two
    decode_tokens: int = 0  # drafts included
    draft_tokens: int = 0  # part of decode_tokens that were drafts
    exchanges: int = 0  # dispatches and combines; 0 on GPUs, which no host counts
    # In exchanges of dispatches: waits for ranks that are still at the layer before, and for wires.
    dispatch_wait_s: float = 0.0
    # In exchanges of combines: waits for ranks with experts that still compute, and for wires.
    combine_wait_s: float = 0.0
    wire_s: float = 0.0  # lower bound of the wires' part of both waits; 0 if unknown
    experts_s: float = 0.0  # computing this rank's experts
    prefill_experts_s: float = 0.0  # part of experts_s in prefill_steps
    # [WAIT_CAUSES] waits for ranks, by the kind of work of which another rank had more.
    wait_causes_s: np.ndarray = _ZERO
    step_s: float = 0.0  # in steps, waits included
    between_steps_s: float = 0.0  # between steps: headers, planning, delivery; without sleep
    prefill_step_s: float = 0.0  # part of step_s in prefill_steps
    dispatch_bytes: np.ndarray = _ZERO  # [R] sent to each rank, by dispatches
    combine_bytes: np.ndarray = _ZERO  # [R] sent to each rank, by combines

    def plus(self, other: "LoadFigures") -> "LoadFigures":
        """Return the sums. Arrays are new."""
        return LoadFigures(*map(operator.add, self, other))

    def minus(self, other: "LoadFigures") -> "LoadFigures":
        """Return the differences, 0 if rounding made one negative. Arrays are new."""
        return LoadFigures(*map(_less, self, other))


def _less(value: Any, other: Any) -> Any:
    rest = value - other
    return np.maximum(rest, 0) if isinstance(rest, np.ndarray) else max(rest, 0)


def no_figures(num_ranks: int) -> LoadFigures:
    """Return zeros, with arrays of the full length."""
    none = np.zeros(num_ranks, dtype=np.int64)
    return LoadFigures(wait_causes_s=np.zeros(len(WAIT_CAUSES)), dispatch_bytes=none, combine_bytes=none)


class _Part(NamedTuple):
    number: int
    counts: np.ndarray  # [L, P, E + R]
    figures: defaultdict[int, LoadFigures]  # of ranks that reported


class LoadWindow:
    """The load of the last steps, of all ranks together."""

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, num_steps: int = 1000) -> None:
        """`num_steps`: length of the window, at least 1; vLLM's `window_size`.

        Raises:
            ValueError: The length is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"the window has {num_steps} steps; it must have at least 1")
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self._part_steps = -(-num_steps // PARTS)
        self._counts = np.zeros((num_layers, len(PHASES), num_experts + num_ranks), dtype=np.int64)
        self._figures = [no_figures(num_ranks)] * num_ranks
        self._parts: deque[_Part] = deque()

    def add(self, step: int, counts: np.ndarray, figures: Mapping[int, LoadFigures]) -> None:
        """Add what was counted up to a step.

        Args:
            step: The last counted step. Counts older than the window are ignored.
            counts: [L, P, E + R] choices of each expert, then of a slot of each rank.
            figures: Figures of the ranks that reported.
        """
        number = step // self._part_steps
        if self._parts and number <= self._parts[-1].number - PARTS:
            return
        part = self._part(number)
        for total in (self._counts, part.counts):
            total += counts
        for rank, more in figures.items():
            self._figures[rank] = self._figures[rank].plus(more)
            part.figures[rank] = part.figures[rank].plus(more)

    def _part(self, number: int) -> _Part:
        """Return the part with this number. A new newest part drops those that leave the window."""
        for part in self._parts:
            if part.number == number:
                return part
        made = _Part(number, np.zeros_like(self._counts), defaultdict(LoadFigures))
        self._parts.append(made)
        if len(self._parts) > 1 and number < self._parts[-2].number:
            self._parts = deque(sorted(self._parts, key=lambda part: part.number))
        while self._parts[0].number <= self._parts[-1].number - PARTS:
            self._drop(self._parts.popleft())
        return made

    def _drop(self, part: _Part) -> None:
        self._counts -= part.counts
        for rank, gone in part.figures.items():
            self._figures[rank] = self._figures[rank].minus(gone)

    def expert_tokens(self, phase: str | None = None) -> np.ndarray:
        """Return the choices of each expert, of one phase or both: [L, E] int64."""
        return self._of(phase)[:, : self.num_experts]

    def rank_tokens(self, phase: str | None = None) -> np.ndarray:
        """Return the choices that fell on each rank's slots, of one phase or both: [L, R] int64."""
        return self._of(phase)[:, self.num_experts :]

    def _of(self, phase: str | None) -> np.ndarray:
        if phase is None:
            total: np.ndarray = self._counts.sum(axis=1)
            return total
        return self._counts[:, PHASES.index(phase)].copy()

    @property
    def figures(self) -> Sequence[LoadFigures]:
        """What each rank did in the window. Nothing in it changes later."""
        return tuple(self._figures)


def measured_balancedness(rank_tokens: np.ndarray) -> np.ndarray:
    """Return mean over max of the ranks' tokens, by layer.

    Args:
        rank_tokens: [L, R]; axis 1 is ranks.

    Returns:
        [L] float64, from 1 / R to 1 (even); nan if a layer has no tokens.
    """
    most, mean = rank_tokens.max(axis=1), rank_tokens.mean(axis=1)
    result: np.ndarray = np.divide(mean, most, out=np.full(len(most), np.nan), where=most > 0)
    return result


def over_layers(even: np.ndarray) -> dict[str, float | None]:
    """Aggregate balancedness [L] over layers with tokens: mean, median and worst. None if no layer has tokens."""
    known = even[~np.isnan(even)]
    if not len(known):
        return dict.fromkeys(("mean", "median", "worst"))
    return {"mean": float(known.mean()), "median": float(np.median(known)), "worst": float(known.min())}


class Slowness(NamedTuple):
    """The largest cause of waiting."""

    kind: str  # "hot expert", "slow rank", "slow link", "uneven ranks" or "none"
    rank: int | None  # for which the others wait
    share: float  # of the steps' time
    sentence: str


def explain(
    figures: Sequence[LoadFigures], rank_tokens: np.ndarray, names: Sequence[int] | None = None
) -> Slowness:
    """Find what ranks wait for most.

    Args:
        figures: [ranks] figures of a window.
        rank_tokens: [ranks] tokens that each rank's experts got in it.
        names: [ranks] numbers of the ranks, if some are missing. By default 0, 1, ...
    """
    names = range(len(rank_tokens)) if names is None else names
    step_s = max(each.step_s for each in figures)
    if step_s <= 0 or len(rank_tokens) < 2:
        return Slowness("none", None, 0.0, "there is only one rank" if step_s else "no step has run yet")
    tokens = rank_tokens.astype(np.float64)
    expected_s = tokens * sum(each.experts_s for each in figures) / max(tokens.sum(), 1.0)
    working_s = [each.step_s - each.dispatch_wait_s - each.combine_wait_s for each in figures]
    own_s = np.array(working_s) - expected_s
    wire_s = min(each.wire_s for each in figures)
    least_s = min(each.dispatch_wait_s for each in figures) + min(each.combine_wait_s for each in figures)
    uneven_s = max(0.0, least_s - wire_s)
    hot, slow = int(expected_s.argmax()), int(own_s.argmax())
    causes = (
        _hot(names[hot], _excess(expected_s) / step_s, tokens[hot] / max(tokens.mean(), 1.0)),
        _slow(names[slow], _excess(own_s) / step_s),
        Slowness("slow link", None, wire_s / step_s, _busiest(figures, names)),
        Slowness("uneven ranks", None, uneven_s / step_s, "different ranks are late in turn"),
    )
    worst = max(causes, key=lambda cause: cause.share)
    if worst.share < FLOOR:
        return Slowness("none", None, worst.share, f"no cause takes {FLOOR:.0%} of the steps' time")
    return worst._replace(sentence=f"{worst.sentence}: {worst.share:.0%} of the steps' time")


def _excess(seconds: np.ndarray) -> float:
    return float(seconds.max() - seconds.mean())


def _slow(rank: int, share: float) -> Slowness:
    return Slowness("slow rank", rank, share, f"rank {rank} takes longest for the same work")


def _hot(rank: int, share: float, ratio: float) -> Slowness:
    return Slowness("hot expert", rank, share, f"rank {rank}'s experts get {ratio:.2f} times the mean tokens")


def _busiest(figures: Sequence[LoadFigures], names: Sequence[int]) -> str:
    sent = np.array([each.dispatch_bytes + each.combine_bytes for each in figures])
    source, to = divmod(int(sent.argmax()), len(sent))
    return f"all ranks wait for wires (most bytes go from rank {names[source]} to rank {names[to]})"
