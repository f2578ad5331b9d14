"""Ranks for a wire."""

from collections.abc import Callable

import pytest

from tests.fixtures import PoolOf
from tests.support.ranks import RankPool

RanksOf = Callable[[str, int], RankPool]


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest, pool_of: PoolOf) -> RanksOf:
    """Return `ranks_of(name, world_size)`: the ranks for a wire. For triton, these are two with interpreted kernels."""
    return lambda name, world_size: (
        request.getfixturevalue("interpreting_pair") if name == "triton" else pool_of(world_size)
    )
