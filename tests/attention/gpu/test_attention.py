"""The GPU kernels against the plain oracle in Triton's interpreter, and compiled for GPUs without one.

The interpreter multiplies and rounds bfloat16 wrongly, so float16 stands for the short types.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import reference
from kvcache.step import Span, Step
from tests.support.ranks import RankPool

pytestmark = (
    pytest.mark.skipif(  # looked for, not imported: ranks import this before they choose to interpret
        find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
    )
)

BLOCK = 16
SHAPES = [(8, 2, 64, 64), (3, 3, 24, 16), (16, 1, 80, 48)]  # H, G, D, V
OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"window": 40, "soft_cap": 3.0}, {"sinks": True}]


def make_step(spans: list[tuple[int, int]], seed: int = 0) -> tuple[Step, int]:
    """Put every sequence on shuffled blocks; returns the step and the number of blocks."""
    order = torch.randperm(sum(-(-sum(span) // BLOCK) for span in spans) + 3).tolist()
    num_blocks, placed = len(order), []
    step = Step(max_tokens=600, max_sequences=8, max_blocks=64, block_tokens=BLOCK)
    for start, length in spans:
        count = -(-(start + length) // BLOCK)
        placed.append(Span(start, length, order[:count]))
        order = order[count:]
    step.fill(placed)
    return step, num_blocks


def make_pages(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_blocks, kv_heads, BLOCK, dim).to(dtype)


def keywords_of(options: dict[str, Any], heads: int) -> dict[str, Any]:
    keywords = {name: value for name, value in options.items() if name != "sinks"}
    if "sinks" in options:
        keywords["sinks_H"] = torch.linspace(-1, 2, heads)
    return keywords


def oracle(query_THD: Tensor, keys: Tensor, values: Tensor, step: Step, **keywords: Any) -> Tensor:
    """Attend in float32."""
    query = query_THD.float().transpose(0, 1)
    return reference.paged_attention(
        query, keys.float().transpose(2, 3), values.float(), step, scale=0.2, **keywords
    )


def check_close(ours: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(ours.float(), want, atol=tolerance, rtol=tolerance)


def decode_all(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """All options, contexts on both sides of blocks and splits, and a padded row."""
    os.environ["TRITON_INTERPRET"] = "1"
    from attention.gpu.decode import DecodeScratch, paged_decode  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    heads, kv_heads, key_dim, value_dim = shape
    step, num_blocks = make_step([(0, 1), (15, 1), (16, 1), (63, 1), (511, 1), (600, 1)])
    keys, values = (make_pages(num_blocks, kv_heads, dim, dtype) for dim in (key_dim, value_dim))
    query = torch.randn(7, heads, key_dim).to(dtype)
    scratch = DecodeScratch(
        max_sequences=8, heads=heads, value_dim=value_dim, max_tokens=640, device=query.device
    )
    for options in OPTIONS:
        keywords = keywords_of(options, heads)
        arguments = (step.context_S[:7], step.block_table_SM[:7], scratch)
        ours = paged_decode(query, keys, values, *arguments, scale=0.2, **keywords)
        want = oracle(query, keys, values, step, **keywords)
        check_close(ours[:6], want[:6], dtype)
        assert (ours[6] == 0).all()
        for row in (2, 5):
            only = slice(row, row + 1)
            alone = paged_decode(
                query[only], keys, values, step.context_S[only], step.block_table_SM[only], scratch, scale=0.2, **keywords
            )  # fmt: skip
            assert torch.equal(alone[0], ours[row])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_the_oracle_and_a_row_does_not_depend_on_others(
    interpreter: RankPool, shape: tuple[int, int, int, int]
) -> None:
    interpreter.run(decode_all, shape, torch.float32)


@pytest.mark.slow
def test_decode_of_a_short_type_is_near_the_oracle(interpreter: RankPool) -> None:
    interpreter.run(decode_all, SHAPES[0], torch.float16)


def prefill_all(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """All options over mixed rows; then the same rows in other chunks (equal bits take a GPU: numpy blocks rows)."""
    os.environ["TRITON_INTERPRET"] = "1"
    from attention.gpu.prefill import paged_prefill, tile_tokens  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    heads, kv_heads, key_dim, value_dim = shape
    step, num_blocks = make_step([(0, 1), (37, 1), (0, 21), (16, 40), (100, 3)])
    tables = [step.block_table_SM[i].tolist() for i in range(5)]
    keys, values = (make_pages(num_blocks, kv_heads, dim, dtype) for dim in (key_dim, value_dim))
    query = torch.randn(step.num_padded, heads, key_dim).to(dtype)

    def attend(rows: Tensor, keywords: dict[str, Any]) -> Tensor:
        tiles = torch.from_numpy(step.tiles(tile_tokens(heads, kv_heads)))
        about = (tiles, step.query_start_S, step.context_S, step.block_table_SM)
        return paged_prefill(rows, keys, values, *about, scale=0.2, **keywords)

    for options in OPTIONS:
        keywords = keywords_of(options, heads)
        step.fill(
            [Span(s, n, tables[i]) for i, (s, n) in enumerate([(0, 1), (37, 1), (0, 21), (16, 40), (100, 3)])]
        )
        whole = attend(query, keywords)
        check_close(whole, oracle(query, keys, values, step, **keywords), dtype)
        for begin, count in ((0, 7), (7, 33)):
            step.fill([Span(16 + begin, count, tables[3])])
            rows = query[23 + begin : 23 + begin + count]
            check_close(attend(rows, keywords)[:count], whole[23 + begin : 23 + begin + count].float(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.float16)]
)
def test_prefill_equals_the_oracle_whatever_the_chunks(
    interpreter: RankPool, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    interpreter.run(prefill_all, shape, dtype)


def decode_latents(dtype: torch.dtype) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from attention.gpu.decode import DecodeScratch  # noqa: PLC0415 - in the interpreter
    from attention.gpu.mla import latent_decode  # noqa: PLC0415

    torch.manual_seed(0)
    step, num_blocks = make_step([(0, 1), (31, 1), (520, 1)])
    latents = torch.randn(num_blocks, BLOCK, 64 + 24).to(dtype)
    query = torch.randn(4, 20, 88).to(dtype)
    scratch = DecodeScratch(max_sequences=4, heads=20, value_dim=64, max_tokens=640, device=query.device)
    about = (step.context_S[:4], step.block_table_SM[:4], scratch)
    ours = latent_decode(query, latents, *about, latent_dim=64, scale=0.2)
    pages = latents[:, None]
    check_close(ours[:3], oracle(query, pages, pages[..., :64], step)[:3], dtype)
    assert (ours[3] == 0).all()
    with pytest.raises(ValueError, match="latent_dim is 60; the kernel takes powers of 2"):
        latent_decode(query, latents, *about, latent_dim=60, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_absorbed_latent_decode_equals_the_oracle(interpreter: RankPool, dtype: torch.dtype) -> None:
    interpreter.run(decode_latents, dtype)


def kernels() -> dict[str, Any]:
    """The kernels as the models we know launch them."""
    from attention.gpu.decode import attend_split, merge_splits  # noqa: PLC0415 - not in the interpreter
    from attention.gpu.mla import attend_latent_split  # noqa: PLC0415
    from attention.gpu.prefill import attend_tile  # noqa: PLC0415
    from tests.support.triton_compile import Kernel  # noqa: PLC0415

    pages = {"query": "*bf16", "keys": "*bf16", "values": "*bf16", "context": "*i64", "table": "*i64"}
    parts = {"sums": "*fp32", "tops": "*fp32", "totals": "*fp32"}
    strides = {"query_stride": "i32", "table_stride": "i32", "scale": "fp32"}
    tile = {"sinks": "*fp32", "out": "*bf16", "tiles": "*i64", "query_start": "*i64"}
    sizes = {"BLOCK": 16, "TILE": 32, "SPLIT": 512, "WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": True}
    d128 = {**sizes, "KV_HEADS": 4, "D": 128, "D_PAD": 128, "V": 128, "V_PAD": 128}
    d64 = {**sizes, "KV_HEADS": 8, "D": 64, "D_PAD": 64, "V": 64, "V_PAD": 64, "WINDOW": 128}
    d256 = {**sizes, "KV_HEADS": 8, "D": 256, "D_PAD": 256, "V": 256, "V_PAD": 256, "SOFT_CAP": 50.0}
    merged = {**parts, "context": "*i64", "sinks": "*fp32", "out": "*bf16", "num_splits": "i32"}
    latent = {**pages, **parts, **strides, "latents": "*bf16"}
    prefill = {**pages, **tile, **strides}
    return {
        "decode_qwen3": Kernel(attend_split, pages | parts | strides, {**d128, "GROUP": 8, "ROWS": 16}, 4, 255, 3),
        "decode_gpt_oss": Kernel(attend_split, pages | parts | strides, {**d64, "GROUP": 8, "ROWS": 16}, 4, 255, 3),
        "decode_gemma": Kernel(attend_split, pages | parts | strides, {**d256, "GROUP": 2, "ROWS": 16}, 4, 255, 3),
        "merge": Kernel(merge_splits, merged, {**d128}, 4, 64),
        "decode_latents": Kernel(
            attend_latent_split,
            latent,
            {"H": 128, "HEADS": 16, "L": 512, "E": 64, "E_PAD": 64, "BLOCK": 16, "TILE": 16, "SPLIT": 512},
            8,
            255,
            3,
        ),
        "prefill_qwen3": Kernel(attend_tile, prefill, {**d128, "TILE": 64, "GROUP": 8, "ROWS": 64}, 8, 255),
        "prefill_gpt_oss": Kernel(attend_tile, prefill, {**d64, "TILE": 64, "GROUP": 8, "ROWS": 64}, 8, 255),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["decode_qwen3", "decode_gpt_oss", "decode_gemma", "merge", "decode_latents", "prefill_qwen3", "prefill_gpt_oss"],
)  # fmt: skip
@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_compile_within_their_budget(name: str, arch: int, tmp_path: Path) -> None:
    from tests.support.triton_compile import check_budget  # noqa: PLC0415 - not in the interpreter

    check_budget(kernels()[name], tmp_path, arch)
