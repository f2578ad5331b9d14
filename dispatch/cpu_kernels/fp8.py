"""`dispatch.fp8` for the CPU, compiled: convert rows to their format on the wire, and back to float32.

Every finite input gives the same bits as the reference. Other inputs give NaN in the same places (sign and payload may
differ). One pass per block of 128 channels, which stays in the first-level cache.

e4m3 has a sign, 4 bits of exponent (bias 7) and 3 of mantissa: steps of 2^-9 below 2^-6, no infinities, one NaN per
sign with all other bits set (Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433). All its values and
their products with a scale are computed in float32, as in the reference.

Legend: T tokens, N rows, H hidden.
"""

from typing import Any

import numpy as np
from numba import carray, types

from dispatch.compiled.native import compiled, copy, floats, inlined, int32s, pointer, uint16s
from dispatch.fp8 import BLOCK

SCRATCH_BYTES = 4 * (128 + 4)  # a block in float32, and four words with its largest value, scale and factor
_FP8_MAX = np.float32(448.0)
_AMAX_FLOOR = np.float32(1e-4)
_TOP, _SCALE, _FACTOR = 128, 129, 130
_NAN_BITS = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF
_NORMAL_FROM = 121 << 23  # 2**-6, the smallest normal e4m3
_SUBNORMAL_SHIFT = np.float32(16384.0)  # adding it rounds to multiples of 2**-9, the subnormal step
_SUBNORMAL_SHIFT_BITS = 141 << 23
_LOST_FROM = 1087 << 20  # 480: only NaN is that large here
_TO_E4M3 = (7 - 127) * (1 << 23) + 0x7FFFF  # from float32's exponents to e4m3's, plus just under half a step


_TO_FLOAT32 = (127 - 7) << 23
_NAN_CODE = 0x7F
_SMALLEST_NORMAL = 8  # codes below count steps of 2^-9
_STEP = np.float32(2.0**-9)


@inlined
def _quantise_block(scratch: int, count: int, target: int, scale_at: int, round_scale: int) -> None:
    """Cast the float32 values in `scratch`, which is overwritten."""
    values, bits = floats(scratch, BLOCK + 4), int32s(scratch, BLOCK + 4)
    top = types.int32(0)
    for i in range(count):
        top = max(top, types.int32(bits[i] & _MAGNITUDE))  # as integers NaN is the largest
    bits[_TOP] = top
    if values[_TOP] < _AMAX_FLOOR:
        values[_TOP] = _AMAX_FLOOR
    values[_SCALE] = values[_TOP] / _FP8_MAX
    values[_FACTOR] = _FP8_MAX / values[_TOP]
    if round_scale != 0:
        exponent = (bits[_SCALE] >> 23) + (1 if bits[_SCALE] & 0x7FFFFF != 0 else 0)
        bits[_SCALE] = exponent << 23 if exponent < 255 else _NAN_BITS
        bits[_FACTOR] = (254 - exponent) << 23 if exponent < 255 else _NAN_BITS
    factor = values[_FACTOR]
    copy(scale_at, scratch + 4 * _SCALE, 4)
    for i in range(count):
        values[i] = values[i] * factor
    out: Any = carray(pointer(target), (count,), types.uint8)
    for i in range(count):
        sign = types.int32((bits[i] >> 24) & 0x80)
        magnitude = types.int32(bits[i] & _MAGNITUDE)
        normal = (magnitude + _TO_E4M3 + ((magnitude >> 20) & 1)) >> 20
        bits[i] = magnitude
        values[i] = values[i] + _SUBNORMAL_SHIFT
        small = bits[i] - _SUBNORMAL_SHIFT_BITS
        code = normal if magnitude >= _NORMAL_FROM else small
        out[i] = sign | (0x7F if magnitude >= _LOST_FROM else code)


@compiled
def quantise_bfloat16(
    x: int, T: int, H: int, out: int, row_bytes: int, scales_at: int, round_scale: int, scratch: int
) -> None:
    """Write T rows: values, then float32 scales from `scales_at` on. `scratch`: SCRATCH_BYTES."""
    bits = int32s(scratch, BLOCK)
    for t in range(T):
        row = uint16s(x + 2 * H * t, H)
        for first in range(0, H, BLOCK):
            count = min(BLOCK, H - first)
            for i in range(count):
                bits[i] = row[first + i] << 16
            at = out + t * row_bytes
            _quantise_block(scratch, count, at + first, at + scales_at + first // BLOCK * 4, round_scale)


@compiled
def quantise_float32(
    x: int, T: int, H: int, out: int, row_bytes: int, scales_at: int, round_scale: int, scratch: int
) -> None:
    """Write float32 rows as `quantise_bfloat16` does."""
    for t in range(T):
        for first in range(0, H, BLOCK):
            count = min(BLOCK, H - first)
            copy(scratch, x + 4 * (H * t + first), 4 * count)
            at = out + t * row_bytes
            _quantise_block(scratch, count, at + first, at + scales_at + first // BLOCK * 4, round_scale)


@compiled
def restore_rows(rows: int, N: int, H: int, row_bytes: int, scales_at: int, scratch: int, out: int) -> None:
    """Write float32 [N, H] to `out`. `rows`: [N, row_bytes], e4m3 [H] and float32 scales at `scales_at`."""
    values, bits = floats(scratch, BLOCK), int32s(scratch, BLOCK)
    for n in range(N):
        at = rows + n * row_bytes
        scales = floats(at + scales_at, (H + BLOCK - 1) // BLOCK)
        for first in range(0, H, BLOCK):
            count = min(BLOCK, H - first)
            codes = carray(pointer(at + first), (count,), types.uint8)
            target, scale = floats(out + 4 * (n * H + first), count), scales[first // BLOCK]
            for i in range(count):
                magnitude = types.int32(codes[i] & 0x7F)
                normal = types.int32((magnitude << 20) + _TO_FLOAT32)
                bits[i] = types.int32(_NAN_BITS) if magnitude == _NAN_CODE else normal
            for i in range(count):
                magnitude = types.int32(codes[i] & 0x7F)
                value = values[i] if magnitude >= _SMALLEST_NORMAL else np.float32(magnitude) * _STEP
                target[i] = (-value if codes[i] >= 0x80 else value) * scale


KERNELS = (quantise_bfloat16, quantise_float32, restore_rows)
