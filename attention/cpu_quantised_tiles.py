"""Register tiles for checkpoints' weights that stay quantised in memory: codes of eight or four bits, in panels of 16 columns.

A weight becomes the float32 number that it stands for, value times scale with one rounding, in registers, and is then
multiplied and added just as `cpu_tiles` does it: every output is the very chain of fused multiply-adds that the
dequantised weight would give. Weights are decoded as they are multiplied; where there are many rows and few registers, up
to 128 inputs are decoded once into a buffer that stays in the first-level cache, and float32 tiles run over it. What codes
are and what scales are is put together freely, and only what a model has is compiled (`times_quantised`).

How a byte becomes a number without a table of 256: e4m3's exponent and mantissa, moved to a float32's places, are
the value times 2^-120, for subnormals too. An e2m1 value is looked up as the e4m3 byte that equals it (16 bytes in one
register). 2^120 is put into the scale, which must therefore stay below 2^8 (`moe.load.quantised_weight` refuses others).
float16 is moved likewise, times 2^112. NaN is not decoded (likewise). Rejected: a table in memory, which AVX2 gathers
from one element at a time.

Layout of a panel, K inputs of 16 output columns: codes [K, 16], or two to a byte [K / 2, 16], the even input in the lower
half. Layout of its scales: 16 float32 that are factors of every block's scales, where there are any; then for each block
of K 16 scales, or one float32 for all columns, and 16 zeros where there are any, in 8 bytes: those of columns 0 to 7 in the
lower halves.
"""

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from attention.cpu_tiles import (
    AHEAD_BYTES,
    F32,
    F32V,
    I16V,
    I32,
    I32V,
    I64,
    LANES,
    MOST_ROWS,
    ROWS,
    TILES_VERSION,
    TileRows,
    add_rows_times_panel_f32,
    compiles_for,
    constant,
    load,
    prefetch,
    splat,
    store,
    vector_call,
)
from dispatch.native import Addressed, renamed

DECODED = 128  # inputs that the decoded buffer holds
ROW_SCALES_BYTES = 4 * LANES
ZEROS_BYTES = LANES // 2

I8, I8V = ir.IntType(8), ir.VectorType(ir.IntType(8), LANES)
I8_HALF = ir.VectorType(I8, ZEROS_BYTES)
UNBIAS = 2.0**120  # of e4m3's exponent in a float32's place
E4M3_PLACES = 0x87F00000 - (1 << 32)  # sign, exponent and mantissa after sign extension and a shift by 20
FLOAT16_UNBIAS = 2.0**112
FLOAT16_PLACES = 0x8FFFE000 - (1 << 32)  # the same after a shift by 13
# e2m1 as e4m3 bytes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same negative.
E2M1_AS_E4M3 = tuple(code | sign for sign in (0, 0x80) for code in (0, 48, 56, 60, 64, 68, 72, 76))
HAS_TABLES = compiles_for("avx512f")  # of 16 float32 in a register
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEAST_E8M0 = 0x00400000  # 2^-127 as a subnormal float32: scale byte 0
MIDDLE = 8  # what an int4 code of 0 is above, where there are no zeros
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


class Coding(NamedTuple):
    """What a panel's codes and scales are."""

    kind: str  # of codes: e4m3, int8, e2m1 or int4
    scale: str  # one of SCALE_BYTES
    is_shared: bool = False  # one scale, a float32, for all columns
    has_row_scales: bool = False
    has_zeros: bool = False

    @property
    def inputs_per_byte(self) -> int:
        """Of codes."""
        return 2 if self.kind in ("e2m1", "int4") else 1

    @property
    def block_bytes(self) -> int:
        """From a block's scales to the next one's."""
        scales = SCALE_BYTES[self.scale] * (1 if self.is_shared else LANES)
        return scales + (ZEROS_BYTES if self.has_zeros else 0)

    @property
    def first_bytes(self) -> int:
        """Before the first block's."""
        return ROW_SCALES_BYTES if self.has_row_scales else 0


