"""How many drafts pay: the estimated gain of a request's drafts against the cost of a step's rows.

A step with more rows takes longer, and all requests in it wait. If R requests try d drafts each and a share p is right,
a step of R * (1 + d) rows yields R * (1 + p + ... + p^d) tokens. A request may try the d with the most tokens per second.
The duration of steps is measured as they run, by number of rows. A number of rows not seen yet is assumed to take as
long as a smaller one, so that it is tried. Only the number of drafts depends on this, never a token.

Idea: the goodput of TurboSpec (Liu et al., 2024). Rejected: its offline profile of the machine.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

MOST_ROWS = 512  # no drafts beyond this many rows
PROBE_TOKENS = 32  # a request without drafts that runs alone tries again after this many tokens
_REMEMBERED = 9  # steps per number of rows
_WEIGHT = 0.9  # of earlier results of a request, at each try
_ASSUMED_RIGHT, _ASSUMED_TRIES = 1.4, 2.0  # assumed results of a request at its start


class StepCosts:
    """Seconds of steps without prompts, by number of rows on this rank."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._rows: list[int] = []  # measured numbers of rows, rising
        self._pass_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._pass_s = 0.0

    def note_passes(self, count: int, seconds: float) -> None:
        """Add the time that `count` passes took to make a step's drafts."""
        self._pass_seconds.append(seconds / count)
        self._pass_s = median(self._pass_seconds)

    def note(self, rows: int, seconds: float) -> None:
        """Add a step."""
        if rows not in self._seconds:
            self._seconds[rows] = deque(maxlen=_REMEMBERED)
            self._rows.insert(bisect_left(self._rows, rows), rows)
        self._seconds[rows].append(seconds)
        self._median[rows] = median(self._seconds[rows])

    def at(self, rows: int) -> float:
        """Interpolate a step's seconds between measured numbers of rows. Above the largest, return its; without any, 0."""
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            return self._median[self._rows[-1]] if self._rows else 0.0
        above = self._rows[at]
        if above == rows or at == 0:
            return self._median[above]
        below = self._rows[at - 1]
        low, high = self._median[below], self._median[above]
        return low + (high - low) * (rows - below) / (above - below)

    def of_drafts(self, num_running: int, most: int) -> list[float]:
        """Estimate the seconds of steps of `num_running` sequences with 0, 1, ... up to `most` drafts each."""
        counts = range(min(most, MOST_ROWS // max(num_running, 1) - 1) + 1)
        return [self.at(num_running * (1 + count)) + max(count, 1) * self._pass_s for count in counts] or [
            self.at(num_running)
        ]


class Acceptance:
    """How often one request's drafts were right. Older tries have less weight."""

    def __init__(self) -> None:
        self._right, self._tries = _ASSUMED_RIGHT, _ASSUMED_TRIES
        self.tokens_since_try = 0

    @property
    def share(self) -> float:
        """Estimated probability that a draft is right if those before it are."""
        return self._right / self._tries

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Add a step: its number of drafts, and how many of the first were right."""
        if not num_drafts:
            self.tokens_since_try += 1
            return
        self.tokens_since_try = 0
        judged = num_accepted + (num_accepted < num_drafts)  # drafts after the first wrong one are not judged
        self._right = _WEIGHT * self._right + num_accepted
        self._tries = _WEIGHT * self._tries + judged


def drafts_that_pay(share: float, seconds: Sequence[float]) -> int:
    """Return the number of drafts with the most tokens per second, if all running sequences try that many.

    Args:
        share: Share of right drafts.
        seconds: Duration of a step with 0, 1, ... drafts per sequence.
    """
    best, best_rate, tokens, chance = 0, 0.0, 1.0, 1.0
    for count, step_s in enumerate(seconds):
        rate = tokens / max(step_s, 1e-9)
        if rate > best_rate:
            best, best_rate = count, rate
        chance *= share
        tokens += chance
    return best
