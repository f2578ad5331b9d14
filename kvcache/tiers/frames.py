"""The wire format between nodes that fetch prefixes from each other.

A connection begins with a handshake. The client sends what its records mean (model, layout, software) and a random number. The
server refuses other versions and layouts first, and answers with its own random number. Then both prove that they know the
service's secret: each sends an HMAC of these messages, and the secret itself is never sent. After that, the client sends requests,
one after the other: the tokens of a prefix. The server computes its node's keys from them, because each node hashes with another
secret. It answers with the range of blocks that it has, and with their records. If both ends have NIXL, it answers with the
addresses and checksums of the records instead, and the client reads them (`kvcache.tiers.remote_memory`).

All messages have fixed sizes, except the tokens of a request and the list of addresses, which are limited. So a hostile peer can only
waste its connection.
Requests and answers carry an HMAC with the connection's key, so a flipped bit cannot request another prefix. Records have their
checksums, which detect faults, not forgeries: as with tensors between ranks, an attacker on the network could change their bytes.
"""

import hmac
import math
import os
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvcache.prefix import KEY_BYTES
from kvcache.tiers.records import RecordLayout

STALL_S = 1.0  # a peer that sends or takes nothing for this long is lost
MOST_TOKENS = 1 << 22  # of a request
# Numbers of records that are not blocks. They differ from those of blocks, and from each other, in several bytes.
STATE, _END = 0xFFFF_FFFF, 0xE5D4_C3B2
_MAGIC, _VERSION = b"WIDEEPPF", 2
_MEANING = struct.Struct("<32s32sQQ")  # model and layout, software, bytes of a block, bytes of a state
_HELLO = struct.Struct(f"<8sI{_MEANING.size}s32s")  # magic, version, meaning, nonce
_REPLY = struct.Struct("<B32s")  # a number of _REFUSALS, nonce
# root, generation, tokens, first block, end of the newest state, awaited blocks, whether addresses are wanted
_REQUEST = struct.Struct(f"<{KEY_BYTES}sQIIII?")
# First block, end, whether addresses follow instead of records, bytes of the agent's metadata, records. The metadata and the
# addresses follow.
_ANSWER = struct.Struct("<II?II")
_ADDRESS = struct.Struct("<IQQ")  # number and checksum as in a record's header; address
_RECORD = struct.Struct("<IQ")  # block of the prefix, STATE or END; checksum
HEADER_BYTES = _RECORD.size
_MAC_BYTES = 32
_MOST_METADATA = 1 << 16
_SLICE = 1 << 20  # bytes that are sent within one time-out
_ACCEPTED, _OTHER_VERSION, _OTHER_LAYOUT, _OTHER_SOFTWARE = range(4)
_REFUSALS = {
    _OTHER_VERSION: "it runs another version of WideEP",
    _OTHER_LAYOUT: "it has another model, checkpoint or cache layout",
    _OTHER_SOFTWARE: "it has other versions of software, or another processor",
}


class PeerProtocolError(ConnectionError):
    """The other end is not a peer of this service, or breaks the protocol."""


class PrefixRequest(NamedTuple):
    """A prefix to fetch."""

    root: bytes  # the key before its first block
    generation: int  # records of older generations must not be sent
    token_ids: "array[int]"  # whole blocks; uint32
    first_block: int  # the client has the blocks before this one
    newest_state: int  # number of blocks before the newest state that the client has; 0 if it has none
    num_awaited: int = 0  # the first blocks that the server's node has or is saving now
    wants_addresses: bool = False  # the client can read the server's memory


class RecordHeader(NamedTuple):
    """What precedes the bytes of a record."""

    number: int  # of the block in the prefix, or STATE
    checksum: int


class RecordAddress(NamedTuple):
    """A record that the client may read in the server's memory."""

    header: RecordHeader
    address: int


class Addresses(NamedTuple):
    """The records of an answer in the server's memory, in the order in which they would be sent."""

    metadata: bytes  # of the server's NIXL agent
    records: Sequence[RecordAddress]


