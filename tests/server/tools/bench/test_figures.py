"""Figures of answers, on numbers that can be checked by hand."""

import pytest

from server.tools.bench.figures import Spread, figures_of, gaps_s, percentile
from server.tools.bench.stream import StreamedAnswer


def answer(start_s: float, arrivals_s: list[float], output_tokens: int, **more: object) -> StreamedAnswer:
    return StreamedAnswer(
        start_s=start_s, arrivals_s=arrivals_s, end_s=arrivals_s[-1], output_tokens=output_tokens, **more
    )


def test_rates_are_over_the_time_from_the_first_start_to_the_last_end() -> None:
    figures = figures_of(
        [
            answer(10.0, [10.5, 11.0, 12.0], 3, prompt_tokens=20, cached_tokens=16),
            answer(11.0, [11.5, 14.0], 2, prompt_tokens=15),
        ]
    )
    assert figures.duration_s == 4.0
    assert (figures.requests_per_s, figures.output_tokens_per_s, figures.total_tokens_per_s) == (
        0.5,
        1.25,
        10.0,
    )
    assert (figures.prompt_tokens, figures.output_tokens, figures.cached_tokens) == (35, 5, 16)
    assert figures.ttft_ms == Spread(mean=500.0, p50=500.0, p90=500.0, p99=500.0)
    assert figures.tpot_ms == Spread(mean=1625.0, p50=1625.0, p90=2325.0, p99=2482.5)  # of 750 and 2,500
    assert figures.itl_ms is not None and figures.itl_ms.p50 == 1000.0  # of 500, 1,000 and 2,500
    assert figures.e2e_ms is not None and figures.e2e_ms.mean == 2500.0
    assert figures.tokens_per_chunk == 1.0 and figures.goodput_per_s is None


def test_failures_count_in_nothing_but_their_number() -> None:
    good = answer(1.0, [1.5, 2.0], 2)
    bad = answer(0.0, [0.1, 9.0], 7, failure="gone")
    figures = figures_of([good, bad])
    assert (figures.num_requests, figures.num_failed, figures.output_tokens) == (2, 1, 2)
    assert figures.duration_s == 2.0, "the failed request began at 0"
    assert figures.ttft_ms is not None and figures.ttft_ms.p99 == 500.0


@pytest.mark.parametrize("answers", [[], [StreamedAnswer(start_s=1.0, end_s=2.0, failure="gone")]])
def test_nothing_good_has_no_times(answers: list[StreamedAnswer]) -> None:
    figures = figures_of(answers, {"ttft": 1.0})
    assert figures.num_failed == len(answers)
    assert figures.requests_per_s == figures.output_tokens_per_s == figures.goodput_per_s == 0.0
    assert figures.ttft_ms is figures.tpot_ms is figures.itl_ms is figures.e2e_ms is None


def test_chunks_of_several_tokens_share_their_time_among_these() -> None:
    counted = answer(0.0, [1.0, 1.3, 1.4], 6, counts=[2, 5, 6])
    assert list(gaps_s(counted)) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    uncounted = answer(0.0, [1.0, 1.3, 1.6], 9)
    assert list(gaps_s(uncounted)) == pytest.approx([0.1] * 6)
    uneven = answer(0.0, [1.0, 1.2, 1.4], 5)
    assert sum(gaps_s(uneven)) == pytest.approx(0.4) and len(list(gaps_s(uneven))) == 3
    parted = answer(0.0, [1.0, 1.3, 1.4], 3, counts=[2, 2, 3])  # a token's text in two chunks
    assert list(gaps_s(parted)) == pytest.approx([0.4])
    single = answer(0.0, [1.0, 1.3], 2)
    assert list(gaps_s(single)) == pytest.approx([0.3])


def test_time_per_token_is_by_usage_and_not_by_chunks() -> None:
    drafted = figures_of([answer(0.0, [1.0, 1.4, 1.8], 9)])
    assert drafted.tpot_ms is not None and drafted.tpot_ms.mean == 100.0
    assert drafted.tokens_per_chunk == 3.0


def test_where_all_tokens_are_hidden_all_the_time_is_theirs() -> None:
    hidden = StreamedAnswer(start_s=1.0, end_s=2.0, output_tokens=11)
    figures = figures_of([hidden], {"tpot": 99.0})
    assert figures.tpot_ms is not None and figures.tpot_ms.mean == 100.0
    assert figures.goodput_per_s == 0.0 and figures.itl_ms is None


def test_one_token_has_no_time_per_token() -> None:
    assert figures_of([answer(0.0, [1.0], 1)]).tpot_ms is None


def test_goodput_counts_requests_within_every_objective() -> None:
    quick, late, slow = answer(0.0, [0.1, 0.2], 2), answer(0.0, [0.9, 1.0], 2), answer(0.0, [0.1, 2.0], 2)
    answers = [quick, late, slow]
    assert figures_of(answers, {"ttft": 500.0}).goodput_per_s == 1.0  # 2 in 2 s
    assert figures_of(answers, {"ttft": 500.0, "tpot": 100.0}).goodput_per_s == 0.5
    assert figures_of(answers, {"e2e": 1000.0}).goodput_per_s == 1.0


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([0.0, 10.0], 90) == 9.0
