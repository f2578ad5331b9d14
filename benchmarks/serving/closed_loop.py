"""A closed loop: a number of clients, each of which sends its next request when the last one is answered; and its prompts.

The loop knows neither HTTP nor models: it drives anything that completes a prompt and reports when tokens arrived. The same
code runs in the client of our service and inside the process of a peer, so that both are timed in the same way. Rejected: a
fixed arrival rate, which would have to be tuned per peer.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from server.api.openai.batches.bulk_client import for_each
from server.tools.bench.figures import percentile
from server.tools.bench.prompts import Passages, documentation


class RequestTiming(NamedTuple):
    """One request, in seconds of one process's clock."""

    start_s: float
    arrivals_s: list[float]  # of tokens, or of pieces of text if a character takes several tokens
    num_tokens: int


Complete = Callable[[list[int]], Awaitable[RequestTiming]]


async def closed_loop(
    complete: Complete, prompts: Sequence[list[int]], concurrency: int
) -> list[RequestTiming]:
    """Complete all prompts with at most `concurrency` at once. Return timings in the order of completion."""
    timings: list[RequestTiming] = []

    async def take(prompt: list[int]) -> None:
        timings.append(await complete(prompt))

    await for_each(prompts, take, concurrency=concurrency)
    return timings


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Throughput and latency of a run."""

    tokens_per_s: float  # output tokens, from the start of the first request to the end of the last
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float  # between arrivals within a request
    itl_p99_ms: float


def summarise(timings: Sequence[RequestTiming]) -> Latency:
    """Summarise at least one timing.

    Raises:
        ValueError: There is no timing, or a request returned no token.
    """
    if not timings or not all(timing.arrivals_s for timing in timings):
        raise ValueError("a request returned no token")
    wall_s = max(each.arrivals_s[-1] for each in timings) - min(each.start_s for each in timings)
    first_s = [each.arrivals_s[0] - each.start_s for each in timings]
    gaps_s = [later - earlier for each in timings for earlier, later in pairwise(each.arrivals_s)] or [0.0]
    return Latency(
        tokens_per_s=round(sum(each.num_tokens for each in timings) / wall_s, 1),
        ttft_p50_ms=round(percentile(first_s, 50) * 1e3, 1),
        ttft_p99_ms=round(percentile(first_s, 99) * 1e3, 1),
        itl_p50_ms=round(percentile(gaps_s, 50) * 1e3, 1),
        itl_p99_ms=round(percentile(gaps_s, 99) * 1e3, 1),
    )


class ExactPrompts:
    """English prompts of an exact number of tokens, each used once. All begin differently, so that no prefix cache helps."""

    def __init__(self, encode: Callable[[str], Sequence[int]], num_tokens: int) -> None:
        """Tokenize the text once.

        Args:
            encode: Function from text to token ids.
            num_tokens: Tokens per prompt.
        """
        self._passages = Passages(encode(documentation()))
        self._num_tokens = num_tokens

    def take(self, count: int) -> list[list[int]]:
        """Return the next prompts."""
        return [self._passages.take(self._num_tokens) for _ in range(count)]
