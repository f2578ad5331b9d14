"""Register tiles that multiply integers: rows of eight bits times int8 and int4 weights, in panels of 16 columns.

A row is quantised once, with one scale per 32 inputs (`quantise_block`). Every 32 products of a column are summed as
integers, which is exact in any order, so bits depend neither on the machine's instructions (VNNI, AVX2 or neither) nor on
neighbouring rows. The sums are converted to float32, multiplied by both scales and added block after block, in one chain
of fused multiply-adds per output. Idea: llama.cpp's Q8_0 times Q8_0 and Q4_0.

Weights are stored as unsigned numbers with an offset of 128 or 8, because VNNI multiplies unsigned by signed bytes. The
sum of a block's inputs, stored with the inputs, is used to subtract the offset.

Layout of a panel, K inputs of 16 output columns: four inputs of a column are adjacent, as in a lane of a register.
int8 codes [K / 4, 16, 4]; int4 codes [K / 8, 16, 4], with inputs 0 to 3 of 8 in the lower halves and 4 to 7 in the upper
ones; both with 16 bfloat16 scales per block. A quantised row has 32 int8, a float32 scale and an int32 sum per block.

Legend: x rows [m, k] quantised; w panel [k, 16]; out rows [m, 16] float32.
"""

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attention.cpu.tiles import (
    AHEAD_BYTES,
    F32,
    F32V,
    I32,
    I32V,
    I64,
    LANES,
    TILES_VERSION,
    TileRows,
    compiles_for,
    constant,
    fold,
    load,
    load_weights,
    prefetch,
    rows_in_tiles,
    splat,
    store,
    vector_call,
)
from dispatch.compiled.native import Addressed

BLOCK = 32  # inputs per scale, in rows and in weights
QUANTISED_BLOCK_BYTES = BLOCK + 8
_SCALE, _SUM = BLOCK, BLOCK + 4  # offsets of a block's scale and sum
_GROUP = 4  # inputs in a lane
_SCALE_BYTES = 2 * LANES
I8 = ir.IntType(8)


def _same(value: int, kind: ir.VectorType = I32V) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _call(builder: ir.IRBuilder, name: str, returns: ir.Type, *args: ir.Value) -> ir.Value:
    signature = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


class _Vnni:
    """Four products and their sum in one instruction."""

    offset_stays = True  # the weights keep their offset

    @staticmethod
    def prepared(_builder: ir.IRBuilder, weights: ir.Value, _offset: int) -> Any:
        return weights

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: Any, x: ir.Value) -> ir.Value:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", I32V, total, weights, x)


class _Avx2:
    """Pairs of products in 16 bits, which hold 127 x 127 x 2 but not 255 x 127 x 2; halves of 8 columns."""

    offset_stays = False

    @staticmethod
    def prepared(builder: ir.IRBuilder, weights: ir.Value, offset: int) -> Any:
        bytes_ = ir.VectorType(I8, 4 * LANES)
        signed = builder.sub(builder.bitcast(weights, bytes_), _same(offset, bytes_))
        return _halves(builder, builder.bitcast(signed, I32V))

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: Any, x: ir.Value) -> ir.Value:
        bytes_, pairs, sums = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
        found = []
        for before, half, rows in zip(_halves(builder, total), weights, _halves(builder, x), strict=True):
            half, rows = builder.bitcast(half, bytes_), builder.bitcast(rows, bytes_)
            signed = _call(builder, "llvm.x86.avx2.psign.b", bytes_, half, rows)
            size = _call(builder, "llvm.x86.avx2.psign.b", bytes_, rows, rows)
            products = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, size, signed)
            both = _call(builder, "llvm.x86.avx2.pmadd.wd", sums, products, _same(1, pairs))
            found.append(builder.add(before, both))
        return builder.shuffle_vector(*found, ir.Constant(I32V, list(range(LANES))))


