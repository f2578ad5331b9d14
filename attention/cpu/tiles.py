"""Register tiles for CPU kernels: the vector loops of which attention and experts are built.

Every output element is one chain of fused multiply-adds over k = 0, 1, 2, ..., for any number of rows in the tile, so
the bits of a row never depend on neighbouring rows. Library GEMMs break that for few rows. The
weights are *panels*: 16 output columns side by side, `w[k][16]`, so that one vector load serves all rows and no
horizontal sum is needed (the outer-product micro-kernel of Goto and van de Geijn, 2008).

The tiles are LLVM vector code emitted through numba's `@intrinsic`, because LLVM's own vectoriser keeps neither the
accumulators in registers nor the order of additions. They work on addresses and strides only: the caller is responsible
for shapes, types and bounds. They live in `attention` because it is the lower of the two packages that use them.
Rejected: a C extension (needs a compiler on the user's machine); padding rows for a library GEMM (2 to 4 x slower at
1 to 8 rows, docs/LOG.md).

Legend: x rows [m, k] float32; w panel [k, 16] float32 or bfloat16; out rows [m, 16] float32.
"""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from dispatch.compiled import native
from dispatch.compiled.native import Addressed, renamed
from kvcache import codes

LANES = 16  # output columns of a panel; also the tokens of a KV block


def compiles_for(feature: str) -> bool:
    """Return whether numba compiles for a machine with this instruction set (LLVM's name)."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return bool(binding.get_host_cpu_features().get(feature, False))


# Prefetch distance, needed because the processor's own prefetching stops at the end of a page. Measured 1.3 to 1.4 x at
# 1 to 16 rows of bfloat16 (512 to 8,192 tried, docs/LOG.md).
AHEAD_BYTES = 4096
ROWS = 6  # rows of a tile: 12 accumulators of 8 floats fit AVX2's 16 registers
# Rows of the largest tile: 12 accumulators of 16 floats fit 32 registers.
MOST_ROWS = 12 if compiles_for("avx512f") else ROWS

# Hash of all code that kernels inline: this folder, `native` and `codes`. It is part of every kernel's name.
_OTHERS = (Path(native.__file__), Path(codes.__file__))
TILES_VERSION = zlib.crc32(
    b"".join(path.read_bytes() for path in (*sorted(Path(__file__).parent.glob("*.py")), *_OTHERS))
)

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32V, I16V, I32V = (ir.VectorType(scalar, LANES) for scalar in (F32, I16, I32))
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
EXP_LOWEST = -87.0  # exp() is 0 here for smaller arguments; float32's smallest normal number is exp(-87.3)
# Minimax polynomial for exp(r), |r| <= ln(2)/2 (the coefficients of Cephes' expf).
EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Emit a vector with the scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(I32V, [0] * LANES))


def constant(value: float) -> ir.Constant:
    """Return a constant vector with the number in every lane."""
    return ir.Constant(F32V, [value] * LANES)


def vector_call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Emit a call of an LLVM intrinsic on float32 vectors."""
    signature = ir.FunctionType(F32V, [F32V] * len(args))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


def load(builder: ir.IRBuilder, address: ir.Value, vector: ir.Type = F32V) -> ir.Value:
    """Emit the load of a vector, float32 by default."""
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=2)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Emit the store of a float32 vector."""
    builder.store(value, builder.inttoptr(address, F32V.as_pointer()), align=4)


def load_weights(builder: ir.IRBuilder, address: ir.Value, bf16: bool) -> ir.Value:
    """Emit the load of 16 float32 or bfloat16 as float32."""
    if not bf16:
        return load(builder, address)
    wide = builder.zext(load(builder, address, I16V), I32V)  # bfloat16 is the upper half of a float32
    return builder.bitcast(builder.shl(wide, ir.Constant(I32V, [16] * LANES)), F32V)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Emit a prefetch of the cache line at an address that is read once, soon. The address may be invalid."""
    pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
    builder.call(function, (builder.inttoptr(address, pointer), read, keep, data))


class TileRows(NamedTuple):
    """Rows of float32 in memory: the address of the first row and the bytes from one row to the next."""

    address: ir.Value
    stride: ir.Value

    def at(self, builder: ir.IRBuilder, row: int) -> ir.Value:
        """Emit the address of a row."""
        return builder.add(self.address, builder.mul(self.stride, ir.Constant(I64, row)))


