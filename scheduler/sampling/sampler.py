"""Sampling on the CPU: greedy and seeded sampling, rules for single tokens, penalties, logprobs.

A token depends on its own row, its request's parameters and seed, and its position, never on the batch. So a replay
draws the same tokens (`scheduler.sampling.draw`).
Order as in vLLM: logprobs of the raw logits, the structure's mask, allowed ids, bad words, min_tokens, biases
(`token_rules`), repetition, frequency and presence penalties, temperature, min-p, top-k, top-p.
Log-probabilities are those of the model's raw logits (vLLM's logprobs_mode "raw_logprobs").

Legend: R rows (one per sampled token), C rows of a prompt, V vocabulary.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dispatch.compiled.team import Team
from scheduler.policy.request import Logprobs
from scheduler.policy.sequence import TokenContext
from scheduler.sampling.draw import KERNELS, NOTHING, draw_tokens, likeliest_tokens

Row = np.ndarray[tuple[int], np.dtype[np.float32]]
LEAST_PENALTY = 1e-6  # of repetition; division by less leaves float32's range


class Sampled(NamedTuple):
    """A step's sampled tokens, row by row."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: dict[str, list[Logprobs]] | None = None  # of prompt tokens that ran, by request id


class Drawing(Protocol):
    """A step's tokens while the device may still choose them.

    Attributes:
        token_R: int64, on the model's device, for later launches.
        is_settled: Whether `token_R` will be what `read` returns. Otherwise `read` may replace tokens.
    """

    token_R: Tensor
    is_settled: bool

    def read(self) -> Sampled:
        """Wait for everything launched before, even without a row to sample, and return the tokens. Call it once."""


