"""Sparse attention on CPU against a dense index and a mask. A row's choice does not depend on other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.cpu.latents import latent_attention
from attention.sparse import index as sparse_index
from attention.sparse.cpu import choose_tokens, chosen_attention
from attention.transformers_names import CACHE
from dispatch.compiled.team import Team
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from tests.attention.cpu.test_latents import SHAPES, SPANS, Shape, absorbed, cache_and_step
from tests.support.cached_codes import ALL, plain_latents, rounded

HEADS, DIM = 5, 24
SCALE = 0.3


def index_pages(
    step: Step, spans: list[tuple[int, int]], *, values: int = 0, codes: torch.dtype | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return pages of index keys for a filled step, and each sequence's keys [context, D] as stored; `values` > 0 limits distinct ones."""
    generator = torch.Generator().manual_seed(4)
    blocks = int(step.block_table_SM.max()) + 1
    shape = LayerShape(num_kv_heads=1, key_dim=16, latent=True, index_dim=DIM, codes=codes)
    cache = PagedCache([shape], blocks)
    tables = step.block_table_SM.tolist()
    cache.step = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=16)
    keys = []
    for (start, length), table in zip(spans, tables, strict=False):
        own = torch.randn(values or start + length, DIM, generator=generator)
        if values:
            own = own[torch.randint(values, (start + length,), generator=generator)]
        keys.append(rounded(own, codes))
        cache.step.fill([Span(0, start + length, table)])
        padded = torch.zeros(1, cache.step.num_padded, DIM)
        padded[0, : start + length] = own
        cache.update_indexer(padded, 0)
    return cache.indexes[0], keys


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(rows, HEADS, DIM, generator=generator), torch.randn(rows, HEADS, generator=generator)


def wanted_of(query_ID: Tensor, weight_I: Tensor, keys_CD: Tensor, count: int) -> list[int]:
    """Return positions by the definition, with ties by position, in the order of the text."""
    scores_IC = (query_ID.double() @ keys_CD.double().T * SCALE).relu()
    scores_C = (weight_I.double() @ scores_IC).round(decimals=5)
    return sorted(torch.sort(scores_C, descending=True, stable=True).indices[:count].tolist())


