"""The grouped product in every format, compiled as launched by Qwen3-30B-A3B, gpt-oss-20b, DeepSeek-V3 and Kimi K2 (32 ranks)."""

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu.tiles import shape_key, tile_of
from moe.gpu.products import tiles
from moe.gpu.products.grouped_kernel import GATES, grouped_rows
from moe.gpu.weights.formats import PLAIN, DeviceFormat, codes_per_word
from tests.support.gpu.triton_compile import (
    Compiled,
    Kernel,
    another,
    check_compiled,
    compile_kernel,
    compile_loops,
    waits_in_loops,
)

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
    ("qwen3_up", "grouped_decode"), ("qwen3_down", "grouped_prefill"), ("gpt_oss_down", "grouped_decode"),
    ("deepseek_down", "grouped_prefill"), ("nvfp4_up", "grouped_64"), ("awq_up", "grouped_32"),
]  # fmt: skip
KERNELS = [each.kernel for each in tiles.RANGES]


def tile_for(shape: Shape, kernel: str, arch: int) -> tiles.GroupedTile:
    """Return the tile of a shape in a range of rows on an architecture."""
    below = next(each.below for each in tiles.RANGES if each.kernel == kernel)
    rows = int(min(below - 1, tiles.MANY_ROWS))
    is_plain, has_gate = shape.form == PLAIN, shape.gate != "none"
    fallback = tiles.choose_tile(rows, 1, is_quantised=not is_plain, has_gate=has_gate)
    key = shape_key(
        "bfloat16" if is_plain else shape.form.kind, N=2 * shape.N if has_gate else shape.N, K=shape.K
    )
    return tile_of(kernel, key, fallback, (f"sm_{arch}",))


def kernel_of(shape: Shape, tile: tiles.GroupedTile) -> Kernel:
    """Return a launch of `grouped_linear`."""
    slots, N, K, gate, own_types, form = shape
    types, word = {**TYPES, **own_types}, codes_per_word(form, K)
    if word > 1:
        types["codes"] = "*i32"  # as `grouped_linear` passes them
    constants = {
        **{name: None for name in ABSENT if name not in types}, "S": slots, "S_PAD": 1 << (slots - 1).bit_length(), "N": N,
        "K": K, "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "GROUP": tile.group,
        "GATE": GATES[gate], "KIND": form.kind, "SCALE": form.scale, "BLOCK": form.block, "SCALE_ROWS": form.rows,
        "WORD": word,
    }  # fmt: skip
    maxnreg = tile.registers if tile.registers < tiles.MOST_REGISTERS else None
    return Kernel(
        grouped_rows, types, constants, tile.warps, tile.registers, tile.stages, fuses=True, aligned=True, maxnreg=maxnreg
    )  # fmt: skip


# The instruction of all tiles. It takes the same number of features in all, so that a row's sums have the same order and roundings.
INSTRUCTIONS = {
    ("qwen3_up", 80): r"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    **dict.fromkeys(
        [("qwen3_up", 90), ("int4_up", 90), ("gpt_oss_up", 90)],
        r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.bf16.bf16",
    ),
}


@cache
def compiled_for(name: str, kernel: str, arch: int) -> Compiled:
    """Compile a launch, once for all tests."""
    return compile_kernel(kernel_of(SHAPES[name], tile_for(SHAPES[name], kernel, arch)), arch)


def check(name: str, kernel: str, arch: int, folder: Path) -> None:
    shape, compiled = SHAPES[name], compiled_for(name, kernel, arch)
    check_compiled(compiled, tile_for(shape, kernel, arch).registers, folder, arch)
    if (name, arch) in INSTRUCTIONS:
        found = re.findall(r"\b(?:mma|wgmma\.mma_async)\.\S*", compiled.ptx)
        assert found
        assert all(re.fullmatch(INSTRUCTIONS[name, arch], each) for each in found), set(found)


@pytest.mark.parametrize(("shape", "kernel"), FAST)
def test_common_launches_compile_within_their_budget(shape: str, kernel: str, tmp_path: Path) -> None:
    check(shape, kernel, 90, tmp_path)


def other_launches() -> list[tuple[str, str, int]]:
    """Return a shape, a range of rows and an architecture for each further tile: ranges may share one.

    Each range of each shape is compiled for sm_90, and each shape for two of the other architectures.
    """
    known = {(shape, 90, tile_for(SHAPES[shape], kernel, 90)) for shape, kernel in FAST}
    found = []
    others = [
        (shape, KERNELS[place], another(place))
        for number, shape in enumerate(SHAPES)
        for place in ((0, 2), (1, 2), (4, 3))[number % 3]
    ]
    for shape, kernel, arch in [*((*pair, 90) for pair in product(SHAPES, KERNELS)), *others]:
        launch = shape, arch, tile_for(SHAPES[shape], kernel, arch)
        if launch not in known:
            known.add(launch)
            found.append((shape, kernel, arch))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kernel", "arch"), other_launches())
def test_every_launch_compiles_within_its_budget(shape: str, kernel: str, arch: int, tmp_path: Path) -> None:
    check(shape, kernel, arch, tmp_path)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ("qwen3_down", tiles.DECODE_TILE),
        ("qwen3_down", tiles.DECODE_TILE._replace(inner=128, stages=3)),
        ("gpt_oss_down", tiles.QUANTISED_DECODE_TILE._replace(inner=64)),
    ],
    ids=["64", "128", "mxfp4, 64"],
)
def test_any_inner_size_chains_the_same_products(shape: str, tile: tiles.GroupedTile) -> None:
    """`check_steps` allows any inner size if a program adds all products to one sum, 16 inputs after another."""
    sums = [
        found.group(1)
        for found in re.finditer(
            r"wgmma\.mma_async\S*k16\S* \{(%\w+)[^}]*\}", compile_kernel(kernel_of(SHAPES[shape], tile)).ptx
        )
    ]
    assert len(sums) == tile.columns // 64 * tile.inner // 16
    assert len(set(sums)) == tile.columns // 64  # the same registers in each product of a tile


def test_decoding_takes_few_instructions_and_reads_16_bytes_at_a_time() -> None:
    """Decode steps of 4-bit weights are limited by instructions: see `moe.gpu.weights.formats`."""
    ptx = compiled_for("gpt_oss_down", "grouped_decode", 90).ptx
    # Scales are copied by 4 bytes, rows and codes by 16.
    assert set(re.findall(r"cp\.async\.ca\S* \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)) <= {"0x4"}
    assert len(re.findall(r"cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], 0x10", ptx)) > 0
    assert len(re.findall(r"mul\S*\.bf16x2", ptx)) == 32  # two values at a time; a scale lifts them, too
    assert "cvt.rn.bf16x2" not in ptx.partition("wgmma.fence")[0]


@pytest.mark.crossed("name", every=3)
@pytest.mark.parametrize("name", ["gpt_oss_up", "nvfp4_up", "int4_up"])
def test_no_tile_of_4_bits_waits_for_a_load_or_a_product(name: str) -> None:
    """Copies fetch rows, codes and scales. The product reads the copied rows, and ends during the next tile."""
    text = compile_loops(kernel_of(SHAPES[name], tile_for(SHAPES[name], "grouped_decode", 90)))
    loops = [
        loop for loop in re.findall(r"scf\.for .*?scf\.yield", text, re.DOTALL) if "warp_group_dot" in loop
    ]
    assert len(loops) == 1
    assert "tt.load" not in loops[0]
    assert "ttg.local_alloc" not in loops[0]
    waits = [int(count) for count in re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", loops[0])]
    assert waits and min(waits) > 0
    assert min(waits_in_loops(text)) > 0
