"""A store of records of one size, by key, in a file that several processes share: one kind of record of a tier.

The file has a header, an index, an entry of 64 bytes per record, and the records. The index is a hash table of buckets, which
list the places of keys. A full file replaces records by the clock algorithm: a hand goes around, skips a record that was read
since it last came by, and takes the first that was not. Processes keep nothing in memory, so they agree without messages and
start without reading the file, and any of them may be killed at any time.

Readers take no lock. They read an entry, then the record, and compare the entry's checksum with that of the bytes that
arrived. If a writer replaced the record meanwhile, the checksum differs, and the read is a miss. If it differs and the entry
stays the same, the bytes are damaged: the entry is erased, and the caller counts a fault. A writer locks the header while it
takes a place, and the place until the record is written; these locks of fcntl(2) end with the process. It erases the place's
entry, writes the record, then the new entry. A list in the index that a killed process left is of no harm: the entry decides.

The file may be a memfd (host memory) or a file on a disk. All access is by pread and pwrite: a full disk is an error and not a
signal. Nothing is synced: after a loss of power, the checksums show which records are whole.

Rejected: a file per block (vLLM, LMCache), which needs a second store for limits and order; sets of 16 records that each replace
their oldest, which break long prefixes (docs/LOG.md).
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from threading import Lock
from typing import NamedTuple

from kvcache.prefix import KEY_BYTES

ENTRY_BYTES = 64
SECRET_BYTES = 32
LEAST_RECORDS = 16
_MAGIC, _VERSION = b"WIDEEPKV", 2
_HEADER = struct.Struct("<8sIQQ32s32s32s")  # magic, version, record bytes, records, model, software, secret
_NUMBER = struct.Struct("<Q")
_ENTRY = struct.Struct(f"<{KEY_BYTES}sQB")  # key, checksum, whether it was read since the hand last came by
_READ_AT = _ENTRY.size - 1  # of an entry
# Of a record that is written in parts: its key, and how many of its bytes are there.
_PART = struct.Struct(f"<{KEY_BYTES}sQ")
_PART_AT = 32  # of an entry
_LISTED = struct.Struct("<II")  # place + 1, or 0 for none; four bytes of the key
_HEADER_BYTES, _GENERATION_AT, _HAND_AT = 4096, 2048, 2056
_PAGE = 4096
_SLOTS = 16  # of a bucket; two fifths are used, so that few buckets are full
_BUCKET_BYTES = _SLOTS * _LISTED.size
_LEAST_OTHERS = _HEADER_BYTES + _PAGE + _BUCKET_BYTES  # bytes that are no records, entries or index
_AT_ONCE = 64  # entries that the hand reads
_READS = 3  # of a record with a wrong checksum: it may have been replaced meanwhile, even twice
_LOCK_TRIES, _LOCK_PAUSE_S = (
    40,
    0.25e-3,
)  # a process that is stopped while it holds a lock must not stop the others
_MOST_BUFFERS = 512  # per call; the system's limit is 1,024


class StoreError(Exception):
    """A file that cannot serve as a store. The message names the file and what to do."""


class RecordLayout(NamedTuple):
    """What the records of a file mean."""

    model: bytes  # 32 bytes: `kvcache.unit.layout_of`
    software: bytes  # 32 bytes: digest of the versions that computed the records
    record_bytes: int


class _Entry(NamedTuple):
    """A record's entry; all zeros without a record."""

    key: bytes
    checksum: int
    was_read: int  # 0 or 1


_NO_ENTRY = _Entry(bytes(KEY_BYTES), 0, 0)


class PartOfRecord(NamedTuple):
    """What is there of a record that is not whole yet. Only the checksum of the whole record shows whether it is right."""

    place: int
    num_bytes: int  # the first ones


class ReadResult(Enum):
    """How a read ended."""

    WHOLE = auto()  # the buffers hold the record
    MISS = auto()  # the key has no record, or it was replaced meanwhile
    DAMAGED = auto()  # its bytes were not those that had been written; it was erased


