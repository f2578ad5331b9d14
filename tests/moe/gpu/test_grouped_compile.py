"""The grouped product compiled as Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3 (one of 32 ranks) would launch it."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu.tiles import shape_key, tile_of
from moe.gpu import tiles
from moe.gpu.grouped_kernel import grouped_rows
from tests.support.gpu.triton_compile import Kernel, check_budget, compile_kernel

TYPES = {
    "x": "*bf16", "rows": "*i64", "weights": "*bf16", "scales": "constexpr",
    "biases": "constexpr", "places": "*i32", "offsets": "*i64", "out": "*bf16",
}  # fmt: skip
ABSENT = {"scales": None, "biases": None, "rows": None}
FP8 = {"weights": "*fp8e4nv", "scales": "*fp32"}
MXFP4 = {"weights": "*u8", "scales": "*u8", "biases": "*bf16"}
SHAPES: dict[str, dict[str, Any]] = {  # S, N, K, gate and format
    "qwen3_up": {"S": 128, "N": 768, "K": 2048, "GATE": 1, "FORMAT": 0, "types": {}},
    "qwen3_down": {"S": 128, "N": 2048, "K": 768, "GATE": 0, "FORMAT": 0, "types": {"rows": "constexpr"}},
    "gpt_oss_bf16_up": {"S": 32, "N": 2880, "K": 2880, "GATE": 2, "FORMAT": 0, "types": {"biases": "*bf16"}},
    "gpt_oss_up": {"S": 32, "N": 2880, "K": 2880, "GATE": 2, "FORMAT": 2, "types": MXFP4},
    "gpt_oss_down": {"S": 32, "N": 2880, "K": 2880, "GATE": 0, "FORMAT": 2, "types": {**MXFP4, "rows": "constexpr"}},
    "deepseek_up": {"S": 9, "N": 2048, "K": 7168, "GATE": 1, "FORMAT": 1, "types": FP8},
    "deepseek_down": {"S": 9, "N": 7168, "K": 2048, "GATE": 0, "FORMAT": 1, "types": {**FP8, "rows": "constexpr"}},
    "gelu": {"S": 8, "N": 4096, "K": 1024, "GATE": 3, "FORMAT": 0, "types": {}},
    "gelu_tanh": {"S": 8, "N": 4096, "K": 1024, "GATE": 4, "FORMAT": 0, "types": {}},
}  # fmt: skip
WEIGHTS = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)  # by format
FAST = [("qwen3_up", "DECODE"), ("gpt_oss_down", "DECODE"), ("deepseek_down", "PREFILL")]


def kernel_of(shape: str, tile_name: str, arch: int = 90) -> Kernel:
    """A launch of `grouped_linear` on an architecture."""
    sizes = dict(SHAPES[shape])
    types = {**TYPES, **sizes.pop("types")}
    prefix = "FP8_" if sizes["FORMAT"] else ""
    fallback = getattr(tiles, f"{prefix}{tile_name}_TILE")
    height, width = sizes["N"] * (2 if sizes["GATE"] else 1), sizes["K"] // (2 if sizes["FORMAT"] == 2 else 1)
    key = shape_key(WEIGHTS[sizes["FORMAT"]], N=height, K=width)
    tile = tile_of(f"grouped_{tile_name.lower()}", key, fallback, (f"sm_{arch}",))
    constants = {
        **{name: None for name in ABSENT if types[name] == "constexpr"}, **sizes,
        "S_PAD": 1 << (sizes["S"] - 1).bit_length(), "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner,
        "GROUP": tile.group, "HAS_ROWS": types["rows"] != "constexpr", "HAS_BIAS": types["biases"] != "constexpr",
    }  # fmt: skip
    return Kernel(grouped_rows, types, constants, tile.warps, 255, tile.stages, fuses=True, aligned=True)


def check(shape: str, tile: str, arch: int, folder: Path) -> None:
    """FP8 is a type from sm_89 on."""
    if arch == 80 and SHAPES[shape]["FORMAT"] == 1:
        pytest.skip("sm_80 has no FP8 type; such weights need sm_89 or later")
    check_budget(kernel_of(shape, tile, arch), folder, arch)


@pytest.mark.parametrize(("shape", "tile"), FAST)
def test_common_launches_compile_within_their_budget(shape: str, tile: str, tmp_path: Path) -> None:
    check(shape, tile, 90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("tile", ["DECODE", "PREFILL"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_compiles_within_its_budget(shape: str, tile: str, arch: int, tmp_path: Path) -> None:
    """FP8 in a process of its own: how triton converts it is settled by the first architecture that a process compiles for."""
    if SHAPES[shape]["FORMAT"] != 1 or arch == 80:
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
        ("gpt_oss_up", 90, r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.bf16.bf16"),
    ],
)
def test_decode_and_prefill_multiply_with_the_same_instruction(
    shape: str, arch: int, instruction: str
) -> None:
    """Which takes as many features at a time in both, so that a row's sums have the same order and roundings."""
    for tile in ("DECODE", "PREFILL"):
        found = re.findall(
            r"\b(?:mma|wgmma\.mma_async)\.\S*", compile_kernel(kernel_of(shape, tile, arch), arch).ptx
        )
        assert found
        assert all(re.fullmatch(instruction, name) for name in found), set(found)
