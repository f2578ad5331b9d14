"""Percentiles of times over a sliding window, at a fraction of a microsecond per observation.

Times are counted in logarithmic buckets, 8 per doubling, so a percentile is accurate to 5 %. A window consists of periods;
`turn` ends a period and drops the oldest. Rejected: keeping and sorting all times, which costs a service of 10,000 tokens/s
100,000 numbers.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping

_PER_DOUBLING = 8
_LEAST_S = 1e-5


class WindowedPercentiles:
    """Counts times; `of` returns percentiles of the last `periods` periods and the current one."""

    def __init__(self, periods: int) -> None:
        self._ended: deque[Counter[int]] = deque(maxlen=periods)
        self._running: Counter[int] = Counter()

    def note(self, seconds: float, count: int = 1) -> None:
        """Count a time `count` times."""
        self._running[_bucket_of(seconds)] += count

    def note_buckets(self, counts: Mapping[int, int]) -> None:
        """Add the counts that `turn` returned elsewhere."""
        self._running.update(counts)

    def turn(self) -> Counter[int]:
        """Begin another period. Returns the counts of the last one, by bucket; do not change them."""
        ended = self._running
        self._ended.append(ended)
        self._running = Counter()
        return ended

    def share_within(self, seconds: float) -> float | None:
        """Return the share of times that are at most `seconds`, accurate to 5 % of these, or None if nothing was counted."""
        counts, limit = sum(self._ended, Counter(self._running)), _bucket_of(seconds)
        total = counts.total()
        return sum(count for bucket, count in counts.items() if bucket <= limit) / total if total else None

    def of(self, *shares: float) -> tuple[float | None, ...]:
        """Return the percentiles in seconds, or None for each if nothing was counted.

        Args:
            shares: Shares from 0 to 1, ascending.
        """
        counts = sum(self._ended, Counter(self._running))
        total, found, seen = counts.total(), [], 0
        buckets = iter(sorted(counts.items()))
        bucket = 0
        for share in shares:
            while seen < max(1, math.ceil(share * total)) and total:
                bucket, count = next(buckets)
                seen += count
            found.append(2 ** (bucket / _PER_DOUBLING) if total else None)
        return tuple(found)


def _bucket_of(seconds: float) -> int:
    return round(_PER_DOUBLING * math.log2(max(seconds, _LEAST_S)))
