"""From logits to tokens on the CPU: greedy and seeded sampling, rules for single tokens, penalties, logprobs.

A token depends on its own row, its request's parameters and seed, and its position, never on the batch: every row
is worked on alone, and the random number of a position is the first of a counter-based generator keyed by
(seed, position) (Philox: Salmon et al., 2011), so that a replay draws the same tokens.
Order as in vLLM: logprobs of the raw logits, the structure's mask, allowed ids, bad words, min_tokens, biases
(`token_rules`), repetition, frequency and presence penalties, temperature, min-p, top-k, top-p.
Log-probabilities are those of the model's raw logits (vLLM's logprobs_mode "raw_logprobs").

Legend: R rows (one per sampled token), C rows of a prompt, V vocabulary.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from scheduler.policy.request import Logprobs, SamplingParams
from scheduler.policy.sequence import Sequence

Row = np.ndarray[tuple[int], np.dtype[np.float32]]
LEAST_TEMPERATURE = (
    1e-5  # below, logits over temperature leave float32's range; the draw is greedy long before
)

LEAST_PENALTY = 1e-6  # of repetition, likewise

CHUNK = 256  # tokens whose weights are summed before any of them is looked at alone


class Sampled(NamedTuple):
    """What a step sampled, row by row."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: dict[str, list[Logprobs]] | None = None  # of prompt tokens that ran, by request id


class Sampler(Protocol):
    """Chooses tokens. Returns when all that the step launched is done, whether or not there is a row to sample."""

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """Choose a token per row.

        Args:
            logits_RV: [R, V] float32, where the model leaves them; may be changed in place.
            sequences: R, as they stand before this token.
        """
        ...

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """Say how likely each row found the token that follows it; see `scheduler.sampling.sampler.prompt_logprobs`."""
        ...


class HostSampler:
    """Samples on the CPU."""

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """See `Sampler`."""
        return sample(logits_RV.cpu(), sequences)

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """See `Sampler`."""
        return prompt_logprobs(logits_CV.cpu(), next_ids, num_top)


