"""Destinations and order of rows, and the sum of answers: the reference for dispatch, in plain torch.

A token goes once to every rank that holds one of its choices. There, a pair is one (row, choice): the unit that an
expert computes. Answers come back as one row per pair and are summed in the order of the choices, in float32 with
one rounding. So the result does not depend on the placement of experts. (DeepEP's low-latency combine also sums in
this order; its normal combine sums per rank first, which changes with the placement.)
Both sides can compute every order from the slots alone, so answers carry no metadata.

`cpu_kernels` does the same faster and is tested against this module bit for bit. This module does not use wires.

Legend: T tokens of this rank, K choices, N rows received, P pairs of this rank, Q answers received, R ranks,
S slots per rank, H hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NO_CHOICE = -1


class RowsToSend(NamedTuple):
    """Rows that a rank sends: one per (token, rank), ordered by rank, then token."""

    token_N: Tensor  # int64: the token of each row
    local_slots_NK: Tensor  # int64: the row's choices as slots of its destination, -1 elsewhere
    row_counts_R: Tensor  # int64: rows for each rank
    pair_counts_R: Tensor  # int64: answers that each rank will send back


class PairOrder(NamedTuple):
    """Order of a rank's pairs: by local slot, then row, then choice."""

    row_P: Tensor  # int64: the row of each pair
    slot_offsets: Tensor  # int64 [S+1]: pairs of local slot s are [offsets[s], offsets[s+1])
    pair_of_answer: Tensor  # int64 [P]: the pair of each answer; answers leave in order of (row, choice)


def route(slots_TK: Tensor, slots_per_rank: int, world_size: int) -> RowsToSend:
    """Find each rank's rows and their choices. `slots_TK` int64, -1 for no choice."""
    rank_TK = torch.div(slots_TK, slots_per_rank, rounding_mode="floor")  # -1 stays negative
    tokens, locals_, row_counts, pair_counts = [], [], [], []
    for rank in range(world_size):
        here_TK = rank_TK == rank
        token_n = here_TK.any(dim=1).nonzero().squeeze(1)
        local_TK = torch.where(here_TK, slots_TK - rank * slots_per_rank, NO_CHOICE)
        tokens.append(token_n)
        locals_.append(local_TK[token_n])
        row_counts.append(token_n.numel())
        pair_counts.append(int(here_TK.sum()))
    return RowsToSend(
        torch.cat(tokens), torch.cat(locals_), torch.tensor(row_counts), torch.tensor(pair_counts)
    )


def order_pairs(local_slots_NK: Tensor, slots_per_rank: int) -> PairOrder:
    """Sort the pairs of received rows by slot, stably. Rows are ordered by source rank, then token."""
    N, K = local_slots_NK.shape
    row_NK = torch.arange(N).unsqueeze(1).expand(N, K)
    chosen_NK = local_slots_NK != NO_CHOICE
    slot_P, row_P = local_slots_NK[chosen_NK], row_NK[chosen_NK]  # in order of (row, choice)
    order_P = torch.argsort(slot_P, stable=True)
    counts = torch.bincount(slot_P, minlength=slots_per_rank)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    pair_of_answer = torch.empty_like(order_P)
    pair_of_answer[order_P] = torch.arange(order_P.numel())
    return PairOrder(row_P[order_P], offsets, pair_of_answer)


def answer_positions(slots_TK: Tensor, slots_per_rank: int) -> Tensor:
    """Return int64 [T, K]: the position of each choice's answer among all answers, which are ordered by answering
    rank, then token, then choice; -1 for no choice."""
    rank_TK = torch.div(slots_TK, slots_per_rank, rounding_mode="floor")
    chosen_TK = slots_TK != NO_CHOICE
    order_Q = torch.argsort(rank_TK[chosen_TK], stable=True)
    position_Q = torch.empty_like(order_Q)
    position_Q[order_Q] = torch.arange(order_Q.numel())
    position_TK = torch.full_like(slots_TK, NO_CHOICE)
    position_TK[chosen_TK] = position_Q
    return position_TK


def sum_answers(answer_QH: Tensor, position_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, H] in `dtype`: the sum over k = 0..K-1 of weight times answer.

    Multiplies, then adds, in float32 (float64 for float64), in the order of k, with one rounding at the end. A
    choice of -1 adds nothing, and its weight is not used. The sum starts at +0.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total_TH = torch.zeros(position_TK.shape[0], answer_QH.shape[1], dtype=wide)
    for k in range(position_TK.shape[1]):
        token = (position_TK[:, k] != NO_CHOICE).nonzero().squeeze(1)
        answer = answer_QH[position_TK[token, k]].to(wide)
        total_TH[token] += weights_TK[token, k].to(wide).unsqueeze(1) * answer
    return total_TH.to(dtype)
