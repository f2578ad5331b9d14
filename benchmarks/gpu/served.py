"""Sequences as a scheduler has them, without one; and a doorbell for an engine whose loop does not run."""

from collections.abc import Sequence

from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.sequence import Sequence as Served


def sequence_of(ids: Sequence[int], blocks: Sequence[int], params: SamplingParams) -> Served:
    """A sequence of prompt tokens that has been given blocks."""
    request = Request(
        request_id=f"{blocks[0]}" if blocks else "alone", prompt_ids=tuple(ids), params=params, arrival_s=0.0
    )
    sequence = Served.from_request(request)
    sequence.block_ids = list(blocks)
    return sequence


class Silent:
    """A doorbell that nobody hears."""

    def ring(self, step: int) -> None:
        """Nobody sleeps."""

    def wait(self, step: int) -> None:
        """Likewise."""
