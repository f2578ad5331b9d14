# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary position embedding on GPUs: for heads in place, and as a part of kernels that also norm heads (`prepare`).

The angles are those that `transformers` computes, with one column per pair; a second half with the same angles is not
read. Dims after E are not rotated (partial rotary). `Rotation` names the kinds (Su et al., 2021; GPT-NeoX, GPT-J, DeepSeek).
Every number is read and written once, with float32 in between. A program has several heads, which share their row's angles.

Legend: T rows, H heads, G KV heads, D head dim, E rotary dim, A columns of the angles.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_TILE = 512  # pairs of a program: four per thread


class Rotation(NamedTuple):
    """Which dims of a head are a pair, and how many columns the angles have."""

    is_interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + E/2)
    is_sorted: bool = False  # pairs that were (2i, 2i + 1) are written to (i, i + E/2), as DeepSeek does
    has_half_angles: bool = False  # E/2 columns instead of E with two equal halves

    def rotary_dim(self, cosines_TA: Tensor) -> int:
        """Return E."""
        return cosines_TA.shape[-1] * (2 if self.has_half_angles else 1)


HALVES = Rotation()


@triton.jit
def turn_heads(
    source, target, weight, cosines, sines, first, heads, source_stride, target_stride, angle_stride, eps,
    D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, IS_SORTED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm (with HAS_NORM) and rotate one tile of a row's heads, from `first` on. Target and source may be the same.

    `source`, `target`, `cosines` and `sines` point to the row. Dims from E to D are normed, and copied.
    """
    head, pair = first + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_pair = pair < E // 2
    is_in = (head < heads) & is_pair
    left_dim = 2 * pair if IS_INTERLEAVED else pair
    right_dim = left_dim + (1 if IS_INTERLEAVED else E // 2)
    place = source + head * source_stride
    dtype = source.dtype.element_ty
    a = tl.load(place + left_dim, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(place + right_dim, mask=is_in, other=0.0).to(tl.float32)
    rest_dim = E + tl.arange(0, REST)[None, :]
    is_rest = (head < heads) & (rest_dim < D)
    rest = tl.zeros([HEADS, REST], tl.float32)
    if D > E:
        rest = tl.load(place + rest_dim, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a_weight = tl.load(weight + left_dim, mask=is_pair, other=0.0).to(tl.float32)
        b_weight = tl.load(weight + right_dim, mask=is_pair, other=0.0).to(tl.float32)
        # Rounded as `transformers` does: after the norm, and after the weight.
        a = ((a * scale).to(dtype).to(tl.float32) * a_weight).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * b_weight).to(dtype).to(tl.float32)
        if D > E:
            rest_weight = tl.load(weight + rest_dim, mask=rest_dim < D, other=0.0).to(tl.float32)
            rest = (rest * scale).to(dtype).to(tl.float32) * rest_weight
    cosine = tl.load(cosines + pair * angle_stride, mask=is_pair, other=0.0).to(tl.float32)
    sine = tl.load(sines + pair * angle_stride, mask=is_pair, other=0.0).to(tl.float32)
    if IS_SORTED:
        tl.debug_barrier()  # pairs move: all must be loaded before the first is stored
        left_dim, right_dim = pair, pair + E // 2
    out = target + head * target_stride
    tl.store(out + left_dim, (a * cosine - b * sine).to(dtype), mask=is_in)
    tl.store(out + right_dim, (b * cosine + a * sine).to(dtype), mask=is_in)
    if D > E:
        tl.store(out + rest_dim, rest.to(dtype), mask=is_rest)


@triton.jit
def rotate_rows(
    x, keys, cosines, sines, x_row_stride, x_head_stride, heads, key_row_stride, key_head_stride, kv_heads, x_tiles,
    angle_row_stride, angle_stride,
    E: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_SORTED: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile of heads): first the tiles of `x`, then those of `keys`."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosines += row * angle_row_stride
    sines += row * angle_row_stride
    if tile < x_tiles:
        own = x + row * x_row_stride
        turn_heads(
            own, own, None, cosines, sines, tile * HEADS, heads, x_head_stride, x_head_stride, angle_stride, 0.0, E, E,
            HALF, 1, HEADS, IS_INTERLEAVED, IS_SORTED, False,
        )  # fmt: skip
    elif HAS_KEYS:
        key = keys + row * key_row_stride
        turn_heads(
            key, key, None, cosines, sines, (tile - x_tiles) * HEADS, kv_heads, key_head_stride, key_head_stride,
            angle_stride, 0.0, E, E, HALF, 1, HEADS, IS_INTERLEAVED, IS_SORTED, False,
        )  # fmt: skip


def rotate(
    x_THD: Tensor,
    cosines_TA: Tensor,
    sines_TA: Tensor,
    *,
    keys_TGD: Tensor | None = None,
    rotation: Rotation = HALVES,
) -> None:
    """Rotate the first E dims of every head in place.

    Args:
        x_THD: Queries; the last dim is contiguous.
        cosines_TA, sines_TA: The same strides; see `Rotation`. E must be even and at most D.
        keys_TGD: Keys to rotate in the same launch; the last dim is contiguous.

    Raises:
        ValueError: E is odd or more than D.
    """
    T, H, D = x_THD.shape
    rotary_dim = rotation.rotary_dim(cosines_TA)
    check_angles(rotary_dim, D)
    half = triton.next_power_of_2(max(1, rotary_dim // 2))
    heads = tile_heads(half)
    x_tiles = triton.cdiv(H, heads)
    kv_heads, key_strides = (0, (0, 0)) if keys_TGD is None else (keys_TGD.shape[1], keys_TGD.stride()[:2])
    rotate_rows[(T, x_tiles + triton.cdiv(kv_heads, heads))](
        x_THD, keys_TGD, cosines_TA, sines_TA, x_THD.stride(0), x_THD.stride(1), H, *key_strides, kv_heads, x_tiles,
        *cosines_TA.stride(), E=rotary_dim, HALF=half, HEADS=heads,
        IS_INTERLEAVED=rotation.is_interleaved, IS_SORTED=rotation.is_sorted, HAS_KEYS=keys_TGD is not None, num_warps=4,
    )  # fmt: skip


def tile_heads(half: int) -> int:
    """Return the heads of a program, given the pairs of a head, padded."""
    return max(1, _TILE // half)


def check_angles(rotary_dim: int, dim: int) -> None:
    """Check that heads can be rotated by these angles.

    Raises:
        ValueError: They cannot.
    """
    if rotary_dim % 2 or rotary_dim > dim:
        raise ValueError(f"the angles have {rotary_dim} dims; the number must be even and at most {dim}")
