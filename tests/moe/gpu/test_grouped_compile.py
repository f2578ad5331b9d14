"""The grouped product in every format, compiled as launched by Qwen3-30B-A3B, gpt-oss-20b, DeepSeek-V3 and Kimi K2 (32 ranks)."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu.tiles import shape_key, tile_of
from moe.gpu import tiles
from moe.gpu.formats import PLAIN, DeviceFormat
from moe.gpu.grouped_kernel import GATES, grouped_rows
from tests.support.gpu.triton_compile import Kernel, check_budget, compile_kernel

TYPES = {"x": "*bf16", "codes": "*bf16", "places": "*i32", "offsets": "*i64", "out": "*bf16"}
ABSENT = ("scales", "row_scales", "zeros", "biases", "rows")
ROWS, BIASES = {"rows": "*i64"}, {"biases": "*bf16"}


class Shape(NamedTuple):
    """S, N, K, a gate, and the format of weights."""

    slots: int
    N: int
    K: int
    gate: str
    types: dict[str, str]  # types of the launch's arguments
    form: DeviceFormat = PLAIN


FP8 = {"codes": "*fp8e4nv", "scales": "*fp32"}, DeviceFormat("e4m3", "float", 128, 128)
FP8_ROWS = {"codes": "*fp8e4nv", "scales": "*bf16"}, DeviceFormat("e4m3", "float", 7168)
MXFP8 = {"codes": "*fp8e4nv", "scales": "*u8"}, DeviceFormat("e4m3", "e8m0", 32)
MXFP4 = {"codes": "*u8", "scales": "*u8", **BIASES}, DeviceFormat("e2m1", "e8m0", 32)
NVFP4 = {"codes": "*u8", "scales": "*u8", "row_scales": "*fp32"}, DeviceFormat("e2m1", "e4m3", 16)
INT4 = {"codes": "*u8", "scales": "*bf16"}, DeviceFormat("int4", "float", 32)
AWQ = {"codes": "*u8", "scales": "*fp16", "zeros": "*u8"}, DeviceFormat("int4", "float", 128)
INT8 = {"codes": "*i8", "scales": "*fp32"}, DeviceFormat("int8", "float", 7168)


def stored(
    slots: int, N: int, K: int, gate: str, kept: tuple[dict[str, str], DeviceFormat], *, by_map: bool = True
) -> Shape:
    """Return a shape with quantised weights."""
    return Shape(slots, N, K, gate, {**kept[0], **(ROWS if by_map else {})}, kept[1])


SHAPES = {
    "qwen3_up": Shape(128, 768, 2048, "silu", ROWS),
    "qwen3_down": Shape(128, 2048, 768, "none", {}),
    "gpt_oss_bf16_up": Shape(32, 2880, 2880, "swiglu_oai", {**ROWS, **BIASES}),
    "gpt_oss_up": stored(32, 2880, 2880, "swiglu_oai", MXFP4),
    "gpt_oss_down": stored(32, 2880, 2880, "none", MXFP4, by_map=False),
    "deepseek_up": stored(9, 2048, 7168, "silu", FP8),
    "deepseek_down": stored(9, 7168, 2048, "none", FP8, by_map=False),
    "gelu": Shape(8, 4096, 1024, "gelu", ROWS),
    "gelu_tanh": Shape(8, 4096, 1024, "gelu_tanh", ROWS),
    "fp8_rows_up": stored(9, 2048, 7168, "silu", FP8_ROWS),
    "mxfp8_up": stored(9, 2048, 7168, "silu", MXFP8),
    "nvfp4_up": stored(9, 2048, 7168, "silu", NVFP4),
    "nvfp4_down": stored(9, 7168, 2048, "none", NVFP4, by_map=False),
    "int4_up": stored(12, 2048, 7168, "silu", INT4),
    "awq_up": stored(12, 2048, 7168, "silu", AWQ),
    "awq_down": stored(12, 7168, 2048, "none", AWQ, by_map=False),
    "int8_up": stored(12, 2048, 7168, "silu", INT8),
}
FAST = [
    ("qwen3_up", "DECODE"), ("gpt_oss_down", "DECODE"), ("deepseek_down", "PREFILL"), ("nvfp4_up", "DECODE"),
    ("awq_up", "PREFILL"),
]  # fmt: skip


def kernel_of(shape: Shape, tile_name: str, arch: int = 90) -> Kernel:
    """Return a launch of `grouped_linear` on an architecture."""
    slots, N, K, gate, own_types, form = shape
    is_plain = form == PLAIN
    fallback = getattr(tiles, f"{'' if is_plain else 'QUANTISED_'}{tile_name}_TILE")
    key = shape_key("bfloat16" if is_plain else form.kind, N=N if gate == "none" else 2 * N, K=K)
    tile = tile_of(f"grouped_{tile_name.lower()}", key, fallback, (f"sm_{arch}",))
    types = {**TYPES, **own_types}
    if arch < 89 and form.kind == "e4m3":
        types["codes"] = "*u8"  # as `grouped_linear` passes them to a GPU without this type
    constants = {
        **{name: None for name in ABSENT if name not in types}, "S": slots, "S_PAD": 1 << (slots - 1).bit_length(), "N": N,
        "K": K, "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "GROUP": tile.group,
        "GATE": GATES[gate], "KIND": form.kind, "SCALE": form.scale, "BLOCK": form.block, "SCALE_ROWS": form.rows,
    }  # fmt: skip
    return Kernel(grouped_rows, types, constants, tile.warps, 255, tile.stages, fuses=True, aligned=True)


def check(name: str, tile: str, arch: int, folder: Path) -> None:
    check_budget(kernel_of(SHAPES[name], tile, arch), folder, arch)


@pytest.mark.parametrize(("shape", "tile"), FAST)
def test_common_launches_compile_within_their_budget(shape: str, tile: str, tmp_path: Path) -> None:
    check(shape, tile, 90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("tile", ["DECODE", "PREFILL"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_compiles_within_its_budget(shape: str, tile: str, arch: int, tmp_path: Path) -> None:
    """FP8 runs in its own process: triton fixes the conversion at the first architecture that a process compiles for."""
    if SHAPES[shape].form.kind != "e4m3" or arch == 80:
        check(shape, tile, arch, tmp_path)
        return
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        own.submit(check, shape, tile, arch, tmp_path).result(timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "arch", "instruction"),
    [
        ("qwen3_up", 80, r"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("qwen3_up", 90, r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.bf16.bf16"),
        ("int4_up", 90, r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.bf16.bf16"),
        ("gpt_oss_up", 90, r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.bf16.bf16"),
    ],
)
def test_decode_and_prefill_multiply_with_the_same_instruction(
    shape: str, arch: int, instruction: str
) -> None:
    """It takes the same number of features in both, so that a row's sums have the same order and roundings."""
    for tile in ("DECODE", "PREFILL"):
        found = re.findall(
            r"\b(?:mma|wgmma\.mma_async)\.\S*", compile_kernel(kernel_of(SHAPES[shape], tile, arch), arch).ptx
        )
        assert found
        assert all(re.fullmatch(instruction, name) for name in found), set(found)
