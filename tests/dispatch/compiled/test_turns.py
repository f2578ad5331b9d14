"""Kernels that several processes need at the same time are compiled by one of them."""

import fcntl
import os
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from dispatch.compiled import turns
from tests.support.ranks import RankPool

RANKS = 3


@pytest.fixture(scope="module")
def pool() -> object:
    with RankPool(RANKS) as pool:
        yield pool


def compile_some(folder: Path, count: int) -> tuple[int, list[int]]:
    """Return how many of these kernels this rank compiled, and what it reported. None is compiled twice."""
    num_compiled = 0
    reported: list[int] = []

    def compile_or_read(number: int) -> None:
        nonlocal num_compiled
        if not (folder / str(number)).exists():
            (folder / str(number)).touch(exist_ok=False)
            num_compiled += 1

    compilations = {f"{folder} {number}": partial(compile_or_read, number) for number in range(count)}
    dist.barrier()
    turns.compile_in_turns(compilations, reported.append)
    return num_compiled, reported


def test_each_kernel_is_compiled_by_one_of_the_processes_that_start_together(
    pool: RankPool, tmp_path: Path
) -> None:
    results = pool.run(compile_some, tmp_path, 200)
    assert sum(num_compiled for num_compiled, _ in results) == 200
    assert all(reported == list(range(1, 201)) for _, reported in results)


def hold(name: str) -> None:
    """Take a kernel's lock on rank 1 as a process that stops while it compiles."""
    if dist.get_rank() == 1:
        locks = turns._locks()
        assert locks is not None
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, zlib.crc32(name.encode()))
    dist.barrier()


def compile_one(name: str, waits: bool, patience_s: float) -> bool:
    turns.PATIENCE_S = patience_s
    compiled: list[str] = []
    is_done = dist.get_rank() != 0 or turns.compile_in_turn(name, lambda: compiled.append(name), waits=waits)
    return is_done and (dist.get_rank() != 0 or compiled == [name])


def free(name: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        locks = turns._locks()
        assert locks is not None
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, zlib.crc32(name.encode()))


def test_a_locked_kernel_is_passed_over_and_a_stopped_process_is_not_awaited_for_ever(
    pool: RankPool, tmp_path: Path
) -> None:
    name = str(tmp_path)
    pool.run(hold, name)
    assert pool.run(compile_one, name, False, 60.0) == [False, True, True]
    assert pool.run(compile_one, name, True, 0.1) == [True] * RANKS
    pool.run(free, name)
    assert pool.run(compile_one, name, False, 60.0) == [True] * RANKS


@pytest.mark.parametrize("folder", ["missing", "."])
def test_kernels_are_compiled_without_locks_if_their_file_cannot_be_opened(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("someone's file")
    (tmp_path / f"wideep-kernels-{os.getuid()}").symlink_to(target)  # locks are not opened through links
    monkeypatch.setattr(turns, "gettempdir", lambda: str(tmp_path / folder))
    turns._locks.cache_clear()
    try:
        compiled: list[int] = []
        turns.compile_in_turns({"a": partial(compiled.append, 1), "b": partial(compiled.append, 2)})
    finally:
        turns._locks.cache_clear()
    assert compiled == [1, 2]
    assert target.read_text() == "someone's file"
