"""Multiply rows by two panels of float32 or bfloat16 weights at once.

With many rows, each loaded value is multiplied twice. With few, two chains of additions hide each other's latency
(1.2 to 1.3 x the speed for bfloat16 read from memory). Every output is the same chain as in `tiles` for one panel.

Legend: as in `tiles`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from attention.cpu.tiles import (
    AHEAD_BYTES,
    F32,
    F32V,
    I64,
    LANES,
    MOST_ROWS,
    ROWS,
    TILES_VERSION,
    TileRows,
    constant,
    load_weights,
    prefetch,
    rows_times_panel_bf16,
    rows_times_panel_f32,
    splat,
    store,
    vector_call,
)
from dispatch.compiled.native import Addressed, renamed


def _two_panels(rows: int, bf16: bool) -> Any:
    """Return an intrinsic for `two_panels_in_tiles` that multiplies rows by plain weights."""

    def tile(
        _typing: Any, x: Any, xs: Any, w: Any, other: Any, scales: Any, other_scales: Any, k: Any, block: Any, out: Any,
        other_out: Any, os: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, w, other, _, _, k, _, out, other_out, out_stride = args
            x_rows = [TileRows(x, x_stride).at(builder, row) for row in range(rows)]
            entry, loop = builder.block, builder.append_basic_block("loop")
            end = builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(I64)
            index.add_incoming(ir.Constant(I64, 0), entry)
            sums = [builder.phi(F32V) for _ in range(2 * rows)]
            for total in sums:
                total.add_incoming(constant(0.0), entry)
            offset = builder.mul(index, ir.Constant(I64, (2 if bf16 else 4) * LANES))
            places = [builder.add(panel, offset) for panel in (w, other)]
            for place in places:
                prefetch(builder, builder.add(place, ir.Constant(I64, AHEAD_BYTES)))
            weights = [load_weights(builder, place, bf16) for place in places]
            following = []
            for row, address in enumerate(x_rows):
                at = builder.add(address, builder.mul(index, ir.Constant(I64, 4)))
                value = splat(builder, builder.load(builder.inttoptr(at, F32.as_pointer()), align=4))
                for panel, weight in enumerate(weights):
                    following.append(vector_call(builder, "fma", value, weight, sums[2 * row + panel]))
            step = builder.add(index, ir.Constant(I64, 1))
            index.add_incoming(step, builder.block)
            for total, value in zip(sums, following, strict=True):
                total.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", step, k), loop, end)
            builder.position_at_end(end)
            for row in range(rows):
                for panel, place in enumerate((out, other_out)):
                    store(builder, following[2 * row + panel], TileRows(place, out_stride).at(builder, row))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return intrinsic(tile)


def two_panels_in_tiles(tile_of: Callable[[int], Any], one_panel: Any, name: str) -> Any:
    """Return njit `(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows)`.

    With few rows, two chains of additions hide each other's latency. With many rows and 32 registers, decoding
    while multiplying is faster than a buffer.

    Args:
        tile_of: Returns the intrinsic for a number of rows, with these arguments except `rows`.
        one_panel: Njit `(x, x_stride, codes, scales, k, block, out, out_stride, rows)`.
        name: Unique name of the function.
    """
    one, two, three, four, six, eight, twelve = (tile_of(rows) for rows in (1, 2, 3, 4, 6, 8, 12))

    def in_16_registers(  # type: ignore[no-untyped-def]
        x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows
    ):
        if rows == 1:
            one(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
        elif rows == 2:
            two(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
        else:
            one_panel(x, x_stride, codes, scales, k, block, out, out_stride, rows)
            one_panel(x, x_stride, others, other_scales, k, block, other_out, out_stride, rows)

    def in_32_registers(  # type: ignore[no-untyped-def]
        x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows
    ):
        while rows > 0:
            if rows >= 20 or 12 <= rows < 16:
                taken = 12
                twelve(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            elif rows >= 8:
                taken = 8
                eight(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            elif rows >= 6:
                taken = 6
                six(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            elif rows >= 4:
                taken = 4
                four(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            elif rows == 3:
                taken = 3
                three(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            elif rows == 2:
                taken = 2
                two(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            else:
                taken = 1
                one(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)
            x += taken * x_stride
            out += taken * out_stride
            other_out += taken * out_stride
            rows -= taken

    chosen = in_32_registers if MOST_ROWS > ROWS else in_16_registers
    return njit(nogil=True)(renamed(chosen, name))


@njit(nogil=True, inline="always")
def _one_f32(x, x_stride, panel, _scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_f32(x, x_stride, panel, 4 * LANES, k, out, out_stride, rows)


@njit(nogil=True, inline="always")
def _one_bf16(x, x_stride, panel, _scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_bf16(x, x_stride, panel, 2 * LANES, k, out, out_stride, rows)


_two_f32 = two_panels_in_tiles(partial(_two_panels, bf16=False), _one_f32, "two_panels_f32")
_two_bf16 = two_panels_in_tiles(partial(_two_panels, bf16=True), _one_bf16, "two_panels_bf16")


def _times_two_f32(x, x_stride, panel, other, scales, others, k, block, out, other_out, out_stride, rows):  # type: ignore[no-untyped-def]
    _two_f32(x, x_stride, panel, other, scales, others, k, block, out, other_out, out_stride, rows)
    return 0


def _times_two_bf16(x, x_stride, panel, other, scales, others, k, block, out, other_out, out_stride, rows):  # type: ignore[no-untyped-def]
    _two_bf16(x, x_stride, panel, other, scales, others, k, block, out, other_out, out_stride, rows)
    return 0


# Functions for `times_two_panels`, by panel format; others are in `quantised_tiles`.
TIMES_TWO_F32, TIMES_TWO_BF16 = (Addressed(each, TILES_VERSION) for each in (_times_two_f32, _times_two_bf16))


@intrinsic
def times_two_panels(
    _typing: Any, function: Any, x: Any, x_stride: Any, panel: Any, other: Any, scales: Any, other_scales: Any, k: Any,
    block: Any, out: Any, other_out: Any, out_stride: Any, rows: Any,
) -> Any:  # fmt: skip
    """Multiply rows by two panels of any format: the function's address, then its arguments."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        called = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 12).as_pointer())
        return builder.call(called, args[1:])

    return types.int64(*[types.int64] * 13), codegen
