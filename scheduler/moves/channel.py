"""Bytes between two ranks beside the steps: a channel of its own, and a pace that steps set.

The channel is a group that nothing else uses, so that expert weights never stand before tokens. A rank sends no more
than so many bytes while one step runs, and its mover works no longer than a small part of a step: where every core has
a step's thread, what the mover takes is taken from steps. Bytes go in small pieces, so that no step bears many at once.
When all ranks sleep there is nothing to disturb, and the pace is off. A peer that dies closes its connections and ends
the wait; there is no time limit on a slow one, whose steps would tell first.
Rejected: a lower priority for the mover's thread, which may hold the interpreter's lock when it loses its core."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from expert_placement.moves import BUSY_PART
from scheduler.step.groups import make_group

GROUP_TIMEOUT = timedelta(hours=24)  # a transfer waits its turn, however long the plan

PIECE_BYTES = 128 << 10  # sent at once: some tenths of a millisecond of copying and hashing

LEAST_BUSY_S = 0.25e-3  # beside every step, however short: about a piece and its check sum

MOST_OWED_S = 0.02  # for one piece of work: what took longer (a compiler, say) is over and not made up for


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
    """Over a gloo group of which this is the only user, called without `torch.distributed`'s layers of Python."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._closing = threading.Lock()  # by the mover and by the step loop

    def send(self, data: Tensor, peer: int) -> None:
        """See `PeerChannel`.

        Raises:
            ChannelError: the peer is gone.
        """
        try:
            self._open_group().send([data], peer, 0).wait(GROUP_TIMEOUT)
        except RuntimeError as error:  # all that gloo says
            raise ChannelError(f"rank {peer} could not be sent to: {error}") from error

    def receive(self, data: Tensor, peer: int) -> None:
        """See `PeerChannel`.

        Raises:
            ChannelError: the peer is gone.
        """
        try:
            self._open_group().recv([data], peer, 0).wait(GROUP_TIMEOUT)
        except RuntimeError as error:
            raise ChannelError(f"nothing more came from rank {peer}: {error}") from error

    def close(self) -> None:
        """See `PeerChannel`; from any thread. Destroying the group closes its connections, which is all that wakes a peer
        of gloo's, once no thread of this process is amid a call."""
        with self._closing:
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


def open_channel(ranks: list[int], connect_timeout_s: float | None = None) -> PeerChannel:
    """Make a channel between ranks of the default group; collective. One rank alone has none.

    Args:
        connect_timeout_s: how long making it may take; None: as long as the others take.

    Raises:
        ChannelError: the others could not be met.
    """
    if len(ranks) == 1:
        return NoPeers()
    try:
        group = make_group(ranks, GROUP_TIMEOUT.total_seconds(), connect_timeout_s)
    except RuntimeError as error:
        raise ChannelError(f"no channel for moving experts: {error}") from error
    return GlooChannel(group)


class Pace:
    """How much may go: so many bytes and so much work for each step that runs, any while none does.

    `step` and `rest` from any thread, `take` from the mover's alone: its processor time is what is counted.
    """

    def __init__(
        self,
        bytes_per_step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock` tells the seconds that the calling thread has worked."""
        self.piece_bytes = min(bytes_per_step, PIECE_BYTES)
        self._bytes_per_step, self._clock, self._work_clock = bytes_per_step, clock, work_clock
        self._changed = threading.Condition()
        self._left = bytes_per_step
        self._is_open = True
        self._begun_s: float | None = None  # the step that runs
        self._worked_s: float | None = None  # the mover's clock when it was last let go
        self._owed_s = (
            0.0  # worked, beyond what the steps so far have allowed; below 0: what is left of this step's
        )

    def step(self) -> None:
        """A step begins: its bytes may go now. What the last one left over is lost."""
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
        """No step runs until `step` is called again."""
        with self._changed:
            self._is_open, self._begun_s, self._owed_s = True, None, 0.0
            self._changed.notify_all()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may go, at most `piece_bytes`; 0 to go on working without sending any."""
        assert num_bytes <= self.piece_bytes, f"{num_bytes} bytes never go at once"
        with self._changed:
            if not self._is_open and self._worked_s is not None:
                self._owed_s += min(max(0.0, self._work_clock() - self._worked_s), MOST_OWED_S)
            self._changed.wait_for(lambda: self._is_open or (self._left >= num_bytes and self._owed_s <= 0.0))
            self._left -= num_bytes
            self._worked_s = self._work_clock()
