import signal

import pytest

from server.serve.children import FRONT_IS_GONE
from server.serve.restarts import MAX_RESTARTS, WINDOW_S, Next, RestartBudget, RestartPolicy
from tests.support.clock import Clock


def test_a_budget_ends_after_so_many_starts() -> None:
    budget = RestartBudget(clock=Clock())
    assert [budget.take() for _ in range(MAX_RESTARTS + 2)] == [True] * MAX_RESTARTS + [False] * 2
    assert budget.num_taken == MAX_RESTARTS


def test_a_start_counts_for_one_window() -> None:
    clock = Clock()
    budget = RestartBudget(max_restarts=2, clock=clock)
    assert budget.take()
    clock.now_s += WINDOW_S / 2
    assert budget.take()
    clock.now_s += WINDOW_S / 2 - 1
    assert not budget.take() and budget.allowed_in_s() == 1.0
    clock.now_s += 1
    assert budget.allowed_in_s() == 0.0
    assert budget.take(), "the first start is a window old"
    assert not budget.take(), "the second one is not"
    assert budget.num_taken == 3


def test_what_is_allowed_is_said_in_minutes() -> None:
    assert RestartBudget().describe() == "3 times in 10 minutes"


KILLED = -signal.SIGKILL


def policy(*, has_served: bool = True, is_draining: bool = False, max_restarts: int = 1) -> RestartPolicy:
    made = RestartPolicy(max_restarts=max_restarts, clock=Clock())
    made.has_served, made.drained_s = has_served, 9.0 if is_draining else None
    return made


@pytest.mark.parametrize(
    ("status", "state", "follows"),
    [
        (KILLED, {}, Next.RESTART),
        (KILLED, {"max_restarts": 0}, Next.EXHAUSTED),
        (KILLED, {"has_served": False}, Next.END),
        (KILLED, {"is_draining": True}, Next.END),
        (0, {}, Next.END),
        (1, {}, Next.END),
    ],
)
def test_only_a_front_that_was_killed_while_serving_is_restarted(
    status: int, state: dict[str, int], follows: Next
) -> None:
    assert policy(**state).may_front_return(status) is (follows is not Next.END)
    assert policy(**state).after_front(status) is follows


@pytest.mark.parametrize(
    ("status", "state", "follows"),
    [
        (KILLED, {}, Next.RESTART),
        (1, {}, Next.RESTART),
        (1, {"max_restarts": 0}, Next.EXHAUSTED),
        (1, {"has_served": False}, Next.END),
        (1, {"is_draining": True}, Next.STOPPING),
        (1, {"has_served": False, "is_draining": True}, Next.END),
        (0, {}, Next.END),
        (0, {"is_draining": True}, Next.END),
        (FRONT_IS_GONE, {}, Next.LEAVE),
        (FRONT_IS_GONE, {"has_served": False, "max_restarts": 0}, Next.LEAVE),
    ],
)
def test_an_engine_that_fails_after_serving_is_restarted(
    status: int, state: dict[str, int], follows: Next
) -> None:
    assert policy(**state).after_engine(status) is follows


def test_front_and_engine_have_separate_budgets_and_only_restarts_count() -> None:
    decided = policy(max_restarts=2)
    assert [decided.after_engine(1) for _ in range(3)] == [Next.RESTART, Next.RESTART, Next.EXHAUSTED]
    assert decided.after_front(KILLED) is Next.RESTART
    assert decided.after_front(1) is Next.END
    assert (decided.engine.num_taken, decided.front.num_taken) == (2, 1)
