"""Register tiles for weights that stay quantised in memory: codes of eight or four bits, in panels of 16 columns.

A weight is decoded in registers to its float32 number, value times scale with one rounding (`attention.cpu.codes`), then
multiplied and added exactly as in `tiles`: every output is the same chain of fused multiply-adds as with the
dequantised weight. Weights are decoded as they are multiplied. With many rows and few registers, up to 128 inputs are
decoded once into a buffer that stays in the first-level cache, and float32 tiles run over it. Formats of codes and scales
can be combined freely; only the combinations that a model has are compiled (`times_quantised`).

Layout of a panel, K inputs of 16 output columns: codes [K, 16], or two to a byte [K / 2, 16] with the even input in the
lower half. `codes` describes the layout of the scales.
"""

from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from attention.cpu.codes import I8V, Coding, emit_block, emit_decoded
from attention.cpu.panel_pairs import two_panels_in_tiles
from attention.cpu.tiles import (
    AHEAD_BYTES,
    F32,
    I64,
    LANES,
    ROWS,
    TILES_VERSION,
    TileRows,
    add_rows_times_panel_f32,
    constant,
    load,
    prefetch,
    splat,
    store,
    vector_call,
)
from dispatch.compiled.native import Addressed, renamed

DECODED = 128  # inputs that the decoded buffer holds


class _Loop:
    """A loop being emitted: an index, and vectors that are carried from one iteration to the next."""

    def __init__(self, builder: ir.IRBuilder, first: ir.Value, carried: list[ir.Value]) -> None:
        self._builder = builder
        entry, self._body = builder.block, builder.append_basic_block("body")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(I64)
        self.index.add_incoming(first, entry)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, entry)

    def close(self, step: ir.Value, end: ir.Value, carried: list[ir.Value]) -> None:
        """Repeat while the index stays below `end`. Code emitted next follows the loop."""
        builder, after = self._builder, self._builder.append_basic_block("after")
        following = builder.add(self.index, step)
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), self._body, after)
        builder.position_at_end(after)


class _Panel(NamedTuple):
    """Addresses of a panel's codes and scales, and of its columns of the result."""

    codes: ir.Value
    scales: ir.Value
    out: TileRows


def _emit_tile(
    builder: ir.IRBuilder, coding: Coding, rows: int, x: TileRows, panels: list[_Panel], k: ir.Value, block: ir.Value
) -> None:  # fmt: skip
    """Emit the product of rows and panels: `out[m, :] = sum_k x[m, k] * w[k, :]`."""
    x_rows = [x.at(builder, row) for row in range(rows)]
    firsts = [builder.add(panel.scales, ir.Constant(I64, coding.first_bytes)) for panel in panels]
    blocks = _Loop(builder, ir.Constant(I64, 0), [*firsts, *[constant(0.0)] * (rows * len(panels))])
    places, sums = blocks.carried[: len(panels)], blocks.carried[len(panels) :]
    factors = [
        emit_block(builder, coding, panel.scales, place) for panel, place in zip(panels, places, strict=True)
    ]
    end = builder.add(blocks.index, block)
    end = builder.select(builder.icmp_signed("<", end, k), end, k)
    inputs = _Loop(builder, blocks.index, sums)
    byte = builder.udiv(inputs.index, ir.Constant(I64, coding.inputs_per_byte))
    weights = []
    for panel, factor in zip(panels, factors, strict=True):
        at = builder.add(panel.codes, builder.mul(byte, ir.Constant(I64, LANES)))
        prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
        weights.append(emit_decoded(builder, coding, load(builder, at, I8V), factor))
    totals = list(inputs.carried)
    for ahead in range(coding.inputs_per_byte):
        offset = builder.mul(builder.add(inputs.index, ir.Constant(I64, ahead)), ir.Constant(I64, 4))
        for row, address in enumerate(x_rows):
            place = builder.inttoptr(builder.add(address, offset), F32.as_pointer())
            value = splat(builder, builder.load(place, align=4))
            for number, decoded in enumerate(weights):
                total = row * len(panels) + number
                totals[total] = vector_call(builder, "fma", value, decoded[ahead], totals[total])
    inputs.close(ir.Constant(I64, coding.inputs_per_byte), end, totals)
    following = [builder.add(place, ir.Constant(I64, coding.block_bytes)) for place in places]
    blocks.close(block, k, [*following, *totals])
    for row in range(rows):
        for number, panel in enumerate(panels):
            store(builder, totals[row * len(panels) + number], panel.out.at(builder, row))


def _tile(coding: Coding, rows: int) -> Any:
    """Return intrinsic `(x, x_stride, codes, scales, k, block, out, out_stride)`: rows times a panel."""

    def tile(
        _typing: Any, x: Any, xs: Any, codes: Any, scales: Any, k: Any, block: Any, out: Any, os: Any
    ) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, codes, scales, k, block, out, out_stride = args
            panel = _Panel(codes, scales, TileRows(out, out_stride))
            _emit_tile(builder, coding, rows, TileRows(x, x_stride), [panel], k, block)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return intrinsic(tile)


