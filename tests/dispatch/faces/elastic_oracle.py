"""Expected results of `ElasticBuffer`, from all ranks' inputs at once and row by row. None of its code is used."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.faces.elastic import ElasticBuffer


class Inputs(NamedTuple):
    """Inputs of a dispatch on one rank."""

    x_TH: Tensor  # bfloat16, or the bytes of float8
    scales_TB: Tensor
    topk_idx_TK: Tensor
    weights_TK: Tensor


class Expected(NamedTuple):
    """Rows received by one rank, unexpanded."""

    x_NH: Tensor
    scales_NB: Tensor
    local_NK: Tensor
    weights_NK: Tensor
    source_N: list[tuple[int, int]]  # rank, token


def make_inputs(
    tokens: list[int], *, experts: int, choices: int, hidden: int, no_choice: float = 0.0, seed: int = 0
) -> list[Inputs]:
    """Draw inputs for every rank. A token's choices differ, and a share of them is -1 with weight 0."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for T in tokens:
        scores = torch.rand(T, experts, generator=generator)
        idx = scores.topk(choices, dim=1).indices
        idx[torch.rand(T, choices, generator=generator) < no_choice] = -1
        weights = torch.rand(T, choices, generator=generator).masked_fill(idx < 0, 0)
        x = torch.randn(T, hidden, generator=generator).to(torch.bfloat16)
        inputs.append(Inputs(x, torch.rand(T, 3, generator=generator), idx, weights))
    return inputs


def expect_dispatch(inputs: list[Inputs], rank: int, experts: int) -> Expected:
    """Select the rank's rows in the order of source rank, then token."""
    local = experts // len(inputs)
    first = rank * local
    source = [
        (s, t)
        for s, given in enumerate(inputs)
        for t, row in enumerate(given.topk_idx_TK.tolist())
        if any(first <= expert < first + local for expert in row)
    ]

    def pick(field: str) -> Tensor:
        of_rank = [getattr(given, field) for given in inputs]
        rows = [of_rank[s][t] for s, t in source]
        return torch.stack(rows) if rows else of_rank[0][:0]

    idx_NK = pick("topk_idx_TK") - first
    idx_NK[(idx_NK < 0) | (idx_NK >= local)] = -1
    return Expected(pick("x_TH"), pick("scales_TB"), idx_NK, pick("weights_TK"), source)


def answer(rank: int, token: int, choice: int, hidden: int) -> Tensor:
    """Return an expert's answer to a token's choice in bfloat16, of a size that reveals the order of additions."""
    generator = torch.Generator().manual_seed((rank * 1009 + token) * 64 + choice)
    scale = 10.0 ** float(torch.randint(-2, 3, (1,), generator=generator))
    row: Tensor = torch.randn(hidden, generator=generator) * scale
    return row.to(torch.bfloat16)


def expect_combine(
    given: Inputs, rank: int, hidden: int, experts_per: list[int], biases: list[Tensor]
) -> Tensor:
    """Sum every token's answers.

    Args:
        given: Inputs of the rank.
        experts_per: Experts of a group, for each level of grouping: of a rank, then of a node.
        biases: Initial values of the sum.
    """
    rows = []
    for token, experts in enumerate(given.topk_idx_TK.tolist()):
        terms = {k: answer(rank, token, k, hidden) for k, expert in enumerate(experts) if expert >= 0}
        for size in experts_per:
            terms = _group(terms, {k: experts[k] // size for k in terms})
        total = torch.zeros(hidden)
        for part in [*(bias[token] for bias in biases), *(terms[k] for k in sorted(terms))]:
            total = total + part.float()
        rows.append(total.to(torch.bfloat16))
    return torch.stack(rows) if rows else torch.empty(0, hidden, dtype=torch.bfloat16)


def _group(terms: dict[int, Tensor], group_of: dict[int, int]) -> dict[int, Tensor]:
    sums: dict[int, Tensor] = {}
    last: dict[int, int] = {}
    for k in sorted(terms):
        group = group_of[k]
        sums[group] = sums.get(group, torch.zeros(terms[k].shape)) + terms[k].float()
        last[group] = k
    return {last[group]: total.to(torch.bfloat16) for group, total in sums.items()}


E, K, H, M = 8, 3, 32, 12


def open_buffer(**options: Any) -> ElasticBuffer:
    """Open a buffer over all ranks of a pool."""
    assert dist.group.WORLD is not None
    return ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=M, timeout_s=20.0, **options)
