"""Figures of one load: rates, and distributions of times. docs/bench.md has the definitions.

They are those of vLLM's and SGLang's serving benchmarks, so that results are comparable. The time between tokens counts
tokens, not chunks: with drafts, a chunk contains several tokens, and a chunk of three after 30 ms is three tokens 10 ms apart.
This module does not depend on HTTP.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from server.tools.bench.stream import StreamedAnswer


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class LevelFigures:
    """The figures of one load. Tokens and times are those of answers without an error."""

    num_requests: int  # answered requests, with and without an error
    num_failed: int
    duration_s: float  # from the first request's start to the last good answer's end
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens from the service's prefix cache
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    tokens_per_chunk: float
    ttft_ms: Spread | None  # None without a measurement
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput_per_s: float | None  # requests that met every objective; None without objectives
    late_p99_ms: float  # delay between a request's scheduled and actual time: the load generator's own lag


def figures_of(
    answers: Sequence[StreamedAnswer], objectives: Mapping[str, float] | None = None
) -> LevelFigures:
    """Compute the figures of one load.

    Args:
        objectives: Maximum in milliseconds by name: ttft, tpot, e2e.
    """
    good = [each for each in answers if not each.failure]
    begun_s = min((each.start_s for each in answers), default=0.0)
    duration_s = max((each.end_s for each in good), default=begun_s) - begun_s
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_prompt, num_output = (
        sum(each.prompt_tokens for each in good),
        sum(each.output_tokens for each in good),
    )
    num_chunks = sum(len(each.arrivals_s) for each in good)
    return LevelFigures(
        num_requests=len(answers),
        num_failed=len(answers) - len(good),
        duration_s=round(duration_s, 3),
        requests_per_s=round(len(good) * per_s, 3),
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        cached_tokens=sum(each.cached_tokens for each in good),
        output_tokens_per_s=round(num_output * per_s, 2),
        total_tokens_per_s=round((num_prompt + num_output) * per_s, 2),
        tokens_per_chunk=round(num_output / num_chunks, 3) if num_chunks else 0.0,
        ttft_ms=_spread([ttft_s(each) for each in good]),
        tpot_ms=_spread([tpot_s(each) for each in good if each.output_tokens > 1]),
        itl_ms=_spread([gap_s for each in good for gap_s in gaps_s(each)]),
        e2e_ms=_spread([e2e_s(each) for each in good]),
        goodput_per_s=round(sum(_meets(each, objectives) for each in good) * per_s, 3)
        if objectives
        else None,
        late_p99_ms=round(1e3 * percentile([each.late_s for each in answers] or [0.0], 99), 2),
    )


def ttft_s(answer: StreamedAnswer) -> float:
    """Return the time to the first token."""
    return answer.first_s - answer.start_s


def e2e_s(answer: StreamedAnswer) -> float:
    """Return the time to the end."""
    return answer.end_s - answer.start_s


def tpot_s(answer: StreamedAnswer) -> float:
    """Return the time per output token after the first (after the request if none is visible), or 0 without a second token."""
    begun_s = answer.first_s if answer.arrivals_s else answer.start_s
    return (answer.end_s - begun_s) / (answer.output_tokens - 1) if answer.output_tokens > 1 else 0.0


def gaps_s(answer: StreamedAnswer) -> Iterator[float]:
    """Yield the times between tokens; the tokens of a chunk share the time since the previous chunk.

    If the service does not report the number of tokens per chunk, all chunks of an answer count as equal.
    """
    times, counts = answer.arrivals_s, answer.counts
    if not times:
        return
    if len(counts) != len(times):
        per_chunk = max(1.0, answer.output_tokens / len(times))
        counts = [round(number * per_chunk) for number in range(1, 1 + len(times))]
    before_s, before = times[0], counts[0]
    for time_s, count in zip(times[1:], counts[1:], strict=True):
        if count > before:  # otherwise a part of a token: its time is added to the next one
            yield from repeat((time_s - before_s) / (count - before), count - before)
            before_s, before = time_s, count


def _meets(answer: StreamedAnswer, objectives: Mapping[str, float]) -> bool:
    seen = {"ttft": ttft_s(answer), "tpot": tpot_s(answer), "e2e": e2e_s(answer)}
    return all(1e3 * seen[name] <= most_ms for name, most_ms in objectives.items())


def _spread(values_s: Sequence[float]) -> Spread | None:
    if not values_s:
        return None
    p50, p90, p99 = (round(1e3 * percentile(values_s, percent), 3) for percent in (50, 90, 99))
    return Spread(mean=round(1e3 * statistics.fmean(values_s), 3), p50=p50, p90=p90, p99=p99)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile (1 to 99), interpolated between neighbours; a single value is returned unchanged."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
