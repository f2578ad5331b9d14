"""Why steps take as long as they do: a slow rank, a slow link, or a hot expert?

Ranks meet twice in every MoE layer, so their steps last equally long, and who waits least is who the others wait for.
From what each rank did in a window:
- a hot expert: some rank's experts got more tokens than the mean, at the cost per token that all ranks have;
- a slow rank: some rank took longer than the mean for the same tokens, in its experts or outside of them;
- a slow link: exchanges take this long even when nobody is late (`dispatch.exchange_clock` bounds it from below);
- uneven ranks: what else even the rank that waits least spends in exchanges. Now one rank is late and now another, as
  on a machine that has other work; or wires, where their part is not known.
The largest is named if it is worth FLOOR of the steps' time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from expert_placement.load import RankFigures

FLOOR = 0.05


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
