"""The grouped GEMM with random experts and its parts of a layer (gate and up, down), compared with torch's own.

The peer gets the weights in its preferred layout. Its time does not include the gate, which our kernel applies at its output.

Legend: S slots, P pairs (rows sorted by slot), N out features, K in features.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, MakeCall, bytes_of, spoiling
from benchmarks.gpu.ranks.models import ExpertShape
from moe.gpu.products.grouped import grouped_linear
from moe.gpu.products.tiles import MANY_ROWS, tile_of_launch
from moe.gpu.weights.formats import PLAIN, DeviceFormat, PlacedWeights, ordered


class _Drawn(NamedTuple):
    """A storage format for experts, and the distribution of random codes and scales."""

    form: DeviceFormat  # a block of 0 means all inputs of a row
    spread: float  # standard deviation of values without scales
    scales: torch.dtype = torch.float32
    has_zeros: bool = False
    has_row_scales: bool = False


# Storage formats of published checkpoints, by name: DeepSeek-V3, compressed-tensors' channels, MiniMax-M3, gpt-oss, ModelOpt,
# Kimi K2.5, AWQ, compressed-tensors' W8A8.
FORMS = {
    "fp8": _Drawn(DeviceFormat("e4m3", "float", 128, 128), 2.0),
    "fp8 rows": _Drawn(DeviceFormat("e4m3", "float"), 2.0, torch.bfloat16),
    "mxfp8": _Drawn(DeviceFormat("e4m3", "e8m0", 32), 2.0, torch.uint8),
    "mxfp4": _Drawn(DeviceFormat("e2m1", "e8m0", 32), 2.7, torch.uint8),
    "nvfp4": _Drawn(DeviceFormat("e2m1", "e4m3", 16), 2.7, torch.float8_e4m3fn, has_row_scales=True),
    "int4": _Drawn(DeviceFormat("int4", "float", 32), 4.6, torch.bfloat16),
    "awq": _Drawn(DeviceFormat("int4", "float", 128), 6.5, torch.float16, has_zeros=True),
    "int8": _Drawn(DeviceFormat("int8", "float"), 74.0),
}


def expert_bytes(weights: PlacedWeights) -> int:
    """Return the bytes of one expert."""
    parts = (weights.codes, weights.scales, weights.row_scales, weights.zeros)
    return bytes_of(*(None if part is None else part[0] for part in parts))


def grouped_call(
    bench: Bench, seed: int, *, shape: ExpertShape, counts: Sequence[int], side: str, tile: Any = None
) -> Call:
    """Build a call that multiplies rows by their slots' weights; `counts` are rows per slot, `side` is up or down."""
    generator, gate = bench.generator(seed), shape.gate if side == "up" else "none"
    height, K = sides_of(shape, side)
    N = height // 2 if side == "up" else height
    weights = draw_experts(bench, generator, shape, height, K)
    biases = bench.normal(generator, shape.slots, height) if shape.has_bias else None
    places = torch.randperm(shape.slots, generator=generator, device=bench.device).int()
    offsets = [sum(counts[:slot]) for slot in range(shape.slots + 1)]
    x = bench.normal(generator, offsets[-1], K)
    out = torch.empty(offsets[-1], N, dtype=bench.dtype, device=bench.device)
    run = functools.partial(
        grouped_linear, x, weights, bench.integers(offsets), places, num_pairs=offsets[-1], gate=gate,
        biases_WN=biases, tile=tile, out=out,
    )  # fmt: skip

    def oracle(shift: int = 0) -> Tensor:
        parts = []
        for slot, place in enumerate(places.roll(shift).tolist()):
            if counts[slot]:
                part = x[offsets[slot] : offsets[slot + 1]].float() @ weights.wide(place).T
                parts.append(gated(part if biases is None else part + biases[place].float(), gate))
        return torch.cat(parts)

    touched = sum(count > 0 for count in counts)
    return Call(
        run=run, prepare=spoiling(out), oracle=oracle, control=functools.partial(oracle, 1),
        operations=2 * offsets[-1] * height * K,
        num_bytes=touched * expert_bytes(weights) + bytes_of(x, out),
        rate="bf16_tflops",
        peers={"grouped_mm": _torchs(bench, x, weights.codes, places, counts)} if weights.format == PLAIN else {},
    )  # fmt: skip


def grouped_maker(shape: ExpertShape, rows: int, side: str, tile: Any = None) -> MakeCall:
    """Return a maker with the same number of rows for every slot."""
    return functools.partial(grouped_call, shape=shape, counts=[rows] * shape.slots, side=side, tile=tile)


def decoded_maker(shape: ExpertShape, touched: int, side: str) -> MakeCall:
    """Return a maker with one row for some slots: a small batch of a decode step."""
    counts = [int(slot < touched) for slot in range(shape.slots)]
    return functools.partial(grouped_call, shape=shape, counts=counts, side=side)


