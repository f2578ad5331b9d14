"""How many drafts pay: what a request's drafts were worth so far, against what a step's rows cost.

A step with more rows takes longer, and everybody in it waits: with R requests that try d drafts each, of which a share p is
right, R * (1 + p + ... + p^d) tokens come out of a step of R * (1 + d) rows. The d for which that is most tokens per second is what a
request may try. What steps cost is measured as they run, by their rows; where a number of rows was not seen yet it is taken to
cost what fewer do, so that it is tried. Only how many drafts are tried follows from this, never a token.

Idea: the goodput of TurboSpec (Liu et al., 2024). Rejected: its offline profile of the machine.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

MOST_ROWS = 512  # beyond which drafts are not tried
PROBE_TOKENS = 32  # a request that does not draft tries again after so many
_REMEMBERED = 9  # steps of a number of rows
_WEIGHT = 0.9  # of what is known of a request, at each of its tries
_ASSUMED_RIGHT, _ASSUMED_TRIES = 1.4, 2.0  # what is taken for known of a request at its start


class StepCosts:
    """Seconds that steps without prompts took, by their rows on this rank."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._rows: list[int] = []  # of which some are known, rising
        self._pass_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._pass_s = 0.0

    def note_passes(self, count: int, seconds: float) -> None:
        """Take in what it took to make a step's drafts, in so many passes."""
        self._pass_seconds.append(seconds / count)
        self._pass_s = median(self._pass_seconds)

    def note(self, rows: int, seconds: float) -> None:
        """Take in a step."""
        if rows not in self._seconds:
            self._seconds[rows] = deque(maxlen=_REMEMBERED)
            self._rows.insert(bisect_left(self._rows, rows), rows)
        self._seconds[rows].append(seconds)
        self._median[rows] = median(self._seconds[rows])

    def at(self, rows: int) -> float:
        """Estimate: on the line between the nearest that are known; what the largest known took beyond it; 0: nothing is."""
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
        """Estimate steps in which so many sequences run, each with 0, 1, ... up to `most` drafts."""
        counts = range(min(most, MOST_ROWS // max(num_running, 1) - 1) + 1)
        return [self.at(num_running * (1 + count)) + max(count, 1) * self._pass_s for count in counts] or [
            self.at(num_running)
        ]


class Acceptance:
    """How often one request's drafts were right, the older the less it counts."""

    def __init__(self) -> None:
        self._right, self._tries = _ASSUMED_RIGHT, _ASSUMED_TRIES
        self.tokens_since_try = 0

    @property
    def share(self) -> float:
        """Estimated chance that a draft is right if those before it are."""
        return self._right / self._tries

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Take in a step: how many drafts it tried, and the first of them that were right."""
        if not num_drafts:
            self.tokens_since_try += 1
            return
        self.tokens_since_try = 0
        judged = num_accepted + (num_accepted < num_drafts)  # behind the first wrong one nothing is known
        self._right = _WEIGHT * self._right + num_accepted
        self._tries = _WEIGHT * self._tries + judged


def drafts_that_pay(share: float, seconds: Sequence[float]) -> int:
    """How many drafts give the most tokens per second, if all that run try as many.

    Args:
        share: of drafts that are right.
        seconds: that a step takes with 0, 1, ... drafts of each.
    """
    best, best_rate, tokens, chance = 0, 0.0, 1.0, 1.0
    for count, step_s in enumerate(seconds):
        rate = tokens / max(step_s, 1e-9)
        if rate > best_rate:
            best, best_rate = count, rate
        chance *= share
        tokens += chance
    return best
