"""Roles of pools: what operators and the load change, and when the load changes nothing."""

import contextlib
from collections.abc import Collection
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from server.front.errors import ApiError
from server.front.events import EventLog
from server.front.members.pool_roles import (
    HOLD_S,
    PAUSE_S,
    PoolRoles,
    PoolState,
    RoleBalance,
    RoleChange,
    _missing_role,
)
from server.front.routing.loads import PoolLoad
from server.front.routing.router import Router
from server.options.pools import Pool, Role, read_pools
from tests.server.front.routing.test_moves import stats_of
from tests.support.clock import Clock
from tests.support.requests.desk import Desk

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def states(*loads: tuple[str, Role, float, float], first: str = "") -> list[PoolState]:
    """Return pools by name, role, steps of waiting prompts, and use of the KV cache. `first`: the roles of `--pools`."""
    roles = [Role(word) for word in first.split()] or [role for _, role, _, _ in loads]
    return [
        PoolState(Pool(name, first_role, rank, 1), role, PoolLoad(1, 0, steps, usage))
        for rank, ((name, role, steps, usage), first_role) in enumerate(zip(loads, roles, strict=True))
    ]


def decided(pools: list[PoolState]) -> RoleChange | None:
    """Return what a lasting load changes."""
    balance = RoleBalance()
    assert balance.decide(pools, 100.0) is None
    return balance.decide(pools, 100.0 + HOLD_S)


@pytest.mark.parametrize(
    ("pools", "change"),
    [
        (states(("p", P, 9, 0), ("d", D, 0, 0.2), ("e", D, 0, 0.1)), ("e", P)),
        (states(("p", P, 9, 0), ("d", D, 0, 0.2)), ("d", B)),
        (states(("p", P, 9, 0), ("d", D, 0, 0.6)), None),
        (states(("p", P, 7, 0), ("d", D, 0, 0.2)), None),
        (states(("p", P, 9, 0), ("q", P, 0, 0), ("d", D, 0, 0.2)), None),
        (states(("p", P, 0, 0.3), ("q", P, 0.5, 0), ("d", D, 0, 0.95)), ("p", D)),
        (states(("p", P, 0, 0.3), ("d", D, 0, 0.95)), ("p", B)),
        (states(("p", P, 2, 0.3), ("d", D, 0, 0.95)), None),
        (states(("p", P, 0, 0.3), ("d", D, 0, 0.95), ("e", D, 0, 0.4)), None),
        (states(("p", P, 0, 0), ("b", B, 0, 0.1), first="prefill decode"), ("b", D)),
        (states(("p", P, 2, 0), ("b", B, 0, 0.1), first="prefill decode"), None),
        (states(("p", B, 0, 0), ("b", B, 0, 0.1)), None),
        (states(("p", D, 0, 0), ("d", P, 0, 0), ("e", P, 0, 0), first="prefill decode decode"), ("d", D)),
        (states(("p", D, 0, 0), ("d", P, 0, 0), first="prefill decode"), ("p", B)),
        (states(("p", B, 0, 0), ("q", P, 0, 0), first="prefill prefill"), None),
        (states(("p", P, 9, 0)), None),
    ],
)
def test_a_role_follows_a_load_that_another_pool_can_take(
    pools: list[PoolState], change: tuple[str, Role] | None
) -> None:
    found = decided(pools)
    assert (found and found[:2]) == change


def test_a_need_must_last_and_a_pause_follows_a_change() -> None:
    needy, calm = (
        states(("p", P, steps, 0), ("d", D, 0, 0.2), ("e", D, 0, 0.1), ("f", D, 0, 0.3)) for steps in (9, 2)
    )
    balance = RoleBalance()
    assert balance.decide(needy, 0.0) is None
    assert balance.decide(calm, HOLD_S - 0.1) is None
    assert balance.decide(needy, HOLD_S) is None, "it begins to last again"
    assert balance.decide(needy, 2 * HOLD_S) is not None
    for passed_s in (0.0, HOLD_S, PAUSE_S - 0.1):
        assert balance.decide(needy, 2 * HOLD_S + passed_s) is None
    assert balance.decide(needy, 2 * HOLD_S + PAUSE_S) is not None


def roles_of(text: str, *, is_auto: bool = False) -> tuple[PoolRoles, Desk, EventLog, Clock]:
    pools = read_pools(text)
    desk, events, clock = Desk(num_ranks=pools[-1].ranks.stop), EventLog(), Clock()
    roles = PoolRoles(pools, desk.router, desk.moves, events, is_auto=is_auto, clock=clock)
    return roles, desk, events, clock


