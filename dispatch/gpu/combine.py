# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The weighted sum of each token's answers, where they lie by pair: in the order of its choices, in float32, one rounding.

Products are rounded before they are added (compiled without fusion), so the bits are those of `layout.sum_answers`.

Legend: T tokens, K choices, P answers, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.gpu.casts import narrow, widen
from dispatch.gpu.memory import as_stored

_TILE = 1024  # channels of a token that a program sums


@triton.jit
def sum_pairs(
    y, pair_of_choice, weights, added, out,
    K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """Program (token, tile). Masks instead of branches: a choice that is none adds +0, which changes no sum's bits."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = at < H
    total = tl.zeros([TILE], tl.float32)
    for k in range(K):
        pair = tl.load(pair_of_choice + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k, mask=pair >= 0, other=0.0)
        answer = tl.load(y + pair * H + at, mask=is_channel & (pair >= 0), other=0)
        total += weight * widen(answer, IS_BFLOAT16)
    if HAS_ADDED:
        rounded = widen(narrow(total, out.dtype.element_ty, IS_BFLOAT16), IS_BFLOAT16)
        total = rounded + widen(tl.load(added + token * H + at, mask=is_channel, other=0), IS_BFLOAT16)
    tl.store(out + token * H + at, narrow(total, out.dtype.element_ty, IS_BFLOAT16), mask=is_channel)


def combine_pairs(
    y_PH: Tensor,
    pair_of_choice_TK: Tensor,
    weights_TK: Tensor,
    out_TH: Tensor,
    *,
    added_TH: Tensor | None = None,
) -> Tensor:
    """Sum every token's answers with their weights.

    Args:
        y_PH: bfloat16, float16 or float32, contiguous.
        pair_of_choice_TK: int32 or int64, contiguous: the row of y_PH that answers each choice; -1 for no choice.
        weights_TK: float32, contiguous; what stands beside a -1 is not read.
        out_TH: where to write, in the type of y_PH, contiguous.
        added_TH: of that type, contiguous: added to the rounded sum, which is rounded again, as torch would.

    Returns:
        out_TH.
    """
    T, K = pair_of_choice_TK.shape
    H = y_PH.shape[1]
    if T == 0:
        return out_TH
    tile = min(_TILE, triton.next_power_of_2(H))
    sum_pairs[(T, triton.cdiv(H, tile))](
        as_stored(y_PH), pair_of_choice_TK, weights_TK, None if added_TH is None else as_stored(added_TH),
        as_stored(out_TH), K=K, H=H, TILE=tile, IS_BFLOAT16=y_PH.dtype == torch.bfloat16,
        HAS_ADDED=added_TH is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TH
