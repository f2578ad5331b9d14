"""Slots divided between layers, and two phases in one placement."""

import numpy as np
import pytest

from expert_placement.budget import share_slots
from expert_placement.measure import imbalance
from expert_placement.nodes import Cluster
from expert_placement.plan import Rules, plan
from expert_placement.profiles import Profile, plan_phases

RULES = Rules(cluster=Cluster(num_ranks=8))


def test_slots_go_where_they_help() -> None:
    level = np.ones((1, 16))
    skewed = np.ones((1, 16))
    skewed[0, :2] = 20.0
    load = np.concatenate((level, skewed * 16 / skewed.sum()))
    widths = share_slots(load, 6, RULES)
    assert widths.tolist() == [2, 4], "the level layer needs no copies"
    divided, equal = plan(load, widths, RULES), plan(load, 3, RULES)
    assert divided.imbalance.sum() < equal.imbalance.sum()


def test_slots_never_exceed_the_cap() -> None:
    load = np.exp(np.random.default_rng(0).normal(0, 1, (4, 16)))
    for total in (8, 9, 13, 40):
        widths = share_slots(load, total, RULES)
        assert widths.sum() <= total and (widths >= 2).all()


def test_a_cap_that_holds_not_every_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="7 slots per rank do not hold 4 layers of 16 experts on 8 ranks"):
        share_slots(np.ones((4, 16)), 7, RULES)


def test_each_phase_has_its_own_shares_of_the_same_slots() -> None:
    rng = np.random.default_rng(1)
    prefill = np.exp(rng.normal(0, 0.7, (3, 32)))
    decode = prefill * np.exp(rng.normal(0, 0.5, (3, 32)))
    made = plan_phases({"prefill": Profile(prefill, 1.0), "decode": Profile(decode, 2.0)}, 6, RULES)
    one, other = made.placements["prefill"], made.placements["decode"]
    assert np.array_equal(one.slot_expert, other.slot_expert) and not np.array_equal(one.share, other.share)
    assert np.allclose(made.imbalance["decode"], imbalance(other, decode))
    stale = plan(prefill, 6, RULES).placement
    assert made.imbalance["decode"].mean() < imbalance(stale, decode).mean()


def test_one_phase_is_an_ordinary_plan() -> None:
    load = np.exp(np.random.default_rng(2).normal(0, 0.7, (2, 16)))
    made = plan_phases({"decode": Profile(load, 1.0)}, 4, RULES)
    assert np.array_equal(made.placements["decode"].slot_expert, plan(load / load.sum(axis=1, keepdims=True), 4, RULES).placement.slot_expert)  # fmt: skip


def test_phases_need_weights() -> None:
    with pytest.raises(ValueError, match="at least one profile, and weights above 0"):
        plan_phases({"decode": Profile(np.ones((1, 8)), 0.0)}, 2, RULES)
