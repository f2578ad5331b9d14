"""Fixtures shared by tests of several packages. Rank pools are spawned once per session and size."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.gpu.interpreted import NO_TRITON, interpret
from tests.support.ranks import RankPool

PoolOf = Callable[[int], RankPool]
OnDevice = Callable[..., Any]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a GPU on a machine without one."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """Return the running pools by size."""
    running: dict[int, RankPool] = {}
    yield running
    for pool in running.values():
        pool.close()


@pytest.fixture
def pool_of(pools: dict[int, RankPool]) -> Iterator[PoolOf]:
    """Return `pool_of(world_size)`: a running pool, replaced if an earlier test broke it."""
    used: dict[int, RankPool] = {}

    def pool_of_size(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not pool.is_whole:
            pools[world_size] = pool = RankPool(world_size, timeout_s=120.0)
        used[world_size] = pool
        return pool

    yield pool_of_size
    for pool in used.values():
        pool.end_groups()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[RankPool]:
    """Return a process that interprets Triton's kernels: this is chosen before any import of triton."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    with RankPool(1, timeout_s=300.0) as pool:  # interpreted kernels are slow, more so on a busy machine
        pool.run(interpret)
        yield pool


@pytest.fixture(scope="session")
def interpreting_pair() -> Iterator[RankPool]:
    """Return two separate ranks with interpreted kernels."""
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        yield pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request: pytest.FixtureRequest) -> OnDevice:
    """Return `on_device(function, *args)`, which calls `function(device, *args)`: on the CPU in Triton's interpreter in a
    separate process, on a GPU in this one."""
    device: str = request.param
    pool: RankPool | None = request.getfixturevalue("interpreter") if device == "cpu" else None

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return pool.run(function, device, *args)[0] if pool else function(device, *args)

    return call
