"""A team computes every tile of every kernel once, one kernel after the other, even if some threads are delayed."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dispatch.compiled.native import fetch_add, words
from dispatch.compiled.team import Kernel, Team, program_of, run, run_alone


def _count(tile, tiles, counts, left, before, each, wrong, leaves):  # type: ignore[no-untyped-def]
    # Arguments: number of tiles, counts of each, a number that a tile of the previous kernel left, the number that this one leaves.
    if tile < 0:
        return tiles
    fetch_add(counts + tile * 8, 1)
    if words(left, 1)[0] != before * each:
        fetch_add(wrong, 1)
    fetch_add(leaves, 1)
    return 0


COUNT = Kernel(_count, 1)


@pytest.fixture(params=[1, 2, 4])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param)
    yield team
    team.close()


class Counted:
    """A program of many kernels. Each checks whether the previous one was complete."""

    def __init__(self, tiles: list[int]) -> None:
        self.computed = [np.zeros(max(1, count), np.int64) for count in tiles]
        self.done = np.zeros(len(tiles) + 1, np.int64)
        self.wrong = np.zeros(1, np.int64)
        before, rows = 0, []
        seen = self.done.ctypes.data
        for index, count in enumerate(tiles):
            leaves = self.done.ctypes.data + (index + 1) * 8
            rows.append(
                COUNT.row(
                    count, self.computed[index].ctypes.data, seen, before, 1, self.wrong.ctypes.data, leaves
                )
            )
            if count:
                seen, before = leaves, count
        self.program = program_of(rows)
        self._tiles = tiles

    def check(self) -> None:
        """Check that every tile was computed once, after all previous kernels."""
        assert not self.wrong[0]
        assert self.done[1:].tolist() == self._tiles
        assert all((each == 1).all() for each, count in zip(self.computed, self._tiles, strict=True) if count)


def test_a_row_has_every_argument_at_its_place() -> None:
    row = COUNT.row(1, 2, before=4, left=3, each=5, wrong=6, leaves=7)
    assert row[: COUNT.place("leaves") + 1] == [COUNT.address, 1, 2, 3, 4, 5, 6, 7]
    assert len(program_of([row])[0]) == len(row)
    for args, kwargs in (((1,) * 8, {}), ((1,) * 6, {}), ((1,) * 7, {"tiles": 1}), ((1,) * 6, {"right": 1})):
        with pytest.raises((AssertionError, KeyError)):
            COUNT.row(*args, **kwargs)


TILES = [[], [0], [1], [0, 3, 0, 0, 1, 0], [7, 1, 100, 2, 3], [1] * 300, [5000]]


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{len(tiles)} kernels, {sum(tiles)} tiles")
def test_every_tile_is_computed_once_and_kernels_keep_their_order(team: Team, tiles: list[int]) -> None:
    for _ in range(20):
        counted = Counted(tiles)
        team.run(counted.program)
        counted.check()
    alone = Counted(tiles)
    run_alone(alone.program)
    alone.check()


def test_programs_follow_each_other_at_any_pace(team: Team) -> None:
    """At once, and after the other threads went to sleep."""
    for pause_s in [0.0] * 2000 + [0.02] * 10:
        if pause_s:
            threading.Event().wait(pause_s)
        counted = Counted([3, 2])
        team.run(counted.program)
        counted.check()


def test_little_work_is_done_alone() -> None:
    counted = Counted([3])
    run(counted.program, None, 10**9)
    counted.check()
    team = Team(2)
    team.close()  # sleeping threads cannot help, and are not needed
    counted = Counted([3])
    run(counted.program, team, 1000)
    counted.check()


def test_a_closed_team_has_no_threads() -> None:
    before = threading.active_count()
    team = Team(4)
    assert threading.active_count() == before + 3
    team.close()
    assert threading.active_count() == before
    team.close()


def test_a_team_that_is_forgotten_ends_its_threads() -> None:
    before = threading.active_count()
    Team(3)
    assert threading.active_count() == before


def test_an_idle_team_uses_no_processor() -> None:
    team = Team(3)
    team.run(Counted([8]).program)
    threading.Event().wait(0.2)  # it first polls for work
    begun = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - begun < 0.1
    team.close()


def test_more_threads_than_cores_still_get_on() -> None:
    """The owner of a tile may be off its core. The others yield to it."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from tests.dispatch.compiled.test_team import Counted, Team\n"
        "team = Team(4)\n"
        "for _ in range(200):\n"
        "    counted = Counted([5, 1, 9]); team.run(counted.program); counted.check()\n"
        "team.close()\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=True)
