"""Read records in the host memory of another node with NIXL: by RDMA if the network has it, without the other processor.

A server registers the files of its stores and describes records by their addresses. A client reads them into its memory and
compares their checksums: a record may be replaced while it is read, as in `kvcache.tiers.records`.

A read that does not end in time may still write to the client's memory later. So a `RemoteReader` gives its memory up after a
failure: the memory is neither used again nor freed.

Source: github.com/ai-dynamo/nixl, docs/nixl.md and the Python API of NIXL 1.5.
"""

import contextlib
import importlib
import importlib.util
import itertools
import logging
import mmap
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvcache.tiers.records import RecordStore

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first one chooses one of the others
READ_BYTES = 16 << 20  # that are read at once; the next ones are read while these are verified
_HOST = 0  # number of the device of host memory
_POLL_S = 50e-6
_MISSING = "NIXL is not installed (pip install nixl)"
_given_up: list[mmap.mmap] = []  # memory that a read may still write to


class RemoteMemoryError(OSError):
    """NIXL is missing, or it cannot read."""


class RemoteRecord(NamedTuple):
    """A record in the memory of another process."""

    address: int
    num_bytes: int


class NixlAgent:
    """This process's end of all reads. Any thread may use it."""

    def __init__(self) -> None:
        """Start the agent.

        Raises:
            RemoteMemoryError: NIXL is missing or cannot start.
        """
        api = _import_api()
        with _named_errors("cannot start"):
            config = api.nixl_agent_config(
                backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            self._agent = api.nixl_agent(f"wideep-{secrets.token_hex(8)}", config)

    def register(self, memory: mmap.mmap) -> "Registration":
        """Let NIXL use memory until `deregister`. Until then it must stay mapped.

        Raises:
            RemoteMemoryError: It cannot be registered.
        """
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        with _named_errors(f"cannot register {len(memory)} bytes of memory"):
            return Registration(
                address, self._agent.register_memory([(address, len(memory), _HOST, "")], "DRAM")
            )

    def deregister(self, registration: "Registration") -> None:
        """End the use of memory."""
        with contextlib.suppress(RemoteMemoryError), _named_errors("cannot deregister memory"):
            self._agent.deregister_memory(registration.descriptors)

    @property
    def metadata(self) -> bytes:
        """What other agents need to read the memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Return the name of the agent with this metadata, for `begin`."""
        with _named_errors("cannot use the peer's address"):
            return str(self._agent.add_remote_agent(metadata).decode())

    def leave(self, name: str) -> None:
        """Forget another agent."""
        with contextlib.suppress(RemoteMemoryError), _named_errors("cannot forget a peer"):
            self._agent.remove_remote_agent(name)

    def begin(self, name: str, records: Sequence[RemoteRecord], address: int) -> "PendingRead":
        """Begin to read records of another agent, one behind the other, to registered memory at `address`."""
        ours, theirs = [], []
        for record in records:
            ours.append((address, record.num_bytes, _HOST))
            theirs.append((*record, _HOST))
            address += record.num_bytes
        agent = self._agent
        with _named_errors("cannot read"):
            descriptions = [agent.get_xfer_descs(each, "DRAM") for each in (ours, theirs)]
            handle = agent.initialize_xfer("READ", *descriptions, name)
            return PendingRead(agent, handle, agent.transfer(handle))


class Registration(NamedTuple):
    """Memory that NIXL uses."""

    address: int
    descriptors: Any


class PendingRead:
    """A read that was begun."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def wait(self, until_s: float) -> None:
        """Wait for the end. `until_s`: time.monotonic() at the latest.

        Raises:
            RemoteMemoryError: The read failed or did not end in time. It may still write to its memory.
        """
        with _named_errors("cannot read"):
            while self._state == "PROC":
                if time.monotonic() > until_s:
                    raise TimeoutError("the time is up")
                time.sleep(_POLL_S)
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state != "DONE":
                raise ConnectionError("the peer is lost")
            self._agent.release_xfer_handle(self._handle)


class SharedMemory:
    """The memory of a node's stores, as other nodes read it."""

    def __init__(self, agent: NixlAgent, stores: Sequence[RecordStore]) -> None:
        """Register the stores.

        Raises:
            RemoteMemoryError: They cannot be registered.
        """
        self._maps = {store: store.map() for store in stores}
        self._registered = {store: agent.register(memory) for store, memory in self._maps.items()}
        self.metadata = agent.metadata

    def address_of(self, store: RecordStore, offset: int) -> int:
        """Return the address of a byte of a store's file."""
        return self._registered[store].address + offset


class RemoteReader:
    """Reads records of one peer. For one thread."""

    def __init__(self, agent: NixlAgent, largest_record: int) -> None:
        """Register memory for the records.

        Raises:
            RemoteMemoryError: It cannot be registered.
        """
        self._agent = agent
        self._half = max(READ_BYTES, largest_record)
        self._memory = mmap.mmap(-1, 2 * self._half)
        self._registered = agent.register(self._memory)
        self._peer = (b"", "")  # metadata and name

    def read(
        self, metadata: bytes, records: Sequence[RemoteRecord], *, stall_s: float, until_s: float
    ) -> Generator[memoryview]:
        """Read records in order. Each one's bytes are valid until the next one. Close the iterator if it has not ended.

        Args:
            metadata: Of the peer's agent.
            stall_s: Most time for `READ_BYTES`.
            until_s: time.monotonic() at the latest.

        Raises:
            RemoteMemoryError: The read failed or is too slow. Call `give_up`: the reader is of no more use.
        """
        name = self._meet(metadata)
        begun: list[tuple[PendingRead, Sequence[RemoteRecord], int]] = []
        halves = itertools.cycle((0, self._half))
        try:
            for batch in [*_batches(records, self._half), []]:
                if batch:
                    at = next(halves)
                    begun.append((self._agent.begin(name, batch, self._registered.address + at), batch, at))
                if len(begun) == 2 or (begun and not batch):
                    yield from self._finish(*begun[0], min(until_s, time.monotonic() + stall_s))
                    del begun[0]
        finally:
            for read, _, _ in begun[1:]:
                read.wait(min(until_s, time.monotonic() + stall_s))

    def _finish(
        self, read: PendingRead, batch: Sequence[RemoteRecord], at: int, until_s: float
    ) -> Iterator[memoryview]:
        read.wait(until_s)
        view = memoryview(self._memory)
        for record in batch:
            yield view[at : at + record.num_bytes]
            at += record.num_bytes

    def _meet(self, metadata: bytes) -> str:
        known, name = self._peer
        if metadata != known:
            name = self._agent.meet(metadata)
            self._peer = metadata, name
        return name

    def give_up(self) -> None:
        """End the use after a failure. The memory is kept, because a read may still write to it."""
        _given_up.append(self._memory)

    def close(self) -> None:
        """Forget the peer and free the memory. No read may be going on."""
        if self._peer[1]:
            self._agent.leave(self._peer[1])
        self._agent.deregister(self._registered)


def check_installed() -> None:
    """Check that NIXL is here, without loading it.

    Raises:
        RemoteMemoryError: It is missing. The message has the remedy.
    """
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        raise RemoteMemoryError(_MISSING)


def _import_api() -> ModuleType:
    for name in PACKAGES:
        try:
            importlib.import_module(name)
            api = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        logger = logging.getLogger("nixl")  # it prints to stdout by itself
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return api
    raise RemoteMemoryError(_MISSING)


@contextlib.contextmanager
def _named_errors(problem: str) -> Iterator[None]:
    """Turn the errors of NIXL, which have no class in common, into ours."""
    try:
        yield
    except Exception as error:
        raise RemoteMemoryError(f"NIXL {problem}: {error}") from error


def _batches(records: Sequence[RemoteRecord], most_bytes: int) -> list[list[RemoteRecord]]:
    """Divide records into groups of at most `most_bytes`."""
    batches: list[list[RemoteRecord]] = []
    left = 0
    for record in records:
        if record.num_bytes > left:
            batches.append([])
            left = most_bytes
        batches[-1].append(record)
        left -= record.num_bytes
    return batches
