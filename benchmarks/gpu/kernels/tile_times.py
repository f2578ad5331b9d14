"""Times of candidate tiles compared with the kernel's own choice; `benchmarks.tune_kernels` writes the best into the table.

A candidate's `times` is the geometric mean over its workloads of the choice's time over its own: above 1 it is faster.
It is first checked against float32. Candidates that are wrong or cannot be launched on the device are rejected.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError

from attention.gpu.decode import decode_tile
from attention.gpu.mla import latent_tile
from attention.gpu.prefill import prefill_tile
from attention.gpu.tiles import shape_key
from benchmarks.gpu.bench import Bench, MakeCall, check, num_copies, time_calls
from benchmarks.gpu.kernels.attention_calls import decode_call, latent_call, prefill_call
from benchmarks.gpu.kernels.expert_calls import grouped_call, no_experts
from benchmarks.gpu.kernels.fp8_calls import fp8_call, fp8_experts
from benchmarks.gpu.kernels.row_calls import linear_call
from benchmarks.gpu.ranks import models
from benchmarks.gpu.ranks.models import AttentionShape, ExpertShape, LatentShape
from benchmarks.gpu.results import Row, Setting
from moe.gpu.products import fp8
from moe.gpu.products.linear_rows import RANGES, LinearTile, linear_tile
from moe.gpu.products.tiles import FLOW, FlowTile, adds_alike, shape_of, tile_of_launch

Grid = Mapping[str, Sequence[int]]  # values of a tile's fields, to be combined in all ways

# With n stages, n - 1 tiles are copied while one is computed.
_DECODE: Grid = {"tokens": (32, 64), "programs": (2, 4), "stages": (3, 4, 5)}
_LATENTS: Grid = {"tokens": (16, 32), "heads": (32, 64), "stages": (2, 3, 4)}
_PREFILL: Grid = {"tokens": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4), "rows": (64, 128)}
FEW = "grouped_decode"  # name in the table
# With one row for an eighth of the experts, small tiles give all multiprocessors work.
_LEAST_ROWS: Grid = {"columns": (32, 64, 128), "inner": (64, 128), "stages": (3, 4, 6)}
# With at most 128 registers, more programs fit on a multiprocessor.
_FEW_ROWS: Grid = {"columns": (64, 128), "inner": (64, 128), "stages": (3, 4, 5), "registers": (128, 255)}
_SOME_ROWS: Grid = {
    "rows": (16, 32, 64), "columns": (32, 64, 128), "inner": (64, 128), "stages": (3, 4), "registers": (168, 255),
}  # fmt: skip
_MANY_ROWS: Grid = {
    "rows": (64, 128, 256), "columns": (128, 256), "warps": (4, 8), "stages": (3, 4), "registers": (128, 255),
}  # fmt: skip
_FLOW_ROWS: Grid = {
    "rows": (64, 128), "columns": (64, 128, 256), "warps": (4, 8), "stages": (3, 4), "programs": (1, 2),
}  # fmt: skip
_FP8_ROWS: Grid = {
    "rows": (64, 128), "group": (4, 8), "warps": (4, 8), "stages": (3, 4), "programs": (1, 2), "loops": (1, 2),
}  # fmt: skip
_FEW_FP8_ROWS: Grid = {"columns": (64, 128), "warps": (4, 8), "stages": (3, 4, 5)}
_LINEAR: Grid = {"columns": (16, 32, 64), "inner": (128, 256, 512), "warps": (4, 8), "stages": (3, 4, 5, 6)}
# Rows per expert to time; below 1, a share of the experts has one.
_RANGES: Mapping[str, tuple[tuple[float, ...], Grid]] = {
    "grouped_few": ((0.125,), _LEAST_ROWS),
    FEW: ((1, 4, 8), _FEW_ROWS),
    "grouped_32": ((16, 24), _SOME_ROWS),
    "grouped_64": ((32, 48), _SOME_ROWS),
    "grouped_prefill": ((256, 1024), _MANY_ROWS),
}


class Tuned(NamedTuple):
    """A kernel at a shape.

    Attributes:
        kernel, shape: Names as in `attention.gpu.tiles`.
        choice: The tile that the kernel uses now, from the table or its fallback. candidates: other tiles to try.
        workloads: Calls that take `tile=`.
    """

    kernel: str
    shape: str
    choice: Any
    candidates: Sequence[Any]
    workloads: Sequence[partial[Any]]

    def calls(self, tile: Any) -> list[MakeCall]:
        """Return the workloads with a tile."""
        return [partial(workload, tile=tile) for workload in self.workloads]


def tuned(setting: Setting, bench: Bench) -> dict[str, Tuned]:
    """Return all kernels and shapes to tune, by a readable name."""
    if setting.is_tiny:
        return {
            "decode tiny": _decode(bench, models.TINY_ATTENTION, [(2, 20)], {"tokens": (16, 32)}),
            "latents tiny": _latents(bench, models.TINY_LATENT, [(1, 20)], {"heads": (16, 32)}),
            "prefill tiny": _prefill(bench, models.TINY_ATTENTION, [(4, 8)], {"tokens": (16, 32)}),
            "grouped tiny": _grouped(bench, FEW, models.TINY_EXPERTS, "up", [2], {"warps": (4, 8)}),
            "fp8 tiny": _fp8(bench, models.TINY_FP8, "up", 0, (2,), {"warps": (4, 8)}),
            "linear tiny": _linear(bench, 32, 48, {"warps": (2, 4)}),
        }
    decodes, prefills = [(1, 2048), (32, 2048), (256, 2048), (1, 32768)], [(0, 4096), (6144, 2048)]
    return {
        "decode qwen3": _decode(bench, models.QWEN3, decodes, _DECODE),
        "decode gpt-oss": _decode(bench, models.GPT_OSS, decodes, _DECODE),
        "decode gemma": _decode(bench, models.GEMMA, decodes, _DECODE),
        "latents deepseek": _latents(bench, models.DEEPSEEK, [(1, 2048), (32, 2048), (1, 32768)], _LATENTS),
        "prefill qwen3": _prefill(bench, models.QWEN3, prefills, _PREFILL),
        "prefill gpt-oss": _prefill(bench, models.GPT_OSS, prefills, _PREFILL),
        "prefill deepseek": _prefill(bench, models.DEEPSEEK_EXPANDED, [(0, 2048)], _PREFILL),
        **{
            f"{kernel} {model} {side}": _grouped(bench, kernel, shape, side, rows, grid)
            for model, shape in models.EXPERTS.items()
            for side in ("up", "down")
            for kernel, (rows, grid) in _RANGES.items()
        },
        **{
            f"fp8_{least} deepseek {side}": _fp8(bench, models.DEEPSEEK_EXPERTS, side, least, rows)
            for side in ("up", "down")
            for least, rows in zip(fp8.LEVELS, ((1, 16), (32, 64), (96, 256)), strict=True)
        },
        **{
            f"linear {words}": _linear(bench, out_dim, 4096)
            for words, out_dim in (("qwen3 output", 2048), ("gpt-oss output", 2880))
        },
    }


def _decode(bench: Bench, shape: AttentionShape, sizes: list[tuple[int, int]], grid: Grid) -> Tuned:
    """Build a decode case. Sizes: number of sequences, and tokens of each."""
    group = shape.heads // shape.kv_heads
    choice = decode_tile(bench.dtype, shape.dim, shape.dim, group, bench.device)
    workloads = [partial(decode_call, shape=shape, contexts=[context] * batch) for batch, context in sizes]
    key = shape_key(bench.dtype, D=shape.dim, V=shape.dim, GROUP=group)
    return Tuned("paged_decode", key, choice, _others(choice, grid), workloads)


def _latents(bench: Bench, shape: LatentShape, sizes: list[tuple[int, int]], grid: Grid) -> Tuned:
    choice = latent_tile(bench.dtype, shape.heads, shape.latent, bench.device)
    workloads = [partial(latent_call, shape=shape, contexts=[context] * batch) for batch, context in sizes]
    key = shape_key(bench.dtype, H=shape.heads, L=shape.latent)
    return Tuned("latent_decode", key, choice, _others(choice, grid), workloads)


def _prefill(bench: Bench, shape: AttentionShape, spans: list[tuple[int, int]], grid: Grid) -> Tuned:
    """Build a prefill case. Spans: cached tokens, and tokens of the prompt after them."""
    group = shape.heads // shape.kv_heads
    choice = prefill_tile(bench.dtype, shape.dim, shape.values, group, bench.device)
    workloads = [partial(prefill_call, shape=shape, spans=[span]) for span in spans]
    key = shape_key(bench.dtype, D=shape.dim, V=shape.values, GROUP=group)
    return Tuned("paged_prefill", key, choice, _others(choice, grid), workloads)


def _grouped(
    bench: Bench, kernel: str, shape: ExpertShape, side: str, rows: Sequence[float], grid: Grid
) -> Tuned:
    """Build a grouped GEMM case. Rows: numbers of rows per expert, in the range of the kernel."""
    like, has_gate = no_experts(bench, shape, side), side == "up"
    choice = tile_of_launch(int(rows[0] * shape.slots), shape.slots, like, has_gate=has_gate)
    if isinstance(choice, FlowTile):  # of another kernel, on Hopper
        kernel, grid = FLOW, _FLOW_ROWS
    workloads = [
        partial(grouped_call, shape=shape, counts=_spread(count, shape.slots), side=side) for count in rows
    ]
    others = [
        tile
        for tile in _others(choice, grid)
        if adds_alike(tile, choice, like.format, like.in_dim, has_gate=has_gate)
    ]
    return Tuned(kernel, shape_of(like), choice, others, workloads)


def _fp8(
    bench: Bench, shape: ExpertShape, side: str, least: int, rows: Sequence[int], grid: Grid | None = None
) -> Tuned:
    """Build a case of products in FP8. least: of `fp8.LEVELS`; rows: numbers of rows per expert from there on."""
    like = fp8_experts(bench, shape._replace(slots=0), side)
    choice = fp8.choose_tile(least, like, shape.gate if side == "up" else "none")
    grid = grid or (_FP8_ROWS if isinstance(choice, fp8.Fp8FlowTile) else _FEW_FP8_ROWS)
    workloads = [
        partial(fp8_call, shape=shape, counts=_spread(count, shape.slots), side=side) for count in rows
    ]
    return Tuned(f"fp8_{least}", shape_of(like), choice, _others(choice, grid), workloads)


def _linear(bench: Bench, out_dim: int, in_dim: int, grid: Grid = _LINEAR) -> Tuned:
    """Build a case of a linear layer of few rows with --batch-invariant."""
    weight = torch.empty(out_dim, in_dim, dtype=bench.dtype, device=bench.device)
    choice: LinearTile = linear_tile(1, weight)
    workloads = [partial(linear_call, rows=rows, out_dim=out_dim, in_dim=in_dim) for rows in (1, 8)]
    key = shape_key(bench.dtype, N=out_dim, K=in_dim)
    return Tuned(RANGES[0].kernel, key, choice, _others(choice, grid), workloads)


def _spread(rows: float, slots: int) -> list[int]:
    """Return the rows of each slot; with less than one on average, one row for a share of the slots."""
    return [int(rows)] * slots if rows >= 1 else [int(slot < rows * slots) for slot in range(slots)]


def _others(choice: Any, grid: Grid) -> list[Any]:
    """Return all tiles of a grid except the kernel's choice."""
    rows = itertools.product(*grid.values())
    tried = [choice._replace(**dict(zip(grid, row, strict=True))) for row in rows]
    return [tile for tile in tried if tile != choice]


