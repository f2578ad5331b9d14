"""Decisions: moves that pay are made, others are not, and both state their numbers in seconds."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from expert_placement.config import EplbConfig
from expert_placement.control import WORK_S_PER_BYTE, Situation, cheapest, cheapest_within, decide, propose
from expert_placement.forecast import StepKind, calibrated
from expert_placement.moves import BUSY_PART, transfers_between
from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import Placement, imbalance, linear_placement
from expert_placement.plan import plan

SKEWED = np.random.default_rng(0).lognormal(0, 0.9, (4, 32)) * 100  # choices per step
STEP_S = 0.02


@cache
def copies() -> Placement:
    """Return a placement on four ranks with a redundant slot on each. Not at import: a fresh checkout compiles the planner."""
    return plan(np.ones((4, 32)), 9, Rules(cluster=Cluster(num_ranks=4))).placement


def situation(
    *,
    prefill: np.ndarray = SKEWED,
    decode: np.ndarray | None = None,
    decode_share: float = 0.0,
    experts_s: float = 0.5 * STEP_S,
    current: Placement | None = None,
    **changes: Any,
) -> Situation:
    """Return a situation. By default all steps have prompts, and experts take half of their time."""
    current = current or copies()
    kinds = [StepKind("prefill", prefill, 1.0 - decode_share, experts_s)] if decode_share < 1 else []
    if decode is not None:
        kinds.append(StepKind("decode", decode, decode_share, experts_s))
    values: dict[str, Any] = {
        "forecast": calibrated(tuple(kinds), current, 1 << 20),
        "current": current,
        "num_steps": 1000,
        "step_s": STEP_S,
        "expert_bytes": 1 << 20,
        "hosts": ("one",) * 4,
    }
    return Situation(**{**values, **changes})


def test_a_skewed_load_is_repaired_within_the_budget_and_the_reason_has_the_numbers() -> None:
    made = decide(situation(), EplbConfig())
    assert made.proposal is not None and made.proposal.kind == "repair"
    assert 0 < made.proposal.moves <= 0.1 * 4 * 36
    before, after = (imbalance(p, SKEWED).max() for p in (copies(), made.proposal.target))
    assert after < before and made.proposal.gain > 0.02
    assert f"{made.proposal.moves} moves" in made.reason and "saved in 600 s" in made.reason
    assert "ms in 100% of steps" in made.reason and "the required minimum of 12.00 s" in made.reason


def test_nothing_is_done_before_a_window_has_passed() -> None:
    made = decide(situation(num_steps=999), EplbConfig())
    assert made.proposal is None and "only 999 of the window's 1000 steps" in made.reason


def test_nothing_is_done_without_a_token() -> None:
    for nothing in (situation(prefill=np.zeros((4, 32))), situation(decode_share=1.0)):
        made = decide(nothing, EplbConfig())
        assert made.proposal is None and "no token" in made.reason


def test_nothing_is_done_where_experts_are_a_small_part_of_a_step() -> None:
    made = decide(situation(experts_s=0.005 * STEP_S), EplbConfig())
    assert made.proposal is None and "experts are 0." in made.reason


def test_nothing_is_done_where_a_step_waits_for_weights_and_not_for_tokens() -> None:
    few = np.full((4, 32), 4.0)  # every slot is read, regardless of which has more tokens
    few[:, [5, 13]] = 16.0
    waiting = decide(situation(decode=few, decode_share=1.0), EplbConfig())
    assert waiting.proposal is None, waiting.reason
    many = decide(situation(decode=100 * few, decode_share=1.0), EplbConfig())
    assert many.proposal is not None, "with the same proportions but more tokens, tokens must decide"


def test_the_kind_that_steps_spend_their_time_in_decides() -> None:
    other = SKEWED[:, ::-1].copy()
    for share, better, worse in ((0.05, SKEWED, other), (0.95, other, SKEWED)):
        target = propose("plan", situation(decode=other, decode_share=share), EplbConfig()).target
        assert imbalance(target, better).mean() < 1.05 < imbalance(target, worse).mean()


@pytest.mark.parametrize("kind", ["plan", "repair", "shares"])
@pytest.mark.parametrize("tokens", [1.0, 0.01], ids=["tokens decide", "weights decide"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_is_planned_for_both_kinds_of_steps_costs_no_more_than_what_is_planned_for_either(
    kind: str, tokens: float, share: float
) -> None:
    mixed = situation(decode=tokens * SKEWED[:, ::-1], decode_share=share, experts_s=0.0)
    both = propose(kind, mixed, EplbConfig()).target
    for only in mixed.forecast.kinds:
        alone = replace(mixed, forecast=replace(mixed.forecast, kinds=(only,), factors=(1.0,)))
        either = propose(kind, alone, EplbConfig()).target
        assert mixed.forecast.step_s(both) <= 1.005 * mixed.forecast.step_s(either)
    if kind != "plan":
        assert (mixed.forecast.layer_seconds(both) <= mixed.forecast.layer_seconds(copies())).all()


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


@pytest.mark.parametrize(("step_s", "said"), [(1e-4, "work"), (1.0, "bytes")])
def test_moving_takes_as_long_as_bytes_or_work_beside_steps_allow(step_s: float, said: str) -> None:
    config = EplbConfig(max_bytes_per_step=1 << 19)
    made = propose("plan", situation(step_s=step_s), config)
    transfers = transfers_between(copies(), made.target)
    handled = Counter(slot // 9 for t in transfers for slot in (t.source, t.target))
    num_bytes = max(handled.values()) << 20
    by_bytes = num_bytes / (1 << 19) * step_s
    by_work = num_bytes * WORK_S_PER_BYTE / BUSY_PART
    assert made.moves and made.seconds == pytest.approx(by_work if said == "work" else by_bytes)
    assert (by_work > by_bytes) == (said == "work")


def test_a_budget_that_the_cheapest_layers_exceed_leaves_the_cheapest_whole() -> None:
    costs = {0: [2.0, 9.0], 1: [1.0, 5.0], 2: [4.0, 1.0]}
    start = linear_placement(2, 4, 2)
    moved = [Placement(np.array(rows), 4, 2, version=number) for number, rows in (
        (1, [[2, 3, 0, 1], [0, 1, 2, 3]]), (2, [[0, 1, 2, 3], [2, 3, 0, 1]]),
    )]  # fmt: skip

    def seconds(placement: Placement) -> np.ndarray:
        return np.array(costs[placement.version])

    made = [start, *moved]
    assert cheapest(made, seconds).slot_expert.tolist() == [[2, 3, 0, 1], [2, 3, 0, 1]]
    assert cheapest_within(made, seconds, start, 8).slot_expert.tolist() == [[2, 3, 0, 1], [2, 3, 0, 1]]
    assert cheapest_within(made, seconds, start, 7) is moved[1]
