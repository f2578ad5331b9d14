"""Where `ElasticBuffer` puts received rows: unexpanded as they came, or expanded, once per local choice by expert.

Rows come ordered by source rank, then token, and keep that order within an expert. What pads an expert to the
alignment, and the rest of worst-case shapes, is zero (-1 where an index is expected), so that results are the same bits
every time. Plain torch; knows no wire.

Legend: T tokens of this rank, K choices, N rows received, L experts of a rank, R ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.choices import NOT_HERE
from dispatch.faces.rows import plain

SCALE_ALIGNMENT = (
    4  # scales (of 4 bytes) per column start at 16 bytes, for DeepGEMM's loads (DeepEP, compiled.cuh)
)


class Experts(NamedTuple):
    """How many choices each local expert got, and where they lie when expanded."""

    counts_L: Tensor  # int64
    starts_L: Tensor  # int64: multiples of the alignment
    num_expanded: int  # all experts, padding included
    slot_NK: Tensor  # int64: -1 for choices of other ranks


def padded(counts_L: Tensor, alignment: int) -> Tensor:
    """Round up to multiples of the alignment."""
    return (counts_L + alignment - 1) // alignment * alignment


def most_expanded(num_rows: int, num_choices: int, num_local_experts: int, alignment: int) -> int:
    """Return how many expanded rows `num_rows` can become at most, padding included."""
    most = num_rows * min(num_choices, num_local_experts) + (alignment - 1) * num_local_experts
    return -(-most // alignment) * alignment


def take(values: Tensor, slot_NK: Tensor) -> Tensor:
    """Return [N, K, ...]: the value at each choice's slot, zero for none."""
    is_here = slot_NK != NOT_HERE
    taken = torch.zeros(*slot_NK.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    taken[is_here] = values[slot_NK[is_here]]
    return taken


def place_experts(local_NK: Tensor, num_local_experts: int, alignment: int) -> Experts:
    """Count the choices of each local expert and give each a place, by expert, then row, then choice."""
    is_here = local_NK != NOT_HERE
    expert_P = local_NK[is_here].long()
    counts_L = torch.bincount(expert_P, minlength=num_local_experts)
    padded_L = padded(counts_L, alignment)
    starts_L = padded_L.cumsum(0) - padded_L
    order_P = torch.argsort(expert_P, stable=True)
    first_L = counts_L.cumsum(0) - counts_L
    slot_P = torch.empty_like(expert_P)
    sorted_P = expert_P[order_P]
    slot_P[order_P] = (
        torch.arange(expert_P.numel(), device=expert_P.device) - first_L[sorted_P] + starts_L[sorted_P]
    )
    slot_NK = torch.full(local_NK.shape, NOT_HERE, dtype=torch.int64, device=local_NK.device)
    slot_NK[is_here] = slot_P
    return Experts(counts_L, starts_L, int(padded_L.sum()), slot_NK)


def expert_ends(experts: Experts, alignment: int, do_expand: bool) -> Tensor:
    """Return int32 [L]: where each expert's rows end, without padding if expanded, with it if not."""
    counts_L = experts.counts_L
    padded_L = padded(counts_L, alignment)
    return (experts.starts_L + (counts_L if do_expand else padded_L)).int()


def source_metadata(
    source_N: Tensor,
    token_N: Tensor,
    experts: Experts,
    *,
    max_tokens: int,
    scaleup_ranks: int,
    do_expand: bool,
) -> Tensor:
    """Return int32 [N, 2 + K], see `EPHandle.recv_src_metadata`. `source_N`: the source rank of each row."""
    N, K = experts.slot_NK.shape
    metadata = torch.full((N, 2 + K), NOT_HERE, dtype=torch.int32, device=token_N.device)
    first_N = (experts.slot_NK != NOT_HERE).int().argmax(1) if K else torch.zeros_like(token_N)
    metadata[:, 0] = (source_N * max_tokens + token_N).int()
    metadata[:, 1] = (source_N % scaleup_ranks * K + first_N).int()
    if do_expand:
        metadata[:, 2:] = experts.slot_NK.int()
    return metadata


def destination_rows(mask_TR: Tensor, counts_RR: Tensor, rank: int, rank_TK: Tensor) -> Tensor:
    """Return int32 [T, K], see `EPHandle.dst_buffer_slot_idx`. `counts_RR`: rows that rank i sent to rank j."""
    before_R = counts_RR[:rank].sum(0).to(mask_TR.device)
    row_TR = mask_TR.long().cumsum(0) - 1 + before_R
    row_TK = row_TR.gather(1, rank_TK.clamp(min=0))
    return torch.where(rank_TK == NOT_HERE, NOT_HERE, row_TK).int()


def expand_rows(rows: Tensor, slot_NK: Tensor, num_expanded: int) -> Tensor:
    """Return [num_expanded, ...]: each row at all its slots, zero elsewhere."""
    expanded = torch.zeros(num_expanded, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    for slot_N in slot_NK.unbind(1):
        is_here = slot_N != NOT_HERE
        plain(expanded)[slot_N[is_here]] = plain(rows)[is_here]
    return expanded


def expand_weights(weights_NK: Tensor, slot_NK: Tensor, num_expanded: int) -> Tensor:
    """Return [num_expanded]: each choice's weight at its slot, zero elsewhere."""
    expanded = torch.zeros(num_expanded, dtype=weights_NK.dtype, device=weights_NK.device)
    is_here = slot_NK != NOT_HERE
    expanded[slot_NK[is_here]] = weights_NK[is_here]
    return expanded


def column_major(scales: Tensor) -> Tensor:
    """Return the same [N, B] with strides (1, N rounded up to SCALE_ALIGNMENT)."""
    N, B = scales.shape
    column = (N + SCALE_ALIGNMENT - 1) // SCALE_ALIGNMENT * SCALE_ALIGNMENT
    strided = torch.empty_strided((N, B), (1, column), dtype=scales.dtype, device=scales.device)
    return strided.copy_(scales)
