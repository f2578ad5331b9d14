"""Percentiles over a window: close to the exact ones, and of the window alone."""

import random

import pytest

from server.http.observability.percentiles import WindowedPercentiles


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_within_five_percent_of_the_exact_ones(seed: int) -> None:
    times = sorted(random.Random(seed).lognormvariate(-3, 1.5) for _ in range(2_000))
    found = WindowedPercentiles(periods=2)
    for at, each in enumerate(times):
        found.note(each)
        if at == 1_000:
            found.turn()
    for share, value in zip((0.5, 0.9, 0.99), found.of(0.5, 0.9, 0.99), strict=True):
        exact = times[round(share * len(times)) - 1]
        assert value == pytest.approx(exact, rel=0.05)


def test_a_window_forgets_and_an_empty_one_has_no_percentiles() -> None:
    found = WindowedPercentiles(periods=2)
    assert found.of(0.5, 0.99) == (None, None)
    found.note(10.0, count=1_000)
    found.turn()
    found.note(0.01)
    assert found.of(0.5)[0] == pytest.approx(10.0, rel=0.05)
    found.turn()
    found.turn()
    assert list(found.of(0.5, 0.99)) == pytest.approx([0.01, 0.01], rel=0.05)
    found.note(0.0)
    assert found.of(0.0)[0] == pytest.approx(1e-5, rel=0.05)


def test_the_share_within_a_time_is_that_of_the_window() -> None:
    found = WindowedPercentiles(periods=1)
    assert found.share_within(1.0) is None
    found.note(0.5, count=3)
    found.note(2.0)
    assert (found.share_within(0.4), found.share_within(1.0), found.share_within(2.0)) == (0.0, 0.75, 1.0)
    found.turn()
    found.note(2.0)
    assert found.share_within(1.0) == 0.6
    found.turn()
    assert found.share_within(1.0) == 0.0, "the first period is over"
