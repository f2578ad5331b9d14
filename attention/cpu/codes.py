"""Decode codes of eight or four bits into float32 weights in registers, 16 columns of a panel at a time.

The product of a value and its scale is rounded once; nothing else is rounded. Bytes are decoded without a table of 256:
the exponent and mantissa of e4m3, moved to their positions in a float32, give the value times 2^-120, for subnormals too.
The factor 2^120 is put into the scale, which must therefore stay below 2^8 (`moe.load.quantised_weight` rejects others).
float16 is moved in the same way, times 2^112. Four-bit codes are looked up: among 16 float32 numbers if a register holds
that many, otherwise as the e4m3 byte that equals an e2m1 value (16 bytes in one register). NaN is not decoded (such
weights are rejected too). Rejected: a table in memory, from which AVX2 gathers one element at a time.

Layout of a panel's scales: first 16 float32 factors of every block's scales, if there are row scales. Then for each
block of K: 16 scales, or one float32 for all columns; then 16 zeros in 8 bytes, if there are zeros, with those of columns
0 to 7 in the lower halves.
"""

from typing import NamedTuple

from llvmlite import binding, ir
from numba.core import cgutils

from attention.cpu.tiles import F32, F32V, I16V, I32, I32V, I64, LANES, compiles_for, constant, load, splat

ROW_SCALES_BYTES = 4 * LANES
ZEROS_BYTES = LANES // 2

I8, I8V = ir.IntType(8), ir.VectorType(ir.IntType(8), LANES)
I8_HALF = ir.VectorType(I8, ZEROS_BYTES)
UNBIAS = 2.0**120  # corrects e4m3's exponent in a float32's position
E4M3_PLACES = 0x87F00000 - (1 << 32)  # sign, exponent and mantissa after sign extension and a shift by 20
FLOAT16_UNBIAS = 2.0**112
FLOAT16_PLACES = 0x8FFFE000 - (1 << 32)  # the same for float16, after a shift by 13
# e2m1 as e4m3 bytes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same negative.
E2M1_AS_E4M3 = tuple(code | sign for sign in (0, 0x80) for code in (0, 48, 56, 60, 64, 68, 72, 76))
HAS_TABLES = compiles_for("avx512f")  # tables of 16 float32 in a register
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEAST_E8M0 = 0x00400000  # 2^-127 as a subnormal float32: scale byte 0
MIDDLE = 8  # subtracted from int4 codes without zeros
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


class Coding(NamedTuple):
    """Format of a panel's codes and scales."""

    kind: str  # format of the codes: e4m3, int8, e2m1 or int4
    scale: str  # a key of SCALE_BYTES
    is_shared: bool = False  # one float32 scale for all columns
    has_row_scales: bool = False
    has_zeros: bool = False

    @property
    def inputs_per_byte(self) -> int:
        """Number of codes in a byte."""
        return 2 if self.kind in ("e2m1", "int4") else 1

    @property
    def block_bytes(self) -> int:
        """Bytes from one block's scales to the next."""
        scales = SCALE_BYTES[self.scale] * (1 if self.is_shared else LANES)
        return scales + (ZEROS_BYTES if self.has_zeros else 0)

    @property
    def first_bytes(self) -> int:
        """Bytes before the first block's scales."""
        return ROW_SCALES_BYTES if self.has_row_scales else 0


def _same(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _look_up(builder: ir.IRBuilder, index: ir.Value) -> ir.Value:
    """Look up 16 bytes below 16 in `E2M1_AS_E4M3`: one instruction on x86 and ARM, lane by lane elsewhere."""
    table = ir.Constant(I8V, [code - 256 if code > 127 else code for code in E2M1_AS_E4M3])
    machine = binding.get_default_triple().partition("-")[0]
    is_x86 = machine in ("x86_64", "i386", "i686") and compiles_for("ssse3")
    name = "llvm.x86.ssse3.pshuf.b.128" if is_x86 else "llvm.aarch64.neon.tbl1.v16i8"
    if is_x86 or machine in ("aarch64", "arm64"):
        signature = ir.FunctionType(I8V, [I8V, I8V])
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), (table, index))
    found: ir.Value = ir.Constant(I8V, ir.Undefined)
    for lane in (ir.Constant(I32, lane) for lane in range(LANES)):
        at = builder.zext(builder.extract_element(index, lane), I32)
        found = builder.insert_element(found, builder.extract_element(table, at), lane)
    return found


def _placed(builder: ir.IRBuilder, bits: ir.Value, shift: int, places: int) -> ir.Value:
    """Move a small float's bits to their positions in a float32. The value is then too small by a power of two."""
    moved = builder.shl(builder.sext(bits, I32V), _same(I32V, shift))
    return builder.bitcast(builder.and_(moved, _same(I32V, places)), F32V)


