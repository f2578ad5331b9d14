"""Absorbed latent attention on CPU against expanded latents, and the independence of its rows."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention import reference
from attention.cpu.latents import AbsorbedWeight, latent_attention
from attention.cpu.lone_latents import most_lone
from attention.latents import halves_of
from dispatch.compiled.team import Team
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from moe.cpu.kernels.panels import pack
from tests.support.cached_codes import ALL, plain_latents

SPANS = [(0, 1), (37, 1), (0, 21), (16, 40), (15, 1), (100, 3)]
SCALE = 0.2


@dataclass
class Shape:
    """H query heads, L latent dim, U unrotated and E rotary dims of the key; V equals U."""

    heads: int
    latent: int
    unrotated: int
    rotary: int

    @property
    def cached(self) -> LayerShape:
        """Return the shape of a layer's cache."""
        return LayerShape(num_kv_heads=1, key_dim=self.latent + self.rotary, value_dim=0, latent=True)

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a `kv_b_proj`: [H * (U + V), L]."""
        rows = self.heads * 2 * self.unrotated
        drawn = torch.randn(rows, self.latent, generator=torch.Generator().manual_seed(5))
        weight: Tensor = (drawn * self.latent**-0.5).to(dtype)
        return weight

    def query(self, rows: int) -> Tensor:
        """Return queries [H, T, U + E]."""
        shape = (self.heads, rows, self.unrotated + self.rotary)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))


SHAPES = [Shape(16, 32, 16, 16), Shape(1, 16, 8, 16), Shape(20, 24, 12, 10), Shape(32, 512, 128, 128)]
SMALL = SHAPES[2]  # none of its sizes is a multiple of 16


def absorbed(weight: Tensor, shape: Shape) -> AbsorbedWeight:
    """Pack a `kv_b_proj`, as at a model's start."""
    halves = halves_of(weight, shape.heads, shape.unrotated)
    return AbsorbedWeight(pack(halves.key_HUL.transpose(1, 2)), pack(halves.value_HVL), shape.unrotated)


def cache_and_step(
    spans: list[tuple[int, int]], shape: Shape, *, team: Team | None = None, codes: torch.dtype | None = None
) -> tuple[PagedCache, Step]:
    """Fill pages with every sequence's whole context, on shuffled blocks. The step covers the rows of the spans."""
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-(start + length) // 16) for start, length in spans]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    cache = PagedCache([replace(shape.cached, codes=codes)], len(order))
    step = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=16, team=team)
    cache.step = step
    placed = []
    for (start, length), count in zip(spans, blocks, strict=True):
        own, order = order[:count], order[count:]
        placed.append(Span(start, length, own))
        step.fill([Span(0, start + length, own)])
        latent = torch.randn(1, 1, step.num_padded, shape.latent, generator=generator)
        cache.update(latent, torch.randn(1, 1, step.num_padded, shape.rotary, generator=generator), 0)
    step.fill(placed)
    return cache, step


def expanded(
    pages: Tensor, step: Step, query_HTD: Tensor, weight: Tensor, shape: Shape, window: int
) -> Tensor:
    """Expand every latent of the cache to every head's key and value. The oracle."""
    L, E, U = shape.latent, shape.rotary, shape.unrotated
    latents_NBW = plain_latents(pages, L)
    both_NBHX = (latents_NBW[..., :L] @ weight.float().T).unflatten(-1, (shape.heads, 2 * U))
    rotary_NBHE = latents_NBW[:, :, None, L : L + E].expand(-1, -1, shape.heads, -1)
    keys_NBHD = torch.cat((both_NBHX[..., :U], rotary_NBHE), dim=-1)
    return reference.paged_attention(
        query_HTD,
        keys_NBHD.permute(0, 2, 3, 1),
        both_NBHX[..., U:].transpose(1, 2),
        step,
        scale=SCALE,
        window=window,
    )


def attend(
    cache: PagedCache, step: Step, query_HTD: Tensor, weight: Tensor, shape: Shape, window: int = 0
) -> Tensor:
    """Run the kernels."""
    return latent_attention(
        query_HTD,
        cache.keys[0],
        step,
        absorbed(weight, shape),
        rotary_dim=shape.rotary,
        scale=SCALE,
        window=window,
    )