def _same(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _look_up(builder: ir.IRBuilder, index: ir.Value) -> ir.Value:
    """Look 16 bytes below 16 up in `E2M1_AS_E4M3`: one instruction on x86 and ARM, lane by lane elsewhere."""
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
    """Put a small float's bits where a float32 has them; what they mean is too small by a power of two."""
    moved = builder.shl(builder.sext(bits, I32V), _same(I32V, shift))
    return builder.bitcast(builder.and_(moved, _same(I32V, places)), F32V)


def _e4m3(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Turn bytes into their values times 2^-120."""
    return _placed(builder, codes, 20, E4M3_PLACES)


def _e8m0(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    exponent = builder.shl(builder.zext(load(builder, address, I8V), I32V), _same(I32V, 23))
    least = _same(I32V, LEAST_E8M0)
    bits = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
    return builder.bitcast(bits, F32V)


def _scale(builder: ir.IRBuilder, coding: Coding, address: ir.Value) -> ir.Value:
    """Load a block's scales as float32."""
    if coding.is_shared:
        return splat(builder, builder.load(builder.inttoptr(address, F32.as_pointer()), align=1))
    if coding.scale == "e8m0":
        return _e8m0(builder, address)
    if coding.scale == "e4m3":
        return builder.fmul(_e4m3(builder, load(builder, address, I8V)), constant(UNBIAS))
    if coding.scale == "float32":
        return load(builder, address)
    halves = load(builder, address, I16V)
    if coding.scale == "float16":
        return builder.fmul(_placed(builder, halves, 13, FLOAT16_PLACES), constant(FLOAT16_UNBIAS))
    return builder.bitcast(builder.shl(builder.zext(halves, I32V), _same(I32V, 16)), F32V)


class _Block(NamedTuple):
    """What the codes of one block are decoded with."""

    scale: ir.Value  # 16 float32
    zero: ir.Value  # 16 bytes


def _block(builder: ir.IRBuilder, coding: Coding, scales: ir.Value, address: ir.Value) -> _Block:
    """Load one; `scales` is where the panel's begin."""
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
    return _Block(scale, zero)


def _decoded(builder: ir.IRBuilder, coding: Coding, codes: ir.Value, block: _Block) -> list[ir.Value]:
    """Turn 16 bytes of codes into the weights of one input or two."""
    if coding.kind == "e4m3":
        values = [_e4m3(builder, codes)]
    elif coding.kind == "int8":
        values = [builder.sitofp(builder.sext(codes, I32V), F32V)]
    elif HAS_TABLES:
        values = _looked_up(builder, _table(coding), codes)
        if coding.has_zeros:
            values = [builder.fsub(value, builder.uitofp(block.zero, F32V)) for value in values]
    else:
        halves = (builder.and_(codes, _same(I8V, 15)), builder.lshr(codes, _same(I8V, 4)))
        if coding.kind == "e2m1":
            values = [_e4m3(builder, _look_up(builder, half)) for half in halves]
        else:
            integers = [builder.sext(builder.sub(half, block.zero), I32V) for half in halves]
            values = [builder.sitofp(integer, F32V) for integer in integers]
    return [builder.fmul(value, block.scale) for value in values]


def _table(coding: Coding) -> tuple[float, ...]:
    """What codes of four bits mean, or mean before their zeros are taken away."""
    if coding.kind == "e2m1":
        return (*_E2M1, *(-value for value in _E2M1))
    return tuple(float(code - (0 if coding.has_zeros else MIDDLE)) for code in range(16))


def _looked_up(builder: ir.IRBuilder, table: tuple[float, ...], codes: ir.Value) -> list[ir.Value]:
    """Look both halves of 16 bytes up among 16 float32, with AVX-512's instruction, which sees four bits of an index."""
    wide = builder.zext(codes, I32V)
    signature = ir.FunctionType(F32V, [F32V, I32V])
    permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.permvar.sf.512")
    indices = (wide, builder.lshr(wide, _same(I32V, 4)))
    return [builder.call(permute, (ir.Constant(F32V, list(table)), index)) for index in indices]


class _Loop:
    """A loop that is being emitted: an index, and vectors that it carries from turn to turn."""

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
        """Go on while the index stays below `end`; what is emitted next comes after the loop."""
        builder, after = self._builder, self._builder.append_basic_block("after")
        following = builder.add(self.index, step)
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), self._body, after)
        builder.position_at_end(after)


