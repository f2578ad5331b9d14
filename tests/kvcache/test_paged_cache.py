"""Pages hold the rows written at the step's positions, and nothing else."""

import pytest
import torch

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache
from kvcache.step import Span, Step

HEADS = LayerShape(num_kv_heads=2, key_dim=24, value_dim=20)
LATENT = LayerShape(num_kv_heads=1, key_dim=24, value_dim=0, latent=True)


def make_step(*spans: Span) -> Step:
    """Return a filled step."""
    step = Step(max_tokens=64, max_sequences=4, max_blocks=4, block_tokens=BLOCK_TOKENS)
    step.fill(spans)
    return step


def rows_for(shape: LayerShape, step: Step, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows as a layer passes them, including padding."""
    generator = torch.Generator().manual_seed(seed)
    dims = (16, 8) if shape.latent else (shape.key_dim, shape.value_dim)
    key, value = (
        torch.randn(1, shape.num_kv_heads, step.num_padded, dim, generator=generator) for dim in dims
    )
    return key, value


def read(cache: PagedCache, layer: int, slot: int) -> torch.Tensor:
    """Return one token's key and value from the pages, [heads, key_dim + value_dim]."""
    block, offset = divmod(slot, BLOCK_TOKENS)
    shape = cache.shapes[layer]
    if shape.latent:
        return cache.keys[layer][block, offset, : shape.key_dim][None]
    value = cache.values[layer][block, :, offset, : shape.value_dim]
    return torch.cat((cache.keys[layer][block, :, :, offset], value), dim=-1)


@pytest.mark.parametrize("shape", [HEADS, LATENT], ids=["heads", "latent"])
def test_every_row_lands_at_its_place_in_its_own_layer(shape: LayerShape) -> None:
    cache = PagedCache([shape, shape], 6)
    cache.step = step = make_step(Span(0, 20, [4, 1]), Span(33, 1, [0, 2, 5]))
    key, value = rows_for(shape, step)
    same_key, same_value = cache.update(key, value, 1)
    assert same_key is key and same_value is value
    written = torch.cat((key[0], value[0]), dim=-1)
    for row in range(step.num_tokens):
        assert torch.equal(read(cache, 1, int(step.cache_slot_T[row])), written[:, row])
    assert not cache.keys[0].any() and not cache.values[0].any()


@pytest.mark.parametrize("shape", [HEADS, LATENT], ids=["heads", "latent"])
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


@pytest.mark.parametrize("shape", [HEADS, LATENT], ids=["heads", "latent"])
def test_a_block_starts_clean_for_its_new_owner(shape: LayerShape) -> None:
    cache = PagedCache([shape], 2)
    cache.keys[0].fill_(float("nan"))
    cache.values[0].fill_(float("inf"))
    cache.step = step = make_step(Span(0, 1, [1]))
    cache.update(*rows_for(shape, step), 0)
    assert cache.keys[0][1].isfinite().all()
    assert shape.latent or cache.values[0][1].isfinite().all()
    assert cache.keys[0][0].isnan().all(), "blocks of other sequences must not be touched"


def test_the_padding_of_value_heads_stays_zero() -> None:
    assert HEADS.padded_value_dim == 32
    cache = PagedCache([HEADS], 1)
    cache.step = step = make_step(Span(0, 16, [0]))
    cache.update(*rows_for(HEADS, step), 0)
    assert not cache.values[0][..., 20:].any()


def test_token_bytes_are_what_the_pages_take() -> None:
    cache = PagedCache([HEADS, LATENT], 5)
    for layer, shape in enumerate((HEADS, LATENT)):
        pages = cache.keys[layer].nbytes + cache.values[layer].nbytes
        assert pages == shape.token_bytes * BLOCK_TOKENS * 5
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
