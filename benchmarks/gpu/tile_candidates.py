"""Which tiles the tuner tries, for which kernels and shapes; what they are held against is the kernels' own choice.

Candidates are few and chosen by hand, as each takes seconds to compile: those whose registers and shared memory the
project's compile tests allow on sm_90, and their neighbours. A workload is a call at a size that matters to the shape.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from attention.gpu.decode import decode_tile
from attention.gpu.mla import latent_tile
from attention.gpu.prefill import prefill_tile
from attention.gpu.tiles import shape_key
from benchmarks.gpu import shapes
from benchmarks.gpu.attention_calls import decode_call, latent_call, prefill_call
from benchmarks.gpu.bench import Bench, MakeCall
from benchmarks.gpu.expert_calls import grouped_call, no_experts
from benchmarks.gpu.rows import Setting
from benchmarks.gpu.shapes import AttentionShape, ExpertShape, LatentShape
from moe.gpu.tiles import tile_of_launch

Grid = Mapping[str, Sequence[int]]  # values of a tile's fields, all of them with all others

_DECODE: Grid = {"tokens": (32, 64), "warps": (4, 8), "programs": (2, 4), "stages": (2, 3)}
_LATENTS: Grid = {"tokens": (16, 32), "heads": (16, 32, 64), "programs": (1, 2)}
_PREFILL: Grid = {"tokens": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)}
FEW, MANY = "grouped_decode", "grouped_prefill"  # as the table names them
# `inner` decides in which order numbers are added, which both kinds of steps share.
_FEW_ROWS: Grid = {"columns": (64, 128), "warps": (4, 8), "stages": (3, 4, 5)}
_MANY_ROWS: Grid = {"rows": (64, 128), "columns": (128, 256), "warps": (4, 8), "stages": (3, 4)}


class Tuned(NamedTuple):
    """A kernel at a shape.

    Attributes:
        kernel, shape: as `attention.gpu.tiles` names them.
        choice: the tile that the kernel takes now, by the table or without it. candidates: what else to try.
        workloads: calls that take `tile=`.
    """

    kernel: str
    shape: str
    choice: Any
    candidates: Sequence[Any]
    workloads: Sequence[partial[Any]]

    def calls(self, tile: Any) -> list[MakeCall]:
        """The workloads with a tile."""
        return [partial(workload, tile=tile) for workload in self.workloads]


def tuned(setting: Setting, bench: Bench) -> dict[str, Tuned]:
    """Everything that is tuned, by a name for people."""
    if setting.is_tiny:
        return {
            "decode tiny": _decode(bench, shapes.TINY_ATTENTION, [(2, 20)], {"tokens": (16, 32)}),
            "latents tiny": _latents(bench, shapes.TINY_LATENT, [(1, 20)], {"heads": (16, 32)}),
            "prefill tiny": _prefill(bench, shapes.TINY_ATTENTION, [(4, 8)], {"tokens": (16, 32)}),
            "grouped tiny": _grouped(bench, FEW, shapes.TINY_EXPERTS, "up", [2], {"warps": (4, 8)}),
        }
    decodes, prefills = [(1, 2048), (32, 2048), (256, 2048), (1, 32768)], [(0, 4096), (6144, 2048)]
    return {
        "decode qwen3": _decode(bench, shapes.QWEN3, decodes, _DECODE),
        "decode gpt-oss": _decode(bench, shapes.GPT_OSS, decodes, _DECODE),
        "latents deepseek": _latents(bench, shapes.DEEPSEEK, [(1, 2048), (32, 2048), (1, 32768)], _LATENTS),
        "prefill qwen3": _prefill(bench, shapes.QWEN3, prefills, _PREFILL),
        "prefill gpt-oss": _prefill(bench, shapes.GPT_OSS, prefills, _PREFILL),
        **{
            f"{kernel} {model} {side}": _grouped(bench, kernel, shape, side, rows, grid)
            for model, shape in shapes.EXPERTS.items()
            for side in ("up", "down")
            for kernel, rows, grid in ((FEW, (1, 4, 16), _FEW_ROWS), (MANY, (256, 1024), _MANY_ROWS))
        },
    }


def _decode(bench: Bench, shape: AttentionShape, sizes: list[tuple[int, int]], grid: Grid) -> Tuned:
    """Sizes: sequences, and tokens of each."""
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
    """Spans: tokens that are cached, and tokens of the prompt behind them."""
    group = shape.heads // shape.kv_heads
    choice = prefill_tile(bench.dtype, shape.dim, shape.dim, group, bench.device)
    workloads = [partial(prefill_call, shape=shape, spans=[span]) for span in spans]
    key = shape_key(bench.dtype, D=shape.dim, V=shape.dim, GROUP=group)
    return Tuned("paged_prefill", key, choice, _others(choice, grid), workloads)


def _grouped(
    bench: Bench, kernel: str, shape: ExpertShape, side: str, rows: Sequence[int], grid: Grid
) -> Tuned:
    """Rows: of every expert; all of them as many as the kernel is for."""
    like = no_experts(bench, shape, side)
    choice = tile_of_launch(rows[0] * shape.slots, shape.slots, like)
    workloads = [
        partial(grouped_call, shape=shape, counts=[count] * shape.slots, side=side) for count in rows
    ]
    _, N, K = like.shape
    key = shape_key(like.dtype, N=N, K=K)
    return Tuned(kernel, key, choice, _others(choice, grid), workloads)


def _others(choice: Any, grid: Grid) -> list[Any]:
    """All of a grid but the kernel's choice."""
    rows = itertools.product(*grid.values())
    tried = [choice._replace(**dict(zip(grid, row, strict=True))) for row in rows]
    return [tile for tile in tried if tile != choice]
