"""One tier below the pages: host memory, or a disk."""

import logging
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

    def advance_to(self, generation: int) -> bool:
        """Keep a generation in the tier's file, unless it has a newer one. Returns False if another process holds the file."""
        try:
            return self.blocks.advance_to(generation)
        except OSError as error:
            log.warning(
                "The flush of the prefix cache could not be written to %s, so a restart may find flushed blocks again: %s",
                self.blocks.name, error,
            )  # fmt: skip
            return True
