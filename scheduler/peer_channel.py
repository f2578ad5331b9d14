"""Bytes between two ranks beside the steps: a channel of its own, and a pace that steps set.

The channel is a group that nothing else uses, so that expert weights never stand before tokens. A rank sends no more
than so many bytes while one step runs; when all ranks sleep there is nothing to disturb, and the pace is off. A peer
that dies closes its connections and ends the wait; there is no time limit on a slow one, whose steps would tell first.
"""

import threading
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

GROUP_TIMEOUT_S = 24 * 3600.0  # a transfer waits its turn, however long the plan


class ChannelError(ConnectionError):
    """A peer is gone or the channel is broken; it is then of no more use."""


class PeerChannel(Protocol):
    """Sends and receives bytes in order, pair by pair."""

    def send(self, data: Tensor, peer: int) -> None:
        """Send [n] uint8, contiguous; blocks."""

    def receive(self, data: Tensor, peer: int) -> None:
        """Fill [n] uint8, contiguous; blocks."""

    def close(self) -> None:
        """Use it no more: peers that wait for this rank are told by an error, now or when they next do."""


class GlooChannel:
    """Over a gloo group of which this is the only user."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def send(self, data: Tensor, peer: int) -> None:
        """See `PeerChannel`.

        Raises:
            ChannelError: the peer is gone.
        """
        try:
            dist.send(data, group=self._open_group(), group_dst=peer)
        except RuntimeError as error:  # all that gloo says
            raise ChannelError(f"rank {peer} could not be sent to: {error}") from error

    def receive(self, data: Tensor, peer: int) -> None:
        """See `PeerChannel`.

        Raises:
            ChannelError: the peer is gone.
        """
        try:
            dist.recv(data, group=self._open_group(), group_src=peer)
        except RuntimeError as error:
            raise ChannelError(f"nothing more came from rank {peer}: {error}") from error

    def close(self) -> None:
        """See `PeerChannel`. Destroying the group closes its connections, which is all that wakes a peer of gloo's."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ChannelError("the channel for moving experts was closed")
        return self._group


class NoPeers:
    """The channel of a rank that is alone."""

    def send(self, data: Tensor, peer: int) -> None:
        """Never called."""
        raise AssertionError("one rank has nobody to send to")

    def receive(self, data: Tensor, peer: int) -> None:
        """Never called."""
        raise AssertionError("one rank has nobody to receive from")

    def close(self) -> None:
        """Nobody waits."""


def open_channel(ranks: list[int]) -> PeerChannel:
    """Make a channel between ranks of the default group; collective. One rank alone has none.

    Raises:
        ChannelError: the others could not be met.
    """
    if len(ranks) == 1:
        return NoPeers()
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=GROUP_TIMEOUT_S), backend="gloo")
    except RuntimeError as error:
        raise ChannelError(f"no channel for moving experts: {error}") from error
    return GlooChannel(group)


class Pace:
    """How many bytes may go: so many for each step that runs, any number while none does. Any thread."""

    def __init__(self, bytes_per_step: int) -> None:
        self.bytes_per_step = bytes_per_step
        self._changed = threading.Condition()
        self._left = bytes_per_step
        self._is_open = True

    def step(self) -> None:
        """A step begins: its bytes may go now. What the last one left over is lost."""
        with self._changed:
            self._left = self.bytes_per_step
            self._is_open = False
            self._changed.notify_all()

    def rest(self) -> None:
        """No step runs until `step` is called again."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may go, at most `bytes_per_step`."""
        assert num_bytes <= self.bytes_per_step, f"{num_bytes} bytes never go in one step"
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._left >= num_bytes)
            self._left -= num_bytes
