# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Row operations of the low-latency Triton kernels: cast to FP8 with scales, widen, narrow, copy.

Casts to FP8 and bfloat16 use integer arithmetic, so they are the same in the interpreter, on every GPU and in torch.
Compile without floating-point fusion: products are rounded before they are added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STORED = {torch.bfloat16: torch.int16, torch.float16: torch.float16, torch.float32: torch.float32}
"""Floating types that kernels support, and their types in kernels: bfloat16 is handled as bits."""

CHANNELS = tl.constexpr(128)  # per FP8 scale
COPIED = tl.constexpr(2048)  # elements that a program copies at once
_FP8_MAX = tl.constexpr(448.0)
_AMAX_FLOOR = tl.constexpr(1e-4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN_BITS = tl.constexpr(0x7FC00000)
_NORMAL_FROM = tl.constexpr(121 << 23)  # see `cpu_kernels.fp8` for these
_SUBNORMAL_SHIFT = tl.constexpr(16384.0)
_SUBNORMAL_SHIFT_BITS = tl.constexpr(141 << 23)
_LOST_FROM = tl.constexpr(1087 << 20)
_E4M3_BIAS = tl.constexpr(127 - 7)
_E4M3_SMALLEST = tl.constexpr(2.0**-9)
_REBIAS = tl.constexpr((7 - 127) * (1 << 23) + 0x7FFFF)


def as_stored(x: Tensor) -> Tensor:
    """View a tensor in the type that kernels use."""
    return x.view(STORED[x.dtype])


@triton.jit
def _e4m3_bits(values):
    """Round float32 to nearest e4m3, as its bits."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    normal = (magnitude + _REBIAS + ((magnitude >> 20) & 1)) >> 20
    shifted = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_SHIFT
    small = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT_BITS
    code = tl.where(magnitude >= _NORMAL_FROM, normal, small)
    code = tl.where(magnitude >= _LOST_FROM, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def _e4m3_values(codes):
    """Widen e4m3 bits, uint8, to float32."""
    bits = codes.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (((exponent + _E4M3_BIAS) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    values = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * _E4M3_SMALLEST)
    values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    return tl.where((bits & 0x80) != 0, -values, values)


@triton.jit
def _scales_of(values, ROUND_SCALE: tl.constexpr):
    """Return each row's scale and its inverse, as `dispatch.fp8` defines them."""
    top = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)  # as integers NaN is the largest
    largest = top.to(tl.float32, bitcast=True)
    largest = tl.where(largest < _AMAX_FLOOR, _AMAX_FLOOR, largest)
    limit = tl.full(largest.shape, _FP8_MAX, tl.float32)
    scale, factor = tl.div_rn(largest, limit), tl.div_rn(limit, largest)
    if ROUND_SCALE:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = tl.where(exponent < 255, exponent << 23, _NAN_BITS).to(tl.float32, bitcast=True)
        factor = tl.where(exponent < 255, (254 - exponent) << 23, _NAN_BITS).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def narrow(values, dtype, IS_BFLOAT16: tl.constexpr):
    """Round float32 to nearest even in a stored type: int16 bits of bfloat16, float16 or float32."""
    if IS_BFLOAT16:
        return _bfloat16_bits(values)
    else:
        return values.to(dtype)


@triton.jit
def _bfloat16_bits(values):
    """Round float32 to nearest even bfloat16, as its bits."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def widen(values, IS_BFLOAT16: tl.constexpr):
    """Convert a stored type (int16 bits of bfloat16, float16 or float32) to float32."""
    if IS_BFLOAT16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def see_row(address, dtype):
    """Convert the int64 address of a row or answer on the wire to a pointer.

    Rows begin at multiples of 16 bytes. The compiler cannot know this for a loaded address, and would store 2 bytes at once.
    """
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def copy_row(target, source, H: tl.constexpr):
    """Copy H elements of the pointers' type: 8 for each of 256 threads at once, 16 bytes for most types."""
    for first in range(0, H, COPIED):
        at = first + tl.arange(0, COPIED)
        tl.store(target + at, tl.load(source + at, mask=at < H), mask=at < H)


@triton.jit
def quantise_row(
    target,
    scales,
    row,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
):
    """Write a row's e4m3 bits to the uint8 address `target` and its scales to the float32 address `scales`."""
    for first in range(0, H, GROUPS * CHANNELS):
        group, channel = tl.arange(0, GROUPS), tl.arange(0, CHANNELS)
        at = first + group[:, None] * CHANNELS + channel[None, :]
        values = widen(tl.load(row + at, mask=at < H, other=0), IS_BFLOAT16)
        scale, factor = _scales_of(values, ROUND_SCALE)
        tl.store(target + at, _e4m3_bits(values * factor[:, None]), mask=at < H)
        index = first // CHANNELS + group
        tl.store(scales + index, scale, mask=index * CHANNELS < H)


@triton.jit
def write_row(
    address, row, H: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
    ROUND_SCALE: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Write one row in its format on the wire."""
    if IS_FP8:
        quantise_row(
            see_row(address, tl.uint8), see_row(address + SCALES_AT, tl.float32), row, H, GROUPS, ROUND_SCALE, IS_BFLOAT16,
        )  # fmt: skip
    else:
        copy_row(see_row(address, row.dtype.element_ty), row, H)


@triton.jit
def restore_row(
    target, address, H: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr
):
    """Restore a row that travelled in FP8: values times scales in float32, rounded to the target's type."""
    codes, scales = see_row(address, tl.uint8), see_row(address + SCALES_AT, tl.float32)
    for first in range(0, H, GROUPS * CHANNELS):
        group, channel = tl.arange(0, GROUPS), tl.arange(0, CHANNELS)
        at = first + group[:, None] * CHANNELS + channel[None, :]
        index = first // CHANNELS + group
        scale = tl.load(scales + index, mask=index * CHANNELS < H, other=0.0)
        values = _e4m3_values(tl.load(codes + at, mask=at < H, other=0)) * scale[:, None]
        tl.store(target + at, narrow(values, target.dtype.element_ty, IS_BFLOAT16), mask=at < H)
