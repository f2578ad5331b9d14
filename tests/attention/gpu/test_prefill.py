"""Chunked prefill for GPUs against the plain oracle: in Triton's interpreter, and on a GPU if there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.codes import E4M3, INT8
from kvcache.step import Span
from tests.fixtures import OnDevice
from tests.support.gpu.attention import (
    SCALE,
    Heads,
    Paged,
    check_close,
    dtypes_on,
    make_paged,
    oracle,
    some_fast,
)

Spans = list[tuple[int, int]]  # tokens cached, tokens of the step
SMALL = Heads(4, 2, 32, 32)
UNEVEN: Spans = [(0, 1), (37, 1), (0, 21), (16, 40), (64, 3), (5, 64)]
FEW: Spans = [(0, 3), (30, 10)]


def prefill(paged: Paged, query_THD: Tensor, tiles: Tensor | None = None, **options: Any) -> Tensor:
    from attention.gpu.prefill import paged_prefill, tile_tokens  # noqa: PLC0415 - in the interpreter

    (H, D), (G, V) = query_THD.shape[1:], (paged.values_NGBV.shape[1], paged.values_NGBV.shape[3])
    if tiles is None:
        tiles = torch.from_numpy(paged.step.tiles(tile_tokens(H, G, D, V))).to(query_THD.device)
    return paged_prefill(
        query_THD, paged.keys_NGBD, paged.values_NGBV, tiles, paged.step.query_start_S.to(query_THD.device),
        *paged.of(slice(None)), scale=SCALE, scales=paged.scales, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def compare(
    device: str,
    spans: Spans,
    heads: Heads,
    short: torch.dtype,
    options: dict[str, Any],
    codes: torch.dtype | None = None,
) -> None:
    """Compare all rows. Padded rows, which no tile covers, stay zero."""
    if "sinks_H" in options:
        options = {**options, "sinks_H": torch.linspace(-1, 2, heads.heads, device=device)}
    for dtype in dtypes_on(device, short):
        paged = make_paged(spans, heads, dtype, codes).to(device)
        query = torch.randn(paged.step.num_tokens + 2, heads.heads, heads.key_dim).to(device, dtype)
        ours = prefill(paged, query, **options)
        check_close(ours, oracle(query, paged, **options))
        assert not ours[-2:].any()


CASES: dict[str, tuple[Spans, Heads, torch.dtype, dict[str, Any]]] = {
    "uneven chunks over prefixes": (UNEVEN, SMALL, torch.float32, {}),
    "one token": ([(0, 1)], SMALL, torch.float32, {}),
    "one head on each KV head, odd dims": (FEW, Heads(3, 3, 24, 16), torch.float32, {}),
    "group of 8, D 128": (FEW, Heads(8, 1, 128, 128), torch.float32, {}),
    "group of 12, D 96": (FEW, Heads(12, 1, 96, 96), torch.float32, {}),
    "expanded latents, D 192 and V 128": (FEW, Heads(2, 2, 192, 128), torch.float32, {}),
    "D 256, soft cap": (FEW, Heads(2, 1, 256, 256), torch.float32, {"soft_cap": 3.0}),
    "D 512, group of 8": (FEW, Heads(8, 1, 512, 512), torch.float32, {}),
    "chunks within a tile": (UNEVEN, SMALL, torch.float32, {"chunk": 5}),
    "chunks over tiles": ([(37, 1), (30, 70)], SMALL, torch.float32, {"chunk": 40}),
    "long prompt behind a prefix": ([(150, 80), (0, 140)], Heads(2, 1, 16, 16), torch.float32, {}),
    "D 80 in two parts": ([(90, 30)], Heads(2, 2, 80, 32), torch.float32, {}),
    "long window": ([(1200, 70)], Heads(2, 1, 16, 16), torch.float32, {"window": 1024}),
    "long chunk": ([(1000, 60)], Heads(2, 1, 16, 16), torch.float32, {"chunk": 1024}),
    "window within a tile": (UNEVEN, SMALL, torch.float32, {"window": 5}),
    "window, cap and sinks": (
        [(37, 1), (30, 70)],
        SMALL,
        torch.float32,
        {"window": 40, "soft_cap": 3.0, "sinks_H": True},
    ),
    "sinks": (FEW, SMALL, torch.float32, {"sinks_H": True}),
    "float16": (FEW, SMALL, torch.float16, {}),
}


@pytest.mark.parametrize(
    "case", some_fast(CASES, "uneven chunks over prefixes", "window, cap and sinks", "float16")
)
def test_prefill_equals_the_oracle(
    on_device: OnDevice, case: tuple[Spans, Heads, torch.dtype, dict[str, Any]]
) -> None:
    on_device(compare, *case)


CODED: dict[str, tuple[Any, ...]] = {
    "int8": (FEW, SMALL, torch.float32, {}, INT8),
    "fp8": (FEW, SMALL, torch.float32, {}, E4M3),
    "int8, uneven chunks over prefixes": (UNEVEN, SMALL, torch.float32, {}, INT8),
    "fp8, D 80 in two parts": ([(90, 30)], Heads(2, 2, 80, 32), torch.float32, {}, E4M3),
    "int8, long prompt behind a prefix": (
        [(150, 80), (0, 140)],
        Heads(2, 1, 16, 16),
        torch.float32,
        {},
        INT8,
    ),
    "fp8, long window": ([(1200, 70)], Heads(2, 1, 16, 16), torch.float32, {"window": 1024}, E4M3),
    "fp8, float16": (FEW, SMALL, torch.float16, {"sinks_H": True}, E4M3),
}


@pytest.mark.parametrize("case", some_fast(CODED, "int8", "fp8"))
def test_prefill_of_codes_equals_the_oracle(on_device: OnDevice, case: tuple[Any, ...]) -> None:
    on_device(compare, *case)


def see_images(device: str, window: int) -> None:
    """Images within a tile, over two tiles, and at the end of a prompt. Rows of an image attend to each other in both directions."""
    paged = make_paged([(37, 1), (20, 90), (0, 30)], SMALL).to(device)
    ends = paged.step.image_end_T
    for row, length, end in ((3, 10, 32), (40, 35, 94), (105, 16, 30)):
        ends[row : row + length] = end
    query = torch.randn(paged.step.num_tokens, 4, 32).to(device)
    ours = prefill(paged, query, window=window, image_end_T=ends.to(device))
    check_close(ours, oracle(query, paged, window=window, sees_images=True))
    assert not torch.allclose(ours, prefill(paged, query, window=window), atol=1e-2), (
        "the control did not fail"
    )


@pytest.mark.parametrize("window", [0, 8, 40, 1024])
def test_rows_of_an_image_see_its_later_rows(on_device: OnDevice, window: int) -> None:
    on_device(see_images, window)


def cut_otherwise(device: str) -> None:
    """Compare bits. On a GPU, any cut gives equal bits. In the interpreter, numpy's products may differ for a row at another
    position in a tile, so only cuts that keep its position are tested."""
    from attention.gpu.prefill import tile_tokens  # noqa: PLC0415 - in the interpreter

    heads = Heads(8, 1, 32, 32)
    tile = tile_tokens(*heads)
    tokens = tile + 24
    paged = make_paged([(16, tokens)], heads).to(device)
    table = paged.step.block_table_SM[0].tolist()
    query = torch.randn(tokens, 8, 32).to(device)
    whole = prefill(paged, query)
    for cut in (tile, 24, 7):
        for begin, end in ((0, cut), (cut, tokens)):
            paged.step.fill([Span(16 + begin, end - begin, table)])
            part = prefill(paged, query[begin:end])
            check_close(part, whole[begin:end])
            assert (device == "cpu" and cut % tile) or torch.equal(part, whole[begin:end]), (cut, begin)


def test_rows_do_not_depend_on_the_chunk_they_come_in(on_device: OnDevice) -> None:
    on_device(cut_otherwise)


def see_a_permuted_table(device: str) -> None:
    paged = make_paged([(40, 9)], SMALL).to(device)
    query = torch.randn(9, 4, 32).to(device)
    want = oracle(query, paged).to(device)
    table = paged.step.block_table_SM
    table[0, :4] = table[0, :4].roll(1)
    assert not torch.allclose(prefill(paged, query), want, atol=1e-2)


def test_a_wrong_block_table_is_seen(on_device: OnDevice) -> None:
    on_device(see_a_permuted_table)


def pad_tiles(device: str) -> None:
    paged = make_paged([(3, 9)], SMALL).to(device)
    query = torch.randn(9, 4, 32).to(device)
    tiles = torch.tensor([[0, 0, 9], [0, 0, 0]], device=device)
    assert torch.equal(prefill(paged, query, tiles), prefill(paged, query))


def test_a_tile_of_no_tokens_does_nothing(on_device: OnDevice) -> None:
    on_device(pad_tiles)