def _tile_of_two(coding: Coding, rows: int) -> Any:
    """Return an intrinsic for `two_panels_in_tiles`."""

    def tile(
        _typing: Any, x: Any, xs: Any, codes: Any, others: Any, scales: Any, other_scales: Any, k: Any, block: Any,
        out: Any, other_out: Any, os: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride = args
            panel = _Panel(codes, scales, TileRows(out, out_stride))
            other = _Panel(others, other_scales, TileRows(other_out, out_stride))
            _emit_tile(builder, coding, rows, TileRows(x, x_stride), [panel, other], k, block)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return intrinsic(tile)


def _decoder(coding: Coding) -> Any:
    """Return intrinsic `(codes, scales, block_at, count, out)`: decode inputs of one block into a buffer."""

    def decode(_typing: Any, codes: Any, scales: Any, block_at: Any, count: Any, out: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            codes, scales, block_at, count, out = args
            factors = emit_block(builder, coding, scales, block_at)
            inputs = _Loop(builder, ir.Constant(I64, 0), [codes, out])
            code_at, out_at = inputs.carried
            for ahead, weights in enumerate(
                emit_decoded(builder, coding, load(builder, code_at, I8V), factors)
            ):
                store(builder, weights, builder.add(out_at, ir.Constant(I64, 4 * LANES * ahead)))
            per_byte = coding.inputs_per_byte
            following = [
                builder.add(code_at, ir.Constant(I64, LANES)),
                builder.add(out_at, ir.Constant(I64, 4 * LANES * per_byte)),
            ]
            inputs.close(ir.Constant(I64, per_byte), count, following)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return intrinsic(decode)


@intrinsic
def _buffer(_typing: Any) -> Any:
    """Return the address of memory for decoded inputs, on the stack of the calling function."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: list[ir.Value]) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, F32, DECODED * LANES), I64)

    return types.int64(), codegen


@intrinsic
def _clear(_typing: Any, out: Any) -> Any:
    """Zero 16 float32 at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        store(builder, constant(0.0), args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _one_panel(coding: Coding, name: str) -> Any:
    """Return njit `(x, x_stride, codes, scales, k, block, out, out_stride, rows)` for any number of rows.

    `block` is the number of inputs per scale. `block` and `k` must be even if a byte has two codes.
    """
    one, two, three, four, five, six = (_tile(coding, rows) for rows in range(1, ROWS + 1))
    decode = _decoder(coding)
    per_byte, first_bytes, block_bytes = coding.inputs_per_byte, coding.first_bytes, coding.block_bytes

    def rows_times_panel(x, x_stride, codes, scales, k, block, out, out_stride, rows):  # type: ignore[no-untyped-def]
        if rows == 1:
            one(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows == 2:
            two(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows == 3:
            three(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows == 4:
            four(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows == 5:
            five(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows == 6:
            six(x, x_stride, codes, scales, k, block, out, out_stride)
        elif rows > 6:
            decoded = _buffer()
            for row in range(rows):
                _clear(out + row * out_stride)
            for begin in range(0, k, DECODED):
                end, at = min(begin + DECODED, k), begin
                while at < end:
                    number = at // block
                    until = min(end, (number + 1) * block)
                    decode(
                        codes + at // per_byte * LANES,
                        scales,
                        scales + first_bytes + number * block_bytes,
                        until - at,
                        decoded + (at - begin) * 4 * LANES,
                    )
                    at = until
                add_rows_times_panel_f32(
                    x + begin * 4, x_stride, decoded, 4 * LANES, end - begin, out, out_stride, rows
                )

    return njit(nogil=True)(renamed(rows_times_panel, name))


def _times(x, x_stride, codes, scales, k, block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    _rows_times(x, x_stride, codes, scales, k, block, out, out_stride, rows)  # type: ignore[name-defined]  # noqa: F821
    return 0


def _times_two(  # type: ignore[no-untyped-def]
    x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows
):
    _rows_times(  # type: ignore[name-defined]  # noqa: F821
        x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows
    )
    return 0


class Times(NamedTuple):
    """The functions for one panel and for two."""

    one: Addressed  # called by `tiles.times_panel`
    two: Addressed  # called by `panel_pairs.times_two_panels`


@cache
def times_quantised(coding: Coding) -> Times:
    """Return the functions for panels of a coding. They are compiled when their addresses are read."""
    name = "_".join(map(str, coding))
    one = _one_panel(coding, name)
    two = two_panels_in_tiles(partial(_tile_of_two, coding), one, name)
    return Times(_addressed(renamed(_times, name), one), _addressed(renamed(_times_two, name), two))


def _addressed(call: FunctionType, rows_times: Any) -> Addressed:
    """Build a function with its own globals, not a closure: numba's disk cache would confuse closures across processes."""
    known = {**call.__globals__, "_rows_times": rows_times}
    return Addressed(FunctionType(call.__code__, known, call.__name__), TILES_VERSION)
