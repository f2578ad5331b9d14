"""Drafts that the model's own layers have made behind a step, kept until the next one tries them."""

from collections.abc import Sequence as Series

from scheduler.policy.sequence import Sequence


class MadeDrafts:
    """A `scheduler.drafts.drafter.Source` that is told what it proposes."""

    def __init__(self) -> None:
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}  # and how long the sequence was

    def put(self, sequence: Sequence, drafts: Series[int]) -> None:
        """Keep what may follow a sequence's newest token."""
        self._drafts[sequence.request.request_id] = len(sequence.token_ids), tuple(drafts)

    def propose(self, sequence: Sequence, most: int) -> Series[int]:
        """See `Source`; nothing where the sequence has got other tokens since."""
        length, drafts = self._drafts.get(sequence.request.request_id, (0, ()))
        return drafts[:most] if length == len(sequence.token_ids) else ()

    def forget(self, sequence: Sequence) -> None:
        """See `Source`."""
        self._drafts.pop(sequence.request.request_id, None)
