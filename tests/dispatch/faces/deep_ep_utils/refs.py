"""References for DeepEP's `tests/elastic/test_ep.py`: dispatch and combine in the plainest way, one row at a time.

Written from scratch, from the needs of the test. `dispatch` gives every rank all inputs, as pickled objects, and selects;
`combine` adds row by row in Python. It uses none of WideEP's exchange or sums. Slow: meant for some hundred tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deep_ep.utils.envs import get_global_seed
from torch import Tensor

_MASK = 0x7FFFFFFF


def dispatch(
    x: Any, topk_idx: Tensor, topk_weights: Tensor | None, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, Tensor, Tensor | None, Tensor, Tensor]:
    """Return what this rank receives: rows, local choices, weights, source indices int32, rows per rank int32.

    Rows are ordered by source rank, then token. The source index is `source rank * num_max_tokens_per_rank + token`. If `x`
    is a tuple of rows and scales, so is the result. Collective over the default group.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs: list[Any] = [None] * num_ranks
    dist.all_gather_object(inputs, (_as_sent(x), topk_idx, topk_weights))
    local_experts = num_experts // num_ranks
    first = rank * local_experts
    picked, sources, counts = [], [], []
    for source, (_, idx, _) in enumerate(inputs):
        tokens = [
            t for t, row in enumerate(idx.tolist()) if any(first <= e < first + local_experts for e in row)
        ]
        picked.append(tokens)
        sources += [source * num_max_tokens_per_rank + token for token in tokens]
        counts.append(len(tokens))

    def gather(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor[tokens] for tensor, tokens in zip(tensors, picked, strict=True)])

    recv_idx = gather([idx for _, idx, _ in inputs]) - first
    recv_idx[(recv_idx < 0) | (recv_idx >= local_experts)] = -1
    recv_weights = None if topk_weights is None else gather([weights for _, _, weights in inputs])
    if isinstance(x, tuple):
        parts = [gather([rows[part] for rows, _, _ in inputs]) for part in range(len(x))]
        recv_x: Any = tuple(part.view(like.dtype) for part, like in zip(parts, x, strict=True))
    else:
        recv_x = gather([rows for rows, _, _ in inputs]).view(x.dtype)
    return (
        recv_x,
        recv_idx,
        recv_weights,
        torch.tensor(sources, dtype=torch.int32),
        torch.tensor(counts).int(),
    )


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Return bfloat16 [N, K, H] in [-1, 1): a scrambled function of source index, choice, column and global seed."""
    seed: int = get_global_seed()
    row_NK = src_token_global_idx.long().unsqueeze(1) * num_topk + torch.arange(num_topk)
    mixed = row_NK.unsqueeze(2) * 40_503 + torch.arange(hidden) * 52_711 + (seed + 1) * 7_919
    for shift, factor in ((13, 19_349_663), (11, 83_492_791), (16, 73_856_093)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return ((mixed >> 7).double() / (1 << 23) - 1).to(torch.bfloat16)


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """Return [N, H]: the sum of [N, K, H] over K, in order, in float32 from `initial_value` on, rounded once."""
    total = torch.zeros(data.shape[0], data.shape[2], dtype=torch.float32)
    if initial_value is not None:
        total += initial_value
    for part in data.unbind(1):
        total += part
    return total.to(data.dtype)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """Return [T, H]: the expected result of a combine of answers [T, K, H], bit for bit.

    Each token's answers are taken in the order of its choices. They are first summed by rank (`reduce_in_local`), and the
    sums by scale-up domain (`reduce_in_scaleup`), each in float32 and rounded, at the position of the last summand. All are
    then added after the biases, in float32, and rounded once.
    """
    experts_per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    rows = []
    for token, experts in enumerate(topk_idx.tolist()):
        terms = [(e, y[token, k]) for k, e in enumerate(experts) if e >= 0]
        if reduce_in_local:
            terms = _sum_by(terms, lambda e: e // experts_per_rank)
        if reduce_in_scaleup:
            terms = _sum_by(terms, lambda e: e // (experts_per_rank * num_scaleup_ranks))
        total = torch.zeros(y.shape[2], dtype=torch.float32)
        for part in (*(b[token] for b in biases), *(row for _, row in terms)):
            total += part
        rows.append(total.to(y.dtype))
    return torch.stack(rows) if rows else y.new_zeros(0, y.shape[2])


def _sum_by(terms: list[tuple[int, Tensor]], group_of: Callable[[int], int]) -> list[tuple[int, Tensor]]:
    """Sum the terms (expert, row) of each group, and put the sum at the position of the group's last term."""
    groups = [group_of(expert) for expert, _ in terms]
    summed = []
    for place, (expert, row) in enumerate(terms):
        if groups[place] in groups[place + 1 :]:
            continue
        total = torch.zeros(row.shape, dtype=torch.float32)
        for group, (_, part) in zip(groups, terms, strict=True):
            if group == groups[place]:
                total += part
        summed.append((expert, total.to(row.dtype)))
    return summed


def _as_sent(x: Any) -> Any:
    """View one-byte types as bytes: torch cannot pickle, index and concatenate all of them."""
    if isinstance(x, tuple):
        return tuple(_as_sent(part) for part in x)
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
