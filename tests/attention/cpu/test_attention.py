"""The CPU kernel against the plain oracle, and the independence of its rows."""

import numpy as np
import pytest
import torch

from attention import reference
from attention.cpu import attention as cpu_attention
from kvcache.images import PlacedRows
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from tests.support.cached_codes import ALL, decoded, stored_bytes

SHAPES = [(4, 2, 32, 32), (6, 6, 24, 16), (9, 3, 64, 64), (8, 1, 48, 32)]


def cache_and_step(
    spans: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    seed: int = 0,
    codes: torch.dtype | None = None,
) -> tuple[PagedCache, Step]:
    """Fill pages with every sequence's whole context, on shuffled blocks. The step covers the rows of the spans."""
    _, kv_heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-(start + length) // 16) for start, length in spans]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    of_layer = LayerShape(num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, codes=codes)
    cache = PagedCache([of_layer], len(order))
    step = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=16)
    cache.step = step
    placed = []
    for (start, length), count in zip(spans, blocks, strict=True):
        own, order = order[:count], order[count:]
        placed.append(Span(start, length, own))
        step.fill([Span(0, start + length, own)])
        rows = torch.randn(2, 1, kv_heads, step.num_padded, max(key_dim, value_dim), generator=generator)
        cache.update(rows[0, ..., :key_dim], rows[1, ..., :value_dim], 0)
    step.fill(placed)
    return cache, step


def attend(
    module: object, cache: PagedCache, step: Step, query: torch.Tensor, **options: object
) -> torch.Tensor:
    """Call a `paged_attention`. The reference gets decoded pages."""
    function = module.paged_attention  # type: ignore[attr-defined]
    pages = decoded(cache, 0) if module is reference else (cache.keys[0], cache.values[0])
    result: torch.Tensor = function(query, *pages, step, scale=0.2, **options)
    return result


@pytest.mark.crossed("codes", "options", "shape", every=2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 40}, {"chunk": 5}, {"chunk": 32}, {"sinks": True}]
)
@pytest.mark.parametrize("codes", ALL)
def test_kernel_equals_the_oracle_on_mixed_prefill_and_decode(
    shape: tuple[int, int, int, int], options: dict[str, int | bool], codes: torch.dtype | None
) -> None:
    spans = [(0, 1), (37, 1), (0, 21), (16, 40), (15, 1), (100, 3)]
    cache, step = cache_and_step(spans, shape, codes=codes)
    query = torch.randn(shape[0], step.num_padded, shape[2], generator=torch.Generator().manual_seed(1))
    keywords: dict[str, object] = {name: options[name] for name in ("window", "chunk") if name in options}
    if "sinks" in options:
        keywords["sinks_H"] = torch.linspace(-1, 2, shape[0])
    ours, oracle = (attend(m, cache, step, query, **keywords) for m in (cpu_attention, reference))
    torch.testing.assert_close(ours, oracle, atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("options", [{}, {"chunk": 40}])
@pytest.mark.parametrize("codes", ALL)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    options: dict[str, object], codes: torch.dtype | None
) -> None:
    shape = (4, 2, 32, 32)
    cache, step = cache_and_step([(0, 90), (33, 30)], shape, codes=codes)
    tables = [step.block_table_SM[i].tolist() for i in range(2)]
    query = torch.randn(4, step.num_padded, 32, generator=torch.Generator().manual_seed(1))
    whole = attend(cpu_attention, cache, step, query, **options)
    for sequence, first_row, start, length in [(0, 0, 0, 90), (1, 90, 33, 30)]:
        for chunk in (1, 7, 16):
            for begin in range(0, length, chunk):
                count = min(chunk, length - begin)
                step.fill([Span(start + begin, count, tables[sequence][: -(-(start + begin + count) // 16)])])
                rows = slice(first_row + begin, first_row + begin + count)
                alone = torch.zeros(4, step.num_padded, 32)
                alone[:, :count] = query[:, rows]
                ours = attend(cpu_attention, cache, step, alone, **options)
                assert torch.equal(ours[:count], whole[rows])


def with_images(step: Step) -> Step:
    """Fill a step of two sequences again, with images in the first: one over several blocks and tiles, and a short one."""
    rows = np.zeros((1, 60, 8), np.float32)
    images = [PlacedRows(10, rows), PlacedRows(75, rows[:, :3])]
    tables = [step.block_table_SM[i].tolist() for i in range(2)]
    step.fill([Span(20, 90, tables[0], images=images), Span(33, 30, tables[1])])
    return step


@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize("codes", ALL)
def test_rows_of_an_image_see_its_later_rows_as_in_the_oracle(window: int, codes: torch.dtype | None) -> None:
    cache, step = cache_and_step([(20, 90), (33, 30)], (4, 2, 32, 32), codes=codes)
    query = torch.randn(4, step.num_padded, 32, generator=torch.Generator().manual_seed(1))
    causal = attend(cpu_attention, cache, step, query, window=window)
    with_images(step)
    ours, oracle = (
        attend(each, cache, step, query, window=window, sees_images=True)
        for each in (cpu_attention, reference)
    )
    torch.testing.assert_close(ours, oracle, atol=3e-6, rtol=2e-5)
    sees_more = {*range(10, 69), 75, 76}
    changed = {row for row in range(120) if not torch.equal(ours[row], causal[row])}
    assert changed == sees_more, "only these rows see more, and all others have the same bits"
    assert torch.equal(attend(cpu_attention, cache, step, query, window=window), causal)


@pytest.mark.parametrize("codes", ALL)
def test_stale_values_of_a_reused_block_never_reach_a_new_owner(codes: torch.dtype | None) -> None:
    cache, step = cache_and_step([(0, 16)], (2, 2, 32, 32), codes=codes)
    block = int(step.block_table_SM[0, 0])
    for part in stored_bytes(cache, 0):
        part[block] = 255
    step.fill([Span(0, 1, [block])])
    rows = torch.randn(1, 2, step.num_padded, 32)
    cache.update(rows, rows, 0)
    assert attend(cpu_attention, cache, step, torch.randn(2, step.num_padded, 32)).isfinite().all()
