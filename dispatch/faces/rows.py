"""The forms in which callers of DeepEP give and get rows: with or without scales, one bias or two, padded below."""

import torch
from torch import Tensor

Rows = Tensor | tuple[Tensor, Tensor]


def split_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales; what is no tuple of two is left for the checks."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def join_rows(x: Tensor, scales: Tensor | None) -> Rows:
    """Hand out rows in the form in which they came."""
    return x if scales is None else (x, scales)


def as_biases(bias: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Return none, one or two."""
    return () if bias is None else bias if isinstance(bias, tuple) else (bias,)


def pad_rows(rows: Tensor, num_rows: int, fill: int = 0) -> Tensor:
    """Return [num_rows, ...] with `fill` below `rows`; `rows` itself if there is nothing to add."""
    if rows.shape[0] == num_rows:
        return rows
    padded = torch.empty(num_rows, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]].copy_(rows)
    plain(padded)[rows.shape[0] :] = fill
    return padded


def plain(tensor: Tensor) -> Tensor:
    """See types of one byte, which torch cannot index, as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
