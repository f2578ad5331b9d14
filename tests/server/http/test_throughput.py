"""The log line of throughput and the content of GET /throughput, with injected clocks, and their series of points."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import DraftCounts, RankStats
from server.http.observability.series import EVERY_S, MOST, Series
from server.http.observability.throughput import NO_TARGETS, WINDOW_S, LatencyTargets, Throughput
from tests.support.clock import Clock
from tests.support.service.dashboard_service import rank_facts

STATS = RankStats(
    rank=0,
    step=1,
    num_running=2,
    num_waiting=1,
    num_free_blocks=75,
    num_blocks=100,
    num_step_tokens=8,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)


class Watched(Throughput):
    """A throughput with a clock that `after` advances, with the front's ticks."""

    def __init__(self, targets: LatencyTargets = NO_TARGETS) -> None:
        self.clock = Clock(0.0)
        super().__init__(targets, clock=self.clock, calendar=lambda: 1_000.0 + self.clock.now_s)

    def after(self, seconds: float) -> None:
        for _ in range(round(seconds / EVERY_S)):
            self.clock.now_s += EVERY_S
            self.tick()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("wideep"), "propagate", True)
    caplog.set_level(logging.INFO, "wideep.throughput")
    return caplog


def test_an_idle_service_is_silent_and_a_busy_one_has_a_line_every_ten_seconds(
    lines: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.after(60)
    assert not lines.messages
    watched.note_stats(STATS)
    watched.note_stats(replace(STATS, prefix_query_tokens=100, prefix_hit_tokens=25))
    watched.note_first_token(0.5, num_prompt_tokens=100)
    watched.note_tokens(200, {})
    watched.after(WINDOW_S)
    assert lines.messages == [
        "prompts 10.0 tokens/s, generation 20.0 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix hits 25.0%"
    ]
    assert vars(lines.records[0])["fields"]["generation_tokens_per_s"] == 20.0
    watched.after(2 * WINDOW_S)
    assert len(lines.messages) == 3, "requests run, although they yield no tokens"
    watched.note_stats(replace(STATS, num_running=0, num_waiting=0))
    watched.after(60)
    assert len(lines.messages) == 3


def test_the_line_can_be_turned_off(lines: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.note_tokens(5, {})
    watched.clock.now_s += WINDOW_S
    watched.tick(logs=False)
    assert not lines.messages
    assert watched.to_json()["now"]["generation_tokens_per_s"] == 0.5


def test_a_lost_rank_runs_nothing_and_one_that_comes_back_counts_from_zero() -> None:
    watched = Watched()
    for rank in (0, 1):
        watched.note_stats(replace(STATS, rank=rank, prefix_query_tokens=40, prefix_hit_tokens=10))
    watched.after(EVERY_S)
    assert [rank["rank"] for rank in watched.to_json()["ranks"]] == [0, 1]
    assert watched.to_json()["now"]["running"] == 4
    watched.note_lost(1)
    assert watched.to_json()["now"]["running"] == 2
    assert [rank["kv_usage"] for rank in watched.to_json()["ranks"]] == [0.25]
    watched.note_stats(replace(STATS, rank=1, prefix_query_tokens=40, prefix_hit_tokens=10))
    assert watched.to_json()["now"]["prefix_hit_rate"] == pytest.approx(20 / 80), "the same engine came back"
    watched.note_lost(1)
    watched.note_new_engine(1)
    watched.note_stats(replace(STATS, rank=1, prefix_query_tokens=20, prefix_hit_tokens=20))
    assert watched.to_json()["now"]["prefix_hit_rate"] == pytest.approx(40 / 100)


def test_percentiles_and_errors_are_of_the_window_and_totals_since_the_start() -> None:
    watched = Watched()
    watched.after(WINDOW_S)
    for ttft_s in (0.1, 0.1, 0.1, 2.0):
        watched.note_first_token(ttft_s, num_prompt_tokens=1)
    watched.note_tokens(100, {0.05: 100})
    watched.note_end(30.0)
    for status in (200, 400, 429, 429, 503):
        watched.note_status(status)
    now = watched.to_json()["now"]
    assert now["ttft_p50_s"] == pytest.approx(0.1, rel=0.05) and now["ttft_p99_s"] == pytest.approx(
        2, rel=0.05
    )
    assert now["itl_p50_s"] == pytest.approx(0.05, rel=0.05) and now["e2e_p99_s"] == pytest.approx(
        30, rel=0.05
    )
    assert (now["refused_per_s"], now["busy_per_s"], now["failed_per_s"]) == (0.1, 0.2, 0.1)
    watched.after(2 * WINDOW_S)
    later = watched.to_json()
    assert later["now"]["ttft_p50_s"] is None and later["now"]["busy_per_s"] == 0
    assert later["http_errors"] == {"4xx": 1, "429": 2, "5xx": 1}


def test_a_rank_says_where_it_runs_and_since_when() -> None:
    watched = Watched()
    watched.after(4.0)
    watched.note_rank(rank_facts(1))
    [rank] = watched.to_json()["ranks"]
    assert rank == {
        "rank": 1, "running": 0, "waiting": 0, "kv_usage": 0.0, "host": "node-1", "pid": 4001, "restarts": 1, "since": 1_004.0,
    }  # fmt: skip
    watched.note_lost(1)
    assert watched.to_json()["ranks"] == []


def test_what_is_older_than_the_window_does_not_count() -> None:
    watched = Watched()
    watched.note_first_token(3.0, num_prompt_tokens=7)
    watched.after(WINDOW_S / 2)
    watched.note_first_token(1.0, num_prompt_tokens=7)
    now = watched.speed()
    assert (now.ttft_s, now.ttft_max_s) == (2.0, 3.0)
    watched.after(WINDOW_S)
    now = watched.speed()
    assert (now.ttft_s, now.ttft_max_s, now.prompt_tokens_per_s) == (1.0, 1.0, 0.7)
    watched.after(EVERY_S)
    assert watched.speed().ttft_s is None


def test_the_wait_is_predicted_from_the_requests_that_began_in_the_window() -> None:
    watched = Watched()
    watched.note_stats(replace(STATS, num_waiting=0))
    assert watched.speed().predicted_wait_s == 0.0
    watched.note_stats(replace(STATS, num_waiting=6))
    assert watched.speed().predicted_wait_s == WINDOW_S, "no request began in the window"
    for _ in range(4):
        watched.note_first_token(0.5, num_prompt_tokens=7)
        watched.after(EVERY_S)
    assert watched.speed().predicted_wait_s == pytest.approx(6 / (4 / 8))
    watched.after(WINDOW_S)
    assert watched.speed().predicted_wait_s == WINDOW_S


def test_attainment_is_the_share_within_each_target() -> None:
    watched = Watched()
    assert (watched.speed().ttft_attainment, watched.speed().itl_attainment) == (None, None)
    watched = Watched(LatencyTargets(ttft_ms=1000))
    assert (watched.speed().ttft_attainment, watched.speed().itl_attainment) == (1.0, None), "no traffic"
    for ttft_s in (0.5, 0.5, 3.0, 0.5):
        watched.note_first_token(ttft_s, num_prompt_tokens=7)
    watched.note_tokens(4, {5.0: 4})
    assert (watched.speed().ttft_attainment, watched.speed().itl_attainment) == (0.75, None)
    watched.after(2 * WINDOW_S)
    assert watched.speed().ttft_attainment == 1.0
    watched = Watched(LatencyTargets(itl_ms=50))
    watched.note_tokens(10, {0.02: 9, 0.2: 1})
    assert watched.speed().itl_attainment == 0.9


def test_ranks_and_their_seats_are_those_that_serve() -> None:
    watched = Watched()
    assert (watched.speed().ranks, watched.speed().seats) == (0, 0)
    watched.note_rank(rank_facts(0))
    watched.note_rank(rank_facts(1))
    assert (watched.speed().ranks, watched.speed().seats) == (2, 128)
    watched.note_lost(0)
    assert (watched.speed().ranks, watched.speed().seats) == (1, 64)


def test_the_answer_has_columns_of_equal_length() -> None:
    watched = Watched()
    watched.after(20)
    series = watched.to_json()["series"]
    assert series["time"] == [1_000.0 + EVERY_S * tick for tick in range(1, 11)]
    assert {len(column) for column in series.values()} == {10}


@pytest.mark.parametrize("hours", [0.01, 1, 30])
def test_a_series_reaches_back_to_its_beginning_and_is_fine_in_its_last_minutes(hours: float) -> None:
    series: Series[int] = Series()
    num_points = int(hours * 3600 / EVERY_S)
    for step in range(num_points):
        series.note(100.0 + step * EVERY_S, step)
    times = [point.time_s for point in series.points()]
    assert times[0] == 100.0 and times[-1] == 100.0 + (num_points - 1) * EVERY_S
    assert len(times) <= 4 * MOST and np.all(np.diff(times) > 0)
    for range_s in (300, 1800, 21_600):
        in_range = [time_s for time_s in times if time_s > times[-1] - range_s]
        assert len(in_range) >= min(num_points, 150) - 1, range_s
    assert all(point.value == (point.time_s - 100.0) / EVERY_S for point in series.points())


def test_drafts_are_told_where_there_are_any(lines: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.note_stats(STATS)
    watched.after(4)
    assert watched.speed().draft_acceptance is None
    watched.note_stats(replace(STATS, step=2, drafts=DraftCounts(5, 20, (5, 4, 3, 0))))
    watched.after(8)
    assert watched.speed().draft_acceptance == 0.6
    assert "drafts accepted 60.0%" in lines.messages[-1]


def test_hits_of_tiers_are_parts_of_the_hit_rate(lines: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.note_stats(STATS)
    watched.after(4)
    assert (watched.speed().host_hit_rate, watched.speed().disk_hit_rate) == (None, None)
    stats = replace(STATS, step=2, prefix_query_tokens=100, prefix_hit_tokens=60)
    watched.note_stats(stats, TierFigures(host_hit_tokens=30, disk_hit_tokens=10))
    watched.after(8)
    speed = watched.speed()
    assert (speed.prefix_hit_rate, speed.host_hit_rate, speed.disk_hit_rate) == (0.6, 0.3, 0.1)
    assert "prefix hits 60.0% (host 30.0%, disk 10.0%)" in lines.messages[-1]
    watched.note_stats(
        replace(stats, step=3, prefix_query_tokens=200, prefix_hit_tokens=65), TierFigures(peer_hit_tokens=5)
    )
    watched.after(8)
    assert watched.speed().peer_hit_rate == 0.05
    assert "prefix hits 5.0% (host 0.0%, disk 0.0%, other nodes 5.0%)" in lines.messages[-1]
    watched.note_stats(replace(stats, step=4, prefix_query_tokens=300), TierFigures())
    watched.after(8)
    assert watched.speed().host_hit_rate == 0, "the tiers were searched in vain"
