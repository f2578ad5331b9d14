"""The connection between a front and the launcher of its node, over which a resize starts and stops ranks.

It is a pair of sockets that the launcher creates. One end reaches the front through the supervisor of rank 0, and outlives both:
the launcher keeps it open for their replacements. Messages are JSON lines, as in `child_messages`. A replacement front begins with
an empty line, because its predecessor may have died within one. torchrun has no such connection.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, get_args

from server.serve.child_messages import decode_as, encode

LAUNCHER_VARIABLE = "WIDEEP_LAUNCHER_FD"  # the front's end, as a descriptor
_MOST_BYTES = 1 << 16  # of a message


class StartRanks(NamedTuple):
    """Start the missing ranks up to this number, as ranks that are to join."""

    start_ranks: int


class KeepRanks(NamedTuple):
    """Stop the ranks beyond this number. The others belong to the service."""

    keep_ranks: int


class RankEnded(NamedTuple):
    """A rank that was to join has ended."""

    ended_rank: int
    reason: str


Message = StartRanks | KeepRanks | RankEnded
_KINDS: dict[tuple[str, ...], type[Message]] = {each._fields: each for each in get_args(Message)}


def write_line(message: Message) -> bytes:
    """Return a message as a line."""
    return f"{encode(message)}\n".encode()


def read_line(line: bytes) -> Message | None:
    """Return the message of a line, or None if the line has none: its sender has died within it."""
    try:
        return decode_as(_KINDS, line)
    except ValueError:
        return None


class FrontLine:
    """The launcher's end."""

    def __init__(self) -> None:
        self._own, self._fronts = socket.socketpair()
        self._own.setblocking(False)
        self._fronts.setblocking(True)
        self._partial = b""

    @property
    def fd(self) -> int:
        """The descriptor to wait for."""
        return self._own.fileno()

    @property
    def fronts_fd(self) -> int:
        """The front's end, for the supervisor of rank 0."""
        return self._fronts.fileno()

    def read(self) -> list[Message]:
        """Return the messages that have arrived."""
        try:
            received = self._own.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [message for line in lines if (message := read_line(line)) is not None]

    def send(self, message: Message) -> None:
        """Send a message, or drop it if no front has read for a long time."""
        try:
            self._own.send(write_line(message))
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._own.close()
        self._fronts.close()


class LauncherLine:
    """The front's end. Runs in its event loop."""

    def __init__(self, fd: int, on_end: Callable[[int, str], None]) -> None:
        """Args: on_end is called with each new rank that has ended, and the reason."""
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._on_end, self._partial = on_end, b""
        self._socket.send(b"\n")
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    @classmethod
    def of(cls, environment: Mapping[str, str], on_end: Callable[[int, str], None]) -> "LauncherLine | None":
        """Return the connection to this node's launcher, or None without one."""
        fd = environment.get(LAUNCHER_VARIABLE)
        return None if fd is None else cls(int(fd), on_end)

    def start(self, num_ranks: int) -> None:
        """Start the ranks that are missing up to this number. They are to attach."""
        self._socket.send(write_line(StartRanks(num_ranks)))

    def keep(self, num_ranks: int) -> None:
        """Stop all ranks beyond this number, and treat the others as ranks of the service."""
        self._socket.send(write_line(KeepRanks(num_ranks)))

    def _read(self) -> None:
        received = self._socket.recv(_MOST_BYTES)
        if not received:  # the launcher has ended, and so will this process
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        *lines, self._partial = (self._partial + received).split(b"\n")
        for line in lines:
            message = read_line(line)
            if isinstance(message, RankEnded):
                self._on_end(message.ended_rank, message.reason)
