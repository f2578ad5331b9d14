"""Kernels for products with decoded weights, compiled as launched by gpt-oss-20b, DeepSeek-V3 and Kimi K2."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.gpu.limits import TILE_INPUTS
from moe.gpu.products import widened
from moe.gpu.products.widened_kernel import order_rows, widen_tiles
from moe.gpu.weights.formats import DeviceFormat, codes_per_word
from tests.moe.gpu.products.test_grouped_compile import INT4, MXFP4, MXFP8, NVFP4
from tests.support.gpu.triton_compile import Kernel, check_budget

AWQ_64 = {"codes": "*u8", "scales": "*fp16", "zeros": "*u8"}, DeviceFormat("int4", "float", 64)
INT8 = {"codes": "*i8", "scales": "*bf16"}, DeviceFormat("int8", "float", 32)
# Out features, in features, and the format of weights.
SHAPES = {
    "gpt_oss_up": (5760, 2880, MXFP4),
    "nvfp4_up": (4096, 7168, NVFP4),
    "nvfp4_down": (7168, 2048, NVFP4),
    "int4_up": (4096, 7168, INT4),
    "awq_down": (7168, 2048, AWQ_64),
    "mxfp8_up": (4096, 7168, MXFP8),
    "int8_up": (4096, 7168, INT8),
}
MOST_REGISTERS = 80  # at least six programs per multiprocessor, so that some read while others write


def decoding(height: int, K: int, types: dict[str, str], form: DeviceFormat) -> Kernel:
    """Return the launch of `widen`."""
    word = codes_per_word(form, K)
    parts = {"places": "*i32", "offsets": "*i64", "out": "*bf16", **types}
    if word > 1:
        parts["codes"] = "*i32"
    constants = {
        "zeros": None, "HEIGHT": height, "K": K, "COLUMNS": widened._COLUMNS, "INNER": TILE_INPUTS, "KIND": form.kind,
        "SCALE": form.scale, "BLOCK": form.block, "SCALE_ROWS": form.rows, "WORD": word,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name not in parts}
    return Kernel(widen_tiles, parts, constants, widened._WARPS, MOST_REGISTERS, fuses=True, aligned=True)


def ordering(K: int, *, has_offsets: bool) -> Kernel:
    """Return the launch that copies rows in the order of words of 8-bit codes."""
    types = {"x": "*bf16", "out": "*bf16", "num_rows": "i32", **({"offsets": "*i64"} if has_offsets else {})}
    constants = {"S": 32, "K": K, "ROWS": widened._ROWS, "INNER": TILE_INPUTS, "WORD": 4}
    if not has_offsets:
        constants["offsets"] = None  # type: ignore[assignment]
    return Kernel(order_rows, types, constants, widened._WARPS, MOST_REGISTERS, fuses=True, aligned=True)


def check(kernel: Kernel, folder: Path, arch: int) -> None:
    compiled = check_budget(kernel, folder, arch)
    stores = re.findall(r"st\.global\S*", compiled.ptx)
    assert stores and set(stores) == {"st.global.v4.b32"}, "16 bytes at a time"


@pytest.mark.parametrize("shape", ["gpt_oss_up", "nvfp4_down"])
def test_common_weights_are_decoded_by_small_programs(shape: str, tmp_path: Path) -> None:
    height, K, stored = SHAPES[shape]
    check(decoding(height, K, *stored), tmp_path, 90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_decoded_by_small_programs(shape: str, arch: int, tmp_path: Path) -> None:
    height, K, stored = SHAPES[shape]
    check(decoding(height, K, *stored), tmp_path, arch)


@pytest.mark.parametrize("has_offsets", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_are_copied_16_bytes_at_a_time(has_offsets: bool, tmp_path: Path) -> None:
    check(ordering(7168, has_offsets=has_offsets), tmp_path, 90)
