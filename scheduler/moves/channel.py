"""Byte transfers between two ranks during steps: a separate channel, and a pace that steps set.

The channel is a group that nothing else uses, so that expert weights never delay tokens. Per step, a rank sends a
limited number of bytes, and its mover works for a limited part of the step: if every core runs a step's thread, the
mover's work slows steps. Bytes are sent in small pieces, so that no step is interrupted for long. While all ranks sleep
the pace is off. A peer that dies closes its connections, which ends the wait. There is no timeout for a slow peer; its
steps would fail first. Rejected: a lower priority for the mover's thread, which may hold the interpreter's lock when it
loses its core."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from expert_placement.moves import BUSY_PART
from scheduler.step.groups import make_group

GROUP_TIMEOUT = timedelta(hours=24)  # a transfer waits its turn, which may take as long as the whole plan

PIECE_BYTES = 128 << 10  # sent at once: some tenths of a millisecond of copying and hashing

LEAST_BUSY_S = 0.25e-3  # during every step, however short: about one piece and its checksum

MOST_OWED_S = 0.02  # counted for one piece of work: a longer one (a compiler run) is not made up for


class ChannelError(ConnectionError):
    """A peer is gone or the channel is broken. It cannot be used again."""


class PeerChannel(Protocol):
    """Sends and receives bytes in order, pair by pair."""

    def send(self, data: Tensor, peer: int) -> None:
        """Send [n] uint8, contiguous. Blocks."""

    def receive(self, data: Tensor, peer: int) -> None:
        """Fill [n] uint8, contiguous. Blocks."""

    def close(self) -> None:
        """Close the channel. Peers that wait for this rank, now or later, get an error."""


class GlooChannel:
    """A channel over a gloo group with no other user. Bypasses `torch.distributed`'s Python layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._closing = threading.Lock()  # the mover and the step loop may both close

    def send(self, data: Tensor, peer: int) -> None:
        try:
            self._open_group().send([data], peer, 0).wait(GROUP_TIMEOUT)
        except RuntimeError as error:  # gloo's only error
            raise ChannelError(f"cannot send to rank {peer}: {error}") from error

    def receive(self, data: Tensor, peer: int) -> None:
        try:
            self._open_group().recv([data], peer, 0).wait(GROUP_TIMEOUT)
        except RuntimeError as error:
            raise ChannelError(f"cannot receive from rank {peer}: {error}") from error

    def close(self) -> None:
        """Close from any thread. Destroying the group closes its connections. Only this wakes a gloo peer, once no
        thread of this process is inside a call."""
        with self._closing:
            group, self._group = self._group, None
            if group is not None:
                dist.destroy_process_group(group)

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ChannelError("the channel for moving experts was closed")
        return self._group


class NoPeers:
    """The channel of a rank without peers."""

    def send(self, data: Tensor, peer: int) -> None:
        raise AssertionError("a single rank has no peer to send to")

    def receive(self, data: Tensor, peer: int) -> None:
        raise AssertionError("a single rank has no peer to receive from")

    def close(self) -> None:
        """Nothing to close."""


def open_channel(ranks: list[int], connect_timeout_s: float | None = None) -> PeerChannel:
    """Open a channel between ranks of the default group. Collective. A single rank gets `NoPeers`.

    Args:
        connect_timeout_s: Timeout of the connection. None waits as long as the other ranks take.

    Raises:
        ChannelError: The other ranks could not be reached.
    """
    if len(ranks) == 1:
        return NoPeers()
    try:
        group = make_group(ranks, GROUP_TIMEOUT.total_seconds(), connect_timeout_s)
    except RuntimeError as error:
        raise ChannelError(f"cannot open the channel for moving experts: {error}") from error
    return GlooChannel(group)


class Pace:
    """Limits the bytes and the work of the mover during each step. There is no limit while no step runs.

    Any thread may call `step` and `rest`. Only the mover may call `take`: its processor time is counted.
    """

    def __init__(
        self,
        bytes_per_step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock`: returns the processor seconds of the calling thread."""
        self.piece_bytes = min(bytes_per_step, PIECE_BYTES)
        self._bytes_per_step, self._clock, self._work_clock = bytes_per_step, clock, work_clock
        self._changed = threading.Condition()
        self._left = bytes_per_step
        self._is_open = True
        self._begun_s: float | None = None  # start of the running step
        self._worked_s: float | None = None  # the mover's clock at the end of its last `take`
        # Work beyond what the steps so far allowed. Below 0: what is left of this step's allowance.
        self._owed_s = 0.0

    def step(self) -> None:
        """Begin a step, which allows new bytes. What the last step left is lost."""
        with self._changed:
            now_s = self._clock()
            lasted_s = 0.0 if self._begun_s is None else now_s - self._begun_s
            allowed_s = max(LEAST_BUSY_S, BUSY_PART * lasted_s)
            self._owed_s = max(-allowed_s, self._owed_s - allowed_s)
            self._begun_s = now_s
            self._left = self._bytes_per_step
            self._is_open = False
            self._changed.notify_all()

    def rest(self) -> None:
        """Note that no step runs until the next call of `step`."""
        with self._changed:
            self._is_open, self._begun_s, self._owed_s = True, None, 0.0
            self._changed.notify_all()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be sent, at most `piece_bytes`. 0 waits for permission to work only."""
        assert num_bytes <= self.piece_bytes, f"{num_bytes} bytes exceed the largest piece"
        with self._changed:
            if not self._is_open and self._worked_s is not None:
                self._owed_s += min(max(0.0, self._work_clock() - self._worked_s), MOST_OWED_S)
            self._changed.wait_for(lambda: self._is_open or (self._left >= num_bytes and self._owed_s <= 0.0))
            self._left -= num_bytes
            self._worked_s = self._work_clock()
