"""Small functions used by DeepEP's tests. Casts are those of WideEP, `dispatch.fp8`."""

from typing import Any

import torch
from torch import Tensor

from dispatch.fp8 import dequantise_fp8, quantise_fp8


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return 0 for equal tensors, growing with the angle between them (both shifted by 1, in float64)."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x.square() + y.square()).sum())


def safe_div(a: float, b: float) -> float:
    """Divide, with 0 / 0 = 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Divide and round up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Round up to a multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [T, H] to float8_e4m3fn and float32 scales [T, ceil(H / 128)]."""
    cast = quantise_fp8(x)
    return cast.x_TH, cast.scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Cast back to bfloat16. Scales are float32, or int32 with four exponents each, in any shape with matching size."""
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    return dequantise_fp8(x_fp8, x_scales.reshape(x_fp8.shape[0], -1), torch.bfloat16)


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Keep each value of a row once, in descending order, and fill the row with -1."""
    ordered = x.sort(dim=1, descending=True).values
    is_repeated = torch.zeros_like(ordered, dtype=torch.bool)
    is_repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    x.copy_(ordered.masked_fill(is_repeated | (ordered < 0), -1).sort(dim=1, descending=True).values)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Keep the scores [T, E] of the groups in `group_idx` [T, any], and set the others to 0."""
    is_chosen = torch.zeros(scores.shape[0], num_groups, dtype=torch.bool).scatter_(1, group_idx, True)
    return scores * is_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of a tensor's bytes as 32-bit integers. The number of bytes must be a multiple of four."""
    return int(t.contiguous().view(-1).view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Combine the hashes of tensors and (nested) tuples of them. None counts as 0."""
    value = 0
    for tensor in tensors:
        if isinstance(tensor, (tuple, list)):
            value ^= hash_tensors(*tensor)
        elif isinstance(tensor, Tensor):
            value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Add up the bytes of tensors and (nested) tuples of them. None counts as 0."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, (tuple, list)):
            total += count_bytes(*tensor)
        elif isinstance(tensor, Tensor):
            total += tensor.numel() * tensor.element_size()
    return total
