"""One request's rules for single tokens, regardless of the model's logits: allowed, forbidden and biased tokens.

Prepared once per request, because every step applies them. Order as in vLLM: allowed ids, bad words, stop tokens before
min_tokens, biases. A rule that would leave nothing to sample yields to those before it. So a row always has a token,
and a ban never breaks what a structure or allowed_token_ids demands.

Legend: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from scheduler.policy.request import SamplingParams

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class TokenRules:
    """The rules of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._bias_ids = np.array([each.token_id for each in params.logit_bias], dtype=np.int64)
        self._biases = np.array([each.bias for each in params.logit_bias], dtype=np.float32)
        self._min_tokens = params.min_tokens
        self._stop_ids = np.array(params.stop_token_ids, dtype=np.int64)
        self._always_bad = [word[0] for word in params.bad_words if len(word) == 1]
        self._bad_after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._bad_after.setdefault(word[-2], []).append(word)
        self._is_lasting = bool(params.allowed_token_ids or params.bad_words or params.logit_bias)

    @classmethod
    def of(cls, params: SamplingParams) -> "TokenRules | None":
        """Prepare a request's rules. Returns None if it has none."""
        rules = cls(params)
        return rules if rules.apply_at(0) else None

    def apply_at(self, num_generated: int) -> bool:
        """Whether any rule applies after `num_generated` generated tokens."""
        return self._is_lasting or (num_generated < self._min_tokens and self._stop_ids.size > 0)

    def apply(self, logits_V: Row, token_ids: Sequence[int], num_generated: int) -> None:
        """Apply the rules to a row, in place.

        Args:
            logits_V: [V].
            token_ids: The sequence so far; its last `num_generated` tokens are generated.
            num_generated: Number of generated tokens; only these can form bad words.
        """
        if self._allowed.size:
            _keep(logits_V, self._allowed)
        bad = self._bad_now(token_ids, num_generated)
        if bad:
            _forbid(logits_V, np.array(bad, dtype=np.int64))
        if num_generated < self._min_tokens and self._stop_ids.size:
            _forbid(logits_V, self._stop_ids)
        if self._bias_ids.size:
            known = self._bias_ids < logits_V.size
            logits_V[self._bias_ids[known]] += self._biases[known]

    def _bad_now(self, token_ids: Sequence[int], num_generated: int) -> list[int]:
        """Return the ids that would complete a bad word."""
        if not num_generated or not self._bad_after:
            return self._always_bad
        bad = list(self._always_bad)
        for word in self._bad_after.get(token_ids[-1], ()):
            head = len(word) - 1
            if head <= num_generated and tuple(token_ids[-head:]) == word[:-1]:
                bad.append(word[-1])
        return bad


def _keep(logits_V: Row, ids: np.ndarray) -> None:
    ids = ids[ids < logits_V.size]
    kept = logits_V[ids]
    if ids.size and kept.max() > -np.inf:
        logits_V.fill(-np.inf)
        logits_V[ids] = kept


def _forbid(logits_V: Row, ids: np.ndarray) -> None:
    ids = ids[ids < logits_V.size]
    kept = logits_V[ids]
    logits_V[ids] = -np.inf
    if logits_V.max() == -np.inf:
        logits_V[ids] = kept
