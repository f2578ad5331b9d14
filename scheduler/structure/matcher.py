"""A request's place in its form, over llguidance's matcher.

Decided here, because clients may ask for things that contradict each other:
- An end-of-sequence token is allowed where the form may end, and nowhere else. With ignore_eos it never is, unless nothing else may come.
- Where nothing can follow, the request ends, whatever min_tokens and ignore_eos say: the form comes first.
- Stop tokens and stop strings of the client's own end the answer wherever the form lets them come up, even if it is
  not complete then.

Legend: V vocabulary.
"""

import numpy as np
from llguidance import LLMatcher

from scheduler.policy.structure import Row
from scheduler.structure.grammar import error_of
from scheduler.structure.vocabulary import Vocabulary


class GrammarMatcher:
    """Follows one request's tokens."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, ignore_eos: bool) -> None:
        """Take over a matcher that nobody else uses, made with `structure_grammar.open_tokenizer(vocabulary)`."""
        self._matcher = matcher
        self._end_ids = sorted(vocabulary.end_ids)
        self._end_place = len(vocabulary.tokens)  # of the token that stands for the end
        self._ignore_eos = ignore_eos
        self.has_ended = matcher.is_stopped()
        self.failure = ""

    def mask(self, logits_V: Row) -> None:
        """Set what may not come next to -inf, in place. A matcher that fails leaves the row and says why."""
        if self.failure:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.failure = error_of(self._matcher)
        if self.failure:
            return
        size = max(logits_V.size, self._end_place + 1)
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if allowed[self._end_place]:
            allowed[self._end_ids] = not self._ignore_eos or not allowed[: self._end_place].any()
        np.copyto(logits_V, -np.inf, where=~allowed[: logits_V.size])

    def advance(self, token_id: int) -> None:
        """Follow a token that was sampled; one that the form does not allow is a failure."""
        if self.failure:
            return
        if token_id in self._end_ids:
            self.has_ended = True
        elif not self._matcher.consume_token(token_id):
            self.failure = f"the structure cannot go on with token {token_id}: {error_of(self._matcher)}"
        else:
            self.has_ended = self._matcher.is_stopped()