def sample(logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
    """Choose a token per row.

    Args:
        logits_RV: [R, V] float32; rows may be changed in place.
        sequences: R, as they stand before this token.
    """
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    for logits_V, sequence in zip(logits_RV.numpy(), sequences, strict=True):
        params, is_plain = sequence.request.params, _is_plain_greedy(sequence)
        raw = None
        if params.num_logprobs is not None:
            stays = is_plain and sequence.matcher is None
            raw = RowLogprobs(logits_V if stays else logits_V.copy())
        if sequence.matcher is not None:
            sequence.matcher.mask(logits_V)
        token = int(logits_V.argmax()) if is_plain else _choose(logits_V, sequence)
        token_ids.append(token)
        measured = None
        if raw is not None:
            measured = raw.of(token, params.num_logprobs or 0, ids=params.logprob_token_ids)
        logprobs.append(measured)
    return Sampled(token_ids, logprobs)


def _is_plain_greedy(sequence: Sequence) -> bool:
    params, rules = sequence.request.params, sequence.rules
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    ruled = rules is not None and rules.apply_at(sequence.num_output_tokens)
    return params.temperature == 0 and not penalised and not ruled


def _choose(logits_V: Row, sequence: Sequence) -> int:
    params = sequence.request.params
    if sequence.rules is not None:
        sequence.rules.apply(logits_V, sequence.token_ids, sequence.num_output_tokens)
    _penalise(logits_V, sequence)
    if params.temperature == 0:
        return int(logits_V.argmax())
    top = logits_V.max()
    if not np.isfinite(
        top
    ):  # rules that exclude each other left nothing to draw from: one request's own trouble
        return int(logits_V.argmax())
    weights_V = np.exp((logits_V - top) * np.float32(1.0 / max(params.temperature, LEAST_TEMPERATURE)))
    draw = uniform_at(params.seed, sequence.num_output_tokens)
    if not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(weights_V, draw)
    ids = _candidates(weights_V, params)
    return int(ids[_draw(weights_V[ids], draw)])


def _penalise(logits_V: Row, sequence: Sequence) -> None:
    """Apply the repetition penalty to all tokens seen, frequency and presence to generated ones; in place."""
    params = sequence.request.params
    if params.repetition_penalty != 1.0:
        ids = np.unique(np.array(sequence.token_ids, dtype=np.int64))
        seen, factor = logits_V[ids], np.float32(max(params.repetition_penalty, LEAST_PENALTY))
        logits_V[ids] = np.where(seen > 0, seen / factor, seen * factor)
    if params.presence_penalty or params.frequency_penalty:
        generated = sequence.token_ids[sequence.num_prompt_tokens :]
        ids, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        logits_V[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _candidates(weights_V: Row, params: SamplingParams) -> np.ndarray:
    """Return the ids that min-p, top-k and top-p leave, likeliest first.

    The nucleus is of the mass that min-p and top-k leave. Only what can be in it is sorted: tokens lighter than
    (1 - top_p) / V of the mass are together lighter than 1 - top_p, so it ends before them.
    """
    least = np.float32(params.min_p) * weights_V.max()
    if params.top_k:
        count = min(params.top_k, weights_V.size)
        ids = np.argpartition(weights_V, weights_V.size - count)[weights_V.size - count :]
        ids.sort()
        ids = ids[weights_V[ids] >= least]
        mass = weights_V[ids].sum(dtype=np.float64)
    else:
        passing = weights_V if params.min_p <= 0.0 else weights_V[weights_V >= least]
        mass = passing.sum(dtype=np.float64)
        light = (1.0 - params.top_p) * mass / weights_V.size
        ids = np.flatnonzero(weights_V >= max(least, np.float32(light)))
    ids = ids[np.argsort(-weights_V[ids], kind="stable")]
    weights = weights_V[ids].astype(np.float64)
    keep = np.cumsum(weights) - weights < params.top_p * mass  # the one that crosses top_p stays
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


def uniform_at(seed: int, position: int) -> float:
    """The random number of a position, in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


class RowLogprobs:
    """The log-probabilities of one row, which must not change while this is in use."""

    def __init__(self, logits_V: Row) -> None:
        top = logits_V.max()
        self._base = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        self._logits_V = logits_V

    def of(self, token: int, num_top: int, *, ids: Rows[int] = (), with_rank: bool = False) -> Logprobs:
        """A token's, and those of the `num_top` likeliest, or of `ids` where there are any."""
        others = np.array(ids, dtype=np.int64) if ids else self._likeliest(num_top)
        mine = self._logits_V[token]
        rank = 1 + int(np.count_nonzero(self._logits_V > mine)) if with_rank else 0
        return make_logprobs(token, float(mine), self._base, others, self._logits_V[others], rank)

    def _likeliest(self, count: int) -> np.ndarray:
        """Ids by falling logit; of equal ones the lower first."""
        count = min(count, self._logits_V.size)
        if count == 0:
            return np.empty(0, dtype=np.int64)
        if count == 1:  # what clients that score texts ask for, a row at a time for whole prompts
            return np.array([self._logits_V.argmax()])
        ids = np.argpartition(self._logits_V, -count)[-count:]
        likeliest: np.ndarray = ids[np.lexsort((ids, -self._logits_V[ids]))]
        return likeliest


def make_logprobs(
    token: int, mine: float, base: float, ids: np.ndarray, logits: np.ndarray, rank: int
) -> Logprobs:
    """Put together what is known of a row.

    Args:
        mine: the token's logit. base: the logarithm of the sum of all logits' exponentials.
        ids: those told of beside the token. logits: theirs, float32.
    """
    return Logprobs(token, mine - base, ids.tolist(), (logits - base).tolist(), rank)


def prompt_logprobs(logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
    """Say how likely each row found the token that follows it.

    Args:
        logits_CV: [C, V] float32.
        next_ids: C, the tokens of the prompt behind the rows.
        num_top: likeliest tokens to tell of beside each.
    """
    return [
        RowLogprobs(logits_V).of(token, num_top, with_rank=True)
        for logits_V, token in zip(logits_CV.numpy(), next_ids, strict=True)
    ]
