# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Casts rows to FP8 on a GPU for products with FP8 weights: DeepSeek-V3's recipe, a scale per row and 128 features.

The casts are those of rows that travel (`dispatch.fp8`), bit for bit: a row that came in FP8 need not be cast again.
What is not finite makes its 128 features NaN.

Legend: T rows, K features, B blocks of 128 of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.fp8 import Quantised, num_blocks
from dispatch.gpu.casts import quantise_row

GROUPS = 8  # blocks that a program casts at once


@triton.jit
def cast_rows(
    x, out, scales, K: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    quantise_row(out + row * K, scales + row * B, x + row * K, K, GROUPS, False, IS_BFLOAT16)


def quantise_rows(x_TK: Tensor) -> Quantised:
    """Cast to float8_e4m3fn [T, K], with float32 scales [T, B]; nothing waits for the device.

    Args:
        x_TK: contiguous; bfloat16, float16 or float32.
    """
    (T, K), blocks = x_TK.shape, num_blocks(x_TK.shape[1])
    out = torch.empty(T, K, dtype=torch.uint8, device=x_TK.device)
    scales_TB = torch.empty(T, blocks, dtype=torch.float32, device=x_TK.device)
    is_bfloat16 = x_TK.dtype == torch.bfloat16
    stored = x_TK.view(torch.int16) if is_bfloat16 else x_TK  # the interpreter has no bfloat16
    cast_rows[(T,)](
        stored, out, scales_TB, K=K, B=blocks, GROUPS=min(GROUPS, triton.next_power_of_2(blocks)),
        IS_BFLOAT16=is_bfloat16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Quantised(out.view(torch.float8_e4m3fn), scales_TB)
