# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writes a step's keys and values, or latents, to their places in GPU pages.

Pages are token-major, as `attention.gpu.pages` reads them. Rows after the step's tokens have slot -1 and are skipped, so
the launch can be replayed for any number of tokens. Keys and values are written in one launch, because launches, not
bytes, determine the cost in a decode step.

With scales, pages hold codes of eight bits (`kvcache.codes`): a program quantises its row, from nothing but itself, and
writes its scale to [N, G, B] float32. Codes and scales are those of the CPU for the same numbers.

Legend: T rows, G KV heads, D dim of a row, V dim of a value's row, N blocks, B tokens of a block.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvcache.codes import E4M3

_LEAST = tl.constexpr(1e-30)  # rows with smaller numbers become 0
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_INFINITY = tl.constexpr(0x7F800000)
_SUBNORMAL, _TO_SUBNORMAL = tl.constexpr(2.0**-6), tl.constexpr(1.5 * 2.0**14)


class Scales(NamedTuple):
    """Scales of pages of codes, float32 [N, G, B]."""

    keys: Tensor
    values: Tensor


@triton.jit
def _to_e4m3(value):
    """Round float32 within +-464 to nearest even. Rounded before the cast, because the interpreter's cast truncates."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (value + _TO_SUBNORMAL) - _TO_SUBNORMAL  # adding leaves multiples of 2^-9
    return tl.where(tl.abs(value) < _SUBNORMAL, small, normal).to(tl.float8e4nv)


@triton.jit
def write_row(
    source,
    pages,
    scales,
    place,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Copy one row to its place, counted in rows of STRIDE. CODES: "" stores numbers as they are; int8 and e4m3 quantise them."""
    dim = tl.arange(0, D_PAD)
    if CODES == "":
        tl.store(pages + place * STRIDE + dim, tl.load(source + dim, mask=dim < D), mask=dim < D)
    else:
        x = tl.load(source + dim, mask=dim < D, other=0.0).to(tl.float32)
        size = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # as integers NaN is the largest
        is_finite, top = size < _INFINITY, size.to(tl.float32, bitcast=True)
        is_seen = is_finite & (top >= _LEAST)
        top = tl.where(is_seen, top, 1.0)
        LARGEST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
        scaled = tl.where(is_seen, x, 0.0) * tl.math.div_rn(LARGEST, top)
        code = ((scaled + _ROUNDING) - _ROUNDING).to(tl.int8) if CODES == "int8" else _to_e4m3(scaled)
        tl.store(pages + place * STRIDE + dim, code, mask=dim < D)
        unseen = tl.where(is_finite, 0.0, float("nan"))
        tl.store(scales + place, tl.where(is_seen, tl.math.div_rn(top, LARGEST), unseen))


@triton.jit
def write_rows(
    rows, slots, pages, values, value_pages, scales, value_scales, row_stride, head_stride, value_row_stride,
    value_head_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Program (row, head). V is 0 if there are no values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        place = (slot // BLOCK * HEADS + head) * BLOCK + slot % BLOCK
        write_row(rows + row * row_stride + head * head_stride, pages, scales, place, D, D_PAD, STRIDE, CODES)
        if V > 0:
            own = values + row * value_row_stride + head * value_head_stride
            write_row(own, value_pages, value_scales, place, V, V_PAD, V_STRIDE, CODES)


def write_pages(
    rows_TGD: Tensor,
    slots_T: Tensor,
    pages_NGBD: Tensor,
    values_TGV: Tensor | None = None,
    value_pages_NGBV: Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """Write rows to their slots, and values to the same slots of their pages. In place.

    Args:
        rows_TGD: Keys or latents, last dim contiguous, of the pages' type.
        slots_T: int64 [T], block * B + offset; -1 for a row that is not stored.
        pages_NGBD: Contiguous, or the first dims of contiguous pages.
        values_TGV, value_pages_NGBV: Values and their pages, in the same form, or other dims of the same pages. Give both or
            neither.
        scales: Given for pages of codes, int8 or float8_e4m3fn. Rows may then have any type.
    """
    T, G, D = rows_TGD.shape
    value_dim, strides = (0, (0, 0)) if values_TGV is None else (values_TGV.shape[2], values_TGV.stride()[:2])
    write_rows[(T, G)](
        rows_TGD, slots_T, pages_NGBD, values_TGV, value_pages_NGBV, *(scales or (None, None)), rows_TGD.stride(0),
        rows_TGD.stride(1), *strides, HEADS=G, BLOCK=pages_NGBD.shape[2], D=D, D_PAD=triton.next_power_of_2(D), V=value_dim,
        V_PAD=triton.next_power_of_2(max(1, value_dim)), STRIDE=pages_NGBD.stride(2),
        V_STRIDE=0 if value_pages_NGBV is None else value_pages_NGBV.stride(2), CODES=_name_of(pages_NGBD) if scales else "",
        num_warps=1,
    )  # fmt: skip


def _name_of(pages: Tensor) -> str:
    return "e4m3" if pages.dtype is E4M3 else "int8"
