"""One thread per peer: fetch prefixes over one connection that is kept, or with NIXL from the peer's memory.

A fetch must be predicted to be faster than computing. The prediction uses moving averages: of a peer's rate and delay, and of the
time that a prompt's token adds to this rank's steps. What is not measured yet counts as free. Idea: Mooncake (arXiv 2407.00079),
which weighs the transfer of a prefix against its computation.
"""

import contextlib
import logging
from array import array
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from kvcache.prefix import PrefixIndex
from kvcache.tiers.frames import (
    END_OF_ANSWER,
    STALL_S,
    STATE,
    Addresses,
    Channel,
    PeerProtocolError,
    PrefixAnswer,
    PrefixRequest,
    RecordHeader,
    meaning_of,
)
from kvcache.tiers.jobs import MOST_LOAD_S, FetchJob
from kvcache.tiers.peer_server import KeySecret
from kvcache.tiers.records import RecordLayout
from kvcache.tiers.remote_memory import NixlAgent, RemoteMemoryError, RemoteReader, RemoteRecord
from kvcache.tiers.tiers import Tiers
from kvcache.unit import sum_of_bytes

log = logging.getLogger(__name__)
AVOID_S = 10.0  # after a failure, a peer is not used for this time
MEASURE_AGAIN_S = 60.0  # an older rate counts as unknown, so that a bad one does not last
_WEIGHT = 0.3  # of the newest measurement
# A pause of this thread can make a short transfer look like a slow link. So a rate predicts transfers of at most 8 times as many
# bytes as it was measured with. A transfer of 0.5 s is long enough to predict any other.
_MOST_TIMES = 8
_SURE_S = 0.5


class TransferPace:
    """The measured speed of one peer. Times are in seconds, of any clock."""

    def __init__(self) -> None:
        self._rate = self._delay_s = 0.0  # bytes per second; from a request to its answer
        self._most_bytes, self._longest_s = 0, 0.0  # of the transfers behind the rate
        self._measured_s = float("-inf")
        self._avoided_until_s = float("-inf")

    def pays(self, num_bytes: int, num_tokens: int, token_s: float, *, left_s: float, now_s: float) -> bool:
        """Whether a transfer ends in time and is predicted to be faster than computing the tokens.

        Args:
            token_s: Time to compute a token. 0 if it is unknown.
            left_s: Most time for the transfer.
        """
        if now_s < self._avoided_until_s or left_s <= 0:
            return False
        is_sure = num_bytes <= _MOST_TIMES * self._most_bytes or self._longest_s >= _SURE_S
        if self._is_unknown(now_s) or not is_sure:
            return True
        seconds = self._delay_s + num_bytes / self._rate
        return seconds < left_s and (not token_s or seconds < num_tokens * token_s)

    def note(self, num_bytes: int, seconds: float, delay_s: float, *, now_s: float) -> None:
        """Learn from a transfer. `delay_s`: time from the request to its answer, not part of `seconds`."""
        if not num_bytes:
            return
        rate = num_bytes / max(seconds, 1e-6)
        weight = _WEIGHT
        if self._is_unknown(now_s):
            weight, self._most_bytes, self._longest_s = 1.0, 0, 0.0
        self._most_bytes = max(self._most_bytes, num_bytes)
        self._longest_s = max(self._longest_s, seconds)
        self._rate += weight * (rate - self._rate)
        self._delay_s += weight * (delay_s - self._delay_s)
        self._measured_s = now_s

    def avoid(self, now_s: float) -> None:
        """Record a failure."""
        self._avoided_until_s = now_s + AVOID_S

    def _is_unknown(self, now_s: float) -> bool:
        return not self._rate or now_s - self._measured_s > MEASURE_AGAIN_S


class PeerSide(NamedTuple):
    """This end of all connections."""

    tiers: Tiers
    secret: bytes  # known to processes of this service only
    blocks: RecordLayout
    states: RecordLayout | None
    block_tokens: int
    clock: Callable[[], float]
    agent: NixlAgent | None  # None: peers send their records

    @property
    def largest_record(self) -> int:
        """Bytes of the largest record."""
        return max(self.blocks.record_bytes, self.states.record_bytes if self.states else 0)

    def record_bytes(self, number: int) -> int:
        """Bytes of a record with the number of a block, or STATE."""
        layout = self.states if number == STATE and self.states else self.blocks
        return layout.record_bytes

    @property
    def meaning(self) -> bytes:
        """What this end's records mean."""
        return meaning_of(self.blocks, self.states)

    def key_secret(self) -> KeySecret:
        """Return the present key of this node's hash."""
        generation = self.tiers.generation
        return KeySecret(generation, self.tiers.secret_of(generation))

    def note_sent(self, num_bytes: int) -> None:
        """Count bytes that were sent to other nodes."""
        self.tiers.note(peer_serve_bytes=num_bytes)


