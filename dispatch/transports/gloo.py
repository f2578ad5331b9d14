"""torch.distributed with gloo: works wherever ranks can connect.

One send and one receive per peer, not `all_to_all_single`: that is faster for small messages (2 ranks, 4 KB: 0.23 ms
against 0.31) and an error names the peer. The receiver of a dispatch does not know its size, and asking first would
cost a second round trip; so the first transfer of a pair has a length that both sides know, taken from the size of
the pair's last such message, and only what does not fit follows in a second one.

After a time-out gloo closes all of this rank's connections: the group is of no more use then.
"""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, RanksDisagree
from dispatch.transport import RankTable

_PREFIX_BYTES = 64  # size, number and epoch in front of each message, and room to keep the rest aligned
_GRAIN_BYTES = 4096
_TAG = 0x57E9  # of all our messages: gloo keeps those of a pair in order


class GlooTransport:
    """See `Transport`. `group` is a gloo group that nobody else uses for send and receive."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float, epoch: int, reason: str) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.epoch, self.reason = epoch, reason
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._patience = timedelta(seconds=timeout_s)
        self._number = 0
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self._peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self._outgoing = {peer: _Message() for peer in self._peers}
        self._incoming = {peer: _Message() for peer in self._peers}

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Transport`."""
        for peer, message in self._outgoing.items():
            message.reserve(max(int(send_bytes.values[peer]), message.first_bytes))
            self.send_addresses.values[peer] = message.body_address

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Transport`."""
        if self._group is None:
            raise DispatchError("the transport is closed")
        self._number += 1
        works = [(peer, self._start_receive(peer, recv_bytes)) for peer in self._peers]
        sends = [
            (peer, self._start_send(peer, int(send_bytes.values[peer]), recv_bytes is not None))
            for peer in self._peers
        ]
        rests = []
        for peer, work in works:
            self._finish(peer, work)
            rests += self._check_prefix(peer, recv_bytes)
        for peer, work in rests:
            self._finish(peer, work)
        for peer, started in sends:
            for work in started:
                self._finish(peer, work)
        for peer in self._peers:
            self.recv_addresses.values[peer] = self._incoming[peer].body_address

    def close(self) -> None:
        """See `Transport`. The group stays its owner's to destroy."""
        self._group = None

    def _start_receive(self, peer: int, recv_bytes: RankTable | None) -> Any:
        message = self._incoming[peer]
        first = message.first_bytes if recv_bytes is None else int(recv_bytes.values[peer])
        message.reserve(first)
        return self._call("recv", message.memory[: _PREFIX_BYTES + first], peer)

    def _start_send(self, peer: int, size: int, is_known: bool) -> list[Any]:
        message = self._outgoing[peer]
        message.prefix[:3] = size, self._number, self.epoch
        first = size if is_known else message.first_bytes
        works = [self._call("send", message.memory[: _PREFIX_BYTES + first], peer)]
        if size > first:
            works.append(
                self._call("send", message.memory[_PREFIX_BYTES + first : _PREFIX_BYTES + size], peer)
            )
        if not is_known:
            message.expect_again(size)
        return works

    def _check_prefix(self, peer: int, recv_bytes: RankTable | None) -> list[tuple[int, Any]]:
        """Check that the message is of this exchange; start to receive what did not fit."""
        message = self._incoming[peer]
        size, number, epoch = (int(word) for word in message.prefix[:3])
        if (number, epoch) != (self._number, self.epoch):
            raise RanksDisagree(
                f"rank {peer} is at exchange {number} of epoch {epoch}, rank {self.rank} at {self._number} "
                f"of {self.epoch}"
            )
        if recv_bytes is not None:
            if size != recv_bytes.values[peer]:
                raise RanksDisagree(
                    f"rank {peer} sent {size} bytes where {int(recv_bytes.values[peer])} are expected"
                )
            return []
        first = message.first_bytes
        message.expect_again(size)
        if size <= first:
            return []
        message.reserve(size, keep=first)
        return [
            (peer, self._call("recv", message.memory[_PREFIX_BYTES + first : _PREFIX_BYTES + size], peer))
        ]

    def _call(self, verb: str, memory: torch.Tensor, peer: int) -> Any:
        try:
            return getattr(self._group, verb)([memory], peer, _TAG)
        except RuntimeError as error:
            raise self._named(peer, error) from error

    def _finish(self, peer: int, work: Any) -> None:
        try:
            work.wait(self._patience)
        except RuntimeError as error:
            raise self._named(peer, error) from error

    def _named(self, peer: int, error: RuntimeError) -> DispatchError:
        text = str(error).split("\n")[0]
        if "imed out" in text or "imeout" in text:
            return DispatchTimeout(peer, self._timeout_s, "an exchange over gloo")
        return PeerLost(peer, text)


class _Message:
    """Memory for one peer's messages in one direction; grows only. The body is 64-byte aligned."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        self.capacity = -1
        self.first_bytes = 0
        self.expect_again(0)
        self.reserve(self.first_bytes)

    def reserve(self, num_bytes: int, keep: int = 0) -> None:
        """Make room for a body of `num_bytes`, keeping the prefix and the first `keep` bytes of it."""
        if num_bytes <= self.capacity:
            return
        capacity = num_bytes * 5 // 4
        store = np.empty(capacity + 2 * _PREFIX_BYTES, dtype=np.uint8)
        skip = -store.ctypes.data % _PREFIX_BYTES
        fresh = store[skip : skip + _PREFIX_BYTES + capacity]
        if self.capacity >= 0:
            fresh[: _PREFIX_BYTES + keep] = self._bytes[: _PREFIX_BYTES + keep]
        self._bytes, self.capacity = fresh, capacity
        self.memory = torch.from_numpy(fresh)
        self.prefix = fresh[:_PREFIX_BYTES].view(np.int64)
        self.body_address: int = fresh.ctypes.data + _PREFIX_BYTES

    def expect_again(self, size: int) -> None:
        """Choose the length of the next first transfer; sender and receiver choose alike."""
        self.first_bytes = (size + size // 4 + _GRAIN_BYTES) // _GRAIN_BYTES * _GRAIN_BYTES
