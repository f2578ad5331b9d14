"""Read records in the host memory of another node with NIXL: by RDMA if the network has it, without the other processor.

A server registers the files of its stores and describes records by their addresses. A client reads them into its memory and
compares their checksums: a record may be replaced while it is read, as in `kvcache.tiers.records`.

A read that does not end in time may still write to the client's memory later. So a `RemoteReader` gives its memory up after a
failure: the memory is neither used again nor freed.

Source: github.com/ai-dynamo/nixl, docs/nixl.md and the Python API of NIXL 1.5.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from kvcache.tiers.records import RecordStore

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first one chooses one of the others
READ_BYTES = 16 << 20  # that are read at once; the next ones are read while these are verified
START_S = 60.0  # until the agent is ready, or memory is registered
CALL_S = 1.0  # of other calls
_HOST = 0  # number of the device of host memory
_POLL_S = 50e-6
_MISSING = "NIXL is not installed (pip install nixl)"
_Result = TypeVar("_Result")
_given_up: list[mmap.mmap] = []  # memory that a read may still write to


class RemoteMemoryError(OSError):
    """NIXL is missing, or it cannot read."""


class RemoteRecord(NamedTuple):
    """A record in the memory of another process."""

    address: int
    num_bytes: int


class NixlAgent:
    """This process's end of all reads. Any thread may use it.

    Every call has a limit, because NIXL has none: it waits for a peer that it cannot reach, and holds a lock meanwhile.
    """

    def __init__(self) -> None:
        """Start the agent.

        Raises:
            RemoteMemoryError: NIXL is missing or cannot start.
        """
        api = _import_api()

        def start() -> Any:
            config = api.nixl_agent_config(
                backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            return api.nixl_agent(f"wideep-{secrets.token_hex(8)}", config)

        self._agent = _within(START_S, "cannot start", start)

    def close(self) -> None:
        """End the agent and its threads. Nothing may use it any more."""
        del self._agent

    def register(self, memory: mmap.mmap) -> "Registration":
        """Let NIXL use memory until `deregister`. Until then it must stay mapped.

        Raises:
            RemoteMemoryError: It cannot be registered.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        descriptors = _within(
            START_S,
            f"cannot register {len(memory)} bytes of memory",
            lambda: self._agent.register_memory([(address, len(memory), _HOST, "")], "DRAM"),
        )
        return Registration(address, descriptors)

    def deregister(self, registration: "Registration") -> None:
        """End the use of memory.

        Raises:
            RemoteMemoryError: NIXL may still use it.
        """
        descriptors = registration.descriptors
        _within(CALL_S, "cannot deregister memory", lambda: self._agent.deregister_memory(descriptors))

    @property
    def metadata(self) -> bytes:
        """What other agents need to read the memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Connect to the agent with this metadata, and return its name for `begin`."""
        name = _within(CALL_S, "cannot reach the peer", lambda: self._agent.add_remote_agent(metadata))
        return str(name.decode())

    def leave(self, name: str) -> None:
        """Forget another agent."""
        with contextlib.suppress(RemoteMemoryError):
            _within(CALL_S, "cannot forget a peer", lambda: self._agent.remove_remote_agent(name))

    def begin(self, name: str, records: Sequence[RemoteRecord], address: int) -> "PendingRead":
        """Begin to read records of another agent, one behind the other, to registered memory at `address`."""
        ours, theirs = [], []
        for record in records:
            ours.append((address, record.num_bytes, _HOST))
            theirs.append((*record, _HOST))
            address += record.num_bytes
        agent = self._agent

        def begin() -> PendingRead:
            descriptions = [agent.get_xfer_descs(each, "DRAM") for each in (ours, theirs)]
            handle = agent.initialize_xfer("READ", *descriptions, name)
            return PendingRead(agent, handle, agent.transfer(handle))

        return _within(CALL_S, "cannot read", begin)


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
        _within(until_s - time.monotonic() + CALL_S, "cannot read", lambda: self._wait(until_s))

    def _wait(self, until_s: float) -> None:
        while self._state == "PROC":
            if time.monotonic() > until_s:
                raise TimeoutError("the time is up")
            time.sleep(_POLL_S)
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state != "DONE":
            raise ConnectionError("the peer is lost")
        self._agent.release_xfer_handle(self._handle)


class RegisteredStores:
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
        """Forget the peer and free the memory, unless NIXL may still use it. No read may be going on."""
        if self._peer[1]:
            self._agent.leave(self._peer[1])
        try:
            self._agent.deregister(self._registered)
        except RemoteMemoryError:
            self.give_up()


def check_installed() -> None:
    """Check that NIXL is here, without loading it.

    Raises:
        RemoteMemoryError: It is missing. The message has the remedy.
    """
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        raise RemoteMemoryError(_MISSING)


def _import_api() -> ModuleType:
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # read when UCX is loaded; by default it prints to stdout
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


def _within(seconds: float, problem: str, call: Callable[[], _Result]) -> _Result:
    """Return what a call of NIXL returns. It runs in a thread, which is left to itself if it hangs.

    Raises:
        RemoteMemoryError: It has failed or takes longer than `seconds`.
    """
    results: Future[_Result] = Future()

    def run() -> None:
        try:
            results.set_result(call())
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no class in common
            results.set_exception(error)

    Thread(target=run, name="kv-nixl", daemon=True).start()
    try:
        return results.result(max(0.0, seconds))
    except Exception as error:
        reason = str(error) or f"no result within {seconds:.1f} s"
        raise RemoteMemoryError(f"NIXL {problem}: {reason}") from error


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
