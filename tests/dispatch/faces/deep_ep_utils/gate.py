"""Router scores for tests: even, or such that the first rank gets more tokens than the others.

Written from scratch, from the requirements of DeepEP's `tests/elastic/test_ep.py`.
"""

import torch
from torch import Tensor

_STEPS = 24  # steps of the bisection: more than the resolution of float32 scores


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Return float32 [T, E] in [0, 1) whose top-k sends the first rank about `ratio` times the others' mean tokens.

    Raises:
        NotImplementedError: With `precise`, which builds choices by hand and is not needed by any test here.
    """
    if precise:
        raise NotImplementedError(
            "precise unbalanced ratios are not part of WideEP's shim; leave the option out"
        )
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if ratio == 1.0:
        return scores
    first = num_experts // num_ranks
    low, high = (
        0.0,
        1.0,
    )  # factor of the other ranks' scores: 0 sends them as little as possible
    for _ in range(_STEPS):
        factor = (low + high) / 2
        low, high = (
            (factor, high)
            if _imbalance(_damped(scores, first, factor), first, num_topk) > ratio
            else (low, factor)
        )
    return _damped(scores, first, high)


def _damped(scores: Tensor, first: int, factor: float) -> Tensor:
    damped = scores.clone()
    damped[:, first:] *= factor
    return damped


def _imbalance(scores: Tensor, first: int, num_topk: int) -> float:
    """Return the tokens of the first rank over the mean of the others."""
    rank_TK = scores.topk(num_topk, dim=1).indices // first
    counts = torch.stack(
        [(rank_TK == rank).any(1).sum() for rank in range(scores.shape[1] // first)]
    ).double()
    return float(counts[0] / counts[1:].mean().clamp(min=1))
