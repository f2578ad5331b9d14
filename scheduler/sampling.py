"""From logits to tokens: greedy and seeded sampling, penalties, logprobs.

A token depends on its own row, its request's parameters and seed, and its position, never on the batch: every row
is worked on alone, and the random number of a position is the first of a counter-based generator keyed by
(seed, position) (Philox: Salmon et al., 2011), so that a replay draws the same tokens.
Order of filters as in vLLM: penalties, temperature, top-k, top-p, min-p.

Legend: R rows (one per sampled token), V vocabulary.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
from torch import Tensor

from scheduler.request import Logprobs, SamplingParams
from scheduler.sequence import Sequence

LEAST_TEMPERATURE = (
    1e-5  # below, logits over temperature leave float32's range; the draw is greedy long before
)
LEAST_PENALTY = 1e-6  # of repetition, likewise
CHUNK = 256  # tokens whose weights are summed before any of them is looked at alone


Row = np.ndarray[tuple[int], np.dtype[np.float32]]


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
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    for logits_V, sequence in zip(logits_RV.numpy(), sequences, strict=True):
        count = sequence.request.params.num_logprobs
        measured = None if count is None else _Logprobs(logits_V, count)
        token = int(logits_V.argmax()) if _is_plain_greedy(sequence) else _choose(logits_V, sequence)
        token_ids.append(token)
        logprobs.append(None if measured is None else measured.of(token))
    return Sampled(token_ids, logprobs)


def _is_plain_greedy(sequence: Sequence) -> bool:
    params = sequence.request.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return params.temperature == 0 and not penalised and sequence.num_output_tokens >= params.min_tokens


def _choose(logits_V: Row, sequence: Sequence) -> int:
    params = sequence.request.params
    _penalise(logits_V, sequence)
    if sequence.num_output_tokens < params.min_tokens and params.stop_token_ids:
        logits_V[list(params.stop_token_ids)] = -np.inf
    if params.temperature == 0:
        return int(logits_V.argmax())
    top = logits_V.max()
    if not np.isfinite(
        top
    ):  # rules that exclude each other left nothing to draw from: one request's own trouble
        return int(logits_V.argmax())
    weights_V = np.exp((logits_V - top) * np.float32(1.0 / max(params.temperature, LEAST_TEMPERATURE)))
    draw = _uniform(params.seed, sequence.num_output_tokens)
    if not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(weights_V, draw)
    ids = _candidates(weights_V, params)
    return int(ids[_draw(weights_V[ids], draw)])


def _penalise(logits_V: Row, sequence: Sequence) -> None:
    """Apply presence and frequency penalties to generated tokens, repetition to all; in place."""
    params = sequence.request.params
    if params.presence_penalty or params.frequency_penalty:
        generated = sequence.token_ids[sequence.num_prompt_tokens :]
        ids, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        logits_V[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.repetition_penalty != 1.0:
        ids = np.unique(np.array(sequence.token_ids, dtype=np.int64))
        seen, factor = logits_V[ids], np.float32(max(params.repetition_penalty, LEAST_PENALTY))
        logits_V[ids] = np.where(seen > 0, seen / factor, seen * factor)


def _candidates(weights_V: Row, params: SamplingParams) -> np.ndarray:
    """Return the ids that top-k, top-p and min-p leave, likeliest first.

    Only what can be among them is sorted: tokens lighter than (1 - top_p) / V of the mass are together lighter than
    1 - top_p, so the nucleus ends before them.
    """
    least = params.min_p * weights_V.max()
    if params.top_k:
        count = min(params.top_k, weights_V.size)
        ids = np.argpartition(weights_V, weights_V.size - count)[weights_V.size - count :]
        ids.sort()
    else:
        light = (1.0 - params.top_p) * weights_V.sum(dtype=np.float64) / weights_V.size
        ids = np.flatnonzero(weights_V >= max(least, np.float32(light)))
    ids = ids[np.argsort(-weights_V[ids], kind="stable")]
    weights = weights_V[ids].astype(np.float64)
    mass = weights.sum() if params.top_k else weights_V.sum(dtype=np.float64)
    keep = np.cumsum(weights) - weights < params.top_p * mass  # the one that crosses top_p stays
    keep &= weights >= least
    keep[0] = True
    kept: np.ndarray = ids[keep]
    return kept


def _draw(weights: Row, uniform: float) -> int:
    """Return the index at which the running sum of the weights passes `uniform` times their sum."""
    chunks = np.add.reduceat(weights, np.arange(0, weights.size, CHUNK), dtype=np.float64)
    ends = np.cumsum(chunks)
    wanted = uniform * ends[-1]
    chunk = min(int(np.searchsorted(ends, wanted, side="right")), chunks.size - 1)
    inside = weights[chunk * CHUNK : (chunk + 1) * CHUNK].astype(np.float64)
    index = np.searchsorted(np.cumsum(inside), wanted - (ends[chunk] - chunks[chunk]), side="right")
    last = int(np.flatnonzero(inside)[-1])  # rounding must not step past the last token that has any weight
    return chunk * CHUNK + min(int(index), last)


def _uniform(seed: int, position: int) -> float:
    """The random number of a position, in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


class _Logprobs:
    """A row's log-probabilities, taken before penalties change it."""

    def __init__(self, logits_V: Row, count: int) -> None:
        top = logits_V.max()
        self._base = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        self._logits_V = logits_V.copy()
        self._count = min(count, logits_V.size)

    def of(self, token: int) -> Logprobs:
        """The chosen token's, and those of the likeliest."""
        ids = np.empty(0, dtype=np.int64)
        if self._count:
            ids = np.argpartition(self._logits_V, -self._count)[-self._count :]
            ids = ids[np.lexsort((ids, -self._logits_V[ids]))]
        logprobs = (self._logits_V[ids] - self._base).tolist()
        return Logprobs(token, float(self._logits_V[token]) - self._base, ids.tolist(), logprobs)
