"""Products in FP8 with random experts, compared with one dense product of cuBLAS that does as many operations.

The first product of a layer maps its rows and quantises its output, as in a service. The second one gets quantised rows in
their order. The peer has one scale per matrix, so it multiplies less often than ours, which has a scale for 128 inputs.

Legend: S slots, P pairs (rows sorted by slot), T tokens, N out features, K in features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, MakeCall, bytes_of
from benchmarks.gpu.kernels.expert_calls import draw_experts, expert_bytes, gated, sides_of
from benchmarks.gpu.ranks.models import ExpertShape
from moe.gpu.products import fp8
from moe.gpu.products.fp8_kernel import STEP_INPUTS
from moe.gpu.weights.formats import PlacedWeights

_CHOICES = 8  # experts of a token
# An output in FP8 has 3 bits after the first: half a step is at most 2^-4 of a value, and 0.026 of it on average.
_QUANTISED_BOUNDS = (0.04, 0.5)


def fp8_experts(bench: Bench, shape: ExpertShape, side: str, seed: int = 0) -> PlacedWeights:
    """Draw experts that take quantised rows."""
    weights = draw_experts(bench, bench.generator(seed), shape, *sides_of(shape, side))
    return weights._replace(format=weights.format._replace(fp8_rows=True))


def fp8_call(
    bench: Bench,
    seed: int,
    *,
    shape: ExpertShape,
    counts: Sequence[int],
    side: str,
    tile: fp8.AnyTile | None = None,
) -> Call:
    """Build a call that multiplies quantised rows by their slots' weights; the arguments are those of `grouped_call`."""
    is_up, generator = side == "up", bench.generator(seed + 1)
    gate = shape.gate if is_up else "none"
    weights, pairs = fp8_experts(bench, shape, side, seed), sum(counts)
    places = torch.randperm(shape.slots, generator=generator, device=bench.device).int()
    offsets = bench.integers([sum(counts[:slot]) for slot in range(shape.slots + 1)])
    tokens = max(1, pairs // _CHOICES) if is_up else pairs
    x = fp8.quantise_rows(bench.normal(generator, tokens, weights.in_dim), weights)
    row_P = torch.randint(0, tokens, (pairs,), generator=generator, device=bench.device) if is_up else None
    N = weights.codes.shape[1] // (2 if is_up else 1)
    out = torch.empty(pairs, N, dtype=torch.float8_e4m3fn if is_up else bench.dtype, device=bench.device)
    scales = torch.zeros(pairs, -(-N // STEP_INPUTS), device=bench.device) if is_up else None
    chosen = tile or fp8.choose_tile(pairs // shape.slots, weights, gate)
    run = functools.partial(
        fp8.launch,
        x,
        weights,
        offsets,
        places,
        out,
        scales,
        tile=chosen,
        expected=pairs,
        rows_P=row_P,
        gate=gate,
    )

    def oracle(shift: int = 0) -> Tensor:
        rows, parts, begin = _wide(x.codes, x.scales), [], 0
        for place, count in zip(places.roll(shift).tolist(), counts, strict=True):
            at = slice(begin, begin + count)
            own = rows[at] if row_P is None else rows[row_P[at]]
            parts.append(gated(own @ weights.wide(place).T, gate))
            begin += count
        return torch.cat(parts)

    touched = sum(count > 0 for count in counts)
    return Call(
        run=run,
        prepare=lambda: out.view(torch.uint8).fill_(0x7F) if is_up else out.fill_(float("nan")),  # NaN
        result=lambda _: out.float() if scales is None else _wide(out, scales),
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=touched * expert_bytes(weights) + bytes_of(x.codes, x.scales, out, scales),
        operations=2 * pairs * weights.codes.shape[1] * weights.in_dim,
        rate="fp8_tflops",
        peers={"scaled_mm": _dense(bench, pairs, weights.codes.shape[1], weights.in_dim)},
        bounds=_QUANTISED_BOUNDS if is_up else None,
    )


def fp8_maker(shape: ExpertShape, rows: int, side: str) -> MakeCall:
    """Return a maker with the same number of rows for every slot."""
    return functools.partial(fp8_call, shape=shape, counts=[rows] * shape.slots, side=side)


def _wide(codes: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(STEP_INPUTS, 1)[:, : codes.shape[1]]
    return codes.float() * wide


def _dense(bench: Bench, rows: int, height: int, in_dim: int) -> Callable[[], object]:
    """Return cuBLAS' product of the same number of operations, with one scale per matrix."""
    left, right = (
        torch.zeros(count, in_dim, dtype=torch.float8_e4m3fn, device=bench.device) for count in (rows, height)
    )
    for part in (left, right):
        part.copy_(bench.normal(bench.generator(0), *part.shape))
    one: Any = torch.ones((), device=bench.device)
    return functools.partial(torch._scaled_mm, left, right.T, one, one, out_dtype=torch.bfloat16)
