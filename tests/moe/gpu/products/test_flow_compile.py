"""The grouped product of many rows, compiled for Hopper as Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3 launch it in bfloat16."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu.tiles import shape_key, tile_of
from moe.gpu.products.flow_kernel import flow_rows
from moe.gpu.products.grouped_kernel import GATES
from moe.gpu.products.tiles import FLOW, FLOW_TILE, SINGLE_FLOW_TILE, FlowTile
from tests.support.gpu.triton_compile import Compiled, Kernel, check_compiled, compile_kernel, waits_in_loops

WIDEST = "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"


class Shape(NamedTuple):
    """S, N, K, a gate, and the arguments that a launch may lack."""

    slots: int
    N: int
    K: int
    gate: str
    has_map: bool
    has_bias: bool = False
    has_scales: bool = False


SHAPES = {
    "qwen3_up": Shape(128, 768, 2048, "silu", has_map=True),
    "qwen3_down": Shape(128, 2048, 768, "none", has_map=False),
    "gpt_oss_up": Shape(32, 2880, 2880, "swiglu_oai", has_map=True, has_bias=True),
    "gpt_oss_down": Shape(32, 2880, 2880, "none", has_map=False, has_bias=True),
    "deepseek_up": Shape(16, 2048, 7168, "silu", has_map=False),
    "deepseek_down": Shape(16, 7168, 2048, "none", has_map=False),
    "deepseek_nvfp4_up": Shape(16, 2048, 7168, "silu", has_map=True, has_scales=True),
    "deepseek_nvfp4_down": Shape(16, 7168, 2048, "none", has_map=False, has_scales=True),
    "gelu": Shape(8, 4096, 1024, "gelu", has_map=True),
}
FAST = ("qwen3_up", "qwen3_down")


def tile_for(shape: Shape) -> FlowTile:
    has_gate = shape.gate != "none"
    key = shape_key("bfloat16", N=2 * shape.N if has_gate else shape.N, K=shape.K)
    return tile_of(FLOW, key, FLOW_TILE if has_gate else SINGLE_FLOW_TILE, ("NVIDIA H200", "sm_90"))


def kernel_of(shape: Shape) -> Kernel:
    """Return a launch of `grouped_linear`."""
    slots, N, K, gate, has_map, has_bias, has_scales = shape
    tile, sides = tile_for(shape), 1 if gate == "none" else 2
    types = {
        "places": "*i32", "offsets": "*i64", "out": "*bf16",
        "w_tiles": f"tensordesc<bf16[{sides}, {tile.columns}, {tile.inner}]>",
        **({"x": "*bf16", "rows": "*i64"} if has_map else {"x_tiles": f"tensordesc<bf16[{tile.rows}, {tile.inner}]>"}),
        **({"biases": "*bf16"} if has_bias else {}),
        **({"row_scales": "*fp32"} if has_scales else {}),
    }  # fmt: skip
    constants = {
        **{name: None for name in ("x", "x_tiles", "rows", "row_scales", "biases") if name not in types}, "S": slots,
        "S_PAD": 1 << (slots - 1).bit_length(), "N": N, "K": K, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "INNER": tile.inner, "GROUP": tile.group, "GATE": GATES[gate],
    }  # fmt: skip
    return Kernel(flow_rows, types, constants, tile.warps, 255, tile.stages, fuses=True, aligned=True)


@cache
def compiled_for(name: str) -> Compiled:
    """Compile the launch of a shape, once for all tests."""
    return compile_kernel(kernel_of(SHAPES[name]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHAPES]
)
def test_copies_run_ahead_of_the_widest_products(name: str, tmp_path: Path) -> None:
    """Copies of the stages but one are in flight, also across tiles, and one product while the next is issued."""
    shape = SHAPES[name]
    tile, compiled = tile_for(shape), compiled_for(name)
    check_compiled(compiled, 255, tmp_path)
    assert set(re.findall(r"wgmma\.mma_async\S*", compiled.ptx)) == {WIDEST}
    assert compiled.ttgir.count("scf.for") == 1, "tiles and inputs have separate loops"
    loop = compiled.ttgir.partition("scf.for")[2]
    assert "pendings = 1" in loop and "async_tma_copy_global_to_local" in loop
    if shape.has_map:
        assert set(waits_in_loops(compiled.ttgir)) == {tile.stages - 2}
        assert len(re.findall(r"cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], 0x10", compiled.ptx)) > 0


def test_products_are_added_to_one_sum_in_the_order_of_the_inputs() -> None:
    """As by the kernel for few rows, so a row has the same bits."""
    shape = SHAPES["qwen3_down"]
    ptx = compiled_for("qwen3_down").ptx
    sums = re.findall(rf"{re.escape(WIDEST)} \{{(%\w+)[^}}]*\}}", ptx)
    assert len(sums) == tile_for(shape).inner // 16 and len(set(sums)) == 1
