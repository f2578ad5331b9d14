"""Copies of blocks layer by layer, while a step still computes them, so that little is left to copy after the step.

The rank that computes a prompt copies the layers that have written their rows (`kvcache.progress`) to host memory. The rank that
will decode copies them from there to its own pages. When the step has ended, both have the last layers left.

A layer counts as copied only if its step was still running after the copy: until then no other request can have the block. The
record becomes whole when its `SaveJob` comes, which copies the rest. Only a rank that follows another one reads a record that is
not whole. It compares the checksum of its copies with that of the whole record, and reads the record again if they differ.

Only for caches in a CPU's memory: a captured step of a GPU does not show which layers have run. States of recurrent layers are
copied after the step.

Rejected: a shorter last chunk of the prompt, which costs a step (docs/LOG.md).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.progress import Progress
from kvcache.tiers.jobs import EarlySave, LoadJob, SaveJob
from kvcache.tiers.records import RecordStore
from kvcache.unit import CacheUnit

_MASK = (1 << 64) - 1
_MOST_COPIES = 32  # of a block: with many layers, several are copied at once


class WrittenLayers(NamedTuple):
    """How the layers of a cache show what they have written."""

    progress: Progress
    parts_after: Sequence[int]  # how many parts of a block the first 0, 1, 2, ... layers have


@dataclass
class _Copied:
    """The parts of a block that were copied."""

    place: int  # of the record
    num_parts: int = 0
    checksum: int = 0  # their share

    def add(self, num_parts: int, share: int) -> None:
        self.num_parts, self.checksum = num_parts, (self.checksum + share) & _MASK


@dataclass
class _Begun:
    """A block that is copied while its step runs."""

    save: EarlySave
    copied: _Copied


class EarlySaves:
    """Saves blocks while their step runs. For the thread that saves."""

    def __init__(self, unit: CacheUnit, layers: WrittenLayers, store: RecordStore) -> None:
        self._unit, self._layers, self._store = unit, layers, store
        self._begun: dict[bytes, _Begun] = {}
        self._fewest_parts = -(-layers.parts_after[-1] // _MOST_COPIES)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are copied for a step that is running or about to begin. Then call `advance` soon."""
        run = self._layers.progress.run
        return any(begun.save.run >= run for begun in self._begun.values())

    def begin(self, save: EarlySave) -> bool:
        """Take a place for a block, unless host memory has it. Returns whether it was taken."""
        if save.key in self._begun or save.run < self._layers.progress.run:
            return False
        place = self._store.begin(save.key)
        if place is not None:
            self._begun[save.key] = _Begun(save, _Copied(place))
        return place is not None

    def advance(self) -> bool:
        """Copy the layers that were written since the last call. Returns whether there were any."""
        has_copied = False
        progress, parts_after = self._layers
        for save, copied in [(begun.save, begun.copied) for begun in self._begun.values()]:
            num_parts = parts_after[progress.layers_of(save.run)]
            if num_parts - copied.num_parts < self._fewest_parts:
                continue
            share = self._copy(save.index, copied, num_parts)
            if progress.run != save.run:  # the block may be another request's
                break
            copied.add(num_parts, share)
            self._store.note_part(copied.place, save.key, self._unit.offsets[num_parts])
            has_copied = True
        return has_copied

    def finish(self, save: SaveJob) -> bool:
        """Copy what is left of a block. Returns whether its record is whole. False if the block was not begun."""
        begun = None if save.is_state else self._begun.pop(save.key, None)
        if begun is None:
            return False
        copied, num_parts = begun.copied, len(self._unit.offsets) - 1
        if begun.save.index != save.index:
            self._store.cancel(copied.place)
            return False
        try:
            copied.add(num_parts, self._copy(save.index, copied, num_parts))
        except BaseException:
            self._store.cancel(copied.place)
            raise
        self._store.complete(copied.place, save.key, copied.checksum)
        return True

    def drop_left(self, is_done: Callable[[], bool]) -> None:
        """Drop blocks for which no `SaveJob` comes: their step was over before the present one began.

        `is_done`: returns whether the caller has done all jobs.
        """
        run = self._layers.progress.run
        if not self._begun or not is_done():
            return
        for key, begun in list(self._begun.items()):
            if begun.save.run + 2 <= run:
                del self._begun[key]
                self._store.cancel(begun.copied.place)

    def close(self) -> None:
        """Drop all blocks."""
        for begun in self._begun.values():
            self._store.cancel(begun.copied.place)
        self._begun.clear()

    def _copy(self, index: int, copied: _Copied, num_parts: int) -> int:
        """Copy the next parts, and return their share of the checksum."""
        parts = slice(copied.num_parts, num_parts)
        at = self._unit.offsets[copied.num_parts]
        self._store.write_part(copied.place, at, self._unit.buffers(index, parts))
        return self._unit.sum_parts(index, parts)


class EarlyLoads:
    """Loads blocks while other ranks save them in parts. For the thread that follows other ranks."""

    def __init__(self, unit: CacheUnit, store: RecordStore) -> None:
        self._unit, self._store = unit, store
        self._copied: dict[LoadJob, dict[int, _Copied]] = {}  # by place in the job's keys

    def advance(self, load: LoadJob) -> bool:
        """Copy the parts of the next blocks that were saved since the last call. Returns whether there were any."""
        of_load = self._copied.setdefault(load, {})
        # The other rank saves the blocks of a step in order, so the first, the last and the one after it show whether there is more.
        ends: list[bool] = []
        if of_load:
            last = max(of_load)
            looked_at = {load.num_loaded, last, min(last + 1, len(load.keys) - 1)}
            ends = [self._advance(load, at) for at in sorted(looked_at)]
            if not any(ends):
                return False
        for at in range(load.num_loaded, len(load.keys)):
            has_copied = self._advance(load, at)
            ends.append(has_copied)
            if at not in of_load:
                break
        return any(ends)

    def _advance(self, load: LoadJob, at: int) -> bool:
        """Copy the parts of one block that were saved since the last call. Returns whether there were any."""
        part = self._store.part_of(load.keys[at])
        if part is None:  # whole, or not begun
            return False
        copied = self._copied[load].get(at)
        if copied is None or copied.place != part.place:
            copied = self._copied[load][at] = _Copied(part.place)
        num_parts = bisect_right(self._unit.offsets, part.num_bytes) - 1
        if num_parts <= copied.num_parts:
            return False
        copied.add(num_parts, self._copy(load.block_ids[at], copied, num_parts))
        return True

    def finish(self, load: LoadJob) -> bool:
        """Copy what is left of the next block if its record is whole and was begun. Returns whether the block is whole."""
        at = load.num_loaded
        copied = self._copied.get(load, {}).pop(at, None)
        if copied is None:
            return False
        checksum = self._store.checksum_of(copied.place, load.keys[at])
        if checksum is None:
            self._copied[load][at] = copied
            return False
        num_parts = len(self._unit.offsets) - 1
        copied.add(num_parts, self._copy(load.block_ids[at], copied, num_parts))
        return copied.checksum == checksum

    def forget(self, load: LoadJob) -> None:
        """Forget a load that has ended."""
        self._copied.pop(load, None)

    def _copy(self, index: int, copied: _Copied, num_parts: int) -> int:
        """Copy the next parts, and return their share of the checksum."""
        parts = slice(copied.num_parts, num_parts)
        at = self._unit.offsets[copied.num_parts]
        self._store.read_part(copied.place, at, self._unit.buffers(index, parts))
        return self._unit.sum_parts(index, parts)