@pytest.mark.crossed("codes", "window", "shape", every=3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize("codes", ALL)
def test_kernels_equal_the_oracle_on_mixed_prefill_and_decode(
    shape: Shape, window: int, codes: torch.dtype | None
) -> None:
    cache, step = cache_and_step(SPANS, shape, codes=codes)
    query, weight = shape.query(step.num_padded), shape.weight()
    ours = attend(cache, step, query, weight, shape, window)
    oracle = expanded(cache.keys[0], step, query, weight, shape, window)
    torch.testing.assert_close(ours, oracle, atol=2e-5, rtol=1e-4)


def test_bfloat16_weights_give_the_bits_of_the_same_in_float32() -> None:
    cache, step = cache_and_step(SPANS, SMALL)
    query, weight = SMALL.query(step.num_padded), SMALL.weight(torch.bfloat16)
    narrow, wide = (attend(cache, step, query, each, SMALL) for each in (weight, weight.float()))
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("chunk", [70, 1])
@pytest.mark.parametrize("codes", ALL)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it_nor_on_threads(
    chunk: int, codes: torch.dtype | None
) -> None:
    cache, step = cache_and_step([(0, 300), (33, 30)], SMALL, team=(team := Team(2)), codes=codes)
    tables = [step.block_table_SM[i].tolist() for i in range(2)]
    query, weight = SMALL.query(step.num_padded), SMALL.weight()
    whole = attend(cache, step, query, weight, SMALL)
    team.close()
    alone = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=16)
    for sequence, first_row, start, length in [(0, 0, 0, 300), (1, 300, 33, 30)]:
        for begin in range(0, length, chunk):
            count = min(chunk, length - begin)
            end = start + begin + count
            alone.fill([Span(start + begin, count, tables[sequence][: -(-end // 16)])])
            rows = slice(first_row + begin, first_row + begin + count)
            own = torch.zeros(SMALL.heads, alone.num_padded, query.shape[2])
            own[:, :count] = query[:, rows]
            assert torch.equal(attend(cache, alone, own, weight, SMALL)[:count], whole[rows])


@pytest.mark.crossed("codes", "window", "shape", every=3)
@pytest.mark.parametrize("shape", [SHAPES[0], SMALL, SHAPES[3], Shape(8, 128, 64, 32)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("codes", ALL)
def test_a_team_that_shares_a_few_rows_makes_the_bits_of_one_thread(
    shape: Shape, window: int, codes: torch.dtype | None
) -> None:
    team, weight, query = Team(8), shape.weight(), shape.query(16)
    for spans in (
        [(590, 1)],
        [(15, 1)],
        [(0, 1)],
        [(300, 1), (37, 1)],
        [(200, 1), (64, 1), (3, 1), (500, 1)],
    ):
        cache, step = cache_and_step(spans, shape, team=team, codes=codes)
        groups = len(spans) * -(-shape.heads // 16)
        step_of_one = cache_and_step(spans, shape, codes=codes)[1]
        assert (most_lone(step), most_lone(step_of_one)) == (4, 0)
        shared, own = (attend(cache, each, query, weight, shape, window) for each in (step, step_of_one))
        assert torch.equal(shared, own), f"{groups} groups of heads"


@pytest.mark.parametrize("codes", ALL)
def test_stale_latents_of_a_reused_block_never_reach_a_new_owner(codes: torch.dtype | None) -> None:
    cache, step = cache_and_step([(0, 16)], SMALL, codes=codes)
    block = int(step.block_table_SM[0, 0])
    cache.keys[0][block].view(torch.uint8).fill_(255)  # NaN
    step.fill([Span(0, 1, [block])])
    latent, rotary = (torch.randn(1, 1, step.num_padded, dim) for dim in (SMALL.latent, SMALL.rotary))
    cache.update(latent, rotary, 0)
    assert attend(cache, step, SMALL.query(step.num_padded), SMALL.weight(), SMALL).isfinite().all()


def test_pages_of_another_shape_are_refused() -> None:
    cache, step = cache_and_step([(0, 1)], SMALL)
    narrow = cache.keys[0][..., :24]
    with pytest.raises(ValueError, match=r"hold 24 \+ 10 values, .*; got 16 and 24"):
        latent_attention(
            SMALL.query(step.num_padded),
            narrow,
            step,
            absorbed(SMALL.weight(), SMALL),
            rotary_dim=10,
            scale=1.0,
        )