class PrefixAnswer(NamedTuple):
    """What the server sends: a state after block `end` - 1 if the model keeps states, and blocks first_block to end - 1."""

    first_block: int
    end: int  # 0 if it has nothing to add
    addresses: Addresses | None = None  # instead of the records


END_OF_ANSWER = RecordHeader(_END, 0)


def meaning_of(blocks: RecordLayout, states: RecordLayout | None) -> bytes:
    """Return what two peers must have in common."""
    return _MEANING.pack(
        blocks.model, blocks.software, blocks.record_bytes, states.record_bytes if states else 0
    )


class Channel:
    """One end of a connection after the handshake. Every wait ends after `STALL_S` without progress, or at its limit.

    All methods raise OSError if the connection breaks or stalls, and PeerProtocolError if the other end breaks the protocol.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._socket, self._key = connection, key
        self._num_requests = 0

    @classmethod
    def connect(cls, address: str, secret: bytes, meaning: bytes, until_s: float) -> "Channel":
        """Connect to a peer's server at HOST:PORT. `until_s`: time.monotonic() at the latest."""
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_seconds_to(until_s))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _HELLO.pack(_MAGIC, _VERSION, meaning, os.urandom(32))
            connection.sendall(hello)
            reply = receive(connection, _REPLY.size, until_s)
            refusal, _ = _REPLY.unpack(reply)
            if refusal != _ACCEPTED:
                raise PeerProtocolError(_REFUSALS.get(refusal, "it refuses this node"))
            key = _key_of(secret, hello, reply)
            connection.sendall(_mac(key, b"client"))
            proof = receive(connection, _MAC_BYTES, until_s)
            if not hmac.compare_digest(proof, _mac(key, b"server")):
                raise PeerProtocolError("it does not belong to this service")
        except BaseException:
            connection.close()
            raise
        return cls(connection, key)

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, meaning: bytes, until_s: float) -> "Channel":
        """Greet a client, or refuse it. The caller closes the connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = receive(connection, _HELLO.size, until_s)
        magic, version, theirs, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise PeerProtocolError("it does not use this protocol")
        refusal = _OTHER_VERSION if version != _VERSION else _compare(meaning, theirs)
        reply = _REPLY.pack(refusal, os.urandom(32))
        connection.sendall(reply)
        if refusal != _ACCEPTED:
            raise PeerProtocolError(_REFUSALS[refusal])
        key = _key_of(secret, hello, reply)
        proof = receive(connection, _MAC_BYTES, until_s)
        if not hmac.compare_digest(proof, _mac(key, b"client")):
            raise PeerProtocolError("it does not belong to this service")
        connection.sendall(_mac(key, b"server"))
        return cls(connection, key)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def request(self, request: PrefixRequest, until_s: float) -> PrefixAnswer:
        """Send a request and return the answer's beginning. Unless it has addresses, records follow: `receive_header`."""
        self._num_requests += 1
        root, generation, token_ids, *numbers = request
        content = _REQUEST.pack(root, generation, len(token_ids), *numbers) + token_ids.tobytes()
        self._send(content + self._mac_of(b"request", content), until_s)
        head = receive(self._socket, _ANSWER.size, until_s)
        first_block, end, has_addresses, num_metadata, num_records = _ANSWER.unpack(head)
        if num_metadata > _MOST_METADATA or num_records > len(token_ids) + 1:
            raise PeerProtocolError("its answer is too long")
        listed = receive(self._socket, num_metadata + num_records * _ADDRESS.size, until_s)
        self._check(b"answer", head + listed, receive(self._socket, _MAC_BYTES, until_s))
        if not has_addresses:
            return PrefixAnswer(first_block, end)
        records = [
            RecordAddress(RecordHeader(number, checksum), address)
            for number, checksum, address in _ADDRESS.iter_unpack(listed[num_metadata:])
        ]
        return PrefixAnswer(first_block, end, Addresses(listed[:num_metadata], records))

    def receive_header(self, until_s: float) -> RecordHeader:
        """Return the header of the next record."""
        return RecordHeader(*_RECORD.unpack(receive(self._socket, _RECORD.size, until_s)))

    def receive_record(self, record: memoryview, until_s: float) -> None:
        """Receive the bytes of the record into `record`."""
        receive_into(self._socket, record, until_s)

    def next_request(self, *, idle_s: float) -> PrefixRequest:
        """Wait up to `idle_s` for a client's next request."""
        self._socket.settimeout(idle_s)
        first = self._socket.recv(1)
        if not first:
            raise ConnectionResetError("the client has closed its connection")
        until_s = time.monotonic() + STALL_S
        head = first + receive(self._socket, _REQUEST.size - 1, until_s)
        root, generation, num_tokens, *numbers = _REQUEST.unpack(head)
        if num_tokens > MOST_TOKENS:
            raise PeerProtocolError(
                f"it requests a prefix of {num_tokens} tokens; the limit is {MOST_TOKENS}"
            )
        token_ids = array("I")
        content = receive(self._socket, num_tokens * token_ids.itemsize, until_s)
        self._num_requests += 1
        self._check(b"request", head + content, receive(self._socket, _MAC_BYTES, until_s))
        token_ids.frombytes(content)
        return PrefixRequest(root, generation, token_ids, *numbers)

    def answer(self, answer: PrefixAnswer) -> None:
        """Send the beginning of an answer."""
        first_block, end, addresses = answer
        metadata, records = addresses or Addresses(b"", ())
        content = (
            _ANSWER.pack(first_block, end, addresses is not None, len(metadata), len(records)) + metadata
        )
        content += b"".join(_ADDRESS.pack(*header, address) for header, address in records)
        self._send(content + self._mac_of(b"answer", content))

    def send_record(self, header: RecordHeader, record: memoryview) -> None:
        """Send a record: its bytes, with room for the header in front (`HEADER_BYTES`), so that they are not copied."""
        _RECORD.pack_into(record, 0, *header)
        self._send(record)

    def send_end(self) -> None:
        """End an answer, perhaps before all of its records: the others are gone."""
        self._send(_RECORD.pack(*END_OF_ANSWER))

    def _send(self, content: bytes | memoryview, until_s: float = math.inf) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _SLICE):
            self._socket.settimeout(_seconds_to(until_s))
            self._socket.sendall(view[start : start + _SLICE])

    def _mac_of(self, kind: bytes, content: bytes) -> bytes:
        return _mac(self._key, kind + self._num_requests.to_bytes(8, "little") + content)

    def _check(self, kind: bytes, content: bytes, given: bytes) -> None:
        if not hmac.compare_digest(given, self._mac_of(kind, content)):
            raise PeerProtocolError("a message was damaged on its way")