Table = dict[str, dict[str, dict[str, dict[str, int]]]]  # device, kernel, shape, fields

LEAST_GAIN = 1.02  # below it the kernel's own choice stays: the difference is within noise


class Tried(NamedTuple):
    """A candidate, its times compared with the kernel's choice, and the reason if it is rejected."""

    tile: Any
    times: float
    trouble: str = ""


def best_of(tried: list[Tried]) -> Tried | None:
    """Return the fastest candidate with at least the required gain."""
    able = [candidate for candidate in tried if not candidate.trouble and candidate.times >= LEAST_GAIN]
    return max(able, key=lambda candidate: candidate.times, default=None)


def fields_of(tile: Any, choice: Any) -> dict[str, int]:
    """Return the fields in which a tile differs from the kernel's choice."""
    return {name: value for name, value in tile._asdict().items() if value != getattr(choice, name)}


def with_entry(table: Table, at: tuple[str, str, str], tile: Any) -> Table:
    """Return a table with an entry added or replaced. The entry has all fields, because fallbacks may change."""
    device, kernel, shape = at
    kernels = table.get(device, {})
    entries = {**kernels.get(kernel, {}), shape: tile._asdict()}
    return {**table, device: {**kernels, kernel: entries}}


def write_table(path: Path, table: Table) -> None:
    """Write the table atomically."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(scratch, path)


# Parts of CUDA's messages after which this process cannot launch anything any more.
_BROKEN = ("illegal", "misaligned address", "unspecified launch failure", "device-side assert")


def units(setting: Setting) -> list[str]:
    """Return one unit per kernel and shape."""
    return list(tuned(setting, Bench.of(setting)))


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Time one kernel's candidates. Each row is yielded when it is known, because a day may end during a unit."""
    bench = Bench.of(setting)
    case = tuned(setting, bench)[unit]
    for tried in try_all(bench, case):
        fields = fields_of(tried.tile, case.choice)
        name = ", ".join(f"{field} {value}" for field, value in fields.items())
        yield Row(name=f"{unit}: {name}", figures={"times": tried.times}, note=tried.trouble)


