"""torch.distributed with gloo: works wherever ranks can connect.

One all-to-all per exchange. One send and receive per peer would say who failed, and is faster on an idle machine (2
ranks, 4 KB: 0.23 ms against 0.31), but costs a whole scheduler tick (4 ms) where ranks share their cores with
anything else; so who failed is asked for afterwards.

The receiver of a dispatch does not know its size, and asking first would cost a second round trip. So every pair's
part of the all-to-all has a length that both sides know, taken from the size of the pair's last such message; only
what does not fit follows, between the two.
After a time-out gloo closes all connections of a rank: the group is of no more use then.
"""

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, RanksDisagree
from dispatch.transport import RankTable

_ALIGNMENT = 64
_PREFIX_BYTES = 64  # size, number and epoch in front of each message, and room to keep the rest aligned
_GRAIN_BYTES = 1024
_TAG_REST, _TAG_PROBE = 0x57E9, 0x57EA
_NEARLY = (
    0.9  # a connection that closes when the time-out is nearly over was closed by another rank's time-out
)


class GlooTransport:
    """See `Transport`. `group` is a gloo group that runs nothing else meanwhile."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float, epoch: int, reason: str) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.epoch, self.reason = epoch, reason
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._options = dist.AllToAllOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._number = 0
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self._peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self._first_sent = [
            _first_bytes(0)
        ] * self.world_size  # lengths of the next parts whose size is not known
        self._first_received = [_first_bytes(0)] * self.world_size
        self._outgoing, self._incoming = _AlignedBytes(), _AlignedBytes()
        self._messages = {peer: _AlignedBytes() for peer in self._peers}  # as kernels write them
        self._large_received = {peer: _AlignedBytes() for peer in self._peers}  # those longer than their part

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Transport`."""
        if self._group is None:
            raise DispatchError("the transport is closed")
        self._sizes = [int(size) for size in send_bytes.values]
        for peer, message in self._messages.items():
            message.reserve(_PREFIX_BYTES + self._sizes[peer])
            self.send_addresses.values[peer] = message.address + _PREFIX_BYTES

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Transport`."""
        self._number += 1
        sent, received = self._part_lengths(recv_bytes)
        self._outgoing.reserve(sum(sent))
        self._incoming.reserve(sum(received))
        self._fill_parts(sent)
        self._all_to_all(sent, received)
        rests = self._take_parts(received, recv_bytes)
        for peer in self._peers:
            if self._sizes[peer] + _PREFIX_BYTES > sent[peer]:
                rest = self._messages[peer].memory[sent[peer] : _PREFIX_BYTES + self._sizes[peer]]
                rests.append((peer, self._start("send", rest, peer)))
        for peer, work in rests:
            self._finish(peer, work)

    def close(self) -> None:
        """See `Transport`. The group stays its owner's to destroy."""
        self._group = None

    def _part_lengths(self, recv_bytes: RankTable | None) -> tuple[list[int], list[int]]:
        """Return each peer's part both ways, prefix included; nothing for this rank."""
        if recv_bytes is None:
            sent, received = list(self._first_sent), list(self._first_received)
        else:
            sent = [_aligned(_PREFIX_BYTES + size) for size in self._sizes]
            received = [_aligned(_PREFIX_BYTES + int(size)) for size in recv_bytes.values]
        sent[self.rank] = received[self.rank] = 0
        return sent, received

    def _fill_parts(self, sent: list[int]) -> None:
        at = 0
        for peer in self._peers:
            message = self._messages[peer]
            message.words[:3] = self._sizes[peer], self._number, self.epoch
            length = min(sent[peer], _PREFIX_BYTES + self._sizes[peer])
            self._outgoing.bytes[at : at + length] = message.bytes[:length]
            at += sent[peer]

    def _take_parts(self, received: list[int], recv_bytes: RankTable | None) -> list[tuple[int, Any]]:
        """Find each message, and start to receive what did not fit."""
        at, rests = 0, []
        for peer in self._peers:
            size = self._read_prefix(peer, self._incoming.words[at // 8 :], recv_bytes)
            if _PREFIX_BYTES + size <= received[peer]:
                self.recv_addresses.values[peer] = self._incoming.address + at + _PREFIX_BYTES
            else:
                large, length = self._large_received[peer], received[peer]
                large.reserve(_PREFIX_BYTES + size)
                large.bytes[:length] = self._incoming.bytes[at : at + length]
                self.recv_addresses.values[peer] = large.address + _PREFIX_BYTES
                rest = large.memory[length : _PREFIX_BYTES + size]
                rests.append((peer, self._start("recv", rest, peer)))
            if recv_bytes is None:
                self._first_received[peer] = _first_bytes(size)
                self._first_sent[peer] = _first_bytes(self._sizes[peer])
            at += received[peer]
        return rests

    def _read_prefix(self, peer: int, words: Any, recv_bytes: RankTable | None) -> int:
        size, number, epoch = (int(word) for word in words[:3])
        if (number, epoch) != (self._number, self.epoch):
            here = f"rank {self.rank} at {self._number} of {self.epoch}"
            raise RanksDisagree(f"rank {peer} is at exchange {number} of epoch {epoch}, {here}")
        if recv_bytes is not None and size != recv_bytes.values[peer]:
            expected = int(recv_bytes.values[peer])
            raise RanksDisagree(f"rank {peer} sent {size} bytes where rank {self.rank} expects {expected}")
        return size

    def _all_to_all(self, sent: list[int], received: list[int]) -> None:
        assert self._group is not None, "open_windows comes first"
        outgoing, incoming = self._outgoing.memory[: sum(sent)], self._incoming.memory[: sum(received)]
        begin = time.monotonic()
        try:
            self._group.alltoall_base(incoming, outgoing, received, sent, self._options).wait()
        except RuntimeError as error:
            text = _first_line(error)
            if _is_timeout(text) or time.monotonic() - begin > _NEARLY * self._timeout_s:
                only = self._peers[0] if self.world_size == 2 else None
                raise DispatchTimeout(only, self._timeout_s, "an exchange over gloo") from error
            raise PeerLost(self._find_lost(), text) from error

    def _find_lost(self) -> int:
        """Ask the connections: gloo refuses a receive from a peer whose connection is closed. Local."""
        self._probes = []  # what the others accept stays pending, for as long as this object lives
        for peer in self._peers:
            try:
                probe = torch.empty(1, dtype=torch.uint8)
                self._probes.append((probe, self._group.recv([probe], peer, _TAG_PROBE)))  # type: ignore[union-attr]
            except RuntimeError:
                return peer
        return self._peers[0]

    def _start(self, verb: str, memory: torch.Tensor, peer: int) -> Any:
        try:
            return getattr(self._group, verb)([memory], peer, _TAG_REST)
        except RuntimeError as error:
            raise PeerLost(peer, _first_line(error)) from error

    def _finish(self, peer: int, work: Any) -> None:
        try:
            work.wait(self._options.timeout)
        except RuntimeError as error:
            if _is_timeout(_first_line(error)):
                raise DispatchTimeout(peer, self._timeout_s, "an exchange over gloo") from error
            raise PeerLost(peer, _first_line(error)) from error


class _AlignedBytes:
    """Private memory that only grows, 64-byte aligned, seen as a tensor, as bytes and as words."""

    def __init__(self) -> None:
        self._capacity = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room; contents are undefined when it grew."""
        if num_bytes > self._capacity:
            self._capacity = _aligned(num_bytes * 5 // 4)
            store = np.empty(self._capacity + _ALIGNMENT, dtype=np.uint8)
            skip = -store.ctypes.data % _ALIGNMENT
            self.bytes: Any = store[skip : skip + self._capacity]
            self.words: Any = self.bytes.view(np.int64)
            self.memory = torch.from_numpy(self.bytes)
            self.address: int = self.bytes.ctypes.data


def _aligned(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _first_bytes(last_size: int) -> int:
    """Choose the length of a pair's next part from its last size; sender and receiver choose alike."""
    return (_PREFIX_BYTES + last_size + last_size // 4 + _GRAIN_BYTES) // _GRAIN_BYTES * _GRAIN_BYTES


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n")[0]


def _is_timeout(text: str) -> bool:
    return "imed out" in text or "imeout" in text