def receive(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Receive exactly `num_bytes`."""
    content = bytearray(num_bytes)
    receive_into(connection, memoryview(content), until_s)
    return bytes(content)


def receive_into(connection: socket.socket, memory: memoryview, until_s: float) -> None:
    """Fill `memory`.

    Raises:
        OSError: The connection ends or stalls, or the time is up.
    """
    while memory:
        connection.settimeout(_seconds_to(until_s))
        count = connection.recv_into(memory)
        if not count:
            raise ConnectionResetError("the peer has closed the connection")
        memory = memory[count:]


def _seconds_to(until_s: float) -> float:
    """Return the time-out of a call that must end at `until_s`."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is up")
    return min(left_s, STALL_S)


def _compare(ours: bytes, theirs: bytes) -> int:
    model, software, *sizes = _MEANING.unpack(ours)
    their_model, their_software, *their_sizes = _MEANING.unpack(theirs)
    if (model, sizes) != (their_model, their_sizes):
        return _OTHER_LAYOUT
    return _ACCEPTED if software == their_software else _OTHER_SOFTWARE


def _key_of(secret: bytes, hello: bytes, reply: bytes) -> bytes:
    """Return the connection's key. Both messages have fixed sizes."""
    return _mac(secret, b"wideep prefixes" + hello + reply)


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
