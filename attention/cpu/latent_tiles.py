"""Operations on one block of latents for 16 heads, one head per lane: softmax weights, and the weighted sums of latents.

Legend: B tokens of a block (16), L latent dim.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from attention.cpu.tiles import (
    I64,
    LANES,
    add_rows_times_panel_f32,
    constant,
    emit_exp,
    load,
    load_f32,
    scale_block,
    splat,
    store,
    vector_call,
)


@intrinsic
def softmax_lanes(
    _typing: Any, scores: Any, scale: Any, low: Any, high: Any, top: Any, total: Any, shrink: Any
) -> Any:
    """Turn raw scores [16 tokens, 16 heads] into weights in place, continuing one softmax per lane.

    `(scores, scale, low, high, top, total, shrink)`: tokens outside [low, high) get weight 0. The running maxima at
    `top` and sums at `total` are updated. The factors by which to multiply earlier sums are written to `shrink`.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        scores, scale, low, high, top, total, shrink = args
        factor = splat(builder, scale)
        before = highest = load(builder, top)
        scaled, places = [], []
        for token in range(LANES):
            place = builder.add(scores, ir.Constant(I64, token * LANES * 4))
            inside = builder.and_(
                builder.icmp_signed(">=", ir.Constant(I64, token), low),
                builder.icmp_signed("<", ir.Constant(I64, token), high),
            )
            product = builder.fmul(load(builder, place), factor)
            value = builder.select(inside, product, constant(float("-inf")))
            highest = vector_call(builder, "maxnum", highest, value)
            scaled.append(value)
            places.append(place)
        less = emit_exp(builder, builder.fsub(before, highest))
        sums = builder.fmul(load(builder, total), less)
        for value, place in zip(scaled, places, strict=True):
            weight = emit_exp(builder, builder.fsub(value, highest))
            store(builder, weight, place)
            sums = builder.fadd(sums, weight)
        for value, place in ((highest, top), (sums, total), (less, shrink)):
            store(builder, value, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 5), codegen


@njit(nogil=True, inline="always")
def transpose_block(scores, weights):  # type: ignore[no-untyped-def]
    """Transpose [B, 16 heads] to [16 heads, B]."""
    for lane in range(LANES):
        for token in range(LANES):
            weights[lane, token] = scores[token, lane]


@njit(nogil=True, inline="always")
def mix_block(weights, shrink, page, row_bytes, sums, sum_bytes, first, last, heads):  # type: ignore[no-untyped-def]
    """Continue sums of latents: multiply each head's by its factor in `shrink`, then add a block's weighted latents.

    Addresses: weights [heads, B], shrink [heads], a page's rows, sums [heads, L]. Covers dims [first, last) in steps of 16.
    """
    for lane in range(heads):
        factor = load_f32(shrink + lane * 4)
        if factor != 1.0:
            for dim in range(first, last, LANES):
                scale_block(sums + lane * sum_bytes + dim * 4, factor)
    for dim in range(first, last, LANES):
        add_rows_times_panel_f32(
            weights, LANES * 4, page + dim * 4, row_bytes, LANES, sums + dim * 4, sum_bytes, heads
        )
