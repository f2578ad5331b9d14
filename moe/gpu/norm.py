# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMSNorm on GPUs: one pass over a row instead of five, after the residual's sum if there is one.

Rounds like `transformers`: the sum to the rows' type, the normed row to the rows' type, then times the weight (Zhang and
Sennrich, 2019; Llama's kind of *RMSNorm modules). Sum and norm in one launch are vLLM's fused_add_rms_norm.
A program has several short rows: one row of a head, 256 bytes, is too little work for four warps.
The number depends on the width only, so a row's bits do not depend on the other rows.

Legend: T rows, D hidden.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # numbers of a program that has several rows: 8 per thread
_WIDE = 2048  # from here on, a row takes more warps


class Summed(NamedTuple):
    """A residual's sum, and its norm."""

    total_TD: Tensor
    normed_TD: Tensor


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x, added, weight, total, out, num_rows, eps, x_stride, added_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, HAS_SUM: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of rows). With HAS_SUM, rows of `added` are added first and the sum is stored too."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, D_PAD)[None, :]
    is_in = (row < num_rows) & (dim < D)
    dtype = x.dtype.element_ty
    wide = tl.load(x + row * x_stride + dim, mask=is_in, other=0.0).to(tl.float32)
    if HAS_SUM:
        wide += tl.load(added + row * added_stride + dim, mask=is_in, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(total + row * D + dim, rounded, mask=is_in)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    normed = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + dim, mask=dim < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + dim, (normed * factor).to(dtype), mask=is_in)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed rows [T, D], contiguous.

    Args:
        x_TD: bfloat16, float16 or float32; rows may have gaps between them.
        weight_D: any floating type.
        eps: added to the mean of squares.
    """
    x_TD = _rows(x_TD)
    out = x_TD.new_empty(x_TD.shape)
    _launch(x_TD, None, weight_D, None, out, eps)
    return out


def add_rms_norm(x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> Summed:
    """Return x + added, rounded to their type, and its normed rows. Both results are contiguous.

    Args:
        x_TD, added_TD: The same shape and type; rows may have gaps between them. Others: see `rms_norm`.
    """
    x_TD, added_TD = _rows(x_TD), _rows(added_TD)
    total, out = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    _launch(x_TD, added_TD, weight_D, total, out, eps)
    return Summed(total, out)


def _rows(x_TD: Tensor) -> Tensor:
    return x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()


def _launch(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weight_D: Tensor,
    total_TD: Tensor | None,
    out_TD: Tensor,
    eps: float,
) -> None:
    T, D = x_TD.shape
    width = triton.next_power_of_2(D)
    rows = max(1, _TILE // width)
    norm_rows[(triton.cdiv(T, rows),)](
        x_TD, added_TD, weight_D, total_TD, out_TD, T, eps, x_TD.stride(0),
        0 if added_TD is None else added_TD.stride(0), D=D, D_PAD=width, ROWS=rows, HAS_SUM=added_TD is not None,
        num_warps=8 if D > _WIDE else 4,
    )  # fmt: skip
