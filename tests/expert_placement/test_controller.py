"""Decisions: what pays is done, what does not is left, and both say their numbers."""

from typing import Any

import numpy as np

from expert_placement.cluster import Cluster
from expert_placement.controller import Situation, decide
from expert_placement.eplb_config import EplbConfig
from expert_placement.measure import imbalance
from expert_placement.placement import linear_placement
from expert_placement.planner import Rules, plan

SKEWED = np.random.default_rng(0).lognormal(0, 0.9, (4, 32)) * 1000


def situation(**changes: Any) -> Situation:
    values: dict[str, Any] = {
        "load": SKEWED,
        "current": plan(np.ones((4, 32)), 9, Rules(cluster=Cluster(num_ranks=4))).placement,
        "num_steps": 1000,
        "step_s": 0.02,
        "experts_part": 0.5,
        "expert_bytes": 1 << 20,
    }
    return Situation(**{**values, **changes})


def test_a_skewed_load_is_repaired_within_the_budget_and_the_reason_has_the_numbers() -> None:
    made = decide(situation(), EplbConfig())
    assert made.proposal is not None and made.proposal.kind == "repair"
    assert 0 < made.proposal.moves <= 0.1 * 4 * 36
    before, after = (imbalance(p, SKEWED).max() for p in (situation().current, made.proposal.target))
    assert after < before and made.proposal.gain > 0.02
    assert f"{made.proposal.moves} moves" in made.reason and "saved in 600 s" in made.reason


def test_nothing_is_done_before_a_window_has_passed() -> None:
    made = decide(situation(num_steps=999), EplbConfig())
    assert made.proposal is None and "only 999 steps of the 1000" in made.reason


def test_nothing_is_done_without_a_token() -> None:
    made = decide(situation(load=np.zeros((4, 32))), EplbConfig())
    assert made.proposal is None and "no token" in made.reason


def test_nothing_is_done_where_experts_are_a_small_part_of_a_step() -> None:
    made = decide(situation(experts_part=0.01), EplbConfig())
    assert made.proposal is None and "experts are 1.0% of one" in made.reason


def test_nothing_moves_where_moving_costs_more_than_the_horizon_brings() -> None:
    made = decide(situation(expert_bytes=1 << 40), EplbConfig())
    assert made.proposal is None or made.proposal.moves == 0
    made = decide(situation(), EplbConfig(horizon_s=0.0))
    assert made.proposal is None


def test_a_decision_that_was_carried_out_is_not_followed_by_another_for_the_same_load() -> None:
    first = decide(situation(), EplbConfig()).proposal
    assert first is not None
    again = decide(situation(current=first.target), EplbConfig(max_moved=0.02))
    assert again.proposal is None, again.reason


def test_the_shares_policy_never_moves() -> None:
    made = decide(situation(), EplbConfig(policy="shares", min_gain=0.001))
    assert made.proposal is None or made.proposal.moves == 0


def test_without_copies_shares_cannot_change_and_nothing_is_done() -> None:
    made = decide(situation(current=linear_placement(4, 32, 4)), EplbConfig(policy="shares"))
    assert made.proposal is None


def test_equal_numbers_give_equal_decisions() -> None:
    one, other = (decide(situation(), EplbConfig()) for _ in range(2))
    assert one.proposal is not None and other.proposal is not None
    assert one.proposal.target.digest() == other.proposal.target.digest() and one.reason == other.reason
