"""One tier below the pages: host memory, or a disk."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvcache.tiers.records import RecordStore

log = logging.getLogger(__name__)


class Tier(NamedTuple):
    """Host memory or a disk."""

    name: str  # "host" or "disk"
    blocks: RecordStore
    states: RecordStore | None = None  # None if the model keeps no states

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of all kinds of records."""
        return [self.blocks] if self.states is None else [self.blocks, self.states]

    def store(self, *, is_state: bool) -> RecordStore:
        """Return the store of a kind of record."""
        if not is_state:
            return self.blocks
        assert self.states is not None, "the model keeps no states"
        return self.states


class GenerationFile:
    """The generation in a tier's file. For the thread that writes to the tier."""

    def __init__(self, tier: Tier, newest: Callable[[], int]) -> None:
        """`newest` returns the generation that the file must have."""
        self._tier, self._newest = tier, newest
        self._written = newest()  # the tiers begin with it

    def write(self) -> bool:
        """Write the newest generation, unless it was written. Returns False if another process holds the file: try again.

        A file that cannot be written counts as written, with a message.
        """
        generation = self._newest()
        if generation == self._written:
            return True
        blocks = self._tier.blocks
        try:
            if not blocks.advance_to(generation):
                return False
        except OSError as error:
            log.warning(
                "The flush of the prefix cache could not be written to %s, so a restart may find flushed blocks again: %s",
                blocks.name, error,
            )  # fmt: skip
        self._written = generation
        return True
