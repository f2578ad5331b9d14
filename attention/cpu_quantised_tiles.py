"""Register tiles for checkpoints' weights that stay quantised in memory: FP8 (e4m3) and MXFP4 (pairs of e2m1), panels of 16.

A weight becomes the float32 number that it stands for, value times scale with one rounding, in registers, and is then
multiplied and added just as `cpu_tiles` does it: every output is the very chain of fused multiply-adds that the
dequantised weight would give. Few rows decode as they multiply; for many, a block is decoded once into a buffer that
stays in the first-level cache, and float32 tiles run over it.

How a byte becomes a number without a table of 256: e4m3's exponent and mantissa, moved to a float32's places, are
the value times 2^-120, for subnormals too. An e2m1 value is looked up as the e4m3 byte that equals it (16 bytes in one
register). 2^120 is put into the scale, which must therefore stay below 2^8 (`moe.load.quantised_weight` refuses others).
e4m3's NaN is not decoded (likewise). Rejected: a table in memory, which AVX2 gathers from one element at a time.

Layout of a panel, K inputs of 16 output columns: FP8 codes [K, 16] and one float32 scale per block of K; MXFP4 codes
[K / 2, 16], the even input in the lower half of a byte, and 16 scales (e8m0: 2^(byte - 127)) per block of K.
"""

from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from attention.cpu_tiles import (
    F32,
    F32V,
    I32,
    I32V,
    I64,
    LANES,
    TILES_VERSION,
    TileRows,
    add_rows_times_panel_f32,
    constant,
    emit_products,
    load,
    splat,
    store,
)
from dispatch.native import Addressed, renamed

MAX_BLOCK = 128  # inputs under one scale: what the decoded buffer holds
FUSED_ROWS = 6  # up to one tile of rows is decoded as it is multiplied

I8, I8V = ir.IntType(8), ir.VectorType(ir.IntType(8), LANES)
UNBIAS = 2.0**120  # of e4m3's exponent in a float32's place
E4M3_PLACES = 0x87F00000 - (1 << 32)  # sign, exponent and mantissa after sign extension and a shift by 20
# e2m1 as e4m3 bytes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same negative.
E2M1_AS_E4M3 = tuple(code | sign for sign in (0, 0x80) for code in (0, 48, 56, 60, 64, 68, 72, 76))
LEAST_E8M0 = 0x00400000  # 2^-127 as a subnormal float32: scale byte 0


def _same(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _look_up(builder: ir.IRBuilder, index: ir.Value) -> ir.Value:
    """Look 16 bytes below 16 up in `E2M1_AS_E4M3`: one instruction on x86 and ARM, lane by lane elsewhere."""
    table = ir.Constant(I8V, [code - 256 if code > 127 else code for code in E2M1_AS_E4M3])
    machine = binding.get_default_triple().partition("-")[0]
    is_x86 = machine in ("x86_64", "i386", "i686") and binding.get_host_cpu_features().get("ssse3", False)
    name = "llvm.x86.ssse3.pshuf.b.128" if is_x86 else "llvm.aarch64.neon.tbl1.v16i8"
    if is_x86 or machine in ("aarch64", "arm64"):
        signature = ir.FunctionType(I8V, [I8V, I8V])
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), (table, index))
    found: ir.Value = ir.Constant(I8V, ir.Undefined)
    for lane in (ir.Constant(I32, lane) for lane in range(LANES)):
        at = builder.zext(builder.extract_element(index, lane), I32)
        found = builder.insert_element(found, builder.extract_element(table, at), lane)
    return found


def _widen(builder: ir.IRBuilder, codes: ir.Value, scale: ir.Value) -> ir.Value:
    """Turn e4m3 bytes into float32 numbers, `scale` having 2^120 in it."""
    placed = builder.shl(builder.sext(codes, I32V), _same(I32V, 20))
    value = builder.bitcast(builder.and_(placed, _same(I32V, E4M3_PLACES)), F32V)
    return builder.fmul(value, scale)


