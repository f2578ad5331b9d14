"""Pools of ranks that the tests of this package share: spawned once per world size, replaced when a rank died."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import RankPool

PoolOf = Callable[[int], RankPool]


@pytest.fixture(scope="session")
def pool_of() -> Iterator[PoolOf]:
    """Return the pool of a world size."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size in pools and not pools[world_size].is_whole:
            pools.pop(world_size).close()
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
