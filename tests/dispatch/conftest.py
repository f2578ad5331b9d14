"""Ranks with interpreted kernels, in addition to those of the pools."""

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import PoolOf
from tests.support.gpu.interpreted import interpret
from tests.support.ranks import RankPool

RanksOf = Callable[[str, int], RankPool]


@pytest.fixture(scope="package")
def interpreting_pair() -> Iterator[RankPool]:
    """Start two separate ranks: processes must choose the interpreter before any import of triton."""
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        yield pool


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest, pool_of: PoolOf) -> RanksOf:
    """Return `ranks_of(name, world_size)`: the ranks for a wire. For triton, these are two with interpreted kernels."""
    return lambda name, world_size: (
        request.getfixturevalue("interpreting_pair") if name == "triton" else pool_of(world_size)
    )
