"""A small fixed header from every rank to every rank, posted now and collected later, without a wait in between.

The lock-step scheduler posts what it knows about step n+1 while step n runs. Rounds are numbered by the calls: post
and collect alternate in the same way on all ranks. Through shared memory a round takes microseconds, through gloo a few
tenths of a millisecond in the background.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, WireUnavailable
from dispatch.wires import signals
from dispatch.wires.availability import ON_DEVICE
from dispatch.wires.segment import SharedSegment
from dispatch.wires.wire import RankTable

MAX_WIDTH = signals.PAYLOAD_WORDS
LOOK_EVERY_S = 0.1  # interval of checks for an interruption while gloo waits
NAMES = ("auto", "local", "gloo", "shm", *ON_DEVICE)


class Mailbox(Protocol):
    """Exchange `width` int64 values with every rank, round by round."""

    width: int

    def post(self, values: Sequence[int]) -> None:
        """Post this rank's values for the next round. Does not block. The last round must have been collected.

        Raises:
            PeerLost: A peer is known to be gone; the mailbox can no longer be used.
        """

    def collect(self, timeout_s: float) -> list[list[int]]:
        """Wait for the posted round and return its values by rank.

        Raises:
            PeerLost, DispatchTimeout: A peer did not post; the mailbox can no longer be used.
        """

    def interrupt(self, error: DispatchError) -> None:
        """Make this rank's current or next wait raise `error`. Local; may be called from any thread."""

    def close(self) -> None:
        """Release all resources. May be called twice."""


class LocalMailbox:
    """Mailbox of a single rank, which collects its own posts."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._posted: list[int] | None = None

    def post(self, values: Sequence[int]) -> None:
        _check_turn(self._posted is None, values, self.width)
        self._posted = list(values)

    def collect(self, timeout_s: float) -> list[list[int]]:
        posted, self._posted = self._posted, None
        if posted is None:
            raise DispatchError("collect called without a post")
        return [posted]

    def interrupt(self, error: DispatchError) -> None:
        """Do nothing: there is no peer to wait for."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class ShmMailbox:
    """Mailbox through shared memory, for ranks of one host. Opening is collective over `group`."""

    def __init__(self, group: dist.ProcessGroup, width: int, *, timeout_s: float) -> None:
        self.width = width
        self._segment = SharedSegment(group, 0, timeout_s=timeout_s)
        self._round = 0
        self._numbers = RankTable(self._segment.world_size)
        self._is_posted = False
        self._outgoing = np.zeros(width, dtype=np.int64)
        self._incoming = np.zeros((self._segment.world_size, width), dtype=np.int64)

    def post(self, values: Sequence[int]) -> None:
        _check_turn(not self._is_posted, values, self.width)
        self._outgoing[:] = values
        self._round += 1
        self._is_posted = True
        place = self._segment.place
        signals.write_payload(*place, self._round, self._outgoing.ctypes.data, self.width)
        self._numbers.values[:] = self._round
        self._numbers.values[self._segment.rank] = 0
        self._segment.post(self._numbers)

    def collect(self, timeout_s: float) -> list[list[int]]:
        if not self._is_posted:
            raise DispatchError("collect called without a post")
        self._segment.wait(self._numbers, f"round {self._round} of the mailbox", timeout_s)
        signals.read_payloads(*self._segment.place, self._round, self._incoming.ctypes.data, self.width)
        self._is_posted = False
        rounds: list[list[int]] = self._incoming.tolist()
        return rounds

    def interrupt(self, error: DispatchError) -> None:
        self._segment.interruption = error

    def close(self) -> None:
        self._segment.close()


class GlooMailbox:
    """Mailbox through an asynchronous all-gather. `group` is a gloo group that runs no other collective meanwhile."""

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        self.width = width
        self._group: dist.ProcessGroup | None = group
        # A guess: gloo's collectives do not report the failed rank.
        self._peer = 1 if dist.get_rank(group) == 0 else 0
        self._incoming = [torch.zeros(width, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        self._work: Any = None
        self._interruption: DispatchError | None = None

    def post(self, values: Sequence[int]) -> None:
        _check_turn(self._work is None, values, self.width)
        self._outgoing = torch.tensor(values, dtype=torch.int64)
        try:
            self._work = dist.all_gather(self._incoming, self._outgoing, group=self._group, async_op=True)
        except RuntimeError as error:
            raise PeerLost(self._peer, _first_line(error)) from error

    def collect(self, timeout_s: float) -> list[list[int]]:
        """Collect a round. With more than two ranks, the rank in an error is a guess."""
        if self._work is None:
            raise DispatchError("collect called without a post")
        until_s = time.monotonic() + timeout_s
        while not self._has_come(until_s - time.monotonic(), timeout_s):
            if self._interruption is not None:
                raise self._interruption
        self._work = None
        return [values.tolist() for values in self._incoming]

    def _has_come(self, left_s: float, timeout_s: float) -> bool:
        """Wait for the posted round, at most until the next check for an interruption."""
        try:
            self._work.wait(timedelta(seconds=max(1e-3, min(left_s, LOOK_EVERY_S))))
        except RuntimeError as error:
            text = _first_line(error)
            if not self._work.is_completed() and left_s > 0:  # only this wait is over, not the collective
                return False
            if "imed out" in text or "imeout" in text:
                raise DispatchTimeout(self._peer, timeout_s, "a round of the mailbox") from error
            raise PeerLost(self._peer, text) from error
        return True

    def interrupt(self, error: DispatchError) -> None:
        self._interruption = error

    def close(self) -> None:
        """Release the group. Its owner destroys it; it can end then because the mailbox keeps no reference to it."""
        self._group = self._work = None


def open_mailbox(
    name: str, group: dist.ProcessGroup | None, *, width: int, timeout_s: float = 30.0
) -> Mailbox:
    """Open a mailbox over all ranks of `group`. Collective. Names and fallback are those of `open_wire`. Names of
    device backends mean auto, because headers are on the hosts.

    Args:
        width: Number of values per rank and round, 1 to MAX_WIDTH.
    """
    if name not in NAMES:
        raise ValueError(f"mailbox is {name!r}; it must be one of {', '.join(NAMES)}")
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}; it must be 1 to {MAX_WIDTH}")
    if group is None or dist.get_world_size(group) == 1:
        return LocalMailbox(width)
    if name == "gloo":
        return GlooMailbox(group, width)
    try:
        return ShmMailbox(group, width, timeout_s=timeout_s)
    except WireUnavailable:
        if name == "shm":
            raise
        return GlooMailbox(group, width)


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n")[0]


def _check_turn(may_post: bool, values: Sequence[int], width: int) -> None:
    if not may_post:
        raise DispatchError("post called before the last round was collected")
    if len(values) != width:
        raise ValueError(f"values has {len(values)} entries; this mailbox was opened for {width}")
