"""Drafting: for each sequence, tokens that may come next, and how many of them are worth a row of the step.

Before a step, the scheduler gets the number of rows that its decodes may have (`limits`; ranks agree on it). While it
plans the step, it gets the drafts, and later reports which were right. A drafter changes no token, only how many a step
yields. Drafting is local to a rank: a sequence that continues on another rank is new to that rank's drafter.
"""

from collections.abc import Sequence as Series
from typing import Protocol

from scheduler.drafts.pays import PROBE_TOKENS, Acceptance, StepCosts, drafts_that_pay
from scheduler.drafts.texts import TextIndex, continue_likeliest, continue_newest
from scheduler.policy.request import DraftCounts
from scheduler.policy.sequence import Sequence
from scheduler.policy.speculative import Method, SpeculativeConfig

_SUFFIX_KEY = 2  # least number of equal tokens; a single one predicts little
_OWN = 0  # number of the text in an index with one text


class Source(Protocol):
    """A source of drafts."""

    def propose(self, sequence: Sequence, most: int) -> Series[int]:
        """Draft at most `most` tokens that may follow a sequence's newest one."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""


class TextSource:
    """Drafts from texts: the tokens that followed the same tokens before."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._is_suffix = config.method is Method.SUFFIX
        self._key_tokens = _SUFFIX_KEY if self._is_suffix else config.shortest_match
        self._own: dict[str, TextIndex] = {}
        self._num_indexed: dict[str, int] = {}
        self._answers = TextIndex(self._key_tokens)
        self._num_answers = 0

    def propose(self, sequence: Sequence, most: int) -> Series[int]:
        config, longest = self._config, self._config.longest_match
        end = sequence.token_ids[-longest:]
        own = self._index(sequence).candidates(end, longest)
        if not self._is_suffix:
            return continue_newest(own, most)
        is_salted = bool(sequence.request.cache_salt)
        found = own if is_salted else own + self._answers.candidates(end, longest)
        length = max((each.length for each in found), default=0)
        return continue_likeliest(found, min(most, int(config.drafts_per_match * length)), config.least_share)

    def forget(self, sequence: Sequence) -> None:
        """Forget the sequence's text. Keep its answer if answers are cached and the request has no salt."""
        request_id = sequence.request.request_id
        self._own.pop(request_id, None)
        self._num_indexed.pop(request_id, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if self._config.max_cached_requests and answer and not sequence.request.cache_salt:
            self._answers.extend(self._num_answers, answer)
            self._num_answers += 1
            if len(self._answers) > self._config.max_cached_requests:
                self._answers.forget_oldest()

    def _index(self, sequence: Sequence) -> TextIndex:
        request_id = sequence.request.request_id
        index = self._own.get(request_id)
        if index is None:
            index = self._own[request_id] = TextIndex(self._key_tokens)
        index.extend(_OWN, sequence.token_ids[self._num_indexed.get(request_id, 0) :])
        self._num_indexed[request_id] = len(sequence.token_ids)
        return index


class MadeDrafts:
    """Drafts that the model's own layers made after a step. A `Source` that is filled with `put`."""

    def __init__(self) -> None:
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}  # sequence length and drafts, by request

    def put(self, sequence: Sequence, drafts: Series[int]) -> None:
        """Store drafts that may follow a sequence's newest token."""
        self._drafts[sequence.request.request_id] = len(sequence.token_ids), tuple(drafts)

    def propose(self, sequence: Sequence, most: int) -> Series[int]:
        """Return the stored drafts, or none if the sequence has other tokens since."""
        length, drafts = self._drafts.get(sequence.request.request_id, (0, ()))
        return drafts[:most] if length == len(sequence.token_ids) else ()

    def forget(self, sequence: Sequence) -> None:
        self._drafts.pop(sequence.request.request_id, None)


class Drafter:
    """Limits a source's drafts to those that pay, and learns from their results."""

    def __init__(self, source: Source, num_drafts: int, *, max_model_len: int, num_ahead: int = 0) -> None:
        """Create a drafter without any experience.

        Args:
            num_drafts: Most drafts per sequence and step.
            max_model_len: Most tokens of a sequence.
            num_ahead: Number of positions after a step's tokens that drafting writes.
        """
        self.num_drafts, self.num_ahead, self.max_model_len = num_drafts, num_ahead, max_model_len
        self.costs = StepCosts()  # filled by the engine
        self._source = source
        self._acceptance: dict[str, Acceptance] = {}
        self._num_tries = self._num_tokens = 0
        self._accepted_at = [0] * num_drafts

    @property
    def counts(self) -> DraftCounts:
        """Present counts."""
        return DraftCounts(self._num_tries, self._num_tokens, tuple(self._accepted_at))

    def limits(self, sequences: Series[Sequence]) -> list[int]:
        seconds = self.costs.of_drafts(len(sequences), self.num_drafts)
        limits = []
        for acceptance in map(self._of, sequences):
            paying = drafts_that_pay(acceptance.share, seconds)
            is_due = acceptance.tokens_since_try >= PROBE_TOKENS and len(sequences) == 1
            limits.append(paying or int(is_due))
        return limits

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        drafts = tuple(self._source.propose(sequence, most)) if most > 0 else ()
        if drafts and sequence.matcher is not None:
            drafts = drafts[: sequence.matcher.look_ahead(drafts)]
        return drafts

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._of(sequence).note(num_drafts, num_accepted)
        self._num_tries += num_drafts > 0
        self._num_tokens += num_drafts
        for place in range(num_accepted):
            self._accepted_at[place] += 1

    def forget(self, sequence: Sequence) -> None:
        self._acceptance.pop(sequence.request.request_id, None)
        self._source.forget(sequence)

    def _of(self, sequence: Sequence) -> Acceptance:
        return self._acceptance.setdefault(sequence.request.request_id, Acceptance())
