"""Copies records from host memory to the disk in a separate thread, so a slow disk delays nothing else.

A copy keeps no block of the cache: it reads the record in host memory. A record that host memory replaces before its turn is
not copied, and the prefix ends there on the disk.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from kvcache.tiers.records import ReadResult
from kvcache.tiers.tier import Tier
from kvcache.unit import sum_of_bytes

log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    key: bytes
    is_state: bool


class KeepsFigures(Protocol):
    """Counts what the copies do; implemented by `kvcache.tiers.tiers.Tiers`."""

    def note(self, **counts: float) -> None: ...

    def count_records(self, tier: Tier) -> None: ...

    def without_failures_of(self, tier: Tier) -> AbstractContextManager[None]: ...


class DiskCopies:
    """Copies to a disk. Any thread may call its methods."""

    def __init__(self, host: Tier, disk: Tier, figures: KeepsFigures, is_on: Callable[[Tier], bool]) -> None:
        """`is_on`: whether a tier has not failed. Start `thread` before the first copy."""
        self._host, self._disk, self._figures, self._is_on = host, disk, figures, is_on
        self._jobs: SimpleQueue[_Copy | int | None] = (
            SimpleQueue()
        )  # an int is a generation; None ends the thread
        # More than host memory has would be replaced before they are copied.
        self._most_jobs = sum(store.num_records for store in host.stores)
        self.thread = Thread(target=self._work, name="kv-disk", daemon=True)

    def copy(self, key: bytes, *, is_state: bool) -> bool:
        """Copy a record soon. Returns False if too many wait already."""
        if self._jobs.qsize() >= self._most_jobs:
            return False
        self._jobs.put(_Copy(key, is_state))
        return True

    def advance_to(self, generation: int) -> None:
        """Write a generation to the disk, also if the disk is full and has been disabled."""
        self._jobs.put(generation)

    def close(self) -> None:
        """Let the thread end after the present jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        records = [memoryview(bytearray(store.record_bytes)) for store in self._disk.stores]
        while (job := self._jobs.get()) is not None:
            if isinstance(job, int):
                if not self._disk.advance_to(job):
                    self._jobs.put(job)
                continue
            try:
                if self._is_on(self._host) and self._is_on(self._disk):
                    self._copy(job, records[job.is_state])
            except Exception:  # the thread goes on, as those of `Tiers`
                log.exception("A KV block was not copied to the disk. It is computed again when it is needed")
            if self._jobs.empty():
                self._figures.count_records(self._disk)

    def _copy(self, job: _Copy, record: memoryview) -> None:
        source, target = (tier.store(is_state=job.is_state) for tier in (self._host, self._disk))
        with self._figures.without_failures_of(self._disk):
            if target.has(job.key):
                target.touch(job.key)
                return
        checksum = 0

        def take() -> int:
            nonlocal checksum
            checksum = sum_of_bytes(record)
            return checksum

        outcome = ReadResult.MISS
        with self._figures.without_failures_of(self._host):
            outcome = source.read(job.key, [record], take, is_use=False)
        if outcome is ReadResult.DAMAGED:
            log.warning("A KV block of %s was damaged. It is computed again", source.name)
            self._figures.note(num_faults=1)
        if outcome is not ReadResult.WHOLE:
            return
        with self._figures.without_failures_of(self._disk):
            begun_s = time.perf_counter()
            is_new = target.write(job.key, [record], checksum)
            self._figures.note(disk_store_s=time.perf_counter() - begun_s)
            if is_new:
                self._figures.note(disk_store_bytes=target.record_bytes)
