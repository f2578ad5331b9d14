# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Write a step's keys and values, or latents, to their places in GPU pages.

Pages are token-major, as `attention.gpu.pages` reads them. Rows past the step's tokens have slot -1 and are left out,
so the launch can be replayed for any number of tokens.

Legend: T rows, G KV heads, D dim of a row, N blocks, B tokens of a block.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_rows(
    rows, slots, pages, row_stride, head_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row, head)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        dim = tl.arange(0, D_PAD)
        value = tl.load(rows + row * row_stride + head * head_stride + dim, mask=dim < D)
        place = (slot // BLOCK * HEADS + head) * BLOCK + slot % BLOCK
        tl.store(pages + place * D + dim, value, mask=dim < D)


def write_pages(rows_TGD: Tensor, slots_T: Tensor, pages_NGBD: Tensor) -> None:
    """Write rows to their slots; in place.

    Args:
        rows_TGD: the last dim contiguous, of the pages' type.
        slots_T: int64 [T], block * B + offset, -1 for a row that is not kept.
        pages_NGBD: contiguous.
    """
    T, G, D = rows_TGD.shape
    write_rows[(T, G)](
        rows_TGD, slots_T, pages_NGBD, rows_TGD.stride(0), rows_TGD.stride(1), HEADS=G, BLOCK=pages_NGBD.shape[2], D=D,
        D_PAD=triton.next_power_of_2(D), num_warps=1,
    )  # fmt: skip
