"""An engine counts the ranks of its pool, and the front those of the service: the link between them translates."""

from dataclasses import replace
from typing import get_args

import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.moves.reports import Cause, MoveState, PlacementReport
from scheduler.policy.request import AdapterReport, RankStats
from scheduler.weights.versions import WeightReport, WeightState
from server.link.messages import (
    ExpertsRead,
    Fault,
    FromRank,
    MemorySwitched,
    MemoryUse,
    PlacementUpdate,
    Regrouped,
    StepOutput,
    Stop,
)
from server.link.pool_numbers import to_pool, to_service
from tests.support.placement.load_reports import counts, expert_map, report

POOL = range(3, 6)  # the engine's rank 1 is the service's rank 4
STATS = RankStats(
    rank=1, step=7, num_running=1, num_waiting=0, num_free_blocks=2, num_blocks=4, num_step_tokens=1, num_preemptions=0,
    prefix_query_tokens=0, prefix_hit_tokens=0,
)  # fmt: skip
FAILED = PlacementReport(
    rank=1, version=2, state=MoveState.FAILED, reason="rank 0 is gone", cause=Cause.CHANNEL
)
REFUSED = AdapterReport(4, 0, "0f", "its file is missing")
LOAD = report(1, 5, counts(0))
EXPERTS = expert_map()
MESSAGES: list[tuple[FromRank, FromRank]] = [
    (StepOutput([], STATS), StepOutput([], replace(STATS, rank=4))),
    (StepOutput([], None), StepOutput([], None)),
    (Heartbeat(1, 2, 3, 4, False, True, 0.5, 1.0), Heartbeat(4, 2, 3, 4, False, True, 0.5, 1.0)),
    (PlacementUpdate(FAILED), PlacementUpdate(replace(FAILED, rank=4, reason="rank 3 is gone"))),
    (Fault(2, "rank 2 did not answer rank 9"), Fault(2, "rank 5 did not answer rank 9")),
    (Regrouped(4), Regrouped(4)),
    (MemoryUse(5), MemoryUse(5)),
    (MemorySwitched(5), MemorySwitched(5)),
    (REFUSED, REFUSED),
    (ExpertsRead(5, "rank 2 has no memory"), ExpertsRead(5, "rank 5 has no memory")),
    (EXPERTS, EXPERTS),
    (
        WeightReport(rank=1, number=3, state=WeightState.STAGED),
        WeightReport(rank=4, number=3, state=WeightState.STAGED),
    ),
]


@pytest.mark.parametrize(("of_engine", "of_service"), MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_to_the_front_has_the_numbers_of_the_service(
    of_engine: FromRank, of_service: FromRank
) -> None:
    assert to_service(of_engine, POOL) == of_service
    assert to_service(of_engine, range(3)) is of_engine, "the first pool's numbers are the same"


def test_a_load_report_has_the_number_of_the_service_and_the_same_counts() -> None:
    sent = to_service(LOAD, POOL)
    assert vars(sent) == {**vars(LOAD), "rank": 4}


def test_every_message_of_a_rank_is_covered() -> None:
    covered = {type(each) for each, _ in MESSAGES} | {type(LOAD)}
    assert covered == set(get_args(FromRank))


def test_an_order_reaches_the_engine_with_the_numbers_of_its_pool() -> None:
    order = Order(3, (3, 5), linear_placement(2, 4, 2), num_ranks=3, leaving=(4,), stopped=(5,))
    assert to_pool(order, POOL) == order._replace(members=(0, 2), leaving=(1,), stopped=(2,))
    assert to_pool(Stop(), POOL) == Stop()
