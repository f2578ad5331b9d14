"""An index over pools of tokens against its definition; what a row chooses is its own, however its text was cut."""

import pytest
import torch
from torch import Tensor

from attention.cpu_pooled import choose_pools
from attention.pooled_index import Pooling
from dispatch.team import Team
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step

HEADS, DIM, SCALE = 5, 32, 0.3
TABLES = [[9], [3, 14, 0, 7, 11], [5, 1], [2, 8, 4]]
TEXTS = [1, 71, 19, 45]  # tokens of each


class Index:
    """Sequences' keys, gates, queries and weights; a cache that is filled step by step."""

    def __init__(self, size: int, num_chosen: int, *, threads: int = 1, is_alike: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pooling = Pooling(size, num_chosen, torch.randn(size, DIM, generator=generator))
        shape = LayerShape(num_kv_heads=1, key_dim=16, latent=True, index_dim=2 * DIM + DIM // size)
        self.cache = PagedCache([shape], 16)
        team = Team(threads) if threads > 1 else None
        self.step = Step(max_tokens=160, max_sequences=8, max_blocks=6, block_tokens=16, team=team)
        self.cache.step = self.step
        self.rows = [torch.randn(count, 2 * DIM, generator=generator) for count in TEXTS]
        if is_alike:  # pools of the same tokens over and over: equal scores
            self.rows = [own[:size].repeat(-(-len(own) // size), 1)[: len(own)] for own in self.rows]
        self.queries = [torch.randn(count, HEADS, DIM, generator=generator) for count in TEXTS]
        self.weights = [torch.randn(count, HEADS, generator=generator) for count in TEXTS]

    def run(self, parts: list[tuple[int, int, int]]) -> list[list[list[int]]]:
        """Run (sequence, start, end)s in one step; returns what every row chose, by sequence."""
        self.step.fill([Span(start, end - start, TABLES[sequence]) for sequence, start, end in parts])
        padding = self.step.num_padded - self.step.num_tokens

        def packed(of: list[Tensor]) -> Tensor:
            own = torch.cat([of[sequence][start:end] for sequence, start, end in parts])
            return torch.cat((own, torch.ones(padding, *own.shape[1:])))

        self.cache.update_indexer(packed(self.rows)[None], 0, more=DIM // self.pooling.pool_tokens)
        chosen = choose_pools(self.cache, 0, packed(self.queries), packed(self.weights), SCALE, self.pooling)[
            0
        ]
        assert (chosen[self.step.num_tokens :] == -1).all(), "padding chooses nothing"
        lengths = [end - start for _, start, end in parts]
        return [own.tolist() for own in torch.split(chosen[: self.step.num_tokens], lengths)]

    def wanted(self, sequence: int, position: int) -> list[int]:
        """By the definition."""
        size, own = self.pooling.pool_tokens, self.rows[sequence].double()
        pools = (position + 1) // size
        keys, gates = (each.view(pools, size, DIM) for each in own[: pools * size].split(DIM, 1))
        pooled = ((gates + self.pooling.bias_BD.double()).softmax(1) * keys).sum(1)
        products = self.queries[sequence][position].double() @ pooled.T * SCALE
        scores = self.weights[sequence][position].double() @ products.relu()
        best = torch.sort(scores.round(decimals=5), descending=True, stable=True).indices[
            : self.pooling.num_chosen
        ]
        tokens = [pool * size + place for pool in sorted(best.tolist()) for place in range(size)]
        tokens += range(pools * size, position + 1)
        slots = [TABLES[sequence][token // 16] * 16 + token % 16 for token in tokens]
        return slots + [-1] * (self.pooling.num_tokens - len(slots))


@pytest.mark.parametrize(("size", "num_chosen"), [(4, 3), (16, 2), (2, 40), (1, 7)])
@pytest.mark.parametrize("is_alike", [False, True], ids=["all different", "all equal"])
def test_the_best_pools_and_the_tokens_behind_the_last_are_chosen(
    size: int, num_chosen: int, is_alike: bool
) -> None:
    index = Index(size, num_chosen, threads=2, is_alike=is_alike)
    found = index.run([(sequence, 0, count) for sequence, count in enumerate(TEXTS)])
    for sequence, rows in enumerate(found):
        for position, row in enumerate(rows):
            assert row == index.wanted(sequence, position), (sequence, position)


@pytest.mark.parametrize("size", [4, 16])
def test_cuts_and_what_is_beside_change_nothing(size: int) -> None:
    whole = Index(size, 2)
    wanted = whole.run([(sequence, 0, count) for sequence, count in enumerate(TEXTS)])[1]
    cut = Index(size, 2)
    found = (
        cut.run([(1, 0, 7)])[0] + cut.run([(2, 0, 19), (1, 7, 8)])[1] + cut.run([(1, 8, 50), (3, 0, 45)])[0]
    )
    for position in range(50, 71):
        found += cut.run([(1, position, position + 1)])[0]
    assert found == wanted
    pages = [each.cache.indexes[0][TABLES[1]].view(torch.int32) for each in (whole, cut)]
    assert torch.equal(*pages), "pools' keys have the same bits"
