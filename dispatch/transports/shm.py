"""Shared memory between the ranks of one host: senders write into the receiver's window, flags say when.

Every ordered pair has two regions, used in turn by the parity of a running number. A message that fits its region is
written there by the sender's kernel and read there by the receiver's: no copy in between. A larger one is staged in
private memory on both sides and goes through the regions in rounds, each a full meeting of all ranks; the number of
rounds is agreed in the first (the largest that any rank needs, made odd so that the next exchange meets the other
parity than this one's windows lie in).

Why two regions are enough: `signals` explains it for flags, and a rank posts a number only when it is done with all
windows of the number before.
"""

import logging

import numpy as np
import torch.distributed as dist

from dispatch.errors import DispatchError, RanksDisagree
from dispatch.native import compile_all, compiled, copy, inlined, words
from dispatch.transport import RankTable
from dispatch.transports import signals
from dispatch.transports.segment import SharedSegment

MAX_REGION_BYTES = 4 << 20
MIN_REGION_BYTES = 64 << 10
SEGMENT_BYTES = 64 << 20  # all regions together stay within it, down to MIN_REGION_BYTES each
_ALIGNMENT = 64
_SIZE, _ROUNDS = 0, 1  # words of a flag's payload

log = logging.getLogger(__name__)


class ShmTransport:
    """See `Transport`. Opening is collective over `group`, which must be of one host."""

    name = "shm"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float,
        epoch: int,
        reason: str,
        region_bytes: int | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.epoch, self.reason = epoch, reason
        pairs = self.world_size * (self.world_size - 1)
        self._region_bytes = region_bytes or fitting_region_bytes(self.world_size)
        compile_all(*KERNELS)
        self._segment = SharedSegment(group, 2 * pairs * self._region_bytes, timeout_s=timeout_s)
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self._found = RankTable(self.world_size)
        self._outgoing, self._incoming = _Staging(), _Staging()
        self._place = (
            self._segment.base,
            self._segment.start,
            self.world_size,
            self.rank,
            self._region_bytes,
        )
        self._number = 0  # of the last flag posted
        self._is_open = True

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Transport`."""
        if not self._is_open:
            raise DispatchError("the transport is closed")
        sizes = send_bytes.address
        staged = place_windows(
            *self._place, self._number + 1, sizes, self._outgoing.address, self.send_addresses.address
        )
        if staged > self._outgoing.capacity:
            self._outgoing.grow(staged)
            place_windows(
                *self._place, self._number + 1, sizes, self._outgoing.address, self.send_addresses.address
            )

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Transport`."""
        sizes = send_bytes.address
        expected = 0 if recv_bytes is None else recv_bytes.address
        self._number += 1
        post_round(*self._place, self._number, 0, sizes, self.send_addresses.address)
        self._segment.wait(self._number, "an exchange")
        rounds = find_windows(
            *self._place, self._number, sizes, expected, self._found.address, self.recv_addresses.address
        )
        if rounds < 0:
            self._disagree(-rounds - 1, recv_bytes)
        if rounds > 1:
            self._exchange_rounds(sizes, rounds)

    def close(self) -> None:
        """See `Transport`."""
        if self._is_open:
            self._is_open = False
            self._segment.close()

    def _exchange_rounds(self, sizes: int, rounds: int) -> None:
        """Take the chunks of large messages out of their regions, round by round."""
        self._incoming.grow(stage_windows(*self._place, self._found.address, 0, self.recv_addresses.address))
        stage_windows(*self._place, self._found.address, self._incoming.address, self.recv_addresses.address)
        take_chunks(*self._place, self._number, 0, self._found.address, self.recv_addresses.address)
        for index in range(1, rounds):
            self._number += 1
            post_round(*self._place, self._number, index, sizes, self.send_addresses.address)
            self._segment.wait(self._number, f"round {index + 1} of {rounds} of an exchange")
            take_chunks(*self._place, self._number, index, self._found.address, self.recv_addresses.address)

    def _disagree(self, peer: int, expected: RankTable | None) -> None:
        assert expected is not None, "sizes were checked against none"
        found = int(self._found.values[peer])
        raise RanksDisagree(
            f"rank {peer} sent {found} bytes where rank {self.rank} expects {int(expected.values[peer])}"
        )


class _Staging:
    """Private memory that only grows, at an address aligned for kernels."""

    def __init__(self) -> None:
        self.capacity = 0
        self.address = 0

    def grow(self, num_bytes: int) -> None:
        if num_bytes > self.capacity:
            self.capacity = num_bytes * 5 // 4
            self._memory = np.empty(self.capacity + _ALIGNMENT, dtype=np.uint8)
            self.address = (self._memory.ctypes.data + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def fitting_region_bytes(world_size: int) -> int:
    """Return the largest region with which all of them stay within SEGMENT_BYTES, within the limits."""
    regions = max(1, 2 * world_size * (world_size - 1))
    share = SEGMENT_BYTES // regions // _ALIGNMENT * _ALIGNMENT
    return max(MIN_REGION_BYTES, min(MAX_REGION_BYTES, share))


@inlined
def _region(start: int, R: int, region_bytes: int, source: int, to: int, number: int) -> int:
    pair = source * (R - 1) + (to if to < source else to - 1)
    return start + (2 * pair + (number & 1)) * region_bytes


@inlined
def _aligned(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@compiled
def place_windows(
    base: int,
    start: int,
    R: int,
    rank: int,
    region_bytes: int,
    number: int,
    send_bytes: int,
    staging: int,
    table: int,
) -> int:
    """Set where to write each message: its region, or staging if it is larger. Returns the staging bytes needed."""
    sizes, addresses = words(send_bytes, R), words(table, R)
    staged = 0
    for to in range(R):
        if to == rank or sizes[to] <= region_bytes:
            addresses[to] = 0 if to == rank else _region(start, R, region_bytes, rank, to, number)
        else:
            addresses[to] = staging + staged
            staged += _aligned(sizes[to])
    return staged


@compiled
def post_round(
    base: int,
    start: int,
    R: int,
    rank: int,
    region_bytes: int,
    number: int,
    index: int,
    send_bytes: int,
    table: int,
) -> None:
    """Copy chunk `index` of each staged message to its region, note sizes and rounds, and post."""
    sizes, addresses = words(send_bytes, R), words(table, R)
    rounds = 1
    for to in range(R):
        rounds = max(rounds, (sizes[to] + region_bytes - 1) // region_bytes)
    for to in range(R):
        if to == rank:
            continue
        first = index * region_bytes
        if sizes[to] > region_bytes and first < sizes[to]:
            region = _region(start, R, region_bytes, rank, to, number)
            copy(region, addresses[to] + first, min(region_bytes, sizes[to] - first))
        payload = words(signals.payload(base, R, to, rank, number), 2)
        payload[_SIZE], payload[_ROUNDS] = sizes[to], rounds | 1
    signals.post(base, R, rank, number)


@compiled
def find_windows(
    base: int, start: int, R: int, rank: int, region_bytes: int, number: int,
    send_bytes: int, expected: int, found: int, table: int,
) -> int:  # fmt: skip
    """Set where each message lies and its size. Returns the rounds that all need, or -1 - a peer whose size is
    not the expected one (`expected` 0: none is)."""
    sizes, sent, addresses = words(found, R), words(send_bytes, R), words(table, R)
    rounds = 1
    for source in range(R):
        if source == rank:
            for to in range(R):
                rounds = max(rounds, ((sent[to] + region_bytes - 1) // region_bytes) | 1)
            continue
        payload = words(signals.payload(base, R, rank, source, number), 2)
        sizes[source] = payload[_SIZE]
        rounds = max(rounds, payload[_ROUNDS])
        addresses[source] = _region(start, R, region_bytes, source, rank, number)
        if expected != 0 and words(expected, R)[source] != sizes[source]:
            return -1 - source
    return rounds


@compiled
def stage_windows(
    base: int, start: int, R: int, rank: int, region_bytes: int, found: int, staging: int, table: int
) -> int:
    """Point the large messages at private memory. Returns the bytes that takes; `staging` 0 only counts."""
    sizes, addresses = words(found, R), words(table, R)
    staged = 0
    for source in range(R):
        if source != rank and sizes[source] > region_bytes:
            if staging != 0:
                addresses[source] = staging + staged
            staged += _aligned(sizes[source])
    return staged


@compiled
def take_chunks(
    base: int,
    start: int,
    R: int,
    rank: int,
    region_bytes: int,
    number: int,
    index: int,
    found: int,
    table: int,
) -> None:
    """Copy chunk `index` of each large message out of its region."""
    sizes, addresses = words(found, R), words(table, R)
    first = index * region_bytes
    for source in range(R):
        if source != rank and sizes[source] > region_bytes and first < sizes[source]:
            region = _region(start, R, region_bytes, source, rank, number)
            copy(addresses[source] + first, region, min(region_bytes, sizes[source] - first))


KERNELS = (place_windows, post_round, find_windows, stage_windows, take_chunks)
