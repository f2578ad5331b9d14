# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""How experts' weights lie in a GPU's memory, and how a tile of them becomes a factor of a product, in registers.

- plain: [W, N, K] in the rows' own type.
- FP8: [W, N, K] e4m3 and one float32 scale per 128 x 128 block (DeepSeek-V3; transformers' fine-grained FP8). The scale
  is a factor of the block's product, so a tile is as wide as a block in K.
- MXFP4: [W, N, K / 2] bytes of two e2m1 values, the low half first, and [W, N, K / 32] bytes, each the power of two that
  32 values share (OCP Microscaling Formats, 2023; gpt-oss). A value times its power of two is exact in bfloat16.

Rejected for MXFP4: `tl.dot_scaled`, which lowers to better code, but which the interpreter lacks, so it could be wrong
unseen.

Legend: W weights in memory, N out features, K in features.
"""

import torch
import triton
import triton.language as tl

SCALE_BLOCK = 128  # of FP8
MICRO_BLOCK = 32  # of MXFP4
PLAIN, FP8, MXFP4 = 0, 1, 2
_FP8_BLOCK, _MICRO_BLOCK = tl.constexpr(SCALE_BLOCK), tl.constexpr(MICRO_BLOCK)
_IS_FP8, _IS_MXFP4 = tl.constexpr(FP8), tl.constexpr(MXFP4)
_UNBIASED = tl.constexpr(
    2.0**126
)  # lifts e2m1's exponent, put at the bottom of float32's, to where it belongs
_LEAST_POWER, _NAN = tl.constexpr(0x00400000), tl.constexpr(0x7FC00000)  # what e8m0 means by 0 and by 255


def format_of(weights: torch.Tensor) -> int:
    """Tell a weight's format by its type."""
    return {torch.float8_e4m3fn: FP8, torch.uint8: MXFP4}.get(weights.dtype, PLAIN)


@triton.jit
def scale_stride(HEIGHT: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """Count the scales of one weight."""
    if FORMAT == _IS_FP8:
        return ((HEIGHT + _FP8_BLOCK - 1) // _FP8_BLOCK) * ((K + _FP8_BLOCK - 1) // _FP8_BLOCK)
    else:
        return HEIGHT * (K // _MICRO_BLOCK)


@triton.jit
def load_tile(
    base, scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, dtype
):  # fmt: skip
    """Load [columns, INNER] of one weight from `begin` on, as `dtype`; what is outside is 0."""
    if FORMAT == _IS_MXFP4:
        return _micro_tile(base, scales, column, begin, HEIGHT, K, INNER).to(dtype)
    else:
        inner = begin + tl.arange(0, INNER)
        is_in = column[:, None] < HEIGHT
        if K % INNER != 0:
            is_in = is_in & (inner[None, :] < K)
        return tl.load(base + column[:, None] * K + inner[None, :], mask=is_in, other=0.0).to(dtype)


@triton.jit
def load_scales(scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr):
    """Load the FP8 scales of columns in the block of K that `begin` is in."""
    blocks: tl.constexpr = (K + _FP8_BLOCK - 1) // _FP8_BLOCK
    return tl.load(
        scales + column // _FP8_BLOCK * blocks + begin // _FP8_BLOCK, mask=column < HEIGHT, other=0.0
    )


@triton.jit
def _micro_tile(base, scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr):
    """Decode MXFP4 to float32."""
    byte = begin // 2 + tl.arange(0, INNER // 2)
    is_in = (column[:, None] < HEIGHT) & (byte[None, :] < K // 2)
    pair_NB = tl.load(base + column[:, None] * (K // 2) + byte[None, :], mask=is_in, other=0).to(tl.int32)
    code_NK = tl.reshape(tl.join(pair_NB & 0xF, pair_NB >> 4), [column.shape[0], INNER])
    value_NK = (((code_NK & 7) << 22) | ((code_NK & 8) << 28)).to(tl.float32, bitcast=True) * _UNBIASED
    group = begin // _MICRO_BLOCK + tl.arange(0, INNER // _MICRO_BLOCK)
    is_in = (column[:, None] < HEIGHT) & (group[None, :] < K // _MICRO_BLOCK)
    power = tl.load(scales + column[:, None] * (K // _MICRO_BLOCK) + group[None, :], mask=is_in, other=127)
    bits = power.to(tl.int32) << 23
    bits = tl.where(power == 0, _LEAST_POWER, tl.where(power == 255, _NAN, bits))
    blocks = tl.reshape(value_NK, [column.shape[0], INNER // _MICRO_BLOCK, _MICRO_BLOCK])
    blocks = blocks * bits.to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(blocks, [column.shape[0], INNER])
