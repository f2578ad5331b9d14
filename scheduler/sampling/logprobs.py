"""Log-probabilities of one row of logits, and of a prompt's tokens given those before them.

A row is worked on alone, so its numbers do not depend on the rows beside it. They are those of the model's raw
logits: what penalties, biases and temperature make of them is not told (vLLM's logprobs_mode "raw_logprobs").

Legend: V vocabulary, C rows of a chunk.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from scheduler.policy.request import Logprobs

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class RowLogprobs:
    """The log-probabilities of one row, which must not change while this is in use."""

    def __init__(self, logits_V: Row) -> None:
        top = logits_V.max()
        self._base = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        self._logits_V = logits_V

    def of(self, token: int, num_top: int, *, ids: Sequence[int] = (), with_rank: bool = False) -> Logprobs:
        """A token's, and those of the `num_top` likeliest, or of `ids` where there are any."""
        others = np.array(ids, dtype=np.int64) if ids else self._likeliest(num_top)
        mine = self._logits_V[token]
        rank = 1 + int(np.count_nonzero(self._logits_V > mine)) if with_rank else 0
        return told(token, float(mine), self._base, others, self._logits_V[others], rank)

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


def told(token: int, mine: float, base: float, ids: np.ndarray, logits: np.ndarray, rank: int) -> Logprobs:
    """Put together what is known of a row.

    Args:
        mine: the token's logit. base: the logarithm of the sum of all logits' exponentials.
        ids: those told of beside the token. logits: theirs, float32.
    """
    return Logprobs(token, mine - base, ids.tolist(), (logits - base).tolist(), rank)


def prompt_logprobs(logits_CV: Tensor, next_ids: Sequence[int], num_top: int) -> list[Logprobs]:
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