def positions_of(chosen: Tensor, table: list[int]) -> list[int]:
    place_of = {block: index for index, block in reversed(list(enumerate(table)))}
    return [place_of[slot // 16] * 16 + slot % 16 for slot in chosen.tolist() if slot >= 0]


@pytest.mark.parametrize("count", [1, 7, 32, 300])
@pytest.mark.parametrize("values", [0, 6], ids=["all different", "many equal"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("codes", ALL)
def test_the_best_of_a_row_s_own_tokens_are_chosen_and_of_equals_the_first(
    count: int, values: int, threads: int, codes: torch.dtype | None
) -> None:
    team = Team(threads) if threads > 1 else None
    _, step = cache_and_step(SPANS, SHAPES[0], team=team)
    pages, keys = index_pages(step, SPANS, values=values, codes=codes)
    query, weight = drawn(step.num_padded)
    chosen = choose_tokens(query, weight, pages, step, scale=SCALE, count=count)
    row = 0
    for sequence, (start, length) in enumerate(SPANS):
        table = step.block_table_SM[sequence, : -(-(start + length) // 16)].tolist()
        for position in range(start, start + length):
            own = keys[sequence][: position + 1]
            found = positions_of(chosen[row], table)
            assert found == wanted_of(query[row], weight[row], own, count), (sequence, position)
            row += 1
    assert (chosen[row:] == -1).all(), "padding rows must choose nothing"


def test_what_is_chosen_does_not_depend_on_the_rows_beside() -> None:
    spans = [(0, 61), (5, 1)]
    _, step = cache_and_step(spans, SHAPES[0])
    pages, _ = index_pages(step, spans, values=9)
    query, weight = drawn(step.num_padded)
    together = choose_tokens(query, weight, pages, step, scale=SCALE, count=8)
    table = step.block_table_SM[0, :4].tolist()
    for start, length in ((0, 13), (13, 1), (14, 47)):
        alone = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=16)
        alone.fill([Span(start, length, table)])
        rows = slice(start, start + length)
        found = choose_tokens(query[rows], weight[rows], pages, alone, scale=SCALE, count=8)
        assert torch.equal(found, together[rows])


@pytest.mark.crossed("codes", "threads", "shape", every=2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("codes", ALL)
def test_attention_to_all_tokens_gives_the_dense_one_s_bits(
    shape: Shape, threads: int, codes: torch.dtype | None
) -> None:
    cache, step = cache_and_step(SPANS, shape, team=Team(threads) if threads > 1 else None, codes=codes)
    pages, _ = index_pages(step, SPANS)
    weight, query = absorbed(shape.weight(), shape), shape.query(step.num_padded)
    chosen = choose_tokens(*drawn(step.num_padded), pages, step, scale=SCALE, count=128)
    options = {"rotary_dim": shape.rotary, "scale": SCALE}
    dense = latent_attention(query, cache.keys[0], step, weight, **options)
    assert torch.equal(chosen_attention(query, cache.keys[0], chosen, step, weight, **options), dense)


@pytest.mark.crossed("codes", "has_sinks", "shape", every=2)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("codes", ALL)
def test_attention_reads_chosen_tokens_only(shape: Shape, has_sinks: bool, codes: torch.dtype | None) -> None:
    cache, step = cache_and_step(SPANS, shape, codes=codes)
    pages, _ = index_pages(step, SPANS)
    weight, query = shape.weight(), shape.query(step.num_padded)
    sinks = torch.randn(shape.heads) if has_sinks else None
    chosen = choose_tokens(*drawn(step.num_padded), pages, step, scale=SCALE, count=9)
    found = chosen_attention(
        query, cache.keys[0], chosen, step, absorbed(weight, shape), rotary_dim=shape.rotary, scale=SCALE, sinks_H=sinks
    )  # fmt: skip
    latents = plain_latents(cache.keys[0], shape.latent).flatten(0, 1).double()
    key_HUL, value_HVL = weight.double().view(shape.heads, 2, shape.unrotated, shape.latent).unbind(1)
    for row in range(step.num_tokens):
        own = latents[chosen[row][chosen[row] >= 0].long()]
        of_latent, rotary = own[:, : shape.latent], own[:, shape.latent : shape.latent + shape.rotary]
        plain, rotated = query[:, row].double().split([shape.unrotated, shape.rotary], -1)
        scores = (torch.einsum("hu,hul,cl->hc", plain, key_HUL, of_latent) + rotated @ rotary.T) * SCALE
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), -1)
        shares = scores.softmax(-1)[:, : len(own)]
        wanted = torch.einsum("hc,cl,hvl->hv", shares, of_latent, value_HVL)
        assert torch.allclose(found[row].double(), wanted, rtol=1e-4, atol=1e-5)


class Indexer(torch.nn.Module):
    """An indexer's code. `spoil` adds an operation without a kernel for the index."""

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, query: Tensor, weight: Tensor, key: Tensor, mask: Any, **options: Any) -> Tensor:
        keys = options[CACHE].update_indexer(key, 3)
        scores = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * 0.5
        scores = torch.tanh(scores) if self.spoil else torch.nn.functional.relu(scores)
        sums = torch.matmul(weight.unsqueeze(-2), scores).squeeze(-2) + mask
        chosen: Tensor = sums.topk(min(4, sums.shape[-1]), dim=-1).indices.to(torch.int32)
        return chosen


class Told:
    """A cache that records the calls it gets."""

    def update_indexer(self, key: Tensor, layer: int) -> None:
        self.key, self.layer = key, layer


def test_an_index_is_read_off_the_module_s_own_code() -> None:
    indexer, cache, asked = Indexer(spoil=False), Told(), []

    def choose(*arguments: object) -> Tensor:
        asked.append(arguments)
        return torch.arange(4, dtype=torch.int32).view(1, 1, 4).expand(1, 2, 4)

    assert sparse_index.exchange(indexer, choose)
    query, weight, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3), torch.randn(1, 2, 8)
    found = indexer(query, weight, key, sparse_index.ANY_MASK, **{CACHE: cache})
    assert found.shape == (1, 2, 4) and cache.layer == 3 and cache.key is key
    pages, layer, query_TID, weight_TI, scale, count = asked[0]
    assert (pages, layer, scale, count) == (cache, 3, 0.5, 4)
    assert torch.equal(query_TID, query[0]) and torch.equal(weight_TI, weight[0])


def test_an_index_of_another_kind_is_not_guessed() -> None:
    indexer = Indexer(spoil=True)
    sparse_index.exchange(indexer, lambda *_: torch.zeros(1))
    with pytest.raises(TypeError, match="tanh"):
        indexer(*(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3), torch.randn(1, 2, 8)), sparse_index.ANY_MASK,
                **{CACHE: Told()})  # fmt: skip
