"""The front's processing of ranks' reports: differences of counters, the JSON of GET /experts/load, metrics."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from expert_placement.load import (
    BY_PEER,
    WAIT_CAUSES,
    LoadFigures,
    LoadWindow,
    no_figures,
    over_layers,
)
from expert_placement.placement import linear_placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import LoadReport
from server.experts.load import VIEWS, ExpertsLoad, LoadSeries
from server.experts.metrics import HOTTEST, ExpertsMetrics, hottest
from server.http.observability.series import EVERY_S
from server.link.messages import decode, encode
from tests.support.placement.load_reports import EXPERTS, LAYERS, RANKS, counts, expert_map, report, told

WITHOUT_COUNTER = {
    "prefill_steps", "prefill_tokens", "decode_tokens", "draft_tokens", "wire_s", "prefill_experts_s", "prefill_step_s",
}  # fmt: skip
NOT_SENT = np.zeros(1, dtype=np.int64)  # by a rank alone


def loaded() -> ExpertsLoad:
    """Two ranks that reported twice each."""
    load = ExpertsLoad("m", clock=lambda: 1000.0)
    for rank in range(RANKS):
        load.note_rank(rank, f"host{rank}")
    load.take_experts(expert_map())
    for step in (10, 20):
        for rank in range(RANKS):
            load.take_load(report(rank, step, counts(rank) * step))
    return load


def metrics_of(load: ExpertsLoad) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ExpertsMetrics({"both": load}, "m"))
    lines = generate_latest(registry).decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def test_counters_are_added_up_over_ranks_once() -> None:
    answer, expected = told(loaded()), 20 * (counts(0) + counts(1))
    for index, phase in enumerate(("prefill", "decode")):
        assert answer["phases"][phase]["tokens"] == expected[:, index, :EXPERTS].tolist()
        assert answer["rank_tokens"][phase] == expected[:, index, EXPERTS:].tolist()
        ranks = expected[:, index, EXPERTS:]
        even = answer["phases"][phase]["balancedness"]
        assert even["per_layer"] == pytest.approx((ranks.mean(1) / ranks.max(1)).tolist(), abs=1e-6)
        assert even["worst"] == pytest.approx(min(even["per_layer"]), abs=1e-6)


def test_the_answer_says_who_where_and_how_long() -> None:
    answer = told(loaded())
    assert (answer["model"], answer["num_layers"], answer["slots_per_rank"]) == ("m", LAYERS, 3)
    assert answer["layers"] == [2, 3, 5]
    assert answer["window"] == {"steps": 20, "seconds": 2.0}
    assert answer["placement"] == [list(range(EXPERTS))] * LAYERS
    assert answer["history"] == []
    rank = answer["ranks"][1]
    assert (rank["rank"], rank["host"], rank["steps"], rank["tokens"]) == (1, "host1", 20, 100)
    assert rank["dispatch_bytes"] == [200, 0]
    assert rank["combine_bytes"] == [400, 0]
    assert (rank["dispatch_wait_s"], rank["experts_s"]) == pytest.approx((0.2, 0.6))


def test_counters_may_pass_2_to_the_32() -> None:
    load = ExpertsLoad("m")
    load.take_experts(expert_map())
    before = np.full((LAYERS, 2, EXPERTS + RANKS), 2**32 - 3)
    load.take_load(report(0, 1, before))
    first = told(load)["phases"]["decode"]["tokens"][0][0]
    load.take_load(report(0, 2, (before + 7) % 2**32))
    assert told(load)["phases"]["decode"]["tokens"][0][0] - first == 7


def test_a_rank_that_attaches_again_counts_from_zero() -> None:
    load = loaded()
    before = np.array(told(load)["phases"]["prefill"]["tokens"])
    load.note_rank(1, "host1")
    load.take_load(report(1, 21, counts(5)))
    after = np.array(told(load)["phases"]["prefill"]["tokens"])
    np.testing.assert_array_equal(after - before, counts(5)[:, 0, :EXPERTS])


def test_an_epoch_has_a_window_of_its_own_with_a_place_for_each_member() -> None:
    load = loaded()
    rank_tokens = metrics_of(load)
    load.regroup(Order(1, (1,), linear_placement(LAYERS, EXPERTS, 1).with_version(4)))
    assert told(load)["window"] == {"steps": 0, "seconds": 0.0}
    load.take_load(report(0, 21, counts(9)))  # of the previous epoch, as the next
    load.take_load(report(1, 21, counts(9)))
    alone = np.concatenate(
        (counts(5)[..., :EXPERTS], counts(5)[..., :EXPERTS].sum(axis=2)[..., None]), axis=2
    )
    bytes_sent = {"dispatch_bytes": np.array([7]), "combine_bytes": np.array([9])}
    load.take_load(report(1, 3, alone, epoch=1, **bytes_sent))
    answer = told(load)
    assert answer["phases"]["prefill"]["tokens"] == counts(5)[:, 0, :EXPERTS].tolist()
    assert (answer["num_ranks"], answer["placement_version"], answer["slots_per_rank"]) == (1, 4, EXPERTS)
    (rank,) = answer["ranks"]
    assert (rank["rank"], rank["host"], rank["steps"], rank["dispatch_bytes"]) == (1, "host1", 3, [7])
    now = metrics_of(load)
    grown = {name: now[name] - rank_tokens[name] for name in rank_tokens if now[name] != rank_tokens[name]}
    prefill = [value for name, value in grown.items() if "tokens_per_rank" in name and "prefill" in name]
    assert prefill == [alone[:, 0, EXPERTS:].sum()], "counters continue, but only for the rank that served"
    assert all('engine="0"' not in name for name in grown)


def second_pool() -> ExpertsLoad:
    """Two ranks, 2 and 3 of the service, that reported the same as those of `loaded`."""
    load = ExpertsLoad("m", first_rank=RANKS, clock=lambda: 1000.0)
    for rank in range(RANKS):
        load.note_rank(RANKS + rank, f"host{rank}")
    load.take_experts(expert_map())
    for step in (10, 20):
        for rank in range(RANKS):
            load.take_load(replace(report(rank, step, counts(rank) * step), rank=RANKS + rank))
    return load


def test_a_pool_s_load_is_the_same_with_the_ranks_numbers_in_the_service() -> None:
    first, second = loaded(), second_pool()
    assert [each["rank"] for each in told(second)["ranks"]] == [2, 3]
    renumbered = [{**each, "rank": each["rank"] - RANKS} for each in told(second)["ranks"]]
    assert renumbered == told(first)["ranks"]
    second.recorder.start()
    second.regroup(Order(1, (3,), linear_placement(LAYERS, EXPERTS, 1).with_version(4)))
    alone = np.concatenate(
        (counts(5)[..., :EXPERTS], counts(5)[..., :EXPERTS].sum(axis=2)[..., None]), axis=2
    )
    before = second.totals and second.totals[3].steps
    not_sent = {"dispatch_bytes": NOT_SENT, "combine_bytes": NOT_SENT}
    second.take_load(replace(report(1, 3, alone, epoch=1, **not_sent), rank=3))
    assert second.totals is not None and second.totals[3].steps == (before or 0) + 3
    assert second.experts is not None
    recorded: Any = sum(row.counts for row in second.recorder.take("m", second.experts).rows)
    np.testing.assert_array_equal(recorded[..., EXPERTS], 0 * alone[..., EXPERTS])
    np.testing.assert_array_equal(recorded[..., EXPERTS + 1], alone[..., EXPERTS])


def test_metrics_of_several_pools_have_their_names_and_ranks_keep_theirs() -> None:
    registry = CollectorRegistry()
    unknown = ExpertsLoad("m", first_rank=4)
    pools = {"prefill": loaded(), "decode": second_pool(), "later": unknown}
    registry.register(ExpertsMetrics(pools, "m"))
    lines = generate_latest(registry).decode().splitlines()
    types = [line for line in lines if line.startswith("# TYPE ")]
    assert len(types) == len(set(types)), "a family of several pools is written once"
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    alone = metrics_of(loaded())
    for phase in ("prefill", "decode"):
        even = alone[f'vllm:eplb_balancedness_avg{{model_name="m",phase="{phase}"}}']
        for pool in ("prefill", "decode"):
            assert (
                found[f'vllm:eplb_balancedness_avg{{model_name="m",phase="{phase}",pool="{pool}"}}'] == even
            )
    name = "wideep:steps_total"
    assert [found[f'{name}{{engine="{rank}",model_name="m"}}'] for rank in range(4)] == [20] * 4
    assert found['vllm:eplb_rearrangements_total{model_name="m",pool="decode"}'] == 0
    assert not any("later" in series for series in found)


def test_a_recording_goes_on_while_a_rank_is_away() -> None:
    load = loaded()
    load.recorder.start()
    load.regroup(Order(1, (1,), linear_placement(LAYERS, EXPERTS, 1).with_version(4)))
    alone = np.concatenate(
        (counts(5)[..., :EXPERTS], counts(5)[..., :EXPERTS].sum(axis=2)[..., None]), axis=2
    )
    load.take_load(report(1, 3, alone, epoch=1, dispatch_bytes=NOT_SENT, combine_bytes=NOT_SENT))
    load.regroup(Order(2, (0, 1), linear_placement(LAYERS, EXPERTS, 2).with_version(5)))
    load.take_load(report(0, 2, counts(6), epoch=2))
    assert load.experts is not None
    recorded: Any = sum(row.counts for row in load.recorder.take("m", load.experts).rows)
    np.testing.assert_array_equal(recorded[..., :EXPERTS], alone[..., :EXPERTS] + counts(6)[..., :EXPERTS])
    np.testing.assert_array_equal(recorded[..., EXPERTS], counts(6)[..., EXPERTS])
    np.testing.assert_array_equal(
        recorded[..., EXPERTS + 1], alone[..., EXPERTS] + counts(6)[..., EXPERTS + 1]
    )


def test_what_a_rank_began_with_does_not_replace_what_serves() -> None:
    load = loaded()
    load.regroup(Order(1, (0, 1), linear_placement(LAYERS, EXPERTS, 2).with_version(4)))
    load.take_experts(expert_map(version=0))
    assert told(load)["placement_version"] == 4


def test_reports_that_come_before_the_experts_are_kept() -> None:
    load = ExpertsLoad("m")
    load.take_load(report(0, 4, counts(0)))
    load.take_experts(expert_map())
    assert told(load)["window"]["steps"] == 4


def test_no_load_is_nothing_and_not_a_number() -> None:
    load = ExpertsLoad("m")
    load.take_experts(expert_map())
    answer = told(load)
    assert answer["window"] == {"steps": 0, "seconds": 0.0}
    empty = {"per_layer": [None] * LAYERS, "mean": None, "median": None, "worst": None}
    assert answer["phases"]["prefill"]["balancedness"] == empty


def test_balancedness_is_aggregated_over_the_layers_that_have_tokens() -> None:
    made = over_layers(np.array([1.0, np.nan, 0.4, 0.5]))
    assert made == pytest.approx({"mean": 1.9 / 3, "median": 0.5, "worst": 0.4})


def test_settle_waits_for_every_ranks_step_and_not_longer_than_it_may() -> None:
    async def scene() -> list[bool]:
        load = loaded()
        await load.settle({0: 20, 1: 20}, 30.0)  # both steps are already reported
        waiting = asyncio.create_task(load.settle({0: 25, 1: 20}, 30.0))
        await asyncio.sleep(0)
        seen = [waiting.done()]
        load.take_load(report(0, 25, counts(0) * 25))
        await asyncio.wait_for(waiting, 10.0)
        await asyncio.wait_for(load.settle({1: 99}, 0.01), 10.0)  # times out
        return seen

    assert asyncio.run(scene()) == [False]


def test_metrics_have_the_named_series_and_the_same_numbers() -> None:
    load = loaded()
    found, answer = metrics_of(load), told(load)
    even = answer["phases"]["decode"]["balancedness"]
    assert found['vllm:eplb_balancedness_avg{model_name="m",phase="decode"}'] == pytest.approx(even["mean"])
    assert found['vllm:eplb_balancedness_min{model_name="m",phase="decode"}'] == pytest.approx(
        even["worst"], abs=1e-6
    )
    assert found['wideep:dispatch_wait_seconds_total{engine="1",model_name="m"}'] == pytest.approx(0.2)
    waited = 'wideep:step_wait_seconds_total{cause="prefill",engine="1",model_name="m"}'
    assert found[waited] == pytest.approx(0.08)
    assert found['wideep:step_wait_share{cause="experts",model_name="m"}'] == pytest.approx(0.15)
    tokens = sum(row[1] for row in answer["rank_tokens"]["prefill"])
    assert found['vllm:eplb_tokens_per_rank_total{engine="1",model_name="m",phase="prefill"}'] == tokens
    assert found['vllm:eplb_rearrangements_total{model_name="m"}'] == 0


@pytest.mark.parametrize("name", LoadFigures._fields)
def test_every_figure_reaches_the_answer_and_its_counter(name: str) -> None:
    load = ExpertsLoad("m")
    load.take_experts(expert_map())
    before = metrics_of(load)
    figures = no_figures(RANKS)
    figures = figures._replace(**{name: getattr(figures, name) + 7})
    load.take_load(LoadReport(rank=1, step=1, placement_version=0, counts=counts(0), figures=figures))
    rank = told(load)["ranks"][1]
    expected = {"wait_causes_s": dict.fromkeys(WAIT_CAUSES, 7.0)} | dict.fromkeys(BY_PEER, [7] * RANKS)
    assert rank[name] == expected.get(name, 7)
    assert name in BY_PEER or rank["since_start"][name] == rank[name]
    after = metrics_of(load)
    grown = {key for key in after if "wideep:" in key and "_total{" in key and after[key] > before[key]}
    assert bool(grown) == (name not in WITHOUT_COUNTER), "add it to COUNTERS of server.experts.metrics"
    assert all('engine="1"' in key for key in grown)


def test_rebalances_and_failures_are_counted_by_names_that_are_few_and_fixed() -> None:
    load = loaded()
    names = set(metrics_of(load))
    done = {"kind": "repair", "moves": 5, "bytes": 1000, "seconds": 0.5, "failed": None, "cause": ""}
    spoilt = {"kind": "apply", "moves": 0, "bytes": 0, "seconds": 0.25, "failed": "x", "cause": "check_sum"}
    shares = {**done, "kind": "shares", "moves": 0, "bytes": 0, "seconds": 0.0}
    for entry in (done, done, spoilt, shares):
        load.note_change(entry)
    load.changes.decisions["nothing"] += 3
    load.changes.is_under_way = True
    found = metrics_of(load)
    assert set(found) == names, "all labels exist from the start"
    assert found['vllm:eplb_rearrangements_total{model_name="m"}'] == 2
    assert found['wideep:eplb_moves_total{model_name="m"}'] == 10
    assert found['wideep:eplb_moved_bytes_total{model_name="m"}'] == 2000
    assert found['vllm:eplb_rearrangement_seconds_total{model_name="m"}'] == pytest.approx(1.25)
    assert found['vllm:eplb_rebalance_events_total{kind="shares",model_name="m"}'] == 1
    assert found['vllm:eplb_rebalance_events_total{kind="apply",model_name="m"}'] == 0
    assert found['wideep:eplb_failures_total{model_name="m",reason="check_sum"}'] == 1
    assert found['wideep:eplb_decisions_total{decision="nothing",model_name="m"}'] == 3
    assert found['vllm:eplb_rebalancing{model_name="m"}'] == 1
    assert told(load)["history"] == [done, done, spoilt, shares]


def test_the_number_of_series_does_not_grow_with_experts_or_time() -> None:
    load, seen = loaded(), set()
    for step in range(30, 90, 10):
        for rank in range(RANKS):
            load.take_load(report(rank, step, counts(rank + step) + 1000 * step))
        seen |= set(metrics_of(load))
    assert len(seen) == len(metrics_of(load))
    places = [name for name in seen if name.startswith("wideep:hot_expert_ratio")]
    assert len(places) == 2 * HOTTEST


def test_nothing_is_exported_before_the_experts_are_known() -> None:
    assert metrics_of(ExpertsLoad("m")) == {}


def test_hottest_are_over_their_layers_mean() -> None:
    tokens = np.array([[1, 1, 1, 5], [0, 0, 0, 0], [100, 100, 110, 90]])
    assert hottest(tokens, 3) == [(0, 3, 2.5), (2, 2, 1.1), (2, 0, 1.0)]


def test_reports_cross_the_wire_unchanged() -> None:
    sent = report(1, 7, counts(3), placement_version=4)
    arrived = decode(encode(sent))
    np.testing.assert_equal(vars(arrived), vars(sent))
    assert isinstance(arrived.figures, LoadFigures)
    experts = expert_map(3)
    same = decode(encode(experts))
    np.testing.assert_array_equal(same.slot_expert, experts.slot_expert)
    assert same[:5] == experts[:5]


def window_of(prefill: list[int], decode: list[int]) -> LoadWindow:
    """Return a window with one layer of two experts on two ranks."""
    window = LoadWindow(1, 2, 2)
    window.add(1, np.array([[prefill * 2, decode * 2]]), {})
    return window


def test_a_point_has_the_windows_balancedness_by_phase() -> None:
    series = LoadSeries()
    series.note(10.0, window_of([1, 3], [0, 0]))
    told = series.to_json()
    views = told["views"]
    assert told["time"] == [10.0] and isinstance(views, dict) and set(views) == set(VIEWS)
    assert views["prefill"] == {"mean": [0.6667], "median": [0.6667], "worst": [0.6667]}
    assert views["decode"]["worst"] == [None] and views["all"]["mean"] == [0.6667]


def test_one_rank_alone_has_no_point() -> None:
    series, window = LoadSeries(), LoadWindow(1, 2, 1)
    window.add(1, np.array([[[2, 2, 4], [0, 0, 0]]]), {})
    series.note(10.0, window)
    assert series.to_json()["time"] == []


def test_points_come_no_more_often_than_they_should_and_none_without_tokens() -> None:
    series, window = LoadSeries(), window_of([1, 3], [1, 1])
    series.note(0.0, LoadWindow(1, 2, 2))
    for now_s in (10.0, 10.0 + 0.9 * EVERY_S, 10.0 + EVERY_S):
        series.note(now_s, window)
    assert series.to_json()["time"] == [10.0, 10.0 + EVERY_S]


def test_more_ranks_continue_the_counters_and_a_recording() -> None:
    load = loaded()
    load.recorder.start()
    load.take_load(report(0, 30, counts(0) * 30))
    load.regroup(Order(1, (0, 1, 2), linear_placement(LAYERS, EXPERTS, 3).with_version(4), num_ranks=3))
    assert load.totals is not None and load.total_rank_tokens is not None
    before = load.total_rank_tokens.copy()
    assert [each.steps for each in load.totals.values()] == [30, 20, 0]
    load.note_rank(2, "host2")
    assert load.window is not None
    new = np.zeros((LAYERS, 2, EXPERTS + 3), dtype=np.int64)
    new[..., EXPERTS + 2] = 7
    by_peer = {name: np.array([1, 2, 3]) for name in BY_PEER}
    load.take_load(report(2, 40, new, epoch=1, placement_version=4, **by_peer))
    assert load.totals[2].steps == 40 and load.totals[2].dispatch_bytes.tolist() == [1, 2, 3]
    assert (load.total_rank_tokens - before).tolist() == [[0, 0, 7 * LAYERS]] * 2
    record = load.recorder.take("m", expert_map())
    recorded: Any = sum(row.counts for row in record.rows)
    assert {row.counts.shape[2] for row in record.rows} == {EXPERTS + 3}
    assert recorded[..., EXPERTS + 2].tolist() == [[7, 7]] * LAYERS
    load.regroup(Order(2, (0, 1), linear_placement(LAYERS, EXPERTS, 2).with_version(5), num_ranks=2))
    assert load.members == (0, 1) and len(load.totals) == 3, "counters of ranks that have left stay"
    assert told(load)["num_ranks"] == 2
    assert (
        metrics_of(load)['vllm:eplb_tokens_per_rank_total{engine="2",model_name="m",phase="decode"}']
        == 7 * LAYERS
    )
