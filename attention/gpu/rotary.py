# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary position embedding on GPUs, in place, for queries and keys in one launch.

The angles are those that `transformers` computes, [T, E] with two equal halves. Dims after E are not changed (partial
rotary). Pairs are (i, i + E/2), or (2i, 2i + 1) for interleaved families (Su et al., 2021; GPT-NeoX, GPT-J).
Every number is read and written once, with float32 in between. A program has several heads, which share their row's angles.

Legend: T rows, H heads, G KV heads, D head dim, E rotary dim.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE_HEADS = 8


@triton.jit
def rotate_heads(
    x, cosines, sines, row, first, heads, row_stride, head_stride,
    E: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of a row's heads, starting at `first`."""
    head, pair = first + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_in = (head[:, None] < heads) & (pair[None, :] < E // 2)
    place = x + row * row_stride + head[:, None] * head_stride
    left = place + (2 * pair if IS_INTERLEAVED else pair)[None, :]
    right = place + (2 * pair + 1 if IS_INTERLEAVED else pair + E // 2)[None, :]
    a = tl.load(left, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(right, mask=is_in, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + row * E + pair, mask=pair < E // 2, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + row * E + pair, mask=pair < E // 2, other=0.0).to(tl.float32)[None, :]
    dtype = x.dtype.element_ty
    tl.store(left, (a * cosine - b * sine).to(dtype), mask=is_in)
    tl.store(right, (b * cosine + a * sine).to(dtype), mask=is_in)


@triton.jit
def rotate_rows(
    x, keys, cosines, sines, x_row_stride, x_head_stride, heads, key_row_stride, key_head_stride, kv_heads, x_tiles,
    E: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile of heads): first the tiles of `x`, then those of `keys`."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile < x_tiles:
        rotate_heads(
            x, cosines, sines, row, tile * HEADS, heads, x_row_stride, x_head_stride, E, HALF, HEADS, IS_INTERLEAVED
        )  # fmt: skip
    elif HAS_KEYS:
        rotate_heads(
            keys, cosines, sines, row, (tile - x_tiles) * HEADS, kv_heads, key_row_stride, key_head_stride, E, HALF,
            HEADS, IS_INTERLEAVED,
        )  # fmt: skip


def rotate(
    x_THD: Tensor,
    cosines_TE: Tensor,
    sines_TE: Tensor,
    *,
    keys_TGD: Tensor | None = None,
    is_interleaved: bool = False,
) -> None:
    """Rotate the first E dims of every head in place.

    Args:
        x_THD: Queries; the last dim is contiguous.
        cosines_TE, sines_TE: Contiguous, E even and at most D. Only the first half of each row is read.
        keys_TGD: Keys to rotate in the same launch; the last dim is contiguous.

    Raises:
        ValueError: E is odd or more than D.
    """
    T, H, D = x_THD.shape
    rotary_dim = cosines_TE.shape[1]
    if rotary_dim % 2 or rotary_dim > D:
        raise ValueError(f"the angles have {rotary_dim} dims; the number must be even and at most {D}")
    x_tiles = triton.cdiv(H, _TILE_HEADS)
    kv_heads, key_strides = (0, (0, 0)) if keys_TGD is None else (keys_TGD.shape[1], keys_TGD.stride()[:2])
    rotate_rows[(T, x_tiles + triton.cdiv(kv_heads, _TILE_HEADS))](
        x_THD, keys_TGD, cosines_TE, sines_TE, x_THD.stride(0), x_THD.stride(1), H, *key_strides, kv_heads, x_tiles,
        E=rotary_dim, HALF=triton.next_power_of_2(max(1, rotary_dim // 2)), HEADS=_TILE_HEADS,
        IS_INTERLEAVED=is_interleaved, HAS_KEYS=keys_TGD is not None, num_warps=4,
    )  # fmt: skip
