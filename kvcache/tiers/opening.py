"""Open the files of the tiers, and find the host memory that other ranks of this host already share.

Host memory is an anonymous file (memfd), which leaves nothing behind, even after kill -9, and needs no room in /dev/shm. Ranks
list their process and descriptor in the job's store, and a new rank opens the file through /proc from any process that lives.
The memory lasts as long as one of them does, so a rank that is restarted finds its blocks again.
"""

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kvcache.tiers.records import RecordLayout, RecordStore, StoreError, least_bytes
from kvcache.tiers.tier import Tier


class Kinds(NamedTuple):
    """The kinds of records of a cache, and how much of a tier each gets."""

    blocks: RecordLayout
    states: RecordLayout | None  # None if the model keeps no states
    states_share: float = 0.0  # of the bytes; equal on all ranks that use the tier


class SharedStore(Protocol):
    """The operation of torch.distributed's `Store` that ranks meet with."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the value if it is the expected one ("" if the key is new). Returns the value."""


def open_disk(directory: Path, kinds: Kinds, num_bytes: int) -> Tier:
    """Open the tier in a directory, which is made if it is missing. Only its owner can read it.

    Raises:
        StoreError: The directory cannot be used, is that of another model, or is in use with another size, or
            `num_bytes` is too small.
    """
    _check_size("--kv-offloading-disk-size", kinds, num_bytes)

    def open_file(name: str, layout: RecordLayout, size: int) -> RecordStore:
        path = directory / name
        with contextlib.ExitStack() as on_error:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            on_error.callback(os.close, fd)
            store = RecordStore(fd, layout, size, name=str(path))
            on_error.pop_all()
        return store

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _open("disk", kinds, num_bytes, open_file)
    except OSError as error:
        raise StoreError(
            f"--kv-offloading-dir {directory} cannot be used: {error.strerror or error}; choose a directory on a local "
            f"disk that this user can write"
        ) from error


def open_host(
    kinds: Kinds, num_bytes: int, *, store: SharedStore | None, host: str, secret: bytes | None
) -> Tier:
    """Open the host memory that the ranks of a host share, or make it.

    Args:
        store: Where ranks list their descriptors. None: this rank is alone.
        host: Identifies the host, in the store.
        secret: Of new memory: the hash key of the disk's tier, if there is one.

    Raises:
        StoreError: `num_bytes` is too small.
    """
    _check_size("--kv-offloading-size", kinds, num_bytes)

    def open_memory(name: str, layout: RecordLayout, size: int) -> RecordStore:
        fd = _make_memory(_new_name()) if store is None else _share_memory(store, f"{host} {name}")
        # Other ranks may be using the memory, so a new rank never divides it again.
        return RecordStore(
            fd, layout, size, name="host memory (--kv-offloading-size)", secret=secret, keeps_size=True
        )

    return _open("host", kinds, num_bytes, open_memory)


def _check_size(flag: str, kinds: Kinds, num_bytes: int) -> None:
    least = least_bytes(kinds.blocks.record_bytes) / (1 - kinds.states_share)
    if kinds.states is not None:
        least = max(least, least_bytes(kinds.states.record_bytes) / kinds.states_share)
    if num_bytes < least:
        raise StoreError(
            f"{flag}: {num_bytes / 2**20:.1f} MiB are too few for this model's KV blocks and states; give at least "
            f"{math.ceil(least / 2**20)} MiB"
        )


def _open(
    tier: str, kinds: Kinds, num_bytes: int, open_store: Callable[[str, RecordLayout, int], RecordStore]
) -> Tier:
    """Open the stores of a tier, which share its bytes."""
    of_states = 0 if kinds.states is None else int(num_bytes * kinds.states_share)
    blocks = open_store("blocks.kv", kinds.blocks, num_bytes - of_states)
    states = None if kinds.states is None else open_store("states.kv", kinds.states, of_states)
    return Tier(tier, blocks, states)


def _new_name() -> str:
    return f"wideep-kv-{secrets.token_hex(8)}"


def _make_memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _share_memory(store: SharedStore, key: str) -> int:
    """Return the descriptor of the memory that the listed processes have open, or of new memory if none of them lives.

    The list has, for each process: its pid, its descriptor and the memory's random name.
    """
    name = _new_name()
    listed = ""
    while True:
        fd, name, living = _open_listed(listed, name)
        wanted = json.dumps([*living, [os.getpid(), fd, name]])
        found = store.compare_set(f"kv memory of {key}", listed, wanted).decode()
        if found == wanted:
            return fd
        os.close(fd)
        listed = found


def _open_listed(listed: str, new_name: str) -> tuple[int, str, list[list[int | str]]]:
    """Open the memory of a listed process. Returns the descriptor, the name and the processes that have it open."""
    living = []
    for pid, number, name in json.loads(listed or "[]"):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if os.readlink(path) == f"/memfd:{name} (deleted)":
                living.append([pid, number, name])
        except OSError:
            continue
    for pid, number, name in living:
        try:
            return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC), name, living
        except OSError:
            continue
    return _make_memory(new_name), new_name, []
