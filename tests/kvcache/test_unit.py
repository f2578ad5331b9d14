"""Exported units: a record has every part of every kind of layer, and its checksum, equal on all devices, changes with any byte."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.codes import E4M3, INT8
from kvcache.gpu.cache import DeviceCache
from kvcache.gpu.unit import DeviceUnit
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache, StateShape
from kvcache.unit import CacheUnit, Unit, block_parts, layout_of, state_parts, sum_of
from tests.support.cached_codes import ALL

SHAPES = [
    LayerShape(num_kv_heads=2, key_dim=8, value_dim=12, window=32),
    LayerShape(num_kv_heads=1, key_dim=40, latent=True, index_dim=4),
    LayerShape(state=StateShape(tail=(3, 5), recurrent=(2, 3, 4))),
    LayerShape(num_kv_heads=1, key_dim=4, value_dim=4, state=StateShape(tail=(1, 2), recurrent=(7,))),
]


def filled_cache(kind: str, codes: torch.dtype | None = None) -> PagedCache:
    """Return a cache of random bytes in every part of five blocks and three slots."""
    shapes = [replace(shape, codes=codes) for shape in SHAPES]
    if kind == "paged":
        cache = PagedCache(shapes, 5, 3)
    else:
        cache = DeviceCache(shapes, 5, 3, dtype=torch.bfloat16, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for part in (*block_parts(cache), *state_parts(cache)):
        if part.numel():
            flat = part.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8))
    return cache


def units(kind: str, cache: PagedCache) -> list[tuple[Unit, list[Tensor]]]:
    make = CacheUnit if kind == "paged" else DeviceUnit
    return [(make(parts), parts) for parts in (block_parts(cache), state_parts(cache))]


@pytest.mark.parametrize("kind", ["paged", "device"])
@pytest.mark.parametrize("codes", ALL)
def test_a_record_has_all_bytes_of_its_index_and_gives_them_back(
    kind: str, codes: torch.dtype | None
) -> None:
    cache = filled_cache(kind, codes)
    for unit, parts in units(kind, cache):
        parts = [part for part in parts if part.numel()]
        copies = [part.clone() for part in parts]
        buffers, checksum = unit.export(1)
        record = b"".join(bytes(buffer) for buffer in buffers)
        expected = b"".join(
            part[1].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts
        )
        assert record == expected and len(record) == unit.num_bytes
        assert checksum == sum_of([part[1].contiguous() for part in parts])
        place = 0
        for buffer in unit.buffers(2):
            buffer[:] = record[place : place + len(buffer)]
            place += len(buffer)
        assert unit.take(2) == checksum
        for part, copy in zip(parts, copies, strict=True):
            copy[2:3] = copy[1:2]
            assert torch.equal(part.view(torch.uint8), copy.view(torch.uint8))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find all tensors that are not empty in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield from [value] if value.numel() else []
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


@pytest.mark.parametrize("kind", ["paged", "device"])
@pytest.mark.parametrize("codes", ALL)
def test_no_tensor_of_a_cache_is_left_out_of_its_units(kind: str, codes: torch.dtype | None) -> None:
    """A new kind of state in a cache must be exported, too."""
    cache = filled_cache(kind, codes)
    parts = [*block_parts(cache), *state_parts(cache)]
    held = {each.data_ptr() for each in tensors_in(vars(cache))}
    assert held == {part.data_ptr() for part in parts if part.numel()}
    assert len(held) > 2 * len(SHAPES)


@pytest.mark.parametrize("kind", ["paged", "device"])
@pytest.mark.parametrize("codes", ALL)
def test_a_block_s_record_has_the_scales_of_its_codes(kind: str, codes: torch.dtype | None) -> None:
    cache = filled_cache(kind, codes)
    of_blocks, _ = units(kind, cache)[0]
    token_bytes = sum(
        shape.token_bytes if kind == "paged" else shape.device_token_bytes(2) for shape in cache.shapes
    )
    assert of_blocks.num_bytes == BLOCK_TOKENS * token_bytes


def test_the_devices_agree_on_the_checksum() -> None:
    generator = torch.Generator().manual_seed(2)
    parts = [
        torch.randint(256, (2, size), generator=generator, dtype=torch.uint8) for size in (4, 64, 1000, 8)
    ]
    _, on_cpu = CacheUnit(parts).export(1)
    _, on_device = DeviceUnit(parts).export(1)
    words = torch.cat([part[1] for part in parts]).numpy().view("<u4").tolist()
    weights = [(0xD1B54A32D192ED03 + 0x9E3779B97F4A7C14 * place) % 2**64 for place in range(len(words))]
    by_definition = sum(word * weight for word, weight in zip(words, weights, strict=True)) % 2**64
    assert on_cpu == on_device == by_definition


@settings(deadline=None, max_examples=60)
@given(at=st.integers(0, 399), change=st.integers(1, 255), seed=st.integers(0, 5))
def test_any_changed_byte_and_any_exchange_changes_the_checksum(at: int, change: int, seed: int) -> None:
    content = torch.randint(256, (1, 400), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    unit = CacheUnit([content])
    before = unit.take(0)
    content[0, at] ^= change
    assert unit.take(0) != before
    content[0, at] ^= change
    words, other = content.view(torch.int32), (at // 4 + 1 + seed) % 100
    if words[0, at // 4] != words[0, other]:
        words[0, [at // 4, other]] = words[0, [other, at // 4]]
        assert unit.take(0) != before


def test_parts_of_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="a part of a record has 6 bytes, not a multiple of 4"):
        CacheUnit([torch.zeros(3, 6, dtype=torch.uint8)])


def test_the_layout_tells_caches_apart() -> None:
    plain = [filled_cache(kind) for kind in ("paged", "device")]
    coded = [filled_cache(kind, codes) for kind in ("paged", "device") for codes in (INT8, E4M3)]
    paged = plain[0]
    more = PagedCache([*SHAPES, SHAPES[0]], 5, 3)
    digests = {layout_of(cache, {}) for cache in (*plain, *coded, more)}
    digests.add(layout_of(paged, {"checkpoint": "x"}))
    assert len(digests) == 8
    assert layout_of(paged, {}) == layout_of(PagedCache(SHAPES, 9, 4), {}), (
        "the sizes of the pools do not matter"
    )