class _Fp8:
    """A byte per weight, a float32 scale per block of a panel."""

    inputs_per_byte, scale_bytes = 1, 4

    @staticmethod
    def scale(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        single = builder.load(builder.inttoptr(address, F32.as_pointer()), align=4)
        return splat(builder, builder.fmul(single, ir.Constant(F32, UNBIAS)))

    @staticmethod
    def decode(builder: ir.IRBuilder, codes: ir.Value, scale: ir.Value) -> list[ir.Value]:
        return [_widen(builder, codes, scale)]


class _Mxfp4:
    """Half a byte per weight, a byte of scale per block of a column."""

    inputs_per_byte, scale_bytes = 2, LANES

    @staticmethod
    def scale(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        exponent = builder.shl(builder.zext(load(builder, address, I8V), I32V), _same(I32V, 23))
        least = _same(I32V, LEAST_E8M0)
        bits = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
        return builder.fmul(builder.bitcast(bits, F32V), constant(UNBIAS))

    @staticmethod
    def decode(builder: ir.IRBuilder, codes: ir.Value, scale: ir.Value) -> list[ir.Value]:
        halves = (builder.and_(codes, _same(I8V, 15)), builder.lshr(codes, _same(I8V, 4)))
        return [_widen(builder, _look_up(builder, half), scale) for half in halves]


_Kind = type[_Fp8] | type[_Mxfp4]


def _tile(kind: _Kind, rows: int) -> Any:
    """Intrinsic `(x, x_stride, codes, k, scale, out, out_stride)`: add the products of one scale's block to out."""

    def tile(_typing: Any, x: Any, xs: Any, codes: Any, k: Any, scale: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, codes, k, scale_at, out, out_stride = args
            scale = kind.scale(builder, scale_at)

            def weights(index: ir.Value) -> list[ir.Value]:
                at = builder.add(codes, builder.mul(index, ir.Constant(I64, LANES)))
                return kind.decode(builder, load(builder, at, I8V), scale)

            steps = builder.sdiv(k, ir.Constant(I64, kind.inputs_per_byte))
            emit_products(
                builder,
                TileRows(x, x_stride),
                weights,
                steps,
                TileRows(out, out_stride),
                rows,
                accumulate=True,
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return intrinsic(tile)


def _decoder(kind: _Kind) -> Any:
    """Intrinsic `(codes, scale, out)`: decode 16 bytes of codes; out has 16 float32 per input."""

    def decode(_typing: Any, codes: Any, scale: Any, out: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            codes, scale_at, out = args
            scale = kind.scale(builder, scale_at)
            for index, weights in enumerate(kind.decode(builder, load(builder, codes, I8V), scale)):
                store(builder, weights, builder.add(out, ir.Constant(I64, 4 * LANES * index)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(decode)


@intrinsic
def _buffer(_typing: Any) -> Any:
    """The address of memory for one decoded block, on the stack of the function that calls this."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: list[ir.Value]) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, F32, MAX_BLOCK * LANES), I64)

    return types.int64(), codegen


@intrinsic
def _clear(_typing: Any, out: Any) -> Any:
    """Zero 16 float32 at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        store(builder, constant(0.0), args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _rows_function(kind: _Kind, name: str) -> Any:
    """Return njit `(x, x_stride, codes, scales, k, block, out, out_stride, rows)`: any number of rows.

    `block` is the inputs under one scale: at most `MAX_BLOCK`, even for MXFP4, whose k is a multiple of it.
    """
    one, two, three, four, five, six = (_tile(kind, rows) for rows in range(1, FUSED_ROWS + 1))
    decode = _decoder(kind)
    per_byte, scale_bytes = kind.inputs_per_byte, kind.scale_bytes

    def rows_times_panel(x, x_stride, codes, scales, k, block, out, out_stride, rows):  # type: ignore[no-untyped-def]
        decoded = _buffer()
        for row in range(rows):
            _clear(out + row * out_stride)
        for begin in range(0, k, block):
            count = min(block, k - begin)
            x_block, codes_block = x + begin * 4, codes + begin // per_byte * LANES
            scale = scales + begin // block * scale_bytes
            if rows == 1:
                one(x_block, x_stride, codes_block, count, scale, out, out_stride)
            elif rows == 2:
                two(x_block, x_stride, codes_block, count, scale, out, out_stride)
            elif rows == 3:
                three(x_block, x_stride, codes_block, count, scale, out, out_stride)
            elif rows == 4:
                four(x_block, x_stride, codes_block, count, scale, out, out_stride)
            elif rows == 5:
                five(x_block, x_stride, codes_block, count, scale, out, out_stride)
            elif rows == 6:
                six(x_block, x_stride, codes_block, count, scale, out, out_stride)
            else:
                for index in range(count // per_byte):
                    decode(codes_block + index * LANES, scale, decoded + index * per_byte * LANES * 4)
                add_rows_times_panel_f32(x_block, x_stride, decoded, 4 * LANES, count, out, out_stride, rows)

    return njit(nogil=True)(renamed(rows_times_panel, name))


rows_times_panel_fp8 = _rows_function(_Fp8, "fp8")
rows_times_panel_mxfp4 = _rows_function(_Mxfp4, "mxfp4")


def _times_fp8(x, x_stride, codes, scales, k, block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_fp8(x, x_stride, codes, scales, k, block, out, out_stride, rows)
    return 0


def _times_mxfp4(x, x_stride, codes, scales, k, block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_mxfp4(x, x_stride, codes, scales, k, block, out, out_stride, rows)
    return 0


TIMES_FP8, TIMES_MXFP4 = (Addressed(each, TILES_VERSION) for each in (_times_fp8, _times_mxfp4))