def try_all(bench: Bench, case: Tuned) -> Iterator[Tried]:
    """Check and time all candidates, one by one.

    Raises:
        RuntimeError: The device has failed, and this process cannot use it any more.
    """
    base_s = _seconds(bench, case, case.choice)
    for tile in case.candidates:
        yield _try(bench, case, tile, base_s)


def _try(bench: Bench, case: Tuned, tile: Any, base_s: list[float]) -> Tried:
    try:
        row = check(bench, case.kernel, case.calls(tile)[0])
        if not row.is_right:
            return Tried(tile, 0.0, f"wrong: error {row.figures['error']:.1e}")
        seconds = _seconds(bench, case, tile)
    except (
        TritonError,
        RuntimeError,
        ValueError,
        AssertionError,
    ) as error:  # too many registers, too much memory
        if any(word in str(error) for word in _BROKEN):
            raise
        return Tried(tile, 0.0, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    ratios = [math.log(base / own) for base, own in zip(base_s, seconds, strict=True)]
    return Tried(tile, math.exp(sum(ratios) / len(ratios)))


def _seconds(bench: Bench, case: Tuned, tile: Any) -> list[float]:
    found = []
    for make in case.calls(tile):
        first = make(bench, 0)
        calls = [first, *(make(bench, seed) for seed in range(1, num_copies(bench, first.num_bytes)))]
        found.append(time_calls(bench, [call.run for call in calls]).seconds)
    return found
