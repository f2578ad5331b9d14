"""How `ElasticBuffer.combine` adds up, bit for bit as DeepEP documents it: in the order of the choices, in groups.

A group (a rank, a scale-up domain) is summed in the order of its choices in float32 and rounded once to the rows' type;
the sum then stands at the group's last choice. The final sum begins with the biases and adds what stands at choice
0..K-1, in float32, rounded once. Grouping changes with the placement, so these sums are outside the service's
invariance; they exist for code written for DeepEP.

Rows are given as values [Q, H] with an index `at` [T, K] that says which row stands at a choice, -1 for none.
Legend: T tokens, K choices, H hidden, Q rows that came back, R ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.rows import GivenBack

NONE = -1


class Terms(NamedTuple):
    """What is to be added: row `at_TK[t, k]` of `values_QH` stands at choice k of token t."""

    values_QH: Tensor
    at_TK: Tensor  # int64, -1 for nothing


def last_of_group(group_TK: Tensor) -> Tensor:
    """Return int64 [T, K]: the last choice of the token that is in the same group as each choice."""
    K = group_TK.shape[1]
    is_same_TKK = group_TK.unsqueeze(2) == group_TK.unsqueeze(1)
    places = torch.arange(K, device=group_TK.device)
    return torch.where(is_same_TKK, places, NONE).amax(2)


def sum_groups(terms: Terms, group_TK: Tensor) -> Terms:
    """Sum each token's terms of a group and let the sum stand at the group's last choice.

    `group_TK`: int64, -1 for no choice; a group whose terms are all missing sums to zero. New rows are numbered by
    token, then choice.
    """
    values, at_TK = terms
    last_TK = last_of_group(group_TK)
    places = torch.arange(at_TK.shape[1], device=at_TK.device)
    stands_TK = (last_TK == places) & (group_TK != NONE)
    number_TK = torch.where(stands_TK, (stands_TK.flatten().cumsum(0) - 1).view(at_TK.shape), NONE)
    row_TK = number_TK.gather(1, last_TK.clamp(min=0))
    sums = torch.zeros(int(stands_TK.sum()), *values.shape[1:], dtype=_wide(values), device=values.device)
    for at_T, row_T in zip(at_TK.unbind(1), row_TK.unbind(1), strict=True):
        is_term = at_T != NONE
        sums[row_T[is_term]] += values[at_T[is_term]]  # a token has one row per choice: no index is twice
    return Terms(sums.to(values.dtype), number_TK)


def sum_choices(terms: Terms, biases: Sequence[Tensor]) -> Tensor:
    """Return [T, H]: the biases, then the terms in the order of the choices."""
    values, at_TK = terms
    total = torch.zeros(at_TK.shape[0], *values.shape[1:], dtype=_wide(values), device=values.device)
    for bias in biases:
        total += bias
    for at_T in at_TK.unbind(1):
        is_term = at_T != NONE
        total[is_term] += values[at_T[is_term]]
    return total.to(values.dtype)


def answers_at(back: GivenBack, rank_TK: Tensor, num_ranks: int) -> Tensor:
    """Return int64 [T, K]: which row that came back is of each choice's rank, -1 for no choice."""
    row_TR = torch.full((rank_TK.shape[0], num_ranks), NONE, dtype=torch.int64, device=rank_TK.device)
    row_TR[back.token_Q, back.rank_Q] = torch.arange(back.token_Q.numel(), device=rank_TK.device)
    return torch.where(rank_TK == NONE, NONE, row_TR.gather(1, rank_TK.clamp(min=0)))


def terms_by_rank(rows_QH: Tensor, answer_TK: Tensor, rank_TK: Tensor) -> Terms:
    """One row per token and rank: it stands at the rank's last choice."""
    places = torch.arange(rank_TK.shape[1], device=rank_TK.device)
    return Terms(rows_QH, torch.where(last_of_group(rank_TK) == places, answer_TK, NONE))


def terms_by_choice(rows_QKH: Tensor, answer_TK: Tensor) -> Terms:
    """One row per choice: row k of a rank's K stands at choice k."""
    K = answer_TK.shape[1]
    at_TK = answer_TK * K + torch.arange(K, device=answer_TK.device)
    return Terms(rows_QKH.flatten(0, 1), torch.where(answer_TK == NONE, NONE, at_TK))


def pick_weights(weights_QK: Tensor, answer_TK: Tensor) -> Tensor:
    """Return [T, K]: each choice's weight from the rank that has it, zero for no choice."""
    K = answer_TK.shape[1]
    at_TK = (answer_TK * K + torch.arange(K, device=answer_TK.device)).clamp(min=0)
    flat = torch.cat(
        [weights_QK.flatten(), weights_QK.new_zeros(1)]
    )  # something to point at where nothing came
    return torch.where(answer_TK == NONE, 0.0, flat[at_TK.clamp(max=flat.numel() - 1)])


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
