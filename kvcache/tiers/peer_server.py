"""The server of a node's host memory: sends the records of prefixes to ranks of other nodes.

Every rank of a node has one, and all of them serve the same memory, so a lost rank makes no record unreachable. It only reads, in
a thread per connection, and no step waits for it. The checksum of a record is computed again before it is sent, so a record that
is damaged here is not sent, and a wrong checksum at the client means a damaged transfer. A client with NIXL only gets a list of
addresses, and verifies what it reads itself. See `kvcache.tiers.frames` for the protocol.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from threading import Lock, Thread
from typing import NamedTuple

from kvcache.prefix import PrefixIndex
from kvcache.tiers.frames import (
    HEADER_BYTES,
    STALL_S,
    STATE,
    Addresses,
    Channel,
    PrefixAnswer,
    PrefixRequest,
    RecordAddress,
    RecordHeader,
)
from kvcache.tiers.records import ReadResult, RecordStore
from kvcache.tiers.remote_memory import RegisteredStores
from kvcache.tiers.tier import Tier
from kvcache.unit import sum_of_bytes

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 64  # at once; others are closed
IDLE_S = 300.0  # a connection without requests is closed
AWAIT_S, _POLL_S = 0.5, 0.002  # for blocks that a rank of this node is saving; below STALL_S
_PAUSE_S = 0.1  # if no descriptor is free for a connection


class KeySecret(NamedTuple):
    """The key of the hash of prefixes, and the generation that it belongs to."""

    generation: int
    secret: bytes


class PeerServer:
    """Serves the host memory of this node on a free port."""

    def __init__(
        self,
        host: str,
        tier: Tier,
        *,
        meaning: bytes,
        secret: bytes,
        block_tokens: int,
        key_secret: Callable[[], KeySecret],
        on_sent: Callable[[int], None],
        memory: RegisteredStores | None = None,
    ) -> None:
        """Listen and start the thread that accepts connections.

        Args:
            host: Address of this node that other nodes reach. The kernel chooses the port.
            meaning: `frames.meaning_of` of the tier's records.
            secret: Known to processes of this service only.
            key_secret: Returns the present key of the tier's hash; called in any thread.
            on_sent: Called with the number of bytes of each record that was sent or listed, in any thread.
            memory: The tier's, for clients that read it. None: all records are sent.

        Raises:
            OSError: The address cannot be used.
        """
        self._tier, self._meaning, self._secret = tier, meaning, secret
        self._block_tokens, self._key_secret, self._on_sent = block_tokens, key_secret, on_sent
        self._memory = memory
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MOST_CONNECTIONS)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._lock = Lock()  # of the connections
        self._connections: set[socket.socket] = set()
        self._is_closing = False
        self._threads = [Thread(target=self._accept, name="kv-peers", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._is_closing = True
            connections, threads = list(self._connections), list(self._threads)
        for each in (self._listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        for thread in threads:
            thread.join(timeout=5)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closing:
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._threads = [each for each in self._threads if each.is_alive()]
                if self._is_closing or len(self._connections) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
                thread = Thread(target=self._serve, args=(connection,), name="kv-peer", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one client until it leaves."""
        try:
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                until_s = time.monotonic() + STALL_S
                channel = Channel.accept(connection, self._secret, self._meaning, until_s)
                while True:
                    self._answer(channel, channel.next_request(idle_s=IDLE_S))
        except OSError as error:  # anyone can connect, so these are no warnings
            log.info("A connection to the KV tier of this node has ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, channel: Channel, request: PrefixRequest) -> None:
        """Send what this node has of a prefix."""
        key_secret = self._key_secret()
        keys: list[bytes] = []
        if key_secret.generation >= request.generation:  # otherwise this node still has to forget its records
            keys = PrefixIndex(self._block_tokens, key_secret.secret).keys_of(request.token_ids, request.root)
        self._await(keys[: request.num_awaited])
        answer = self._find(keys, request)
        if request.wants_addresses and self._memory is not None:
            channel.answer(answer._replace(addresses=self._addresses(self._memory, keys, answer)))
            return
        channel.answer(answer)
        self._send_records(channel, keys, answer)

    def _await(self, keys: list[bytes]) -> None:
        """Wait until a rank of this node has saved these blocks, and the state after them if the model keeps states."""
        stores = [each for each in (self._tier.blocks, self._tier.states) if each is not None]
        until_s = time.monotonic() + AWAIT_S
        while keys and not all(each.has(keys[-1]) for each in stores) and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _find(self, keys: list[bytes], request: PrefixRequest) -> PrefixAnswer:
        """Choose what to send. Blocks must continue the client's, and a state is of use only after the client's newest one."""
        blocks, states = self._tier.blocks, self._tier.states
        first = end = min(request.first_block, len(keys))
        while end < len(keys) and blocks.has(keys[end]):
            end += 1
        if states is not None:
            ends = range(end, request.newest_state, -1)
            end = next((each for each in ends if states.has(keys[each - 1])), 0)
        elif end == first:
            end = 0
        return PrefixAnswer(min(first, end), end)

    def _records(self, keys: list[bytes], answer: PrefixAnswer) -> Iterator[tuple[RecordStore, int, bytes]]:
        """Yield the store, number and key of each record of an answer: a state, then blocks."""
        blocks, states = self._tier.blocks, self._tier.states
        if answer.end and states is not None:
            yield states, STATE, keys[answer.end - 1]
        for number in range(answer.first_block, answer.end):
            yield blocks, number, keys[number]

    def _send_records(self, channel: Channel, keys: list[bytes], answer: PrefixAnswer) -> None:
        """Send the records up to the first one that is gone."""
        blocks, states = self._tier.blocks, self._tier.states
        most_bytes = max(blocks.record_bytes, states.record_bytes if states else 0)
        frame = memoryview(bytearray(HEADER_BYTES + most_bytes))
        for store, number, key in self._records(keys, answer):
            if not self._send(channel, store, number, key, frame):
                break
        channel.send_end()

    def _addresses(self, memory: RegisteredStores, keys: list[bytes], answer: PrefixAnswer) -> Addresses:
        """List the records up to the first one that is gone."""
        listed = []
        for store, number, key in self._records(keys, answer):
            found = store.offset_of(key)
            if found is None:
                break
            offset, checksum = found
            listed.append(RecordAddress(RecordHeader(number, checksum), memory.address_of(store, offset)))
            self._on_sent(store.record_bytes)
        return Addresses(memory.metadata, listed)

    def _send(self, channel: Channel, store: RecordStore, number: int, key: bytes, frame: memoryview) -> bool:
        """Send a record by way of `frame`. Returns False if it is gone."""
        frame = frame[: HEADER_BYTES + store.record_bytes]
        record = frame[HEADER_BYTES:]
        checksum = 0

        def take() -> int:
            nonlocal checksum
            checksum = sum_of_bytes(record)
            return checksum

        if store.read(key, [record], take) is not ReadResult.WHOLE:
            return False
        channel.send_record(RecordHeader(number, checksum), frame)
        self._on_sent(store.record_bytes)
        return True