def emit_products(
    builder: ir.IRBuilder,
    x: TileRows,
    weights: Callable[[ir.Value], list[ir.Value]],
    steps: ir.Value,
    out: TileRows,
    rows: int,
    *,
    accumulate: bool,
    factors: ir.Value | None = None,
) -> None:
    """Emit `out[m, :] (+)= sum_k x[m, k] * w[k, :]`.

    Args:
        weights: Emits the vectors w[k, :] of step 0, 1, 2, ...; the same number for every step.
        steps: At least 1.
        factors: Emit `out[m, :] = factors[:] * sum_k x[m, k] * w[k, :]` instead, with a sum of even and one of odd k, which
            are added last. A step then has two vectors.
    """
    x_rows = [x.at(builder, row) for row in range(rows)]
    out_rows = [out.at(builder, row) for row in range(rows)]
    chains = 1 if factors is None else 2
    first = [load(builder, address) if accumulate else constant(0.0) for address in out_rows * chains]
    entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), entry)
    sums = [builder.phi(F32V) for _ in first]
    for total, value in zip(sums, first, strict=True):
        total.add_incoming(value, entry)
    vectors, following = weights(index), list(sums)
    for ahead, vector in enumerate(vectors):
        offset = builder.add(
            builder.mul(index, ir.Constant(I64, 4 * len(vectors))), ir.Constant(I64, 4 * ahead)
        )
        for row in range(rows):
            value = builder.load(
                builder.inttoptr(builder.add(x_rows[row], offset), F32.as_pointer()), align=4
            )
            place = ahead % chains * rows + row
            following[place] = vector_call(builder, "fma", splat(builder, value), vector, following[place])
    step = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(step, builder.block)
    for total, value in zip(sums, following, strict=True):
        total.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", step, steps), loop, end)
    builder.position_at_end(end)
    if factors is not None:
        both = zip(following[:rows], following[rows:], strict=True)
        following = [builder.fmul(builder.fadd(even, odd), factors) for even, odd in both]
    for value, address in zip(following, out_rows, strict=True):
        store(builder, value, address)


