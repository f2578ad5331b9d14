"""One step's work, as a scheduler plans it and a runner runs it."""

from collections.abc import Sequence as Series
from typing import NamedTuple

from kvcache.states import StatePiece
from scheduler.policy.request import RequestOutput
from scheduler.policy.sequence import Sequence, SequenceStatus


class Scheduled(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence; `samples`: the last of them yields the next token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    pieces: Series[StatePiece] = ()  # the states between them, where the model keeps any
    drafts: Series[
        int
    ] = ()  # the last of the tokens, which are tried: each of them and the one before samples

    @property
    def num_samples(self) -> int:
        """Tokens that it samples."""
        return (1 + len(self.drafts)) * self.samples

    @property
    def end(self) -> int:
        """Position after the last token to run, which is the sampled token's position."""
        return self.start + self.num_tokens


class StepBatch(NamedTuple):
    """One step's work: decodes first, then prefills, the most urgent first."""

    items: list[Scheduled]
    num_tokens: int
    num_prefill_tokens: int

    @property
    def begun(self) -> list[RequestOutput]:
        """Of a prompt that is half done, which yields nothing yet, that its request has begun; read behind the step's commit."""
        return [
            RequestOutput(request_id=item.sequence.request.request_id, token_ids=[])
            for item in self.items[-1:]
            if not item.samples
            and item.sequence.num_delivered_tokens == 0
            and item.sequence.status is SequenceStatus.RUNNING
        ]
