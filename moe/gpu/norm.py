# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMSNorm on GPUs, with the residual added on the way in: one pass over a row instead of six.

Rounded as `transformers` rounds: the residual's sum to the rows' type, then the normed row to that type, then times the
weight (Zhang and Sennrich, 2019; the modules named *RMSNorm of Llama's kind).

Legend: T rows, D hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_rows(
    x, residual, weight, out, eps, D: tl.constexpr, D_PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    """Program (row). `residual` gets the sum."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, D_PAD)
    is_in = dim < D
    value = tl.load(x + row * D + dim, mask=is_in, other=0.0)
    dtype = x.dtype.element_ty
    if HAS_RESIDUAL:
        other = tl.load(residual + row * D + dim, mask=is_in, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(residual + row * D + dim, value, mask=is_in)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + dim, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * D + dim, (normed * factor).to(dtype), mask=is_in)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, residual_TD: Tensor | None = None) -> Tensor:
    """Return the normed rows [T, D].

    Args:
        x_TD: contiguous; bfloat16, float16 or float32. weight_D: any floating type.
        eps: added to the mean of squares.
        residual_TD: added to x first and set to the sum, in place; as x.
    """
    out = torch.empty_like(x_TD)
    T, D = x_TD.shape
    norm_rows[(T,)](
        x_TD, residual_TD, weight_D, out, eps, D=D, D_PAD=triton.next_power_of_2(D),
        HAS_RESIDUAL=residual_TD is not None, num_warps=8 if D > 2048 else 4,
    )  # fmt: skip
    return out
