"""How CPU kernels read and write the pages of the KV cache: float32, or codes of eight bits with scales (`kvcache.codes`).

A kernel is written once, with the functions of this file for float32 pages. `kernels_of` makes the same kernel for codes, with
other functions of the same names in its globals. Scales are per token, so they are no part of the inner loops: a block's
scores are multiplied by the scales of its 16 keys, and its weights by those of its 16 values. Codes become float32 in
registers, without rounding. Scores are two chains of additions, over even and odd dims, for any number of rows. A latent is
both key and value of many heads, so a block of latents is decoded once, to memory.
Rejected: integer products of quantised queries, which would round queries and weights too. A decode is bound by memory, and
by the latency of one chain of additions per output, not by the number of multiplications.

Legend: B tokens of a block (16), D key dim, V value dim padded to 16, L latent dim, E rotary dim.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, cast

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from attention.cpu.codes import I8V, UNBIAS, emit_e4m3
from attention.cpu.tiles import (
    F32,
    F32V,
    I32V,
    I64,
    LANES,
    MOST_ROWS,
    ROWS,
    TILES_VERSION,
    TileRows,
    add_rows_times_panel_f32,
    address_of,
    constant,
    emit_products,
    load,
    load_f32,
    prefetch,
    rows_in_tiles,
    rows_times_panel_f32,
    splat,
    store,
    vector_call,
)
from dispatch.compiled.native import copy, floats, renamed, uint8s
from dispatch.compiled.team import Kernel
from kvcache.codes import E4M3, INT8, LATENT_SCALES_BYTES, SCALE_BYTES, quantise

_SCALES = LANES * SCALE_BYTES  # bytes of 16 scales
_LINE_BYTES = 64
_LoadVector = Callable[[ir.IRBuilder, ir.Value], ir.Value]
_Arguments = ParamSpec("_Arguments")


def _load_int8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(load(builder, address, I8V), I32V), F32V)


def _load_e4m3(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.fmul(emit_e4m3(builder, load(builder, address, I8V)), constant(UNBIAS))


@intrinsic
def multiply_block(_typing: Any, address: Any, factors: Any) -> Any:
    """Multiply 16 float32 at an address by 16 others, in place."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        store(builder, builder.fmul(load(builder, args[0]), load(builder, args[1])), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_line(_typing: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _score_tile(load_vector: _LoadVector, rows: int) -> Any:
    """Return the intrinsic of `rows_in_tiles`: products of rows and a panel of codes, times the panel's scales. `k` is even."""

    def tile(_typing: Any, x: Any, xs: Any, w: Any, ws: Any, k: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            x, x_stride, w, _, k, out, out_stride = args

            def weights(index: ir.Value) -> list[ir.Value]:
                at = builder.add(w, builder.mul(index, ir.Constant(I64, 2 * LANES)))
                return [
                    load_vector(builder, builder.add(at, ir.Constant(I64, LANES * odd))) for odd in (0, 1)
                ]

            emit_products(
                builder,
                TileRows(x, x_stride),
                weights,
                builder.lshr(k, ir.Constant(I64, 1)),
                TileRows(out, out_stride),
                rows,
                accumulate=False,
                factors=load(builder, builder.add(w, builder.mul(k, ir.Constant(I64, LANES)))),
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return intrinsic(tile)


def _value_tile(load_vector: _LoadVector, rows: int, panels: int) -> Any:
    """Return intrinsic `(weights, panel, value_lanes, sums)`: add a block's values, times rows of weights, to some lanes."""

    def tile(_typing: Any, weights: Any, panel: Any, value_lanes: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            weights, panel, value_lanes, sums = args
            of_weights = TileRows(weights, ir.Constant(I64, LANES * 4))
            of_sums = TileRows(sums, builder.shl(value_lanes, ir.Constant(I64, 2)))
            of_values = TileRows(panel, value_lanes)
            places = [
                [
                    builder.add(of_sums.at(builder, row), ir.Constant(I64, each * LANES * 4))
                    for each in range(panels)
                ]
                for row in range(rows)
            ]
            totals = [[load(builder, place) for place in of_row] for of_row in places]
            for token in range(LANES):
                at = of_values.at(builder, token)
                values = [
                    load_vector(builder, builder.add(at, ir.Constant(I64, each * LANES)))
                    for each in range(panels)
                ]
                for row in range(rows):
                    place = builder.add(of_weights.at(builder, row), ir.Constant(I64, token * 4))
                    weight = splat(builder, builder.load(builder.inttoptr(place, F32.as_pointer()), align=4))
                    for each, value in enumerate(values):
                        totals[row][each] = vector_call(builder, "fma", weight, value, totals[row][each])
            for of_row, sums_of_row in zip(places, totals, strict=True):
                for place, total in zip(of_row, sums_of_row, strict=True):
                    store(builder, total, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return intrinsic(tile)


def _score_function(load_vector: _LoadVector, name: str) -> Any:
    """Return `score_rows` for codes."""
    rows_times_codes = rows_in_tiles(partial(_score_tile, load_vector), name)

    def score(queries, dim, panel, scores, rows):  # type: ignore[no-untyped-def]
        rows_times_codes(queries, dim * 4, panel, LANES, dim, scores, LANES * 4, rows)

    return njit(nogil=True)(renamed(score, name))


_WIDE = 4 if MOST_ROWS > ROWS else 1  # panels of values at a time: their sums fit 32 registers


def _in_rows(make_tile: Callable[[int, int], Any], panels: int, name: str) -> Any:
    """Return `(rows, weights, panel, value_lanes, sums)`, which runs the tile of 6, 4, 2 or 1 rows."""
    one, two, four, six = (make_tile(rows, panels) for rows in (1, 2, 4, 6))

    def run(rows, weights, panel, value_lanes, sums):  # type: ignore[no-untyped-def]
        if rows == 6:
            six(weights, panel, value_lanes, sums)
        elif rows == 4:
            four(weights, panel, value_lanes, sums)
        elif rows == 2:
            two(weights, panel, value_lanes, sums)
        else:
            one(weights, panel, value_lanes, sums)

    return njit(nogil=True, inline="always")(renamed(run, f"{name}_{panels}"))


def _value_function(load_vector: _LoadVector, name: str) -> Any:
    """Return `add_values` for codes."""
    narrow, wide = (_in_rows(partial(_value_tile, load_vector), panels, name) for panels in (1, _WIDE))
    wide_lanes = _WIDE * LANES

    def add(weights, panel, value_lanes, scales, sums, rows):  # type: ignore[no-untyped-def]
        for row in range(rows):
            multiply_block(weights + row * LANES * 4, scales)
        while rows > 0:
            taken = 6 if rows >= 6 else 4 if rows >= 4 else 2 if rows >= 2 else 1
            lane = 0
            while lane + wide_lanes <= value_lanes:
                wide(taken, weights, panel + lane, value_lanes, sums + lane * 4)
                lane += wide_lanes
            while lane < value_lanes:
                narrow(taken, weights, panel + lane, value_lanes, sums + lane * 4)
                lane += LANES
            weights += taken * LANES * 4
            sums += taken * value_lanes * 4
            rows -= taken

    return njit(nogil=True)(renamed(add, name))


def _decoder(load_vector: _LoadVector) -> Any:
    """Return intrinsic `(codes, scale, out)`: decode 16 codes to float32."""

    def decode(_typing: Any, codes: Any, scale: Any, out: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            store(builder, builder.fmul(load_vector(builder, args[0]), splat(builder, args[1])), args[2])
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64), codegen

    return intrinsic(decode)


# Pages of float32.


@njit(nogil=True, inline="always")
def score_rows(queries, dim, panel, scores, rows):  # type: ignore[no-untyped-def]
    """Multiply rows of queries [rows, D] by a panel of keys [D, B] into scores [rows, B]. Addresses."""
    rows_times_panel_f32(queries, dim * 4, panel, LANES * 4, dim, scores, LANES * 4, rows)


@njit(nogil=True, inline="always")
def add_values(weights, panel, value_lanes, _scales, sums, rows):  # type: ignore[no-untyped-def]
    """Add a block's values [B, V], multiplied by weights [rows, B], to sums [rows, V]. May change the weights."""
    for lane in range(0, value_lanes, LANES):
        add_rows_times_panel_f32(
            weights, LANES * 4, panel + lane * 4, value_lanes * 4, LANES, sums + lane * 4, value_lanes * 4, rows
        )  # fmt: skip


@njit(nogil=True, inline="always")
def write_head(key, value, keys, values, value_lanes, offset, _is_e4m3):  # type: ignore[no-untyped-def]
    """Write a head's key [D] and value [V] to a token's place in its block. `keys`, `values`: addresses of panels."""
    key_page, value_page = floats(keys, len(key) * LANES), floats(values, LANES * value_lanes)
    if offset == 0:  # a block's tail is read with weight 0: its values must be finite
        key_page[:] = np.float32(0.0)
        value_page[:] = np.float32(0.0)
    for dim in range(len(key)):
        key_page[dim * LANES + offset] = key[dim]
    for dim in range(len(value)):
        value_page[offset * value_lanes + dim] = value[dim]


@njit(nogil=True, inline="always")
def fetch_next(_keys, _key_bytes, _values, _value_bytes):  # type: ignore[no-untyped-def]
    """Prefetch the next block's panels. The products of float32 panels prefetch what follows in memory instead."""


@njit(nogil=True, inline="always")
def latent_room(_row_bytes):  # type: ignore[no-untyped-def]
    """Return memory for `read_latents`."""
    return np.empty(1, np.float32)


@njit(nogil=True, inline="always")
def read_latents(page, row_bytes, _latent, _width, _room):  # type: ignore[no-untyped-def]
    """Return the address of a block's 16 rows in float32, and the bytes from one to the next."""
    return page, row_bytes


@njit(nogil=True, inline="always")
def read_latent_dims(page, row_bytes, _first, _last, _room):  # type: ignore[no-untyped-def]
    """As `read_latents`, for some dims of the latents only."""
    return page, row_bytes


@njit(nogil=True, inline="always")
def read_latent(row, row_bytes, _latent, _width, out):  # type: ignore[no-untyped-def]
    """Copy a token's latent and rotary key to `out`, as float32."""
    copy(out, row, row_bytes)


@njit(nogil=True, inline="always")
def float_bytes(row_bytes):  # type: ignore[no-untyped-def]
    """Return the bytes of a token's latent and rotary key in float32, padded."""
    return row_bytes


@njit(nogil=True, inline="always")
def latent_target(row, _room):  # type: ignore[no-untyped-def]
    """Return the address at which a latent [L + E] is computed before `write_latent`."""
    return row


@njit(nogil=True, inline="always")
def write_latent(_computed, _latent, _rotary, _row, _row_bytes, _is_e4m3):  # type: ignore[no-untyped-def]
    """Write a computed latent and its rotary key to a token's place."""


# Pages of codes.


@njit(nogil=True, inline="always")
def _fetch_panels(keys, key_bytes, values, value_bytes):  # type: ignore[no-untyped-def]
    for at in range(0, key_bytes, _LINE_BYTES):
        fetch_line(keys + at)
    for at in range(0, value_bytes, _LINE_BYTES):
        fetch_line(values + at)


@njit(nogil=True, inline="always")
def _write_head_codes(key, value, keys, values, value_lanes, offset, is_e4m3):  # type: ignore[no-untyped-def]
    at = len(key) * LANES
    key_page, value_page = uint8s(keys, at + 2 * _SCALES), uint8s(values, LANES * value_lanes)
    if offset == 0:  # as in `write_head`
        key_page[:] = 0
        value_page[:] = 0
    scales = floats(keys + at, 2 * LANES)
    scales[offset] = quantise(key, is_e4m3 != 0, key_page[offset:at:LANES])
    to = value_page[offset * value_lanes : offset * value_lanes + len(value)]
    scales[LANES + offset] = quantise(value, is_e4m3 != 0, to)


@njit(nogil=True, inline="always")
def _float_bytes_of_codes(row_bytes):  # type: ignore[no-untyped-def]
    return (row_bytes - LATENT_SCALES_BYTES) * 4


@njit(nogil=True, inline="always")
def _latent_room_of_codes(row_bytes):  # type: ignore[no-untyped-def]
    # The decoding of a row may write up to 15 numbers after its end.
    return np.empty(LANES * (row_bytes - LATENT_SCALES_BYTES) + LANES, np.float32)


@njit(nogil=True, inline="always")
def _latent_target_of_codes(_row, room):  # type: ignore[no-untyped-def]
    return address_of(room)


@njit(nogil=True, inline="always")
def _write_latent_codes(computed, latent, rotary, row, row_bytes, is_e4m3):  # type: ignore[no-untyped-def]
    own = uint8s(row, row_bytes)
    scales = floats(row + row_bytes - LATENT_SCALES_BYTES, 2)
    scales[0] = quantise(floats(computed, latent), is_e4m3 != 0, own[:latent])
    scales[1] = quantise(floats(computed + latent * 4, rotary), is_e4m3 != 0, own[latent : latent + rotary])


def _functions(name: str, load_vector: _LoadVector) -> dict[str, Any]:
    """Return the functions for codes of one format, by the names of those for float32."""
    decode = _decoder(load_vector)

    def read(row, row_bytes, latent, width, out):  # type: ignore[no-untyped-def]
        scales = row + row_bytes - LATENT_SCALES_BYTES
        scale = load_f32(scales)
        for dim in range(0, latent, LANES):
            decode(row + dim, scale, out + dim * 4)
        scale = load_f32(scales + SCALE_BYTES)  # the rotary key may begin inside the last 16 numbers
        for dim in range(latent, width, LANES):
            decode(row + dim, scale, out + dim * 4)

    read_one = njit(nogil=True)(renamed(read, name))

    def read_block(page, row_bytes, latent, width, room):  # type: ignore[no-untyped-def]
        to, out_bytes = address_of(room), (row_bytes - LATENT_SCALES_BYTES) * 4
        for token in range(LANES):
            read_one(page + token * row_bytes, row_bytes, latent, width, to + token * out_bytes)
        return to, out_bytes

    def read_dims(page, row_bytes, first, last, room):  # type: ignore[no-untyped-def]
        to, out_bytes = address_of(room), (row_bytes - LATENT_SCALES_BYTES) * 4
        for token in range(LANES):
            row = page + token * row_bytes
            scale = load_f32(row + row_bytes - LATENT_SCALES_BYTES)
            for dim in range(first, last, LANES):
                decode(row + dim, scale, to + token * out_bytes + dim * 4)
        return to, out_bytes

    own = {"read_latents": read_block, "read_latent_dims": read_dims}
    return {place: njit(nogil=True)(renamed(each, name)) for place, each in own.items()} | {
        "score_rows": _score_function(load_vector, name),
        "add_values": _value_function(load_vector, name),
        "fetch_next": _fetch_panels,
        "read_latent": read_one,
        "latent_room": _latent_room_of_codes,
        "float_bytes": _float_bytes_of_codes,
        "latent_target": _latent_target_of_codes,
        "write_latent": _write_latent_codes,
        "write_head": _write_head_codes,
    }


_FUNCTIONS = {INT8: _functions("cached_int8", _load_int8), E4M3: _functions("cached_e4m3", _load_e4m3)}


def kernels_of(
    function: Callable[Concatenate[int, _Arguments], int],
) -> dict[torch.dtype, Kernel[_Arguments]]:
    """Return a kernel for pages of each type. `function` is written with the functions for float32 pages."""
    made = {torch.float32: Kernel(function, TILES_VERSION)}
    assert isinstance(function, FunctionType)
    for dtype, functions in _FUNCTIONS.items():
        # Its own globals, not a closure, which numba's disk cache would confuse across processes.
        known = {**function.__globals__, **functions}
        name = f"{function.__name__}_{str(dtype).removeprefix('torch.')}"
        own = FunctionType(function.__code__, known, name)
        own.__qualname__, own.__module__ = name, function.__module__
        made[dtype] = Kernel(cast(Callable[Concatenate[int, _Arguments], int], own), TILES_VERSION)
    return made
