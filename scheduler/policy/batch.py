"""One step's work: the scheduler plans it and the runner runs it."""

from collections.abc import Sequence as Series
from typing import NamedTuple

from kvcache.states import StatePiece
from scheduler.policy.request import RequestOutput
from scheduler.policy.sequence import Sequence, SequenceStatus


class Scheduled(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence. If `samples`, the last one yields the next token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    pieces: Series[StatePiece] = ()  # the recurrent states between them, if the model keeps any
    # The last of the tokens, if they are drafts. Each of them and the token before them samples.
    drafts: Series[int] = ()

    @property
    def num_samples(self) -> int:
        """Number of tokens that it samples."""
        return (1 + len(self.drafts)) * self.samples

    @property
    def end(self) -> int:
        """Position after the last token to run, which is the position of the sampled token."""
        return self.start + self.num_tokens


class StepBatch(NamedTuple):
    """One step's work: decodes first, then prefills, the most urgent first."""

    items: list[Scheduled]
    num_tokens: int
    num_prefill_tokens: int

    @property
    def num_decode_tokens(self) -> int:
        """Number of generated tokens to run, drafts included."""
        return self.num_tokens - self.num_prefill_tokens

    @property
    def begun(self) -> list[RequestOutput]:
        """Return empty outputs of requests without a token so far, which show that they have begun. Read it after `commit`."""
        return [
            RequestOutput(request_id=item.sequence.request.request_id, token_ids=[])
            for item in self.items
            if not item.samples
            and item.sequence.num_delivered_tokens == 0
            and item.sequence.status is SequenceStatus.RUNNING
        ]
