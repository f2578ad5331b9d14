"""FP8 rows with block scales back to float32, compiled: the values of `dispatch.fp8.dequantise_fp8`.

e4m3 has a sign, 4 bits of exponent (bias 7) and 3 of mantissa: steps of 2^-9 below 2^-6, no infinities, one NaN per
sign, all other bits set (Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433). All its values and
their products with a scale are computed in float32, as the oracle does. `low_latency.cpu_fp8` has the way there.

Legend: N rows, H hidden.
"""

import numpy as np
from numba import carray, types

from dispatch.fp8 import BLOCK
from dispatch.native import compiled, floats, int32s, pointer

SCRATCH_BYTES = 4 * BLOCK
_REBIAS = (127 - 7) << 23
_NAN_CODE, _NAN_BITS = 0x7F, 0x7FC00000
_SMALLEST_NORMAL = 8  # codes below count steps of 2^-9
_STEP = np.float32(2.0**-9)


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
                normal = types.int32((magnitude << 20) + _REBIAS)
                bits[i] = types.int32(_NAN_BITS) if magnitude == _NAN_CODE else normal
            for i in range(count):
                magnitude = types.int32(codes[i] & 0x7F)
                value = values[i] if magnitude >= _SMALLEST_NORMAL else np.float32(magnitude) * _STEP
                target[i] = (-value if codes[i] >= 0x80 else value) * scale


KERNELS = (restore_rows,)
