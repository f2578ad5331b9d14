"""Inputs of `Buffer.dispatch` for all ranks, and the expected result of each rank, from loops over tokens in one process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class BufferCase(NamedTuple):
    """Inputs of one rank."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


class Expected(NamedTuple):
    """Expected result of a dispatch on one rank."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    per_expert: list[int]
    source_rank: Tensor
    source_token: Tensor


def make_cases(
    seed: int,
    tokens: list[int],
    *,
    experts: int,
    hidden: int = 16,
    choices: int = 3,
    no_choice: float = 0.2,
    dtype: torch.dtype = torch.bfloat16,
    scale_columns: int = 0,
    only_expert: int | None = None,
) -> list[BufferCase]:
    """Draw a case per entry of `tokens`. With `scale_columns`, x has one byte per element and scales."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for T in tokens:
        topk_idx = torch.rand(T, experts, generator=generator).topk(min(choices, experts), dim=1).indices
        if only_expert is not None:
            topk_idx.fill_(only_expert)
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < no_choice] = -1
        x = torch.randn(T, hidden, generator=generator)
        scales = torch.rand(T, scale_columns, generator=generator) if scale_columns else None
        x = x.to(torch.float8_e4m3fn) if scale_columns else x.to(dtype)
        cases.append(BufferCase(x, scales, topk_idx, torch.randn(topk_idx.shape, generator=generator)))
    return cases


def expect_dispatch(cases: list[BufferCase], rank: int, experts: int, alignment: int = 1) -> Expected:
    """Collect the rows of `rank` by looking at every token of every rank in turn."""
    L = experts // len(cases)
    here = range(rank * L, (rank + 1) * L)
    rows: list[tuple[int, int]] = []
    counts = [0] * L
    for source, case in enumerate(cases):
        for token, choices in enumerate(case.topk_idx.tolist()):
            if any(expert in here for expert in choices):
                rows.append((source, token))
            for expert in choices:
                if expert in here:
                    counts[expert - rank * L] += 1
    K = cases[0].topk_idx.shape[1]
    local, weights = torch.full((len(rows), K), -1), torch.zeros(len(rows), K)
    for row, (source, token) in enumerate(rows):
        for k, expert in enumerate(cases[source].topk_idx[token].tolist()):
            if expert in here:
                local[row, k] = expert - rank * L
                weights[row, k] = cases[source].topk_weights[token, k]
    return Expected(
        gather([case.x for case in cases], rows),
        None if cases[0].scales is None else gather([case.scales for case in cases], rows),
        local,
        weights,
        [-(-count // alignment) * alignment for count in counts],
        torch.tensor([source for source, _ in rows], dtype=torch.int64),
        torch.tensor([token for _, token in rows], dtype=torch.int32),
    )


def gather(planes: list[Tensor | None], rows: list[tuple[int, int]]) -> Tensor:
    """Pick (rank, token) rows from all ranks' tensors."""
    first = planes[0]
    assert first is not None
    picked = [planes[source][token : token + 1].view(torch.uint8) for source, token in rows]  # type: ignore[index]
    empty = first[:0].contiguous().view(torch.uint8)
    return torch.cat([empty, *picked]).view(first.dtype)


def expect_combined(
    rows: list[Expected], answers: list[Tensor], rank: int, num_tokens: int, biases: tuple[Tensor, ...] = ()
) -> Tensor:
    """Sum all ranks' answers to this rank's tokens: biases, then ranks in order, in float32 with one rounding."""
    wide = torch.float64 if answers[0].dtype == torch.float64 else torch.float32
    totals = torch.zeros(num_tokens, *answers[0].shape[1:], dtype=wide)
    for bias in biases:
        totals += bias
    for expected, answer in zip(rows, answers, strict=True):
        sources = zip(expected.source_rank.tolist(), expected.source_token.tolist(), strict=True)
        for row, (source, token) in enumerate(sources):
            if source == rank:
                totals[token] += answer[row].to(wide)
    return totals.to(answers[0].dtype)


def portable(value: Any) -> Any:
    """Convert float8 tensors, which cannot be pickled, to bytes, also within tuples and lists."""
    if isinstance(value, Tensor):
        return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(portable, value))
    return type(value)(map(portable, value)) if isinstance(value, (tuple, list)) else value
