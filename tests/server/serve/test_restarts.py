from server.serve.restarts import MAX_RESTARTS, WINDOW_S, RestartBudget
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
