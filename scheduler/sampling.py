"""From logits to tokens: greedy and seeded sampling, penalties, logprobs.

A token depends on its own row, its request's parameters and seed, and its position, never on the batch: every row
is worked on alone, and the random number of a position is the first of a counter-based generator keyed by
(seed, position) (Philox: Salmon et al., 2011), so that a replay draws the same tokens.
Order of filters as in vLLM: penalties, temperature, top-k, top-p, min-p.

Legend: R rows (one per sampled token), V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scheduler.request import Logprobs, SamplingParams
from scheduler.sequence import Sequence

FIRST_CANDIDATES = 256  # of the likeliest tokens looked at for top-p before widening by 8


class Sampled(NamedTuple):
    """What a step sampled, row by row."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]


def sample(logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
    """Choose a token per row.

    Args:
        logits_RV: [R, V] float32; rows may be changed in place.
        sequences: R, as they stand before this token.
    """
    greedy_R = logits_RV.argmax(dim=-1).tolist()
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        raw_V = logits_RV[row]
        if params.num_logprobs is not None:
            raw_V = raw_V.clone()
        token = greedy_R[row] if _is_plain_greedy(sequence) else _choose(logits_RV[row], sequence)
        token_ids.append(token)
        logprobs.append(None if params.num_logprobs is None else _logprobs(raw_V, token, params.num_logprobs))
    return Sampled(token_ids, logprobs)


def _is_plain_greedy(sequence: Sequence) -> bool:
    params = sequence.request.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return params.temperature == 0 and not penalised and sequence.num_output_tokens >= params.min_tokens


def _choose(logits_V: Tensor, sequence: Sequence) -> int:
    params = sequence.request.params
    _penalise(logits_V, sequence)
    if sequence.num_output_tokens < params.min_tokens and params.stop_token_ids:
        logits_V[list(params.stop_token_ids)] = float("-inf")
    if params.temperature == 0:
        return int(logits_V.argmax())
    weights, ids = _candidates(logits_V / params.temperature, params)
    mass = np.cumsum(weights)
    draw = _uniform(params.seed, sequence.num_output_tokens) * mass[-1]
    index = min(int(np.searchsorted(mass, draw, side="right")), len(mass) - 1)
    return int(index if ids is None else ids[index])


def _penalise(logits_V: Tensor, sequence: Sequence) -> None:
    """Apply presence and frequency penalties to generated tokens, repetition to all; in place."""
    params = sequence.request.params
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
        ids = torch.tensor(list(counts), dtype=torch.int64)
        number = torch.tensor(list(counts.values()), dtype=torch.float32)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * number
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(sequence.token_ids)), dtype=torch.int64)
        seen = logits_V[ids]
        logits_V[ids] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )


def _candidates(scaled_V: Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the unnormalised weights (float64) that may be drawn, and their ids; ids None: all, in order.

    With top-k, top-p or min-p the candidates come likeliest first.
    """
    weights_V = (scaled_V - scaled_V.max()).exp().double()
    if not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return weights_V.numpy(), None
    total = float(weights_V.sum())
    size = weights_V.numel()
    count = min(size, params.top_k or FIRST_CANDIDATES)
    while True:
        top, ids = weights_V.topk(count)
        weights = top.numpy()
        mass = float(weights.sum()) if params.top_k else total
        keep = np.cumsum(weights) - weights < params.top_p * mass  # the one that crosses top_p stays
        keep &= weights >= params.min_p * weights[0]
        if params.top_k or count == size or not keep[-1]:
            break
        count = min(size, count * 8)
    keep[0] = True
    return weights[keep], ids.numpy()[keep]


def _uniform(seed: int, position: int) -> float:
    """The random number of a position, in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _logprobs(logits_V: Tensor, token: int, count: int) -> Logprobs:
    logprobs_V = logits_V.log_softmax(-1)
    top, ids = logprobs_V.topk(count) if count else (logprobs_V[:0], torch.empty(0, dtype=torch.int64))
    return Logprobs(token, float(logprobs_V[token]), ids.tolist(), top.tolist())
