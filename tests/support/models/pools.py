"""Test an index over pools of tokens on every device: texts, keys, gates, and the definition."""

from collections.abc import Callable

import torch
from torch import Tensor

from attention.sparse.pools import Pooling
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step

HEADS, DIM, SCALE = 5, 32, 0.3
TABLES = [[9], [3, 14, 0, 7, 11], [5, 1], [2, 8, 4]]
TEXTS = [1, 71, 19, 45]  # number of tokens of each


class Index:
    """Keys, gates, queries and weights of sequences, and a cache that is filled step by step."""

    def __init__(
        self,
        pooling: Pooling,
        step: Step,
        cache: PagedCache,
        choose: Callable[..., Tensor],
        *,
        device: str = "cpu",
        is_alike: bool = False,
    ) -> None:
        """`choose`: `choose_pools` of a device. `is_alike`: pools have the same tokens, and therefore equal scores."""
        generator, size = torch.Generator().manual_seed(3), pooling.pool_tokens
        self.pooling, self.step, self.cache, self.choose, self.device = pooling, step, cache, choose, device
        self.rows = [torch.randn(count, 2 * DIM, generator=generator) for count in TEXTS]
        if is_alike:  # pools with the same tokens repeated: equal scores
            self.rows = [own[:size].repeat(-(-len(own) // size), 1)[: len(own)] for own in self.rows]
        self.queries = [torch.randn(count, HEADS, DIM, generator=generator) for count in TEXTS]
        self.weights = [torch.randn(count, HEADS, generator=generator) for count in TEXTS]

    def run(self, parts: list[tuple[int, int, int]], num_decodes: int = 0) -> list[list[list[int]]]:
        """Run (sequence, start, end) parts in one step. Return the choice of every row, by sequence."""
        self.step.fill(
            [Span(start, end - start, TABLES[sequence]) for sequence, start, end in parts], num_decodes
        )
        self.step.inputs([0] * self.step.num_tokens, [])
        padding = self.step.num_padded - self.step.num_tokens

        def packed(of: list[Tensor]) -> Tensor:
            own = torch.cat([of[sequence][start:end] for sequence, start, end in parts])
            return torch.cat((own, torch.ones(padding, *own.shape[1:]))).to(self.device)

        self.cache.update_indexer(packed(self.rows)[None], 0, more=DIM // self.pooling.pool_tokens)
        arguments = packed(self.queries), packed(self.weights), SCALE, self.pooling
        chosen = self.choose(self.cache, 0, *arguments)[0].cpu()
        assert (chosen[self.step.num_tokens :] == -1).all(), "padding rows must choose nothing"
        lengths = [end - start for _, start, end in parts]
        return [own.tolist() for own in torch.split(chosen[: self.step.num_tokens], lengths)]

    def wanted(self, sequence: int, position: int) -> list[int]:
        """Return the choice by the definition."""
        size, own = self.pooling.pool_tokens, self.rows[sequence].double()
        pools = (position + 1) // size
        keys, gates = (each.view(pools, size, DIM) for each in own[: pools * size].split(DIM, 1))
        pooled = ((gates + self.pooling.bias_BD.cpu().double()).softmax(1) * keys).sum(1)
        products = self.queries[sequence][position].double() @ pooled.T * SCALE
        scores = self.weights[sequence][position].double() @ products.relu()
        best = torch.sort(scores.round(decimals=5), descending=True, stable=True).indices[
            : self.pooling.num_chosen
        ]
        tokens = [pool * size + place for pool in sorted(best.tolist()) for place in range(size)]
        tokens += range(pools * size, position + 1)
        slots = [TABLES[sequence][token // 16] * 16 + token % 16 for token in tokens]
        return slots + [-1] * (self.pooling.num_tokens - len(slots))


def pooling_of(size: int, num_chosen: int, device: str = "cpu") -> Pooling:
    """Return seeded pooling weights."""
    bias = torch.randn(size, DIM, generator=torch.Generator().manual_seed(4))
    return Pooling(size, num_chosen, bias.to(device))


def shape_of(size: int) -> LayerShape:
    """Return what a layer with such an index keeps."""
    return LayerShape(num_kv_heads=1, key_dim=16, latent=True, index_dim=2 * DIM + DIM // size)


def check_choice(index: Index) -> None:
    """Check that all texts in one step choose what the definition chooses."""
    found = index.run([(sequence, 0, count) for sequence, count in enumerate(TEXTS)])
    for sequence, rows in enumerate(found):
        for position, row in enumerate(rows):
            assert row == index.wanted(sequence, position), (sequence, position)


def check_cuts(whole: Index, cut: Index) -> None:
    """Check that chunks, decodes and other parts of a step change nothing, including the keys of pools."""
    wanted = whole.run([(sequence, 0, count) for sequence, count in enumerate(TEXTS)])[1]
    found = (
        cut.run([(1, 0, 7)])[0] + cut.run([(2, 0, 19), (1, 7, 8)])[1] + cut.run([(1, 8, 50), (3, 0, 45)])[0]
    )
    for position in range(50, TEXTS[1]):
        found += cut.run([(1, position, position + 1)], num_decodes=1)[0]
    assert found == wanted
    pages = [each.cache.indexes[0].cpu()[TABLES[1]].view(torch.int32) for each in (whole, cut)]
    assert torch.equal(*pages), "the keys of pools differ"