def uneven_maker(shape: ExpertShape, side: str, *, is_decode: bool) -> MakeCall:
    """Return a maker with uneven loads, using the device's tile for a kind of step."""
    counts = uneven_counts(shape)
    num_pairs = 0 if is_decode else MANY_ROWS * shape.slots

    def make(bench: Bench, seed: int) -> Call:
        tile = tile_of_launch(num_pairs, shape.slots, no_experts(bench, shape, side), has_gate=side == "up")
        return grouped_call(bench, seed, shape=shape, counts=counts, side=side, tile=tile)

    return make


def uneven_counts(shape: ExpertShape) -> list[int]:
    """Return the rows of each slot: none, one, or many."""
    counts = [(0, 1, 5, 17)[slot % 4] for slot in range(shape.slots)]
    counts[-1] = 70
    return counts


def sides_of(shape: ExpertShape, side: str) -> tuple[int, int]:
    """Return out and in features of a layer's first product (gate and up together) or its second."""
    return (2 * shape.inner, shape.hidden) if side == "up" else (shape.hidden, shape.inner)


def no_experts(bench: Bench, shape: ExpertShape, side: str) -> PlacedWeights:
    """Return stored weights of zero experts."""
    return draw_experts(bench, bench.generator(0), shape._replace(slots=0), *sides_of(shape, side))


def gated(x_PN: Tensor, gate: str) -> Tensor:
    """Apply a gate to [gate, up] in float32."""
    if gate == "none":
        return x_PN
    left, right = x_PN.chunk(2, dim=1)
    if gate == "silu":
        return torch.nn.functional.silu(left) * right
    assert gate == "swiglu_oai", f"no oracle for gate {gate}"
    left, right = left.clamp(max=7.0), right.clamp(-7.0, 7.0)
    return (right + 1) * left * torch.sigmoid(1.702 * left)


def draw_experts(
    bench: Bench, generator: torch.Generator, shape: ExpertShape, height: int, K: int
) -> PlacedWeights:
    """Draw experts with values near 1 / sqrt(K), and the scales and zeros of their format."""
    if shape.form == "plain":
        return PlacedWeights(bench.normal(generator, shape.slots, height, K, spread=K**-0.5))
    drawn = FORMS[shape.form]
    form, size = drawn.form._replace(block=drawn.form.block or K), K**-0.5 / drawn.spread
    per_block = (shape.slots, height, -(-K // form.block))
    sizes = (shape.slots, -(-height // form.rows), per_block[2])
    if drawn.scales == torch.uint8:
        scales = _integers(bench, generator, 126 + round(math.log2(size)), 3, *sizes)
    else:
        scales = _factors(bench, generator, 1.0 if drawn.has_row_scales else size, *sizes).to(drawn.scales)
    parts = {"": _codes(bench, generator, form.kind, shape.slots, height, K), "scales": scales}
    if drawn.has_row_scales:
        parts["row_scales"] = _factors(bench, generator, size, *per_block[:2])
    if drawn.has_zeros:
        parts["zeros"] = _integers(bench, generator, 0, 16, *per_block)
    return PlacedWeights.of(ordered(parts, form), form)


def _codes(bench: Bench, generator: torch.Generator, kind: str, slots: int, height: int, K: int) -> Tensor:
    if kind == "int8":
        return _integers(bench, generator, 0, 256, slots, height, K).view(torch.int8)
    if kind != "e4m3":
        return _integers(bench, generator, 0, 256, slots, height, K // 2)
    codes = torch.empty(slots, height, K, dtype=torch.float8_e4m3fn, device=bench.device)
    for expert in codes:  # one at a time: all of them in float would take four times the memory
        expert.copy_(bench.normal(generator, height, K, spread=2.0))
    return codes


def _integers(bench: Bench, generator: torch.Generator, first: int, count: int, *shape: int) -> Tensor:
    """Draw `count` different byte values, starting at `first`."""
    return torch.randint(
        first, first + count, shape, generator=generator, dtype=torch.uint8, device=bench.device
    )


def _factors(bench: Bench, generator: torch.Generator, size: float, *shape: int) -> Tensor:
    return (0.5 + torch.rand(shape, generator=generator, device=bench.device)) * size


def _torchs(
    bench: Bench, x: Tensor, weights: Tensor, places: Tensor, counts: Sequence[int]
) -> Callable[[], object]:
    """Return torch's grouped product of the same rows and experts, with weights already in the order of the slots."""
    ends = bench.integers(list(counts)).cumsum(0).int()
    in_order = weights if bench.device.type != "cuda" else weights[places.long()]
    return functools.partial(torch._grouped_mm, x, in_order.transpose(1, 2), offs=ends)
