"""Pages hold the rows written at the step's positions, and nothing else."""

from dataclasses import replace

import pytest
import torch

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache
from kvcache.step import Span, Step
from tests.support.cached_codes import ALL, FORMATS, decoded, plain_index, rounded, rounded_row, stored_bytes

HEADS = LayerShape(num_kv_heads=2, key_dim=24, value_dim=20)
LATENT = LayerShape(num_kv_heads=1, key_dim=24, value_dim=0, latent=True, index_dim=40)
LATENT_DIM = 16
both_shapes = pytest.mark.parametrize("shape", [HEADS, LATENT], ids=["heads", "latent"])


def make_step(*spans: Span) -> Step:
    """Return a filled step."""
    step = Step(max_tokens=64, max_sequences=4, max_blocks=4, block_tokens=BLOCK_TOKENS)
    step.fill(spans)
    return step


def rows_for(shape: LayerShape, step: Step, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows as a layer passes them, including padding."""
    generator = torch.Generator().manual_seed(seed)
    dims = (LATENT_DIM, 8) if shape.latent else (shape.key_dim, shape.value_dim)
    key, value = (
        torch.randn(1, shape.num_kv_heads, step.num_padded, dim, generator=generator) for dim in dims
    )
    return key, value


def read(cache: PagedCache, layer: int, slot: int) -> torch.Tensor:
    """Return one token's key and value from the pages, [heads, key_dim + value_dim]."""
    block, offset = divmod(slot, BLOCK_TOKENS)
    shape = cache.shapes[layer]
    keys, values = decoded(cache, layer, LATENT_DIM)
    if shape.latent:
        return keys[block, offset, : shape.key_dim][None]
    return torch.cat((keys[block, :, :, offset], values[block, :, offset, : shape.value_dim]), dim=-1)


@both_shapes
@pytest.mark.parametrize("codes", ALL)
def test_every_row_lands_at_its_place_in_its_own_layer(shape: LayerShape, codes: torch.dtype | None) -> None:
    shape = replace(shape, codes=codes)
    cache = PagedCache([shape, shape], 6)
    cache.step = step = make_step(Span(0, 20, [4, 1]), Span(33, 1, [0, 2, 5]))
    key, value = rows_for(shape, step)
    same_key, same_value = cache.update(key, value, 1)
    assert same_key is key and same_value is value
    written = rounded_row(torch.cat((key[0], value[0]), dim=-1), shape, key.shape[-1])
    for row in range(step.num_tokens):
        assert torch.equal(read(cache, 1, int(step.cache_slot_T[row])), written[:, row])
    assert not any(page.float().any() for page in cache.parts(0))


@both_shapes
def test_padded_rows_are_not_cached(shape: LayerShape) -> None:
    cache = PagedCache([shape], 3)
    cache.step = step = make_step(Span(0, 1, [2]))
    assert step.num_padded > 1
    cache.update(*rows_for(shape, step), 0)
    touched = [slot for slot in range(3 * BLOCK_TOKENS) if read(cache, 0, slot).any()]
    assert touched == [2 * BLOCK_TOKENS]


def test_transposed_views_are_written_as_what_they_show() -> None:
    """Attention modules pass views: [1, T, G, D] with two dimensions swapped."""
    cache, other = PagedCache([HEADS], 2), PagedCache([HEADS], 2)
    cache.step = other.step = step = make_step(Span(0, 20, [1, 0]))
    key, value = rows_for(HEADS, step)
    cache.update(key, value, 0)
    views = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (key, value)]
    other.update(views[0], views[1], 0)
    assert torch.equal(cache.keys[0], other.keys[0]) and torch.equal(cache.values[0], other.values[0])


@both_shapes
@pytest.mark.parametrize("codes", ALL)
def test_a_block_starts_clean_for_its_new_owner(shape: LayerShape, codes: torch.dtype | None) -> None:
    shape = replace(shape, codes=codes)
    cache = PagedCache([shape], 2)
    for part in stored_bytes(cache, 0):
        part.fill_(255)
    cache.step = step = make_step(Span(0, 1, [1]))
    cache.update(*rows_for(shape, step), 0)
    if shape.latent:
        cache.update_indexer(torch.randn(1, step.num_padded, shape.index_dim), 0)
    pages = [*decoded(cache, 0, LATENT_DIM), plain_index(cache.indexes[0])]
    assert all(page[1].isfinite().all() for page in pages if page.numel())
    assert all((part[0] == 255).all() for part in stored_bytes(cache, 0)), (
        "blocks of other sequences must not be touched"
    )