class Sampler(Protocol):
    """Chooses tokens."""

    def begin(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Drawing:
        """Launch the choice of a token per row, as `sample`. On a GPU this does not wait for the device."""

    def sample(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Sampled:
        """Choose a token per row.

        Args:
            logits_RV: [R, V] float32, on the model's device; may be changed in place.
            contexts: R contexts, with everything known before this token.
        """

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """Score the token that follows each row, as `scheduler.sampling.sampler.prompt_logprobs`."""


class _Chosen:
    """A `Drawing` that has ended."""

    is_settled = True

    def __init__(self, sampled: Sampled) -> None:
        self.token_R, self._sampled = torch.tensor(sampled.token_ids, dtype=torch.int64), sampled

    def read(self) -> Sampled:
        return self._sampled


class HostSampler:
    """Samples on the CPU."""

    def __init__(self, team: Team | None = None) -> None:
        """`team`: threads to use; None uses the caller's."""
        self._team = team

    def warm_up(self) -> None:
        """Compile the kernels before the first step."""
        for kernel in KERNELS:
            kernel.compile()

    def begin(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Drawing:
        return _Chosen(self.sample(logits_RV, contexts))

    def sample(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Sampled:
        return sample(logits_RV.cpu(), contexts, self._team)

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        return prompt_logprobs(logits_CV.cpu(), next_ids, num_top)


def sample(logits_RV: Tensor, contexts: Rows[TokenContext], team: Team | None = None) -> Sampled:
    """Choose a token per row.

    Args:
        logits_RV: [R, V] float32; rows may be changed in place.
        contexts: R contexts, with everything known before this token.
        team: Threads to use. None uses the caller's.
    """
    rows_RV = logits_RV.numpy()
    raws = [_chosen_from(logits_V, context) for logits_V, context in zip(rows_RV, contexts, strict=True)]
    token_ids = [NOTHING] * len(contexts)
    if drawn := [row for row, each in enumerate(contexts) if each.request.params.temperature != 0]:
        params = [contexts[row].request.params for row in drawn]
        positions = [contexts[row].num_output_tokens for row in drawn]
        for row, token in zip(
            drawn, draw_tokens([rows_RV[row] for row in drawn], params, positions, team), strict=True
        ):
            token_ids[row] = token
    # Greedy rows, and rows in which contradictory rules left nothing to draw from.
    if left := [row for row, token in enumerate(token_ids) if token == NOTHING]:
        for row, token in zip(left, likeliest_tokens([rows_RV[row] for row in left], team), strict=True):
            token_ids[row] = token
    logprobs: list[Logprobs | None] = []
    for token, raw, context in zip(token_ids, raws, contexts, strict=True):
        asked, measured = context.request.params, None
        if raw is not None:
            measured = raw.of(token, asked.num_logprobs or 0, ids=asked.logprob_token_ids)
        logprobs.append(measured)
    return Sampled(token_ids, logprobs)


def _chosen_from(logits_V: Row, context: TokenContext) -> "RowLogprobs | None":
    """Apply rules and penalties to a row, in place. Returns the row's logprobs if they are requested."""
    is_plain, raw = _is_plain_greedy(context), None
    if context.request.params.num_logprobs is not None:
        stays = is_plain and not context.has_structure
        raw = RowLogprobs(logits_V if stays else logits_V.copy())
    if context.has_structure:
        context.mask(logits_V)
    if not is_plain:
        if context.rules is not None:
            context.rules.apply(logits_V, context.token_ids, context.num_output_tokens)
        _penalise(logits_V, context)
    return raw


def _is_plain_greedy(context: TokenContext) -> bool:
    params, rules = context.request.params, context.rules
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    ruled = rules is not None and rules.apply_at(context.num_output_tokens)
    return params.temperature == 0 and not penalised and not ruled


def _penalise(logits_V: Row, context: TokenContext) -> None:
    """Apply the repetition penalty to all tokens seen, frequency and presence to generated ones. In place."""
    params = context.request.params
    if params.repetition_penalty != 1.0:
        ids = np.unique(np.array(context.token_ids, dtype=np.int64))
        seen, factor = logits_V[ids], np.float32(max(params.repetition_penalty, LEAST_PENALTY))
        logits_V[ids] = np.where(seen > 0, seen / factor, seen * factor)
    if params.presence_penalty or params.frequency_penalty:
        generated = context.token_ids[context.num_prompt_tokens :]
        ids, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        logits_V[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


class RowLogprobs:
    """The log-probabilities of one row, which must not change while this object is used."""

    def __init__(self, logits_V: Row) -> None:
        top = logits_V.max()
        self._base = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        self._logits_V = logits_V

    def of(self, token: int, num_top: int, *, ids: Rows[int] = (), with_rank: bool = False) -> Logprobs:
        """Return the logprob of a token, and of the `num_top` most likely tokens or of `ids` if given."""
        others = np.array(ids, dtype=np.int64) if ids else self._likeliest(num_top)
        mine = self._logits_V[token]
        rank = 1 + int(np.count_nonzero(self._logits_V > mine)) if with_rank else 0
        return make_logprobs(token, float(mine), self._base, others, self._logits_V[others], rank)

    def _likeliest(self, count: int) -> np.ndarray:
        """Return ids by falling logit, lower ids first among equals."""
        count = min(count, self._logits_V.size)
        if count == 0:
            return np.empty(0, dtype=np.int64)
        if count == 1:  # common: clients that score whole prompts request this for every row
            return np.array([self._logits_V.argmax()])
        ids = np.argpartition(self._logits_V, -count)[-count:]
        likeliest: np.ndarray = ids[np.lexsort((ids, -self._logits_V[ids]))]
        return likeliest


def make_logprobs(
    token: int, mine: float, base: float, ids: np.ndarray, logits: np.ndarray, rank: int
) -> Logprobs:
    """Build the logprobs of a row.

    Args:
        mine: The token's logit. base: Logarithm of the sum of all logits' exponentials.
        ids: Further tokens. logits: Their logits, float32.
    """
    return Logprobs(token, mine - base, ids.tolist(), (logits - base).tolist(), rank)


def prompt_logprobs(logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
    """Return the logprob of the token that follows each row.

    Args:
        logits_CV: [C, V] float32.
        next_ids: C tokens, those of the prompt after each row.
        num_top: Number of most likely tokens to return for each row.
    """
    return [
        RowLogprobs(logits_V).of(token, num_top, with_rank=True)
        for logits_V, token in zip(logits_CV.numpy(), next_ids, strict=True)
    ]
