"""The grouped GEMM with random experts, its parts of a layer (gate and up, down), and torch's own beside it.

The peer gets the weights in the layout that it wants; the gate that our kernel applies on the way out is not in its time.

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
from moe.gpu.formats import MICRO_BLOCK, SCALE_BLOCK
from moe.gpu.grouped import grouped_linear
from moe.gpu.tiles import MANY_ROWS, choose_tile

# OCP Microscaling Formats (2023); the fourth bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_RANGE = 2.0  # of scaled weights as they are stored


class Weights(NamedTuple):
    """Experts as they are stored, with their scales."""

    stored_WNK: Tensor
    scales: Tensor | None

    def wide(self, place: int) -> Tensor:
        """One expert in float32, [N, K]."""
        stored = self.stored_WNK[place]
        if self.scales is None:
            return stored.float()
        scales = self.scales[place]
        if stored.dtype == torch.uint8:
            codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).long()
            values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=stored.device)[codes]
            return values * torch.exp2(scales.float() - 127).repeat_interleave(MICRO_BLOCK, -1)
        spread = scales.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
        return stored.float() * spread[: stored.shape[0], : stored.shape[1]]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return bytes_of(self.stored_WNK[0], None if self.scales is None else self.scales[0])


def grouped_call(
    bench: Bench, seed: int, *, shape: ExpertShape, counts: Sequence[int], side: str, tile: Any = None
) -> Call:
    """Multiply rows by their slots' weights; `counts` are rows per slot, `side` is up or down."""
    generator, gate = bench.generator(seed), shape.gate if side == "up" else "none"
    height, K = sides_of(shape, side)
    N = height // 2 if side == "up" else height
    weights = _draw(bench, generator, shape, height, K)
    biases = bench.normal(generator, shape.slots, height) if shape.has_bias else None
    places = torch.randperm(shape.slots, generator=generator, device=bench.device).int()
    offsets = [sum(counts[:slot]) for slot in range(shape.slots + 1)]
    x = bench.normal(generator, offsets[-1], K)
    out = torch.empty(offsets[-1], N, dtype=bench.dtype, device=bench.device)
    run = functools.partial(
        grouped_linear, x, weights.stored_WNK, bench.integers(offsets), places, num_pairs=offsets[-1], gate=gate,
        scales_WBB=weights.scales, biases_WN=biases, tile=tile, out=out,
    )  # fmt: skip

    def oracle(shift: int = 0) -> Tensor:
        parts = []
        for slot, place in enumerate(places.roll(shift).tolist()):
            if counts[slot]:
                part = x[offsets[slot] : offsets[slot + 1]].float() @ weights.wide(place).T
                parts.append(gated(part if biases is None else part + biases[place].float(), gate))
        return torch.cat(parts)

    touched = sum(count > 0 for count in counts)
    plain = weights.scales is None
    return Call(
        run=run, prepare=spoiling(out), oracle=oracle, control=functools.partial(oracle, 1),
        operations=2 * offsets[-1] * height * K,
        num_bytes=touched * weights.expert_bytes + bytes_of(x, out),
        rate="bf16_tflops",
        peers={"grouped_mm": _torchs(bench, x, weights.stored_WNK, places, counts)} if plain else {},
    )  # fmt: skip


def grouped_maker(shape: ExpertShape, rows: int, side: str, tile: Any = None) -> MakeCall:
    """So many rows for every slot."""
    return functools.partial(grouped_call, shape=shape, counts=[rows] * shape.slots, side=side, tile=tile)


def decoded_maker(shape: ExpertShape, touched: int, side: str) -> MakeCall:
    """One row for some slots: a small batch of a decode step."""
    counts = [int(slot < touched) for slot in range(shape.slots)]
    return functools.partial(grouped_call, shape=shape, counts=counts, side=side)


def uneven_maker(shape: ExpertShape, side: str, *, is_decode: bool) -> MakeCall:
    """Slots without rows, with one, and one that has many, by the tile of a kind of step."""
    counts = [(0, 1, 5, 17)[slot % 4] for slot in range(shape.slots)]
    counts[-1] = 70
    num_pairs = 0 if is_decode else MANY_ROWS * shape.slots
    tile = choose_tile(num_pairs, shape.slots, is_quantised=shape.form != "plain")
    return functools.partial(grouped_call, shape=shape, counts=counts, side=side, tile=tile)


def sides_of(shape: ExpertShape, side: str) -> tuple[int, int]:
    """Out and in features of a layer's first product, gate and up together, or of its second."""
    return (2 * shape.inner, shape.hidden) if side == "up" else (shape.hidden, shape.inner)


def no_experts(bench: Bench, shape: ExpertShape, side: str) -> Tensor:
    """Weights as they are stored, of no expert."""
    height, K = sides_of(shape, side)
    if shape.form == "mxfp4":
        return torch.empty(0, height, K // 2, dtype=torch.uint8, device=bench.device)
    dtype = bench.dtype if shape.form == "plain" else torch.float8_e4m3fn
    return torch.empty(0, height, K, dtype=dtype, device=bench.device)


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


def _draw(bench: Bench, generator: torch.Generator, shape: ExpertShape, height: int, K: int) -> Weights:
    """Draw experts, and scales where they are stored in few bits."""
    if shape.form == "plain":
        return Weights(bench.normal(generator, shape.slots, height, K, spread=K**-0.5), None)
    if shape.form == "mxfp4":
        stored = _bytes(bench, generator, 256, shape.slots, height, K // 2)
        middle = 127 - round(math.log2(2 * K**0.5))  # values are about 2 without their scales
        return Weights(
            stored, _bytes(bench, generator, 3, shape.slots, height, K // MICRO_BLOCK).add_(middle - 1)
        )
    stored = torch.empty(shape.slots, height, K, dtype=torch.float8_e4m3fn, device=bench.device)
    for expert in stored:  # one at a time: float values of all would take four times the memory
        expert.copy_(bench.normal(generator, height, K, spread=_FP8_RANGE))
    blocks = (shape.slots, -(-height // SCALE_BLOCK), -(-K // SCALE_BLOCK))
    drawn = torch.rand(blocks, generator=generator, device=bench.device)
    return Weights(stored, (0.5 + drawn) * (K**-0.5 / _FP8_RANGE))


def _bytes(bench: Bench, generator: torch.Generator, end: int, *shape: int) -> Tensor:
    return torch.randint(0, end, shape, generator=generator, dtype=torch.uint8, device=bench.device)


def _torchs(
    bench: Bench, x: Tensor, weights: Tensor, places: Tensor, counts: Sequence[int]
) -> Callable[[], object]:
    """Torch's grouped product of the same rows and experts, weights in the order of the slots beforehand."""
    ends = bench.integers(list(counts)).cumsum(0).int()
    in_order = weights if bench.device.type != "cuda" else weights[places.long()]
    return functools.partial(torch._grouped_mm, x, in_order.transpose(1, 2), offs=ends)