@pytest.mark.parametrize("codes", ALL)
def test_index_keys_land_at_their_places(codes: torch.dtype | None) -> None:
    cache = PagedCache([replace(LATENT, codes=codes)], 6)
    cache.step = step = make_step(Span(0, 20, [4, 1]), Span(33, 1, [0, 2, 5]))
    key = torch.randn(1, step.num_padded, LATENT.index_dim, generator=torch.Generator().manual_seed(0))
    cache.update_indexer(key, 0)
    pages = plain_index(cache.indexes[0]).transpose(1, 2).flatten(0, 1)
    assert torch.equal(pages[step.cache_slot_T[: step.num_tokens]], rounded(key[0, : step.num_tokens], codes))


@both_shapes
@pytest.mark.parametrize("codes", FORMATS)
def test_bytes_of_a_block_do_not_depend_on_the_cut_of_a_prompt(shape: LayerShape, codes: torch.dtype) -> None:
    whole, cut = (PagedCache([replace(shape, codes=codes)], 2) for _ in range(2))
    whole.step = step = make_step(Span(0, 32, [1, 0]))
    key, value = rows_for(shape, step)
    index = torch.randn(1, step.num_padded, 40, generator=torch.Generator().manual_seed(1))
    whole.update(key, value, 0)
    whole.update_indexer(index, 0) if shape.latent else None
    for first, count in ((0, 5), (5, 1), (6, 20), (26, 6)):
        cut.step = part = make_step(Span(first, count, [1, 0]))
        here = [
            torch.zeros(*each.shape[:-2], part.num_padded, each.shape[-1]) for each in (key, value, index)
        ]
        for to, each in zip(here, (key, value, index), strict=True):
            to[..., :count, :] = each[..., first : first + count, :]
        cut.update(here[0], here[1], 0)
        cut.update_indexer(here[2], 0) if shape.latent else None
    assert [cut.block_bytes(0, block) for block in range(2)] == [
        whole.block_bytes(0, block) for block in range(2)
    ]


def test_the_padding_of_value_heads_stays_zero() -> None:
    assert HEADS.padded_value_dim == 32
    cache = PagedCache([HEADS], 1)
    cache.step = step = make_step(Span(0, 16, [0]))
    cache.update(*rows_for(HEADS, step), 0)
    assert not cache.values[0][..., 20:].any()


@pytest.mark.parametrize("codes", ALL)
def test_token_bytes_are_what_the_pages_take(codes: torch.dtype | None) -> None:
    pooled = replace(LATENT, has_pools=True)  # its index is not quantised
    shapes = [replace(shape, codes=codes) for shape in (HEADS, LATENT, pooled, LayerShape())]
    cache = PagedCache(shapes, 5)
    for layer, shape in enumerate(shapes):
        assert sum(part.nbytes for part in cache.parts(layer)) == shape.token_bytes * BLOCK_TOKENS * 5
        assert all(len(part) == 5 for part in cache.parts(layer))
        assert len(cache.block_bytes(layer, 3)) == shape.token_bytes * BLOCK_TOKENS


def test_a_blocks_bytes_are_its_keys_then_its_values() -> None:
    cache = PagedCache([HEADS], 2)
    cache.step = step = make_step(Span(0, 16, [1]))
    cache.update(*rows_for(HEADS, step), 0)
    numbers = torch.frombuffer(bytearray(cache.block_bytes(0, 1)), dtype=torch.float32)
    keys = cache.keys[0][1].numel()
    assert torch.equal(numbers[:keys], cache.keys[0][1].flatten())
    assert torch.equal(numbers[keys:], cache.values[0][1].flatten())


def test_running_without_a_step_is_our_own_bug_and_says_so() -> None:
    cache = PagedCache([HEADS], 1)
    with pytest.raises(AssertionError, match="a step must be set"):
        cache.update(torch.zeros(1, 2, 8, 24), torch.zeros(1, 2, 8, 20), 0)