class _Plain:
    """Any machine: one byte of every lane at a time."""

    offset_stays = True

    @staticmethod
    def prepared(builder: ir.IRBuilder, weights: ir.Value, _offset: int) -> Any:
        return [builder.and_(builder.lshr(weights, _same(8 * place)), _same(255)) for place in range(_GROUP)]

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: Any, x: ir.Value) -> ir.Value:
        for place, weight in enumerate(weights):
            number = builder.ashr(builder.shl(x, _same(24 - 8 * place)), _same(24))
            total = builder.add(total, builder.mul(weight, number))
        return total


def _halves(builder: ir.IRBuilder, lanes: ir.Value) -> list[ir.Value]:
    undefined = ir.Constant(I32V, ir.Undefined)
    eight = ir.VectorType(I32, LANES // 2)
    return [
        builder.shuffle_vector(lanes, undefined, ir.Constant(eight, list(range(first, first + LANES // 2))))
        for first in (0, LANES // 2)
    ]


_PRODUCTS = _Vnni if compiles_for("avx512vnni") else _Avx2 if compiles_for("avx2") else _Plain


def _next(builder: ir.IRBuilder, codes: ir.Value, place: int) -> ir.Value:
    """Load the block's vector of codes at an index and prefetch later ones."""
    at = builder.add(codes, ir.Constant(I64, 64 * place))
    prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
    return load(builder, at, I32V)


class _Int8:
    """One byte per weight, with an offset of 128."""

    offset, block_bytes = 128, BLOCK * LANES

    @staticmethod
    def groups(builder: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
        """Return the block's vectors, with four inputs in each lane."""
        return [_next(builder, codes, group) for group in range(BLOCK // _GROUP)]


class _Int4:
    """Half a byte per weight, with an offset of 8."""

    offset, block_bytes = 8, BLOCK * LANES // 2

    @staticmethod
    def groups(builder: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
        """Return the block's vectors, with four inputs in each lane."""
        low, groups = 0x0F0F0F0F, []
        for pair in range(BLOCK // _GROUP // 2):
            both = _next(builder, codes, pair)
            groups += [builder.and_(both, _same(low)), builder.and_(builder.lshr(both, _same(4)), _same(low))]
        return groups


_Kind = type[_Int8] | type[_Int4]


def _tile(kind: _Kind, rows: int) -> Any:
    """Return intrinsic `(x, x_stride, codes, scales, blocks, out, out_stride)` for at least one block."""

    def tile(
        _typing: Any, x: Any, xs: Any, codes: Any, scales: Any, blocks: Any, out: Any, stride: Any
    ) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, codes, scales, blocks, out, out_stride = args
            x_rows = [TileRows(x, x_stride).at(builder, row) for row in range(rows)]
            out_rows = [TileRows(out, out_stride).at(builder, row) for row in range(rows)]
            entry, loop = builder.block, builder.append_basic_block("loop")
            end = builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            block = builder.phi(I64)
            block.add_incoming(ir.Constant(I64, 0), entry)
            totals = [builder.phi(F32V) for _ in range(rows)]
            for total in totals:
                total.add_incoming(constant(0.0), entry)
            following = _emit_block(builder, kind, block, x_rows, codes, scales, totals)
            step = builder.add(block, ir.Constant(I64, 1))
            block.add_incoming(step, builder.block)
            for total, value in zip(totals, following, strict=True):
                total.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", step, blocks), loop, end)
            builder.position_at_end(end)
            for value, address in zip(following, out_rows, strict=True):
                store(builder, value, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return intrinsic(tile)


def _emit_block(
    builder: ir.IRBuilder, kind: _Kind, block: ir.Value, x_rows: list[ir.Value], codes: ir.Value, scales: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Emit the products of one block and add them to each row's totals."""
    at = builder.mul(block, ir.Constant(I64, QUANTISED_BLOCK_BYTES))
    x_blocks = [builder.add(row, at) for row in x_rows]
    weights = kind.groups(builder, builder.add(codes, builder.mul(block, ir.Constant(I64, kind.block_bytes))))
    sums = []
    for x_block in x_blocks:
        total = ir.Constant(I32, 0)
        if _PRODUCTS.offset_stays:
            total = builder.mul(_word(builder, x_block, _SUM), ir.Constant(I32, -kind.offset))
        sums.append(splat(builder, total))
    for group, plain in enumerate(weights):
        ready = _PRODUCTS.prepared(builder, plain, kind.offset)
        for row, x_block in enumerate(x_blocks):
            four = splat(builder, _word(builder, x_block, group * _GROUP))
            sums[row] = _PRODUCTS.added(builder, sums[row], ready, four)
    of_weights = load_weights(
        builder, builder.add(scales, builder.mul(block, ir.Constant(I64, _SCALE_BYTES))), bf16=True
    )
    following = []
    for total, x_block, products in zip(totals, x_blocks, sums, strict=True):
        of_row = splat(builder, builder.bitcast(_word(builder, x_block, _SCALE), F32))
        both = builder.fmul(of_row, of_weights)
        following.append(vector_call(builder, "fma", builder.sitofp(products, F32V), both, total))
    return following


def _word(builder: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    place = builder.add(address, ir.Constant(I64, offset))
    return builder.load(builder.inttoptr(place, I32.as_pointer()), align=4)


@intrinsic
def quantise_block(_typing: Any, x: Any, out: Any) -> Any:
    """`(x, out)`: quantise 32 float32. The scale is NaN if one of them is infinite or NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        x, out = args
        halves = [load(builder, builder.add(x, ir.Constant(I64, 4 * first))) for first in (0, LANES)]
        sizes = [vector_call(builder, "fabs", half) for half in halves]
        highest = fold(
            builder,
            vector_call(builder, "maximum", *sizes),
            lambda one, other: vector_call(builder, "maximum", one, other),
        )
        is_finite = builder.fcmp_ordered("<", highest, ir.Constant(F32, float("inf")))
        # Below about 1e-30 the inverse would be infinite: such rows become 0.
        is_seen = builder.and_(is_finite, builder.fcmp_ordered(">", highest, ir.Constant(F32, 1e-30)))
        scale = builder.fdiv(highest, ir.Constant(F32, 127.0))
        inverse = splat(builder, builder.fdiv(ir.Constant(F32, 127.0), highest))
        codes = [
            builder.select(
                is_seen,
                builder.fptosi(
                    vector_call(
                        builder, "rint", builder.fmul(builder.select(is_seen, half, constant(0.0)), inverse)
                    ),
                    I32V,
                ),
                _same(0),
            )
            for half in halves
        ]
        total = builder.add(*codes)
        width = LANES
        while width > 1:
            width //= 2
            lanes = ir.Constant(I32V, [(lane + width) % LANES for lane in range(LANES)])
            total = builder.add(total, builder.shuffle_vector(total, ir.Constant(I32V, ir.Undefined), lanes))
        total = builder.extract_element(total, ir.Constant(I32, 0))
        for half, code in enumerate(codes):
            place = builder.add(out, ir.Constant(I64, half * LANES))
            narrow = builder.trunc(code, ir.VectorType(I8, LANES))
            builder.store(narrow, builder.inttoptr(place, narrow.type.as_pointer()), align=1)
        kept = builder.select(
            is_seen, scale, builder.select(is_finite, ir.Constant(F32, 0.0), ir.Constant(F32, float("nan")))
        )
        for value, offset in ((kept, _SCALE), (total, _SUM)):
            place = builder.add(out, ir.Constant(I64, offset))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


_rows_times_int8 = rows_in_tiles(partial(_tile, _Int8), "int8")
_rows_times_int4 = rows_in_tiles(partial(_tile, _Int4), "int4")


def _times_int8(x, x_stride, codes, scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    _rows_times_int8(x, x_stride, codes, scales, k // BLOCK, out, out_stride, rows)
    return 0


def _times_int4(x, x_stride, codes, scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    _rows_times_int4(x, x_stride, codes, scales, k // BLOCK, out, out_stride, rows)
    return 0


TIMES_INT8, TIMES_INT4 = (Addressed(each, TILES_VERSION) for each in (_times_int8, _times_int4))
