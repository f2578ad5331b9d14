"""The products in FP8, compiled as launched by DeepSeek-V3 on 32 ranks, and with scales of whole rows."""

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.gpu.products import fp8
from moe.gpu.products.fp8_flow_kernel import flow_fp8_rows
from moe.gpu.products.fp8_kernel import grouped_fp8_rows, quantise_groups, quantise_whole_rows
from moe.gpu.products.grouped_kernel import GATES
from tests.support.gpu.triton_compile import SHARED_LIMITS, Kernel, assemble, check_budget, compile_kernel

SIDES = {"up": (2048, 7168), "down": (7168, 2048)}
# Bytes per thread of the tile with two sums of 128 x 128: part of the state of the loop over tiles.
SPILLED = 64
TYPES = {
    "x": "*fp8e4nv", "x_scales": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32", "places": "*i32", "offsets": "*i64",
}  # fmt: skip
ROWS = {
    "blocks": Kernel(
        quantise_groups, {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "groups": "i32"},
        {"K": 7168, "STEP": 128, "GROUPS": 32}, warps=4, aligned=True,
    ),
    "whole rows": Kernel(
        quantise_whole_rows, {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}, {"K": 7168, "K_PAD": 8192},
        warps=8, aligned=True,
    ),
}  # fmt: skip


def kernel_of(side: str, tile: fp8.AnyTile, *, in_blocks: bool = True) -> Kernel:
    """Return a launch of a layer's first or second product."""
    N, K = SIDES[side]
    is_up, quantises = side == "up", side == "up" and in_blocks
    types = {**TYPES, "out": "*fp8e4nv" if quantises else "*bf16"}
    types |= {"rows": "*i64"} if is_up else {}
    types |= {"out_scales": "*fp32"} if quantises else {}
    sizes = {
        "S": 9, "S_PAD": 16, "N": N, "K": K, "STEP": 128, "ROWS": tile.rows, "COLUMNS": tile.columns, "GROUP": tile.group,
        "GATE": GATES["silu" if is_up else "none"],
    }  # fmt: skip
    if isinstance(tile, fp8.Fp8FlowTile):
        function = flow_fp8_rows
        types |= {"w_tiles": f"tensordesc<fp8e4nv[{tile.columns}, 128]>"}
        types |= {} if is_up else {"x_tiles": f"tensordesc<fp8e4nv[{tile.rows}, 128]>"}
        types.pop("codes" if is_up else "x")
        sizes |= {"S_PAD": 32, "HALVES": tile.halves, "IN_BLOCKS": in_blocks, "FLAT": tile.loops == 1}
    else:
        function = grouped_fp8_rows
        sizes |= {"BLOCK": 128 if in_blocks else K, "SCALE_ROWS": 128 if in_blocks else 1}
    missing = {name: None for name in ("x", "x_tiles", "rows", "biases", "out_scales") if name not in types}
    return Kernel(
        function, types, {**sizes, **missing}, tile.warps, 255, tile.stages, fuses=True, aligned=True
    )


def check(side: str, tile: fp8.AnyTile, arch: int, folder: Path, *, in_blocks: bool = True) -> str:
    """Compile a launch and check its budget. Return its PTX."""
    compiled = compile_kernel(kernel_of(side, tile, in_blocks=in_blocks), arch)
    registers, spilled = assemble(compiled.ptx, folder, arch=arch)
    is_flow = isinstance(tile, fp8.Fp8FlowTile)
    allowed = SPILLED if is_flow and tile.rows == 128 else 0
    assert spilled <= allowed, f"{spilled} bytes spilled with {registers} registers"
    assert ("cp.async.bulk.tensor" in compiled.ptx) == is_flow
    assert compiled.shared_bytes <= SHARED_LIMITS[arch], f"{compiled.shared_bytes} bytes of shared memory"
    return compiled.ptx


def tiles_of(side: str, arch: int) -> list[fp8.AnyTile]:
    small, large = (fp8._SMALL_GATED, fp8._GATED) if side == "up" else (fp8._SMALL_PLAIN, fp8._PLAIN)
    return list((large if arch == 90 else small).values())


@pytest.mark.parametrize("side", SIDES)
def test_decode_steps_compile_to_fp8_products_within_their_budget(side: str, tmp_path: Path) -> None:
    ptx = check(side, tiles_of(side, 90)[0], 90, tmp_path)
    found = set(re.findall(r"wgmma\.mma_async\.\S*", ptx))
    assert found == {"wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"}


@pytest.fixture(scope="module", params=[89, 90, 100])
def architecture(request: pytest.FixtureRequest) -> Iterator[tuple[int, Executor]]:
    """Return an architecture and its process: triton fixes the conversion of FP8 at the first one that a process compiles for."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        yield request.param, own


@pytest.mark.slow
@pytest.mark.paired("architecture", "side", "in_blocks", of=2)
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("side", SIDES)
def test_every_tile_compiles_within_its_budget(
    side: str, architecture: tuple[int, Executor], in_blocks: bool, tmp_path: Path
) -> None:
    arch, own = architecture
    for tile in tiles_of(side, arch):
        own.submit(check, side, tile, arch, tmp_path, in_blocks=in_blocks).result(timeout=300)


@pytest.mark.parametrize("kernel", ROWS.values(), ids=ROWS)
def test_rows_are_quantised_within_their_budget(kernel: Kernel, tmp_path: Path) -> None:
    check_budget(kernel, tmp_path)
