# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary position embedding on GPUs, in place, for queries and keys in one launch.

The angles come as `transformers` computes them, [T, E] with both halves alike; dims past E are left alone (partial
rotary). Pairs are (i, i + E/2), or (2i, 2i + 1) where a family interleaves (Su et al., 2021; GPT-NeoX, GPT-J).

Legend: T rows, H heads, D head dim, E rotary dim.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_rows(
    x,
    cosines,
    sines,
    row_stride,
    head_stride,
    E: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Program (row, head)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    is_in = pair < E // 2
    place = x + row * row_stride + head * head_stride
    left = place + (2 * pair if IS_INTERLEAVED else pair)
    right = place + (2 * pair + 1 if IS_INTERLEAVED else pair + E // 2)
    a = tl.load(left, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(right, mask=is_in, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + row * E + pair, mask=is_in, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * E + pair, mask=is_in, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(left, (a * cosine - b * sine).to(dtype), mask=is_in)
    tl.store(right, (b * cosine + a * sine).to(dtype), mask=is_in)


def rotate(x_THD: Tensor, cosines_TE: Tensor, sines_TE: Tensor, *, is_interleaved: bool = False) -> None:
    """Rotate the first E dims of every head; in place.

    Args:
        x_THD: the last dim contiguous.
        cosines_TE, sines_TE: contiguous, E at most D; only the first half of each row is read.
    """
    T, H, _ = x_THD.shape
    rotary_dim = cosines_TE.shape[1]
    rotate_rows[(T, H)](
        x_THD, cosines_TE, sines_TE, x_THD.stride(0), x_THD.stride(1), E=rotary_dim,
        HALF=triton.next_power_of_2(rotary_dim // 2), IS_INTERLEAVED=is_interleaved, num_warps=1,
    )  # fmt: skip