def emit_e4m3(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Emit the values of e4m3 bytes, times 2^-120."""
    return _placed(builder, codes, 20, E4M3_PLACES)


def _e8m0(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    exponent = builder.shl(builder.zext(load(builder, address, I8V), I32V), _same(I32V, 23))
    least = _same(I32V, LEAST_E8M0)
    bits = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
    return builder.bitcast(bits, F32V)


def _scale(builder: ir.IRBuilder, coding: Coding, address: ir.Value) -> ir.Value:
    if coding.is_shared:
        return splat(builder, builder.load(builder.inttoptr(address, F32.as_pointer()), align=1))
    if coding.scale == "e8m0":
        return _e8m0(builder, address)
    if coding.scale == "e4m3":
        return builder.fmul(emit_e4m3(builder, load(builder, address, I8V)), constant(UNBIAS))
    if coding.scale == "float32":
        return load(builder, address)
    halves = load(builder, address, I16V)
    if coding.scale == "float16":
        return builder.fmul(_placed(builder, halves, 13, FLOAT16_PLACES), constant(FLOAT16_UNBIAS))
    return builder.bitcast(builder.shl(builder.zext(halves, I32V), _same(I32V, 16)), F32V)


class BlockFactors(NamedTuple):
    """Factors for decoding the codes of one block."""

    scale: ir.Value  # 16 float32
    zero: ir.Value  # 16 bytes


def emit_block(builder: ir.IRBuilder, coding: Coding, scales: ir.Value, address: ir.Value) -> BlockFactors:
    """Load the factors of the block at `address`. `scales` is the start of the panel's scales."""
    scale = _scale(builder, coding, address)
    if coding.has_row_scales:
        scale = builder.fmul(scale, load(builder, scales))
    if coding.kind == "e4m3" or (coding.kind == "e2m1" and not HAS_TABLES):
        scale = builder.fmul(scale, constant(UNBIAS))
    zero: ir.Value = _same(I8V, MIDDLE)
    if coding.has_zeros:
        at = builder.add(address, ir.Constant(I64, coding.block_bytes - ZEROS_BYTES))
        packed = builder.load(builder.inttoptr(at, I8_HALF.as_pointer()), align=1)
        low = builder.and_(packed, ir.Constant(I8_HALF, [15] * ZEROS_BYTES))
        high = builder.lshr(packed, ir.Constant(I8_HALF, [4] * ZEROS_BYTES))
        zero = builder.shuffle_vector(low, high, ir.Constant(I32V, list(range(LANES))))
    return BlockFactors(scale, zero)


def emit_decoded(
    builder: ir.IRBuilder, coding: Coding, codes: ir.Value, block: BlockFactors
) -> list[ir.Value]:
    """Decode 16 bytes of codes into the weights of one or two inputs."""
    if coding.kind == "e4m3":
        values = [emit_e4m3(builder, codes)]
    elif coding.kind == "int8":
        values = [builder.sitofp(builder.sext(codes, I32V), F32V)]
    elif HAS_TABLES:
        values = _looked_up(builder, _table(coding), codes)
        if coding.has_zeros:
            values = [builder.fsub(value, builder.uitofp(block.zero, F32V)) for value in values]
    else:
        halves = (builder.and_(codes, _same(I8V, 15)), builder.lshr(codes, _same(I8V, 4)))
        if coding.kind == "e2m1":
            values = [emit_e4m3(builder, _look_up(builder, half)) for half in halves]
        else:
            integers = [builder.sext(builder.sub(half, block.zero), I32V) for half in halves]
            values = [builder.sitofp(integer, F32V) for integer in integers]
    return [builder.fmul(value, block.scale) for value in values]


def _table(coding: Coding) -> tuple[float, ...]:
    """Return the values of four-bit codes, before any zeros are subtracted."""
    if coding.kind == "e2m1":
        return (*_E2M1, *(-value for value in _E2M1))
    return tuple(float(code - (0 if coding.has_zeros else MIDDLE)) for code in range(16))


def _looked_up(builder: ir.IRBuilder, table: tuple[float, ...], codes: ir.Value) -> list[ir.Value]:
    """Look up both halves of 16 bytes among 16 float32, with AVX-512's instruction, which uses four bits of an index."""
    wide = builder.zext(codes, I32V)
    signature = ir.FunctionType(F32V, [F32V, I32V])
    permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.permvar.sf.512")
    indices = (wide, builder.lshr(wide, _same(I32V, 4)))
    return [builder.call(permute, (ir.Constant(F32V, list(table)), index)) for index in indices]
