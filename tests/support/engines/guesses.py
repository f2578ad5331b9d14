"""A drafter for tests of the policy: it guesses the next tokens, often correctly, from the model's own oracle."""

import random

from scheduler.policy.sequence import Sequence
from tests.support.models.fake_model import VOCABULARY, next_token


class Guesses:
    """Proposes random numbers of drafts, correct with a random chance; a `scheduler.policy.step_plans.DraftsTokens`."""

    def __init__(self, num_drafts: int, seed: int) -> None:
        self.num_drafts, self.num_ahead = num_drafts, seed % 3
        self.num_tried = self.num_accepted = 0
        self.known: set[str] = set()  # sequences that were noted and not forgotten
        self._random = random.Random(seed)

    def limits(self, sequences: list[Sequence]) -> list[int]:
        """Return the maximum for all sequences, so that ranks agree on it. `propose` makes fewer."""
        return [self.num_drafts] * len(sequences)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guess up to `most` tokens."""
        text, chance = list(sequence.token_ids), self._random.choice([0.0, 0.5, 0.9, 1.0])
        count = self._random.randint(0, min(most, self.num_drafts))
        for _ in range(count):
            is_right = self._random.random() < chance
            text.append(next_token(text) if is_right else self._random.randrange(VOCABULARY))
        return tuple(text[len(sequence.token_ids) :])

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.known.add(sequence.request.request_id)
        self.num_tried += num_drafts
        self.num_accepted += num_accepted

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence.request.request_id)