class _Panel(NamedTuple):
    """Where a panel's codes and scales are, and where its columns of the result go."""

    codes: ir.Value
    scales: ir.Value
    out: TileRows


def _emit_tile(
    builder: ir.IRBuilder, coding: Coding, rows: int, x: TileRows, panels: list[_Panel], k: ir.Value, block: ir.Value
) -> None:  # fmt: skip
    """Emit so many rows times panels: `out[m, :] = sum_k x[m, k] * w[k, :]`."""
    x_rows = [x.at(builder, row) for row in range(rows)]
    firsts = [builder.add(panel.scales, ir.Constant(I64, coding.first_bytes)) for panel in panels]
    blocks = _Loop(builder, ir.Constant(I64, 0), [*firsts, *[constant(0.0)] * (rows * len(panels))])
    places, sums = blocks.carried[: len(panels)], blocks.carried[len(panels) :]
    factors = [
        _block(builder, coding, panel.scales, place) for panel, place in zip(panels, places, strict=True)
    ]
    end = builder.add(blocks.index, block)
    end = builder.select(builder.icmp_signed("<", end, k), end, k)
    inputs = _Loop(builder, blocks.index, sums)
    byte = builder.udiv(inputs.index, ir.Constant(I64, coding.inputs_per_byte))
    weights = []
    for panel, factor in zip(panels, factors, strict=True):
        at = builder.add(panel.codes, builder.mul(byte, ir.Constant(I64, LANES)))
        prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
        weights.append(_decoded(builder, coding, load(builder, at, I8V), factor))
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
    """Intrinsic `(x, x_stride, codes, scales, k, block, out, out_stride)`: so many rows times a panel."""

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
    """Intrinsic `(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride)`."""

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
    """Intrinsic `(codes, scales, block_at, count, out)`: decode inputs of one block into a buffer."""

    def decode(_typing: Any, codes: Any, scales: Any, block_at: Any, count: Any, out: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            codes, scales, block_at, count, out = args
            factors = _block(builder, coding, scales, block_at)
            inputs = _Loop(builder, ir.Constant(I64, 0), [codes, out])
            code_at, out_at = inputs.carried
            for ahead, weights in enumerate(_decoded(builder, coding, load(builder, code_at, I8V), factors)):
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
    """The address of memory for decoded inputs, on the stack of the function that calls this."""

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
    """Return njit `(x, x_stride, codes, scales, k, block, out, out_stride, rows)`: any number of rows.

    `block` is the inputs under one scale, any number; even, as k is, where a byte has two codes.
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


def _two_panels(coding: Coding, name: str, one_panel: Any) -> Any:
    """The same for two: `(x, x_stride, codes, others, scales, other_scales, k, block, out, other_out, out_stride, rows)`.

    For few rows there are two chains of additions, where one would wait for itself. For many, and as many registers,
    decoding as one multiplies is quicker than a buffer.
    """
    one, two, three, four, six, eight, twelve = (
        _tile_of_two(coding, rows) for rows in (1, 2, 3, 4, 6, 8, 12)
    )

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
    """What is called for one panel and for two."""

    one: Addressed  # by `cpu_tiles.times_panel`
    two: Addressed  # by `cpu_panel_pairs.times_two_panels`


@cache
def times_quantised(coding: Coding) -> Times:
    """Return the functions for panels of a coding; compiled when their addresses are asked for."""
    name = "_".join(map(str, coding))
    one = _one_panel(coding, name)
    two = _two_panels(coding, name, one)
    return Times(_addressed(renamed(_times, name), one), _addressed(renamed(_times_two, name), two))


def _addressed(call: FunctionType, rows_times: Any) -> Addressed:
    """In globals of its own, not a closure: numba's cache on disk would take every process's for another one."""
    known = {**call.__globals__, "_rows_times": rows_times}
    return Addressed(FunctionType(call.__code__, known, call.__name__), TILES_VERSION)