class _ReplacedError(Exception):
    """A record changed while it was read."""


class _Wanted(NamedTuple):
    """What a node lacks of a prefix."""

    keys: list[bytes]  # of all blocks
    num_blocks: int  # the first ones that it has
    newest_state: int  # number of blocks before the newest state that it has
    num_tokens: int  # that it would compute
    num_bytes: int  # that would be sent


class PeerLink:
    """A thread that fetches from one peer, over one connection that is kept."""

    def __init__(self, side: PeerSide, address: str) -> None:
        self._side, self._tiers, self._clock, self._address = side, side.tiers, side.clock, address
        self._pace = TransferPace()
        self._channel: Channel | None = None
        self._can_read = side.agent is not None
        self._reader: RemoteReader | None = None
        self._last_problem = ""
        self._is_closing = False
        self._jobs: SimpleQueue[tuple[FetchJob, float] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="kv-fetch", daemon=True)
        self._thread.start()

    def add(self, fetch: FetchJob) -> None:
        """Do a job after those before it."""
        self._jobs.put((fetch, self._clock() + MOST_LOAD_S))

    def close(self) -> None:
        """End the thread soon."""
        self._is_closing = True
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            fetch, until_s = job
            begun_s = self._clock()
            try:
                self._fetch(fetch, until_s)
            except Exception:  # the thread goes on: a job that never ended would keep its request waiting
                log.exception("A prefix was not fetched from %s. It is computed", self._address)
                self._disconnect()
            self._tiers.note(peer_fetch_s=self._clock() - begun_s)
            self._tiers.end_fetch(fetch)
        self._disconnect()
        if self._reader is not None:
            self._reader.close()

    def _fetch(self, fetch: FetchJob, until_s: float) -> None:
        wanted = self._wanted(fetch)
        if fetch.is_unwanted or self._is_closing or not wanted.num_tokens:
            return
        now_s, token_s = self._clock(), self._tiers.prompt_token_s
        pays = self._pace.pays(
            wanted.num_bytes, wanted.num_tokens, token_s, left_s=until_s - now_s, now_s=now_s
        )
        if not pays:
            self._tiers.note(num_fetches_declined=1)
            return
        try:
            has_records = self._copy(fetch, wanted, until_s)
        except OSError as error:
            self._disconnect()
            self._pace.avoid(self._clock())
            self._tiers.note(num_fetches_failed=1)
            self._warn(error)
        else:
            self._last_problem = ""
            self._tiers.note(**{"num_fetches_whole" if has_records else "num_fetches_empty": 1})

    def _warn(self, error: OSError) -> None:
        """Log a failure, unless the one before was the same."""
        if str(error) != self._last_problem and not self._is_closing:
            self._last_problem = str(error)
            log.warning("Fetching a prefix from %s failed: %s. It is computed", self._address, error)

    def _wanted(self, fetch: FetchJob) -> _Wanted:
        """Find out what this node lacks."""
        blocks, states, size = self._side.blocks, self._side.states, self._side.block_tokens
        keys = PrefixIndex(size, fetch.secret).keys_of(fetch.token_ids, fetch.root)
        num_blocks = min(fetch.num_cached, len(keys))
        while num_blocks < len(keys) and self._tiers.has(keys[num_blocks]):
            num_blocks += 1
        num_bytes = (len(keys) - num_blocks) * blocks.record_bytes
        if states is None:
            return _Wanted(keys, num_blocks, 0, (len(keys) - num_blocks) * size, num_bytes)
        ends = range(num_blocks, fetch.newest_state, -1)
        has_state = (end for end in ends if self._tiers.has(keys[end - 1], is_state=True))
        newest = next(has_state, fetch.newest_state)
        num_bytes += states.record_bytes
        return _Wanted(keys, num_blocks, newest, (len(keys) - newest) * size, num_bytes)

    def _copy(self, fetch: FetchJob, wanted: _Wanted, until_s: float) -> bool:
        """Keep what the peer has of a prefix, read with NIXL if both ends have it. Returns whether there was anything.

        What cannot be read is sent: the peer finds out whether a record was replaced or is damaged.

        Raises:
            OSError: The peer cannot be reached, is too slow, or sent something wrong.
        """
        if self._can_read:
            try:
                return self._keep(fetch, wanted, until_s, wants_addresses=True)
            except RemoteMemoryError as error:
                self._stop_reading(error)
            except _ReplacedError:
                pass
            wanted = self._wanted(fetch)
        return self._keep(fetch, wanted, until_s, wants_addresses=False) or bool(fetch.keys)

    def _keep(self, fetch: FetchJob, wanted: _Wanted, until_s: float, *, wants_addresses: bool) -> bool:
        """Request records and keep them. Returns whether there were any."""
        request = PrefixRequest(
            fetch.root, fetch.generation, array("I", fetch.token_ids),
            wanted.num_blocks, wanted.newest_state, fetch.num_awaited, wants_addresses,
        )  # fmt: skip
        begun_s = self._clock()
        channel, answer = self._request(request, until_s)
        answered_s, num_bytes = self._clock(), 0
        connects = answer.addresses is not None and self._reader is None  # that takes longer than most reads
        try:
            with contextlib.closing(self._records(channel, wanted, answer, until_s)) as records:
                for key, record, checksum, is_state in records:
                    num_bytes += len(record)
                    if self._tiers.keep(key, record, checksum, is_state=is_state) and not is_state:
                        fetch.keys.add(key)
                    if fetch.is_unwanted or self._is_closing:
                        self._disconnect()  # otherwise the peer sends the rest
                        break
        finally:
            now_s = self._clock()
            if not connects:
                self._pace.note(num_bytes, now_s - answered_s, answered_s - begun_s, now_s=now_s)
            self._tiers.note(peer_fetch_bytes=num_bytes, peer_read_bytes=num_bytes if answer.addresses else 0)
        return num_bytes > 0

    def _request(self, request: PrefixRequest, until_s: float) -> tuple[Channel, PrefixAnswer]:
        """Send a request, over a new connection if the peer has closed the last one."""
        if self._channel is not None:
            try:
                return self._channel, self._channel.request(request, until_s)
            except ConnectionError:
                self._disconnect()
        side = self._side
        self._channel = Channel.connect(self._address, side.secret, side.meaning, until_s)
        return self._channel, self._channel.request(request, until_s)

    def _records(
        self, channel: Channel, wanted: _Wanted, answer: PrefixAnswer, until_s: float
    ) -> Generator[tuple[bytes, memoryview, int, bool]]:
        """Get the records of an answer and verify them.

        Yields:
            Each record's key, its bytes, valid until the next one, their checksum, and whether it is a state.
        """
        first, end, addresses = answer
        if not first <= end <= len(wanted.keys) or (end and first != min(end, wanted.num_blocks)):
            raise PeerProtocolError("it sends blocks that were not requested")
        numbers = [STATE] if self._side.states is not None and end else []
        numbers += range(first, end)
        if addresses is None:
            arrived = self._receive(channel, numbers, until_s)
        else:
            arrived = self._read(addresses, numbers, until_s)
        with contextlib.closing(arrived):
            for header, record in arrived:
                if sum_of_bytes(record) != header.checksum:
                    if addresses is not None:
                        raise _ReplacedError
                    self._tiers.note(num_faults=1)
                    raise PeerProtocolError("a record was damaged on its way")
                is_state = header.number == STATE
                yield wanted.keys[end - 1 if is_state else header.number], record, header.checksum, is_state

    def _receive(
        self, channel: Channel, numbers: Sequence[int], until_s: float
    ) -> Generator[tuple[RecordHeader, memoryview]]:
        """Receive the first of these records."""
        memory = memoryview(bytearray(self._side.largest_record if numbers else 0))
        for number in [*numbers, None]:
            header = channel.receive_header(until_s)
            if header == END_OF_ANSWER:
                return
            if header.number != number:
                raise PeerProtocolError("it sends records in another order")
            record = memory[: self._side.record_bytes(header.number)]
            channel.receive_record(record, until_s)
            yield header, record

    def _read(
        self, addresses: Addresses, numbers: Sequence[int], until_s: float
    ) -> Generator[tuple[RecordHeader, memoryview]]:
        """Read the first of these records in the peer's memory."""
        headers = [header for header, _ in addresses.records]
        if [header.number for header in headers] != numbers[: len(headers)]:
            raise PeerProtocolError("it lists records in another order")
        if not headers:
            return
        if self._reader is None:
            assert self._side.agent is not None
            self._reader = RemoteReader(self._side.agent, self._side.largest_record)
        records = [
            RemoteRecord(address, self._side.record_bytes(header.number))
            for header, address in addresses.records
        ]
        with contextlib.closing(
            self._reader.read(addresses.metadata, records, stall_s=STALL_S, until_s=until_s)
        ) as read:
            yield from zip(headers, read, strict=True)

    def _stop_reading(self, error: RemoteMemoryError) -> None:
        """Let this peer send its records from now on."""
        log.warning("%s: %s. It sends its records from now on", self._address, error)
        self._can_read = False
        if self._reader is not None:
            self._reader.give_up()
            self._reader = None

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