def _tile(rows: int, bf16: bool, accumulate: bool) -> Any:
    def tile(_typing: Any, x: Any, xs: Any, w: Any, ws: Any, k: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, w, w_stride, k, out, out_stride = args

            def weights(index: ir.Value) -> list[ir.Value]:
                at = builder.add(w, builder.mul(index, w_stride))
                prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
                return [load_weights(builder, at, bf16)]

            emit_products(
                builder,
                TileRows(x, x_stride),
                weights,
                k,
                TileRows(out, out_stride),
                rows,
                accumulate=accumulate,
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return intrinsic(tile)


def rows_in_tiles(tile_of: Callable[[int], Any], name: str) -> Any:
    """Return njit `(x, x_stride, w, w_stride, k, out, out_stride, rows)` for any number of rows and k of at least 1.

    Args:
        tile_of: Returns the intrinsic for a number of rows, with these arguments except `rows`. It may read `w_stride` and
            `k` as something else.
        name: Unique name of the function.
    """
    one, two, three, four, five, six = (tile_of(rows) for rows in range(1, ROWS + 1))
    most, most_rows = tile_of(MOST_ROWS), MOST_ROWS

    def rows_times_panel(x, x_stride, w, w_stride, k, out, out_stride, rows):  # type: ignore[no-untyped-def]
        while rows >= most_rows:
            most(x, x_stride, w, w_stride, k, out, out_stride)
            x += most_rows * x_stride
            out += most_rows * out_stride
            rows -= most_rows
        while rows >= 6:
            six(x, x_stride, w, w_stride, k, out, out_stride)
            x += 6 * x_stride
            out += 6 * out_stride
            rows -= 6
        if rows == 1:
            one(x, x_stride, w, w_stride, k, out, out_stride)
        elif rows == 2:
            two(x, x_stride, w, w_stride, k, out, out_stride)
        elif rows == 3:
            three(x, x_stride, w, w_stride, k, out, out_stride)
        elif rows == 4:
            four(x, x_stride, w, w_stride, k, out, out_stride)
        elif rows == 5:
            five(x, x_stride, w, w_stride, k, out, out_stride)

    return njit(nogil=True)(renamed(rows_times_panel, name))


rows_times_panel_f32 = rows_in_tiles(partial(_tile, bf16=False, accumulate=False), "f32")
rows_times_panel_bf16 = rows_in_tiles(partial(_tile, bf16=True, accumulate=False), "bf16")
add_rows_times_panel_f32 = rows_in_tiles(partial(_tile, bf16=False, accumulate=True), "f32_added")


def _times_f32(x, x_stride, panel, _scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_f32(x, x_stride, panel, 4 * LANES, k, out, out_stride, rows)
    return 0


def _times_bf16(x, x_stride, panel, _scales, k, _block, out, out_stride, rows):  # type: ignore[no-untyped-def]
    rows_times_panel_bf16(x, x_stride, panel, 2 * LANES, k, out, out_stride, rows)
    return 0


# Functions for `times_panel`, by panel format; others are in `quantised_tiles` and `integer_tiles`.
TIMES_F32, TIMES_BF16 = Addressed(_times_f32, TILES_VERSION), Addressed(_times_bf16, TILES_VERSION)


@intrinsic
def times_panel(
    _typing: Any, function: Any, x: Any, x_stride: Any, panel: Any, scales: Any, k: Any, block: Any, out: Any,
    out_stride: Any, rows: Any,
) -> Any:  # fmt: skip
    """Multiply rows by a panel of any format into 16 columns of `out`: the function's address, then its arguments.

    A kernel that calls it is compiled once for all formats.
    """

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        called = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 9).as_pointer())
        return builder.call(called, args[1:])

    return types.int64(*[types.int64] * 10), codegen


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit exp(x) for x <= 88, to 2 ulp; 0 below `EXP_LOWEST`, so that a masked score adds exactly nothing."""
    clamped = vector_call(builder, "maxnum", x, constant(EXP_LOWEST))
    n = vector_call(builder, "floor", vector_call(builder, "fma", clamped, constant(LOG2E), constant(0.5)))
    r = vector_call(builder, "fma", n, constant(-LN2_HIGH), clamped)
    r = vector_call(builder, "fma", n, constant(-LN2_LOW), r)
    series = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = vector_call(builder, "fma", series, r, constant(term))
    series = vector_call(builder, "fma", series, builder.fmul(r, r), builder.fadd(r, constant(1.0)))
    exponent = builder.shl(builder.fptosi(n, I32V), ir.Constant(I32V, [23] * LANES))
    power = builder.bitcast(builder.add(builder.bitcast(series, I32V), exponent), F32V)
    return builder.select(builder.fcmp_ordered("<", x, constant(EXP_LOWEST)), constant(0.0), power)


def fold(
    builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Fold the lanes as a fixed binary tree and return the scalar."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = ir.Constant(I32V, [(lane + width) % LANES for lane in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, ir.Constant(F32V, ir.Undefined), lanes))
    return builder.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def softmax_block(_typing: Any, scores: Any, scale: Any, low: Any, high: Any, running_max: Any) -> Any:
    """Turn 16 raw scores into weights in place: `(scores address, scale, low, high, running max) -> (max, sum)`.

    Lanes outside [low, high) get weight 0. The weights are exp(scale * score - new max).
    """

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        address, scale, low, high, running = args
        lane = ir.Constant(I32V, list(range(LANES)))
        inside = builder.and_(
            builder.icmp_signed(">=", lane, splat(builder, builder.trunc(low, I32))),
            builder.icmp_signed("<", lane, splat(builder, builder.trunc(high, I32))),
        )
        scaled = builder.fmul(load(builder, address), splat(builder, scale))
        scaled = builder.select(inside, scaled, constant(float("-inf")))
        top = fold(builder, scaled, lambda a, b: vector_call(builder, "maxnum", a, b))
        top = builder.select(builder.fcmp_ordered(">", top, running), top, running)
        # A block without a visible lane leaves the maximum at -inf. Its weights are taken against 0 to avoid NaN.
        empty = builder.fcmp_ordered("==", top, ir.Constant(F32, float("-inf")))
        base = builder.select(empty, ir.Constant(F32, 0.0), top)
        weights = emit_exp(builder, builder.fsub(scaled, splat(builder, base)))
        store(builder, weights, address)
        total = fold(builder, weights, builder.fadd)
        return cgutils.pack_array(builder, [top, total])

    return types.UniTuple(types.float32, 2)(
        types.int64, types.float32, types.int64, types.int64, types.float32
    ), codegen


@intrinsic
def silu_times(_typing: Any, gate: Any, up: Any, out: Any) -> Any:
    """Compute 16 lanes of `out = gate / (1 + exp(-gate)) * up`. Takes three addresses."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        gate, up = load(builder, args[0]), load(builder, args[1])
        # Below -88 exp(-gate) would overflow and silu is at most 1e-36. NaN stays NaN.
        low = builder.fcmp_ordered("<", gate, constant(-88.0))
        gate = builder.select(low, constant(-88.0), gate)
        divisor = builder.fadd(constant(1.0), emit_exp(builder, builder.fneg(gate)))
        store(builder, builder.fmul(builder.fdiv(gate, divisor), up), args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_f32(_typing: Any, address: Any) -> Any:
    """Load the float32 at an address."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        return builder.load(builder.inttoptr(args[0], F32.as_pointer()), align=4)

    return types.float32(types.int64), codegen


@intrinsic
def scale_block(_typing: Any, address: Any, factor: Any) -> Any:
    """Multiply 16 float32 at an address by a scalar, in place."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        store(builder, builder.fmul(load(builder, args[0]), splat(builder, args[1])), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@njit(nogil=True, inline="always")
def address_of(array):  # type: ignore[no-untyped-def]
    """Return the address of an array's first element."""
    return array.ctypes.data
