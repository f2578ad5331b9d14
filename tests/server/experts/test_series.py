"""Balancedness over time: it begins at the start, its points are bounded, and each is the window's."""

import numpy as np
import pytest

from expert_placement.load import LoadWindow, no_figures
from server.experts.series import EVERY_S, MOST, VIEWS, LoadSeries


def window_of(prefill: list[int], decode: list[int]) -> LoadWindow:
    """One layer of two experts on two ranks."""
    window = LoadWindow(1, 2, 2)
    window.add(1, np.array([[prefill * 2, decode * 2]]), no_figures(2))
    return window


def test_a_point_has_the_windows_balancedness_by_phase() -> None:
    series = LoadSeries()
    series.note(10.0, window_of([1, 3], [0, 0]))
    told = series.to_json()
    views = told["views"]
    assert told["time"] == [10.0] and isinstance(views, dict) and set(views) == set(VIEWS)
    assert views["prefill"] == {"mean": [0.6667], "median": [0.6667], "worst": [0.6667]}
    assert views["decode"]["worst"] == [None] and views["all"]["mean"] == [0.6667]


def test_points_come_no_more_often_than_they_should_and_none_without_tokens() -> None:
    series, window = LoadSeries(), window_of([1, 3], [1, 1])
    series.note(0.0, LoadWindow(1, 2, 2))
    for now_s in (10.0, 10.0 + 0.9 * EVERY_S, 10.0 + EVERY_S):
        series.note(now_s, window)
    assert series.to_json()["time"] == [10.0, 10.0 + EVERY_S]


@pytest.mark.parametrize("hours", [1, 30])
def test_a_long_service_has_as_many_points_from_its_beginning_on(hours: int) -> None:
    series, window = LoadSeries(), window_of([1, 3], [1, 1])
    for step in range(int(hours * 3600 / EVERY_S)):
        series.note(100.0 + step * EVERY_S, window)
    times = series.to_json()["time"]
    assert isinstance(times, list) and MOST // 2 <= len(times) <= MOST
    assert times[0] == 100.0 and set(np.diff(times)) == {series.every_s}
    assert times[-1] > 100.0 + hours * 3600 - 2 * series.every_s
