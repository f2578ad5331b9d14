"""The pool of ranks: results by rank, errors with tracebacks, deaths and timeouts without a hang."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankDied, RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def add_rank(number: int) -> int:
    return dist.get_rank() + number


def sum_over_ranks() -> float:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one is wrong")


def skip_on_rank_one() -> None:
    if dist.get_rank() == 1:
        pytest.skip("not here")


def die_on_rank_one() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_on_rank_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(1)


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(add_rank, 10) == [10, 11]


def test_ranks_share_a_gloo_group(pool: RankPool) -> None:
    assert pool.run(sum_over_ranks) == [3.0, 3.0]


def leave_a_group_in_a_cycle() -> int:
    left: list[object] = [dist.new_group([0, 1], backend="gloo")]
    left.append(left)
    return gloo_threads()


def gloo_threads() -> int:
    return sum(task.read_text().startswith("gloo") for task in Path("/proc/self/task").glob("*/comm"))


def test_a_test_s_groups_end_with_their_threads(pool: RankPool) -> None:
    before = pool.run(gloo_threads)
    assert all(left > were for left, were in zip(pool.run(leave_a_group_in_a_cycle), before, strict=True))
    pool.end_groups()
    assert pool.run(gloo_threads) == before


def test_an_exception_names_its_rank_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*one is wrong"):
        pool.run(fail_on_rank_one)
    assert pool.run(add_rank, 0) == [0, 1]


def test_a_rank_that_skips_skips_the_test_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        pool.run(skip_on_rank_one)
    assert pool.run(add_rank, 3) == [3, 4]


def test_an_expected_death_is_a_result() -> None:
    with RankPool(2) as pool:
        pool.start(die_on_rank_one)
        assert pool.collect(may_die=[1]) == ["alive", RankDied(-signal.SIGKILL)]
        assert not pool.is_whole


def test_a_hang_is_killed() -> None:
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match=r"ranks \[(0, )?1\] of 2"),
    ):  # rank 0 may be slow to start
        pool.run(hang_on_rank_one, timeout_s=0.5)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pool.pids)
