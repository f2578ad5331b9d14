# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writes a step's keys and values, or latents, to their places in GPU pages.

Pages are token-major, as `attention.gpu.pages` reads them. Rows after the step's tokens have slot -1 and are skipped, so
the launch can be replayed for any number of tokens. Keys and values are written in one launch, because launches, not
bytes, determine the cost in a decode step.

Legend: T rows, G KV heads, D dim of a row, V dim of a value's row, N blocks, B tokens of a block.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_row(source, pages, place, D: tl.constexpr, D_PAD: tl.constexpr):
    """Copy one row to its place, counted in rows."""
    dim = tl.arange(0, D_PAD)
    tl.store(pages + place * D + dim, tl.load(source + dim, mask=dim < D), mask=dim < D)


@triton.jit
def write_rows(
    rows, slots, pages, values, value_pages, row_stride, head_stride, value_row_stride, value_head_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row, head). V is 0 if there are no values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        place = (slot // BLOCK * HEADS + head) * BLOCK + slot % BLOCK
        write_row(rows + row * row_stride + head * head_stride, pages, place, D, D_PAD)
        if V > 0:
            own = values + row * value_row_stride + head * value_head_stride
            write_row(own, value_pages, place, V, V_PAD)


def write_pages(
    rows_TGD: Tensor,
    slots_T: Tensor,
    pages_NGBD: Tensor,
    values_TGV: Tensor | None = None,
    value_pages_NGBV: Tensor | None = None,
) -> None:
    """Write rows to their slots, and values to the same slots of their pages. In place.

    Args:
        rows_TGD: Keys or latents, last dim contiguous, of the pages' type.
        slots_T: int64 [T], block * B + offset; -1 for a row that is not stored.
        pages_NGBD: Contiguous.
        values_TGV, value_pages_NGBV: Values and their pages, in the same form. Give both or neither.
    """
    T, G, D = rows_TGD.shape
    value_dim, strides = (0, (0, 0)) if values_TGV is None else (values_TGV.shape[2], values_TGV.stride()[:2])
    write_rows[(T, G)](
        rows_TGD, slots_T, pages_NGBD, values_TGV, value_pages_NGBV, rows_TGD.stride(0), rows_TGD.stride(1), *strides,
        HEADS=G, BLOCK=pages_NGBD.shape[2], D=D, D_PAD=triton.next_power_of_2(D), V=value_dim,
        V_PAD=triton.next_power_of_2(max(1, value_dim)), num_warps=1,
    )  # fmt: skip
