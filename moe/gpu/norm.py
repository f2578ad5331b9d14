# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMSNorm on GPUs: one pass over a row instead of five.

Rounds like `transformers`: the normed row to the rows' type, then times the weight (Zhang and Sennrich, 2019; Llama's kind of *RMSNorm modules).

Legend: T rows, D hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_rows(x, weight, out, eps, D: tl.constexpr, D_PAD: tl.constexpr):
    """Program (row)."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, D_PAD)
    is_in = dim < D
    value = tl.load(x + row * D + dim, mask=is_in, other=0.0)
    dtype = x.dtype.element_ty
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + dim, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * D + dim, (normed * factor).to(dtype), mask=is_in)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed rows [T, D].

    Args:
        x_TD: contiguous; bfloat16, float16 or float32. weight_D: any floating type.
        eps: added to the mean of squares.
    """
    out = torch.empty_like(x_TD)
    T, D = x_TD.shape
    norm_rows[(T,)](
        x_TD, weight_D, out, eps, D=D, D_PAD=triton.next_power_of_2(D), num_warps=8 if D > 2048 else 4
    )
    return out
