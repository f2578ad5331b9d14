"""Writing pages as an operator of PyTorch, for code that torch.compile compiles.

Importing this registers the operator, under `torch.ops.wideep`.
"""

import torch
from torch import Tensor

from kvcache.gpu import write


@torch.library.custom_op("wideep::write_pages", mutates_args=("pages",))
def _write_pages(rows: Tensor, slots: Tensor, pages: Tensor) -> None:
    write.write_pages(rows, slots, pages)


@torch.library.custom_op("wideep::write_both_pages", mutates_args=("pages", "value_pages"))
def _write_both_pages(
    rows: Tensor, slots: Tensor, pages: Tensor, values: Tensor, value_pages: Tensor
) -> None:
    write.write_pages(rows, slots, pages, values, value_pages)


def write_pages(
    rows_TGD: Tensor,
    slots_T: Tensor,
    pages_NGBD: Tensor,
    values_TGV: Tensor | None = None,
    value_pages_NGBV: Tensor | None = None,
) -> None:
    """See `write.write_pages`; in place."""
    if values_TGV is None or value_pages_NGBV is None:
        torch.ops.wideep.write_pages(rows_TGD, slots_T, pages_NGBD)
    else:
        torch.ops.wideep.write_both_pages(rows_TGD, slots_T, pages_NGBD, values_TGV, value_pages_NGBV)