class RecordStore:
    """The records of one file. Any thread may read and write."""

    def __init__(
        self,
        fd: int,
        layout: RecordLayout,
        num_bytes: int,
        *,
        name: str,
        secret: bytes | None = None,
        keeps_size: bool = False,
    ) -> None:
        """Open the store in a file. Format the file if it is empty, or of another size or version of the software.

        Args:
            fd: A descriptor to read and write. The store keeps it.
            num_bytes: Most bytes of the file. One of another size is emptied.
            name: The file's name in messages.
            secret: Of a new file: 32 bytes that key the hash of prefixes. None draws them.
            keeps_size: Use a file of another size as it is.

        Raises:
            StoreError: The file is not a store, or that of another model, or must be emptied while others use it, or
                `num_bytes` is too small.
            OSError: The file cannot be read or written.
        """
        self._fd, self.name = fd, name
        self._writing = Lock()  # the locks of fcntl(2) exclude other processes, but no threads of this one
        self._open: set[int] = set()  # places of records that this process writes in parts
        num_records = num_records_in(num_bytes, layout.record_bytes)
        with self._locked(0, _HEADER_BYTES, waits=True):
            found = os.pread(fd, _HEADER.size, 0)
            wanted = None if keeps_size else num_records
            if not found.strip(b"\0") or self._is_outdated(found, layout, wanted):
                self._format(layout, num_records, secret)
                found = os.pread(fd, _HEADER.size, 0)
            fcntl.flock(fd, fcntl.LOCK_SH)  # in use
            _, _, _, num_records, _, _, self.secret = _HEADER.unpack(found)
            # A copy of the file may have been interrupted. Zeros are no entry, and a record that was cut fails its checksum.
            if os.fstat(fd).st_size < file_bytes(num_records, layout.record_bytes):
                os.ftruncate(fd, file_bytes(num_records, layout.record_bytes))
        self.num_records, self.record_bytes = num_records, layout.record_bytes
        self._num_buckets = _num_buckets(num_records)
        self._entries_at = _HEADER_BYTES + self._num_buckets * _BUCKET_BYTES
        self._records_at = _records_at(num_records)

    def _is_outdated(self, found: bytes, layout: RecordLayout, num_records: int | None) -> bool:
        """Whether the file has this model's records, but computed by other software or in another number. None: any number."""
        if len(found) < _HEADER.size or found[: len(_MAGIC)] != _MAGIC:
            raise StoreError(
                f"{self.name} is not a store of KV blocks: choose another place, or remove the file"
            )
        _, version, record_bytes, present, model, software, _ = _HEADER.unpack(found)
        # A layout of another version may describe the same model by other facts.
        if version == _VERSION and model != layout.model:
            raise StoreError(
                f"{self.name} holds the KV blocks of another model, checkpoint or cache layout: choose another "
                f"directory, or remove the file"
            )
        num_records = present if num_records is None else num_records
        wanted = (_VERSION, layout.record_bytes, num_records, layout.software)
        return (version, record_bytes, present, software) != wanted

    def _format(self, layout: RecordLayout, num_records: int, secret: bytes | None) -> None:
        if num_records < LEAST_RECORDS:
            least = least_bytes(layout.record_bytes) / 2**20
            raise StoreError(f"{self.name} is too small: the fewest records need {least:.1f} MiB")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{self.name} is in use by a service of another version or size: stop it, or choose another directory"
            ) from error
        header = _HEADER.pack(
            _MAGIC, _VERSION, layout.record_bytes, num_records,
            layout.model, layout.software, secret or os.urandom(SECRET_BYTES),
        )  # fmt: skip
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, file_bytes(num_records, layout.record_bytes))
        os.pwrite(self._fd, header, 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def generation(self) -> int:
        """The generation of the records: a number that grows when they are forgotten."""
        return int(_NUMBER.unpack(os.pread(self._fd, _NUMBER.size, _GENERATION_AT))[0])

    def advance_to(self, generation: int) -> bool:
        """Set the generation, unless the file has a newer one. Returns False if another process holds the file's lock.

        It waits for a record that another thread writes.
        """
        with self._writing, self._locked(0, _HEADER_BYTES, waits=False) as is_locked:
            if is_locked and generation > self.generation:
                os.pwrite(self._fd, _NUMBER.pack(generation), _GENERATION_AT)
            return is_locked

    def count(self) -> int:
        """Count the records. Reads all entries."""
        entries = os.pread(self._fd, self.num_records * ENTRY_BYTES, self._entries_at)
        starts = range(0, len(entries), ENTRY_BYTES)
        return sum(entries[at : at + KEY_BYTES] != _NO_ENTRY.key for at in starts)

    def has(self, key: bytes) -> bool:
        """Whether there is a record with this key. It may be replaced before it is read."""
        return self._find(key) is not None

    def touch(self, key: bytes) -> None:
        """Note a use of a record, if it is there."""
        if (found := self._find(key)) is not None:
            self._note_read(found[0], 1)

    def read(
        self, key: bytes, buffers: Sequence[memoryview], take: Callable[[], int], *, is_use: bool = True
    ) -> ReadResult:
        """Read a record into buffers.

        Args:
            take: Called when the buffers are full. Returns the checksum of what they held.
            is_use: Whether the record stays longer in the file because of it.

        Raises:
            OSError: The file cannot be read.
        """
        before = None
        for _ in range(_READS):
            found = self._find(key)
            if found is None or before not in (None, found):
                return ReadResult.MISS
            before = found
            place, checksum = found
            self._transfer(os.preadv, buffers, place)
            if take() == checksum:
                if is_use:
                    self._note_read(place, 1)
                return ReadResult.WHOLE
        if place in self._open:  # replaced meanwhile; its lock is held
            return ReadResult.MISS
        with self._writing, self._locked(self._entry_at(place), ENTRY_BYTES, waits=False) as is_locked:
            if not is_locked or self._find(key) != before:
                return ReadResult.MISS
            self._write_entry(place, _NO_ENTRY)
        return ReadResult.DAMAGED

    def map(self) -> mmap.mmap:
        """Map the file, for reads by address. See `offset_of`."""
        return mmap.mmap(self._fd, 0)

    def offset_of(self, key: bytes) -> tuple[int, int] | None:
        """Note a use of a record, and return where its bytes begin in the file, and their checksum. None if it is not there."""
        found = self._find(key)
        if found is None:
            return None
        place, checksum = found
        self._note_read(place, 1)
        return self._record_at(place), checksum

    def write(self, key: bytes, buffers: Sequence[memoryview], checksum: int) -> bool:
        """Write a record, unless it is there or no place can be taken now. Returns whether it was written.

        Raises:
            OSError: The file cannot be written, for example because the disk is full.
        """
        with self._writing:
            place = self._take_place(key)
            if place is None:
                return False
            try:
                self._transfer(os.pwritev, buffers, place)
                self._write_entry(place, _Entry(key, checksum, 0))
            finally:
                self._unlock(self._entry_at(place), ENTRY_BYTES)
        return True

    def begin(self, key: bytes) -> int | None:
        """Take a place for a record that is written in parts, unless it is there or no place can be taken now.

        Returns:
            The place, for `write_part`, `note_part`, and one call of `complete` or `cancel`.
        """
        with self._writing:
            place = self._take_place(key)
            if place is not None:
                self._open.add(place)
                self.note_part(place, key, 0)
            return place

    def write_part(self, place: int, at: int, buffers: Sequence[memoryview]) -> None:
        """Write bytes of a record that was begun, from byte `at`."""
        self._transfer(os.pwritev, buffers, place, at)

    def note_part(self, place: int, key: bytes, num_bytes: int) -> None:
        """Let `part_of` find the first bytes of a record that was begun."""
        os.pwrite(self._fd, _PART.pack(key, num_bytes), self._entry_at(place) + _PART_AT)

    def complete(self, place: int, key: bytes, checksum: int) -> None:
        """End a record that was begun. All its bytes were written."""
        self._end(place, _Entry(key, checksum, 0))

    def cancel(self, place: int) -> None:
        """Drop a record that was begun."""
        self._end(place, _NO_ENTRY)

    def _end(self, place: int, entry: _Entry) -> None:
        with self._writing:
            try:
                self._write_entry(place, entry)
            finally:
                self._open.discard(place)
                self._unlock(self._entry_at(place), ENTRY_BYTES)

    def part_of(self, key: bytes) -> PartOfRecord | None:
        """Return what is there of a record that some process writes in parts. None if it is whole, or not begun."""
        for place, tag in self._bucket(key):
            if place and tag == _tag(key):
                entry = os.pread(self._fd, ENTRY_BYTES, self._entry_at(place - 1))
                found, num_bytes = _PART.unpack_from(entry, _PART_AT)
                if found == key:
                    return PartOfRecord(place - 1, num_bytes)
        return None

    def checksum_of(self, place: int, key: bytes) -> int | None:
        """Return the checksum of a record at its place. None if it is not whole, or another record is there."""
        entry = self._entry(place)
        return entry.checksum if entry.key == key else None

    def read_part(self, place: int, at: int, buffers: Sequence[memoryview]) -> None:
        """Read bytes of a record from byte `at`. They may be those of another record."""
        self._transfer(os.preadv, buffers, place, at)

    def _take_place(self, key: bytes) -> int | None:
        """Lock a place for a new record, and list it. Its old record is gone. None if the key is there, or no place is free."""
        with self._locked(0, _HEADER_BYTES, waits=False) as is_locked:
            if not is_locked or self._find(key) is not None:
                return None
            place = self._sweep()
            if place is None:
                return None
            old = self._entry(place)
            if old.key != _NO_ENTRY.key:
                self._write_entry(place, _NO_ENTRY)
                self._unlist(old.key, place)
            self._list(key, place)
            return place

    def _sweep(self) -> int | None:
        """Move the hand to the next record that was not read since it last came by, and lock its place."""
        hand = int(_NUMBER.unpack(os.pread(self._fd, _NUMBER.size, _HAND_AT))[0])
        passed = 0
        while passed <= 2 * self.num_records:
            first = (hand + passed) % self.num_records
            entries = self._entries(first, min(_AT_ONCE, self.num_records - first))
            for place, entry in enumerate(entries, first):
                passed += 1
                if entry.key != _NO_ENTRY.key and entry.was_read:
                    self._note_read(place, 0)
                elif place not in self._open and self._lock(self._entry_at(place), ENTRY_BYTES):
                    os.pwrite(self._fd, _NUMBER.pack((place + 1) % self.num_records), _HAND_AT)
                    return place
        return None

    def _find(self, key: bytes) -> tuple[int, int] | None:
        """Return the place and the checksum of a key's record."""
        for place, tag in self._bucket(key):
            if place and tag == _tag(key):
                entry = self._entry(place - 1)
                if entry.key == key:
                    return place - 1, entry.checksum
        return None

    def _list(self, key: bytes, place: int) -> None:
        """List a place in a key's bucket: in a free slot, one without a record, or the first."""
        slots = self._bucket(key)
        free = [slot for slot, (listed, _) in enumerate(slots) if not listed]
        gone = (slot for slot, (listed, tag) in enumerate(slots) if _tag(self._entry(listed - 1).key) != tag)
        slot = free[0] if free else next(gone, 0)
        self._write_slot(key, slot, (place + 1, _tag(key)))

    def _unlist(self, key: bytes, place: int) -> None:
        for slot, (listed, _) in enumerate(self._bucket(key)):
            if listed == place + 1:
                self._write_slot(key, slot, (0, 0))

    def _bucket_at(self, key: bytes) -> int:
        return _HEADER_BYTES + int.from_bytes(key[:8], "little") % self._num_buckets * _BUCKET_BYTES

    def _bucket(self, key: bytes) -> list[tuple[int, int]]:
        return list(_LISTED.iter_unpack(os.pread(self._fd, _BUCKET_BYTES, self._bucket_at(key))))

    def _write_slot(self, key: bytes, slot: int, listed: tuple[int, int]) -> None:
        os.pwrite(self._fd, _LISTED.pack(*listed), self._bucket_at(key) + slot * _LISTED.size)

    def _record_at(self, place: int) -> int:
        return self._records_at + place * self.record_bytes

    def _entry_at(self, place: int) -> int:
        return self._entries_at + place * ENTRY_BYTES

    def _entry(self, place: int) -> _Entry:
        return self._entries(place, 1)[0]

    def _entries(self, first: int, count: int) -> list[_Entry]:
        data = os.pread(self._fd, count * ENTRY_BYTES, self._entry_at(first))
        return [_Entry(*_ENTRY.unpack_from(data, at)) for at in range(0, len(data), ENTRY_BYTES)]

    def _write_entry(self, place: int, entry: _Entry) -> None:
        os.pwrite(self._fd, _ENTRY.pack(*entry).ljust(ENTRY_BYTES, b"\0"), self._entry_at(place))

    def _note_read(self, place: int, was_read: int) -> None:
        """Write one byte only: another process may be replacing the entry."""
        os.pwrite(self._fd, bytes([was_read]), self._entry_at(place) + _READ_AT)

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        buffers: Sequence[memoryview],
        place: int,
        at: int = 0,
    ) -> None:
        """Read or write a record from byte `at`, as many bytes as the buffers have."""
        at += self._record_at(place)
        for begin in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[begin : begin + _MOST_BUFFERS]
            wanted = sum(len(buffer) for buffer in some)
            done = call(self._fd, some, at)
            while done < wanted:  # a call may stop early, at most some GiB or a signal
                some = _after(buffers[begin : begin + _MOST_BUFFERS], done)
                more = call(self._fd, some, at + done)
                if more <= 0:
                    raise OSError(errno.EIO, f"a record of {self.name} is short")
                done += more
            at += wanted

    @contextlib.contextmanager
    def _locked(self, start: int, length: int, *, waits: bool) -> Iterator[bool]:
        """Lock a range of the file against other processes. Yields whether it is locked."""
        if waits:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, length, start)
        elif not any(self._lock(start, length, pause_s=_LOCK_PAUSE_S) for _ in range(_LOCK_TRIES)):
            yield False
            return
        try:
            yield True
        finally:
            self._unlock(start, length)

    def _lock(self, start: int, length: int, *, pause_s: float = 0.0) -> bool:
        """Try to lock a range, and wait a little if another process has it."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES
            time.sleep(pause_s)
            return False
        return True

    def _unlock(self, start: int, length: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, length, start)


def num_records_in(num_bytes: int, record_bytes: int) -> int:
    """Return how many records a file of this size has."""
    return max(0, int((num_bytes - _LEAST_OTHERS) / _bytes_per(record_bytes)))


def least_bytes(record_bytes: int) -> int:
    """Return the least size of a store's file."""
    return math.ceil(LEAST_RECORDS * _bytes_per(record_bytes)) + _LEAST_OTHERS + 1


def file_bytes(num_records: int, record_bytes: int) -> int:
    """Return the size of a file with this many records."""
    return _records_at(num_records) + num_records * record_bytes


def _bytes_per(record_bytes: int) -> float:
    """Return the bytes of a record, its entry and its part of the index."""
    return record_bytes + ENTRY_BYTES + _LISTED.size * 5 / 2


def _num_buckets(num_records: int) -> int:
    return -(-num_records * 5 // (2 * _SLOTS))


def _records_at(num_records: int) -> int:
    return _round_up(_HEADER_BYTES + _num_buckets(num_records) * _BUCKET_BYTES + num_records * ENTRY_BYTES)


def _tag(key: bytes) -> int:
    return int.from_bytes(key[8:12], "little")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers after their first `done` bytes."""
    left = []
    for buffer in buffers:
        skipped = min(done, len(buffer))
        done -= skipped
        if skipped < len(buffer):
            left.append(buffer[skipped:])
    return left
