"""The autoscaler's policy: when it changes the number of ranks, and that a constant load never has two sizes in turn."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.clients.autoscale.policy import LoadSample, Policy, SizeChange, State, decide, load_of, replay

SEATS = 10  # of each rank
EVERY_S = 5.0
POLICY = Policy(
    sizes=tuple(range(1, 9)), use=0.5, margin=0.2, up_after_s=30.0, down_after_s=300.0, most_step=8
)


def sample(time_s: float = 0.0, *, ranks: int = 2, requests: int = 0, **fields: Any) -> LoadSample:
    return LoadSample(time_s, ranks, ranks * SEATS, requests, fields.pop("kv_usage", 0.0), **fields)


def run(
    policy: Policy,
    size: int,
    sample_at: Callable[[float, int], LoadSample],
    *,
    seconds: float,
    every_s: float = EVERY_S,
) -> list[SizeChange]:
    """Run a policy in a closed loop: its decisions change the size at which the next samples are taken."""
    state, decisions, now_s = State(size), list[SizeChange](), 0.0
    while now_s <= seconds:
        state, decision = decide(policy, state, sample_at(now_s, state.size))
        decisions += [] if decision is None else [decision]
        now_s += every_s
    return decisions


def test_the_load_is_the_larger_of_seats_and_memory() -> None:
    assert load_of(POLICY, sample(requests=20)) == pytest.approx(4.0), "20 requests on seats of 10, half used"
    assert load_of(POLICY, sample(requests=5, kv_usage=0.75)) == pytest.approx(3.0)
    assert load_of(POLICY, sample()) == 0.0


def test_it_grows_when_the_ranks_were_too_few_for_the_whole_window() -> None:
    decisions = run(POLICY, 2, lambda now_s, size: sample(now_s, ranks=size, requests=20), seconds=600)
    assert decisions == [SizeChange(30.0, 2, 4, "20 running and waiting requests need 4.0 ranks")]


def test_a_peak_that_is_shorter_than_the_window_changes_nothing() -> None:
    load_at = lambda now_s, size: sample(now_s, ranks=size, requests=20 if now_s % 30 else 5)  # noqa: E731
    assert run(POLICY, 2, load_at, seconds=3600) == []


def test_it_shrinks_when_the_largest_load_of_the_window_fits_with_the_margin() -> None:
    load_at = lambda now_s, size: sample(now_s, ranks=size, requests=20 if now_s < 100 else 8)  # noqa: E731
    decisions = run(POLICY, 4, load_at, seconds=3600)
    assert decisions == [
        SizeChange(400.0, 4, 2, "8 running and waiting requests needed at most 1.6 ranks for 300 s")
    ]
    with_more = dataclasses.replace(POLICY, margin=0.25)
    assert [each.after for each in run(with_more, 4, load_at, seconds=3600)] == [3]


def test_steps_are_bounded_and_the_next_one_waits() -> None:
    policy = dataclasses.replace(POLICY, most_step=2)
    decisions = run(policy, 1, lambda now_s, size: sample(now_s, ranks=size, requests=30), seconds=600)
    assert [(each.time_s, each.before, each.after) for each in decisions] == [
        (30.0, 1, 3),
        (60.0, 3, 5),
        (90.0, 5, 6),
    ]
    decisions = run(policy, 6, lambda now_s, size: sample(now_s, ranks=size), seconds=3600)
    assert [(each.time_s, each.after) for each in decisions] == [(300.0, 4), (600.0, 2), (900.0, 1)]


def test_only_sizes_that_the_service_accepts_are_chosen() -> None:
    policy = dataclasses.replace(POLICY, sizes=(2, 4, 8), most_step=1)
    decisions = run(policy, 2, lambda now_s, size: sample(now_s, ranks=size, requests=21), seconds=600)
    assert [each.after for each in decisions] == [4, 8], "a step of one would lead nowhere"
    decisions = run(policy, 16, lambda now_s, size: sample(now_s, ranks=size, requests=21), seconds=600)
    assert (decisions[0].after, decisions[0].why) == (8, "at most 8 ranks are allowed")
    decisions = run(policy, 1, lambda now_s, size: sample(now_s, ranks=size), seconds=600)
    assert (decisions[0].after, decisions[0].why) == (2, "at least 2 ranks are allowed")


@pytest.mark.parametrize(
    ("missed", "why"),
    [
        ({"ttft_s": 3.0}, "the time to the first token (p99) was 3 s, over 2 s"),
        ({"itl_s": 0.2}, "the time between tokens (p99) was 0.2 s, over 0.1 s"),
        ({"wait_s": 6.0}, "the predicted wait was 6 s, over 5 s"),
    ],
)
def test_a_missed_target_lets_a_loaded_service_grow_once_and_it_stays(
    missed: dict[str, float], why: str
) -> None:
    policy = dataclasses.replace(POLICY, ttft_s=2.0, itl_s=0.1)

    def load_at(now_s: float, size: int) -> LoadSample:
        return sample(
            now_s, ranks=size, requests=8, **(missed if size < 3 else {"ttft_s": 1.0, "itl_s": 0.05})
        )

    assert run(policy, 2, load_at, seconds=7200) == [SizeChange(30.0, 2, 3, why)]
    idle = lambda now_s, size: load_at(now_s, size)._replace(requests=0)  # noqa: E731
    assert [each.after for each in run(policy, 2, idle, seconds=7200)] == [1], "more ranks would not help"
    without = dataclasses.replace(policy, ttft_s=None, itl_s=None, wait_s=None)
    assert run(without, 2, load_at, seconds=7200) == []


def test_a_knee_is_forgotten_when_targets_are_met_with_more_load() -> None:
    policy = dataclasses.replace(POLICY, ttft_s=2.0, down_after_s=60.0)
    state = State(4)
    for now_s in range(0, 40, 5):
        state, _ = decide(policy, state, sample(float(now_s), ranks=4, requests=10, ttft_s=3.0))
    assert state.knee == pytest.approx(0.5)
    state, _ = decide(policy, state, sample(45.0, ranks=4, requests=11, ttft_s=1.0))
    assert state.knee == pytest.approx(0.5), "not clearly more"
    state, _ = decide(policy, state, sample(50.0, ranks=4, requests=13, ttft_s=1.0))
    assert state.knee is None


def test_a_replay_uses_the_ranks_that_served_and_continues_from_its_own_size() -> None:
    samples = [sample(5.0 * at, ranks=2, requests=20) for at in range(200)]
    assert [(each.before, each.after) for each in replay(POLICY, 2, samples)] == [(2, 4)], (
        "the service kept 2 ranks"
    )


@settings(max_examples=80, deadline=None)
@given(
    requests=st.integers(0, 200),
    kv_usage=st.floats(0, 1),
    knee=st.floats(0.05, 3.0),
    start=st.integers(1, 20),
    sizes=st.sets(st.integers(1, 20), min_size=1),
    margin=st.floats(0, 0.9),
    use=st.floats(0.1, 1.0),
    most_step=st.integers(1, 20),
    every_s=st.sampled_from([10.0, 144.0]),
)
def test_a_constant_load_never_has_two_sizes_in_turn(
    requests: int,
    kv_usage: float,
    knee: float,
    start: int,
    sizes: set[int],
    margin: float,
    use: float,
    most_step: int,
    every_s: float,
) -> None:
    policy = Policy(
        sizes=tuple(sorted(sizes)), use=use, margin=margin, ttft_s=1.0, most_step=most_step, down_after_s=60.0
    )

    def load_at(now_s: float, size: int) -> LoadSample:
        """Return the same work on any number of ranks. The target is missed above a load per rank."""
        found = LoadSample(now_s, size, size * SEATS, requests, min(1.0, kv_usage * start / size))
        return found._replace(ttft_s=2.0 if load_of(policy, found) / size > knee else 0.5)

    decisions = run(policy, start, load_at, seconds=20_000 if every_s > 100 else 3_000, every_s=every_s)
    after = [each.after for each in decisions]
    assert all(each in sizes for each in after)
    for each in decisions:
        is_next = not any(
            min(each.before, each.after) < size < max(each.before, each.after) for size in sizes
        )
        assert abs(each.after - each.before) <= most_step or is_next
    grows = [each.after > each.before for each in decisions]
    if start in range(min(sizes), max(sizes) + 1):
        assert not any(up and not later for up, later in itertools.pairwise(grows)), "it grows last"
    times_s = [each.time_s for each in decisions]
    assert all(later - earlier >= 30 for earlier, later in itertools.pairwise(times_s))


@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 300), st.floats(0, 1), st.floats(0, 30)), max_size=300
    ),
    least=st.integers(1, 4),
    most=st.integers(4, 12),
)
def test_any_load_keeps_to_the_limits(
    loads: list[tuple[int, int, float, float]], least: int, most: int
) -> None:
    policy = dataclasses.replace(POLICY, sizes=tuple(range(least, most + 1)), most_step=3)
    samples = [
        LoadSample(12.0 * at, ranks, ranks * SEATS, requests, kv_usage, wait_s)
        for at, (ranks, requests, kv_usage, wait_s) in enumerate(loads)
    ]
    size, changed_s = least, 0.0
    for each in replay(policy, least, samples):
        assert (
            each.before == size != each.after and least <= each.after <= most and abs(each.after - size) <= 3
        )
        assert each.time_s - changed_s >= (30 if each.after > size else 300)
        size, changed_s = each.after, each.time_s
