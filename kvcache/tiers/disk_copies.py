"""Copies records from host memory to the disk in a separate thread, so a slow disk delays nothing else.

A copy keeps no block of the cache: it reads the record in host memory. A record that host memory replaces before its turn is
not copied, and the prefix ends there on the disk. A flush is written before the copies that wait, and those of flushed records are
skipped.
"""

import logging
import time
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from kvcache.tiers.jobs import WriteGeneration
from kvcache.tiers.records import ReadResult
from kvcache.tiers.tier import GenerationFile, Tier
from kvcache.unit import sum_of_bytes

log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    key: bytes
    is_state: bool
    generation: int


class OwnsTiers(Protocol):
    """The owner of host memory and disk; implemented by `kvcache.tiers.tiers.Tiers`."""

    @property
    def generation(self) -> int: ...

    def is_on(self, tier: Tier) -> bool: ...

    def note(self, **counts: float) -> None: ...

    def count_records(self, tier: Tier) -> None: ...

    def without_failures_of(self, tier: Tier) -> AbstractContextManager[None]: ...


class DiskCopies:
    """Copies to a disk. Any thread may call its methods."""

    def __init__(self, host: Tier, disk: Tier, owner: OwnsTiers) -> None:
        """Start `thread` before the first copy."""
        self._host, self._disk, self._owner = host, disk, owner
        self._generation = GenerationFile(disk, lambda: owner.generation)
        self._jobs: SimpleQueue[_Copy | WriteGeneration | None] = SimpleQueue()  # None ends the thread
        # More than host memory has would be replaced before they are copied.
        self._most_jobs = sum(store.num_records for store in host.stores)
        self.thread = Thread(target=self._work, name="kv-disk", daemon=True)

    def copy(self, key: bytes, *, is_state: bool) -> bool:
        """Copy a record soon. Returns False if too many wait already."""
        if self._jobs.qsize() >= self._most_jobs:
            return False
        self._jobs.put(_Copy(key, is_state, self._owner.generation))
        return True

    def write_generation(self) -> None:
        """Write the owner's generation to the disk soon, also if the disk is full and has been disabled."""
        self._jobs.put(WriteGeneration())

    def close(self) -> None:
        """Let the thread end after the present jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        records = [memoryview(bytearray(store.record_bytes)) for store in self._disk.stores]
        while (job := self._jobs.get()) is not None:
            is_written = self._generation.write()
            if isinstance(job, WriteGeneration):
                if not is_written:
                    self._jobs.put(job)
            elif job.generation == self._owner.generation:
                self._follow(job, records[job.is_state])
            if self._jobs.empty():
                self._owner.count_records(self._disk)

    def _follow(self, job: _Copy, record: memoryview) -> None:
        if not (self._owner.is_on(self._host) and self._owner.is_on(self._disk)):
            return
        begun_s = time.perf_counter()
        try:
            self._copy(job, record)
        except Exception:  # the thread goes on, as those of `Tiers`
            log.exception("A KV block was not copied to the disk. It is computed again when it is needed")
        self._owner.note(store_s=time.perf_counter() - begun_s)

    def _copy(self, job: _Copy, record: memoryview) -> None:
        source, target = (tier.store(is_state=job.is_state) for tier in (self._host, self._disk))
        with self._owner.without_failures_of(self._disk):
            if target.has(job.key):
                target.touch(job.key)
                return
        checksum = 0

        def take() -> int:
            nonlocal checksum
            checksum = sum_of_bytes(record)
            return checksum

        outcome = ReadResult.MISS
        with self._owner.without_failures_of(self._host):
            outcome = source.read(job.key, [record], take, is_use=False)
        if outcome is ReadResult.DAMAGED:
            log.warning("A KV block of %s was damaged. It is computed again", source.name)
            self._owner.note(num_faults=1)
        if outcome is not ReadResult.WHOLE:
            self._owner.note(num_dropped=0 if job.is_state else 1)
            return
        with self._owner.without_failures_of(self._disk):
            begun_s = time.perf_counter()
            is_new = target.write(job.key, [record], checksum)
            self._owner.note(disk_store_s=time.perf_counter() - begun_s)
            if is_new:
                self._owner.note(disk_store_bytes=target.record_bytes)
