"""Rows of node-limited dispatch as they travel: bytes, of the tokens' own type or of FP8 with its scales behind.

The same bits as the flat dispatcher's formats (`row_formats`, which works on addresses). A row is made once, at its
source, and not touched by the rank that forwards it.
"""

import torch
from torch import Tensor

from dispatch.fp8 import dequantise_fp8, num_blocks, quantise_fp8


def encode_rows(x_TH: Tensor, name: str) -> Tensor:
    """Return uint8 [T, bytes of a row]. `name`: a name of `row_formats`."""
    if name != "fp8":
        return x_TH.contiguous().view(torch.uint8)
    quantised = quantise_fp8(x_TH)
    return torch.cat([quantised.x_TH.view(torch.uint8), quantised.scales.view(torch.uint8)], dim=1)


def decode_rows(rows: Tensor, like_TH: Tensor, name: str) -> Tensor:
    """Return [N, H] in the type of `like_TH` of uint8 [N * bytes of a row]."""
    hidden = like_TH.shape[1]
    if name != "fp8":
        return rows.view(like_TH.dtype).view(-1, hidden)
    rows_NB = rows.view(-1, hidden + 4 * num_blocks(hidden))
    scales = rows_NB[:, hidden:].contiguous().view(torch.float32)
    return dequantise_fp8(rows_NB[:, :hidden].contiguous().view(torch.float8_e4m3fn), scales, like_TH.dtype)
