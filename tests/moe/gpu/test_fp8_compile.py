"""The products in FP8, compiled as launched by DeepSeek-V3 on 32 ranks, and with scales of whole rows."""

import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from triton import knobs

from moe.gpu import fp8
from moe.gpu.fp8_kernel import grouped_fp8_rows, quantise_groups, quantise_whole_rows
from moe.gpu.grouped_kernel import GATES
from tests.support.gpu.triton_compile import SHARED_LIMITS, Kernel, assemble, check_budget, compile_kernel

SIDES = {"up": (2048, 7168), "down": (7168, 2048)}
# Bytes per thread of the widest tile: the state of the loop over tiles, spilled outside the loop over inputs. Narrower tiles
# without spills multiply half as much per read of shared memory.
SPILLED = 224
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


def kernel_of(side: str, tile: fp8.Fp8Tile, *, in_blocks: bool = True) -> Kernel:
    """Return a launch of a layer's first or second product."""
    N, K = SIDES[side]
    is_up, quantises = side == "up", side == "up" and in_blocks
    types = {**TYPES, "out": "*fp8e4nv" if quantises else "*bf16"}
    types |= {"rows": "*i64"} if is_up else {}
    types |= {"out_scales": "*fp32"} if quantises else {}
    constants = {
        **{name: None for name in ("rows", "biases", "out_scales") if name not in types}, "S": 9, "S_PAD": 16, "N": N,
        "K": K, "STEP": 128, "ROWS": tile.rows, "COLUMNS": tile.columns, "HALVES": tile.halves, "GROUP": tile.group,
        "GATE": GATES["silu" if is_up else "none"], "BLOCK": 128 if in_blocks else K, "SCALE_ROWS": 128 if in_blocks else 1,
        "SWAP": tile.rows < fp8.LEAST_UNSWAPPED,
    }  # fmt: skip
    return Kernel(grouped_fp8_rows, types, constants, tile.warps, 255, tile.stages, fuses=True, aligned=True)


def check(side: str, tile: fp8.Fp8Tile, arch: int, folder: Path, *, in_blocks: bool = True) -> str:
    """Compile a launch and check its budget. Return its PTX."""
    compiled = compile_kernel(kernel_of(side, tile, in_blocks=in_blocks), arch)
    registers, spilled = assemble(compiled.ptx, folder, arch=arch)
    allowed = SPILLED if tile.rows * tile.columns * tile.halves > 128 * 128 else 0
    assert spilled <= allowed, f"{spilled} bytes spilled with {registers} registers"
    if spilled and arch == 90:
        loop = innermost_loop(folder)
        assert not [line for line in loop if re.search(r"\b(LDL|STL)\b", line)], (
            "spilled in the loop over inputs"
        )
    assert compiled.shared_bytes <= SHARED_LIMITS[arch], f"{compiled.shared_bytes} bytes of shared memory"
    return compiled.ptx


def innermost_loop(folder: Path) -> list[str]:
    """Return the instructions of the shortest loop with FP8 products."""
    command = [knobs.nvidia.nvdisasm.path, "-c", "kernel.o"]
    lines = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith(".L_")}
    loops = []
    for at, line in enumerate(lines):
        found = re.search(r"\bBRA.*`\((\.L_\w+)\)", line)
        if found and (begin := labels[found[1]]) < at and any("QGMMA" in each for each in lines[begin:at]):
            loops.append(lines[begin : at + 1])
    return min(loops, key=len)


def tiles_of(side: str, arch: int) -> list[fp8.Fp8Tile]:
    small, large = (fp8._SMALL_GATED, fp8._GATED) if side == "up" else (fp8._SMALL_PLAIN, fp8._PLAIN)
    return list((large if arch == 90 else small).values())


@pytest.mark.parametrize("side", SIDES)
def test_decode_steps_compile_to_fp8_products_within_their_budget(side: str, tmp_path: Path) -> None:
    ptx = check(side, tiles_of(side, 90)[0], 90, tmp_path)
    found = set(re.findall(r"wgmma\.mma_async\.\S*", ptx))
    assert found == {"wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("arch", [89, 90, 100])
def test_every_tile_compiles_within_its_budget(side: str, arch: int, in_blocks: bool, tmp_path: Path) -> None:
    """In its own process: triton fixes the conversion of FP8 at the first architecture that a process compiles for."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        for tile in tiles_of(side, arch):
            own.submit(check, side, tile, arch, tmp_path, in_blocks=in_blocks).result(timeout=300)


@pytest.mark.parametrize("kernel", ROWS.values(), ids=ROWS)
def test_rows_are_quantised_within_their_budget(kernel: Kernel, tmp_path: Path) -> None:
    check_budget(kernel, tmp_path)