class Period(NamedTuple):
    """A time with one kind of load, and a change by an operator at its beginning, which may be refused."""

    kind: str  # calm, prompts (they wait) or full (of KV)
    weights: tuple[int, ...]  # by pool, from 0 to 3: orders the loads. 4 means that it does not serve.
    change: tuple[int, Role] | None = None

    def load_of(self, rank: int) -> PoolLoad:
        weight = self.weights[rank]
        if weight == 4:
            return PoolLoad(0, 0, 0.0, 0.0)
        loads = {"calm": (0.0, 0.0), "prompts": (20.0, weight / 10), "full": (weight / 4, 0.95)}
        return PoolLoad(1, 0, *loads[self.kind])


class LoadedRouter(Router):
    """A router for pools of one rank, with the loads of a period."""

    period: Period

    def load_of(self, ranks: Collection[int]) -> PoolLoad:
        (rank,) = ranks
        return self.period.load_of(rank)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Role], list[Period]]:
    """Draw the first roles of pools, and periods."""
    first = draw(st.lists(st.sampled_from(Role), min_size=2, max_size=4))
    assume(_missing_role({*first}) is None)
    period = st.builds(
        Period,
        st.sampled_from(["prompts", "full", "calm"]),
        st.tuples(*[st.integers(0, 4) for _ in first]),
        st.none() | st.tuples(st.integers(0, len(first) - 1), st.sampled_from(Role)),
    )
    return first, draw(st.lists(period, min_size=3, max_size=8))


@given(histories())
@example(
    (
        [P, D, D],
        [Period("prompts", (0, 0, 1)), Period("full", (0, 1, 1)), Period("prompts", (2, 1, 0))],
    )
)
def test_no_load_makes_a_change_that_is_refused_and_roles_return_when_it_has_passed(
    history: tuple[list[Role], list[Period]],
) -> None:
    first, periods = history
    pools = [Pool(f"p{rank}", role, rank, 1) for rank, role in enumerate(first)]
    router, clock, moves = LoadedRouter(len(pools)), Clock(), Desk().moves
    roles = PoolRoles(pools, router, moves, EventLog(), is_auto=True, clock=clock)
    for period in periods:
        router.period = period
        if period.change is not None:
            with contextlib.suppress(ApiError):
                roles.change(f"p{period.change[0]}", period.change[1])
        balance_for(PAUSE_S + HOLD_S, roles, clock)
    router.period = Period("calm", (0,) * len(pools))
    balance_for((len(pools) + 2) * (PAUSE_S + HOLD_S), roles, clock)
    assert [*roles.roles.values()] == first


def balance_for(seconds: float, roles: PoolRoles, clock: Clock) -> None:
    while seconds > 0:
        seconds -= HOLD_S / 2
        clock.sleep(HOLD_S / 2)
        roles.balance()


def test_an_operator_changes_a_role_and_sees_it() -> None:
    roles, desk, events, _ = roles_of("prefill:1,decode:2,both:1")
    assert desk.router.assign([1] * 300).rank in (0, 3)
    roles.change("decode", P)
    roles.change("decode", P)
    assert roles.roles == {"prefill": P, "decode": P, "both": B}
    assert desk.router.assign([1] * 300).next_rank in (3, None)
    (event,) = events.to_json()
    assert event["text"] == "pool decode changes its role from decode to prefill: by an operator"
    shown = roles.to_json()
    assert shown["roles"] == "fixed"
    assert [(each["name"], each["role"], each["ranks"], each["serving"]) for each in shown["pools"]] == [
        ("prefill", "prefill", [0], 1),
        ("decode", "prefill", [1, 2], 2),
        ("both", "both", [3], 1),
    ]


@pytest.mark.parametrize(
    ("name", "role", "status", "text"),
    [
        ("decode", P, 409, "no other pool has the role decode or both"),
        ("prefill", D, 409, "no other pool has the role prefill or both"),
        ("other", D, 400, "Pool 'other' does not exist; the pools are prefill, decode"),
    ],
)
def test_refused_changes_name_the_reason(name: str, role: Role, status: int, text: str) -> None:
    roles, *_ = roles_of("prefill:1,decode:1")
    with pytest.raises(ApiError, match=text) as refused:
        roles.change(name, role)
    assert refused.value.status == status


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_long_queue_of_prompts_changes_a_role_if_roles_follow_the_load(is_auto: bool) -> None:
    roles, desk, events, clock = roles_of("prefill:1,decode:2", is_auto=is_auto)
    for rank in range(3):
        desk.router.note_size(rank, seats=4, block_tokens=16, step_tokens=100)
        desk.router.note_stats(stats_of(rank))
    desk.router.admit("long", 0, [1] * 900, 10, next_rank=1)
    assert roles.to_json()["pools"][0]["prompt_steps"] == 9
    roles.balance()
    clock.sleep(HOLD_S)
    roles.balance()
    assert roles.roles["decode"] is (B if is_auto else D)
    assert len(events.to_json()) == is_auto
    assert roles.to_json()["roles"] == ("auto" if is_auto else "fixed")
