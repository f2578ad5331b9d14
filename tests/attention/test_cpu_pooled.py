"""An index over pools of tokens on CPU against its definition. A row's choice does not depend on the cuts of its text."""

import pytest

from attention.sparse.cpu_pools import choose_pools
from dispatch.compiled.team import Team
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from tests.support.models.pools import Index, check_choice, check_cuts, pooling_of, shape_of


def index_of(size: int, num_chosen: int, *, threads: int = 1, is_alike: bool = False) -> Index:
    team = Team(threads) if threads > 1 else None
    step = Step(max_tokens=160, max_sequences=8, max_blocks=6, block_tokens=16, team=team)
    cache = PagedCache([shape_of(size)], 16)
    cache.step = step
    return Index(pooling_of(size, num_chosen), step, cache, choose_pools, is_alike=is_alike)


@pytest.mark.parametrize(("size", "num_chosen"), [(4, 3), (16, 2), (2, 40), (1, 7)])
@pytest.mark.parametrize("is_alike", [False, True], ids=["all different", "all equal"])
def test_the_best_pools_and_the_tokens_behind_the_last_are_chosen(
    size: int, num_chosen: int, is_alike: bool
) -> None:
    check_choice(index_of(size, num_chosen, threads=2, is_alike=is_alike))


@pytest.mark.parametrize("size", [4, 16])
def test_cuts_and_what_is_beside_change_nothing(size: int) -> None:
    check_cuts(index_of(size, 2), index_of(size, 2))
