"""The leading front as the standby's front sees it: it follows that front, copies its files, and notices the loss of its node.

The leading front may be killed and restarted on its node. The standby then waits for it. The node is lost if torchrun's agent there is
gone, because every process of the service on that node ends with it. Its port refuses connections then, or does not answer
if the machine or its link is gone. After seconds without an answer of that machine, one short attempt to connect confirms it. A front that
ends in order announces it, and the standby does not take over.

If only the link between the nodes is cut, both sides are alive, and both serve with the ranks that they reach. When the link is back,
the standby's front ends the other one. Rejected: a majority of nodes, which a service of two nodes does not have.
"""

import contextlib
import errno
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from scheduler.epochs.connections import break_silent
from scheduler.epochs.heartbeat import LOOK_EVERY_S
from server.link.messages import (
    METHOD,
    OPTIONS,
    SERVICE,
    Copied,
    FileGone,
    FilePart,
    Follow,
    KeptFile,
    ServiceEnds,
)
from server.link.rank_link import Handshake, LinkError, reach
from server.link.seal import SealError
from server.machine.folder_watch import status_of
from server.machine.whole_files import replace_text
from server.serve.store.meeting import Endpoint

AGENT_S = 2.0  # for torchrun's agent to accept a connection; its kernel does that even if the machine is busy
_SILENT_AGENT_S = 0.5  # the same, right after that machine has left probes unanswered for seconds
RETRY_S = 0.1
_PAUSE_S = 1.0  # after an error that probably recurs
_FRONT_S = 0.5  # for the leading front to accept a connection
_FIRST, _TAKEN_OVER = "first.json", "taken_over"  # in the standby's folder, next to the copies
_PARTIAL = "partial_copy"
# Errors of this machine while it connects. They do not show that the other one is gone.
_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class FirstFront(NamedTuple):
    """The leading front and the store of its node."""

    ranks_address: str
    token: str
    store: Endpoint


def leave_first(folder: Path, front: dict[str, str], store: Endpoint) -> None:
    """Write the leading front's addresses for the standby's front, which does not reach the store."""
    said = {"ranks_address": front["ranks_address"], "token": front["token"], "store": str(store)}
    replace_text(folder / _FIRST, json.dumps(said))


def find_first(folder: Path) -> FirstFront | None:
    """Return the leading front, or None if it is not known yet."""
    try:
        said = json.loads((folder / _FIRST).read_text())
    except FileNotFoundError:
        return None
    return FirstFront(said["ranks_address"], said["token"], Endpoint.parse(said["store"]))


def has_taken_over(folder: Path) -> bool:
    """Return whether an earlier process of the standby's front leads the service."""
    return (folder / _TAKEN_OVER).exists()


def note_taken_over(folder: Path) -> None:
    """Let the processes that replace this one lead the service at once."""
    (folder / _TAKEN_OVER).touch()


class Following:
    """The standby's connection to the leading front, in a separate thread."""

    def __init__(
        self, first: FirstFront, copies: "FileCopies", *, cluster_key: bytes | None, silence_s: float
    ) -> None:
        """`silence_s`: how long the other node's kernel may leave probes unanswered; 0 disables the probes."""
        self._first, self._copies, self._key = first, copies, cluster_key
        self._agent: list[Endpoint] = []  # addresses of torchrun's agent, as last resolved
        self._silence_s = silence_s
        self._call: grpc.Call | None = None
        self.has_copies = False  # all that the leading front had at some time
        self._said = ""
        self._is_stopped, self._was_silent = threading.Event(), threading.Event()

    def follow(self, say: Callable[[str], None]) -> str | None:
        """Follow the leading front until its node is lost, and return why. Returns None if the service ends or after `stop`."""
        if self._silence_s:
            threading.Thread(target=self._break_silent, daemon=True).start()
        try:
            while not self._is_stopped.is_set():
                if self._follow_once(say):
                    return None
                timeout_s = _SILENT_AGENT_S if self._was_silent.is_set() else AGENT_S
                self._was_silent.clear()
                while not self._is_stopped.is_set():
                    if (why := why_lost(self._agent or [self._first.store], timeout_s)) is not None:
                        return why
                    timeout_s = AGENT_S
                    with contextlib.suppress(LinkError):
                        reach(self._first.ranks_address, _FRONT_S)
                        self._is_stopped.wait(RETRY_S)
                        break
            return None
        finally:
            self._is_stopped.set()

    def stop(self) -> None:
        """Let `follow` return soon. Any thread may call it."""
        self._is_stopped.set()
        if self._call is not None:
            self._call.cancel()

    def _follow_once(self, say: Callable[[str], None]) -> bool:
        """Copy until the connection breaks. Returns whether the service ends."""
        # A name may not be resolved later, although the node is there, or because it is gone.
        self._agent = addresses_of(self._first.store) or self._agent
        handshake = Handshake(self._key)
        sent: queue.SimpleQueue[object] = queue.SimpleQueue()
        sent.put(Follow(self._copies.files()))
        with grpc.insecure_channel(self._first.ranks_address, options=OPTIONS) as channel:
            attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            self._call = call = attach(
                handshake.seal(_until_none(sent)), metadata=handshake.metadata(self._first.token)
            )
            if self._is_stopped.is_set():  # before there was a call to cancel
                call.cancel()
            try:
                for message in handshake.open(call):
                    if isinstance(message, ServiceEnds):
                        return True
                    if isinstance(message, Copied):
                        self.has_copies = True
                        sent.put(message)
                    else:
                        self._copies.take(message)
            except grpc.RpcError as error:
                is_known = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
                if not is_known and not self._is_stopped.is_set():
                    details = error.details() if isinstance(error, grpc.Call) else error
                    self._say_once(say, f"the connection to the leading front broke: {details}")
                    self._is_stopped.wait(_PAUSE_S)
            except (SealError, OSError, ValueError, LookupError) as error:
                self._say_once(say, f"cannot follow the leading front: {error}")
                self._is_stopped.wait(_PAUSE_S)
            finally:
                sent.put(None)
                call.cancel()
        return False

    def _say_once(self, say: Callable[[str], None], text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)

    def _break_silent(self) -> None:
        while not self._is_stopped.wait(LOOK_EVERY_S):
            with contextlib.suppress(OSError):  # no descriptor is free for listing connections
                if break_silent(self._silence_s):
                    self._was_silent.set()


def _until_none(sent: "queue.SimpleQueue[object]") -> Iterator[object]:
    while (message := sent.get()) is not None:
        yield message


def addresses_of(store: Endpoint) -> list[Endpoint]:
    """Return the addresses of a host name; none if it cannot be resolved now."""
    try:
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [Endpoint(str(address[0]), store.port) for *_, address in found]


def why_lost(addresses: Sequence[Endpoint], timeout_s: float = AGENT_S) -> str | None:
    """Return why torchrun's agent on the leading front's node counts as gone, or None if it may be there.

    It is gone if it answers at none of its addresses. An error of this machine does not count.
    """
    problems = []
    for address in addresses:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
        except OSError as error:
            if error.errno in _OWN_ERRORS or isinstance(error, socket.gaierror):
                return None
            problems.append(f"torchrun does not answer at {address}: {error.strerror or error}")
        else:
            return None
    return "; ".join(problems) or None


def end_first(first: FirstFront, cluster_key: bytes | None) -> bool:
    """End the former leading front if it can be reached. Returns whether it got the message."""
    with contextlib.suppress(LinkError, grpc.RpcError, SealError):
        reach(first.ranks_address, _FRONT_S)
        handshake = Handshake(cluster_key)
        with grpc.insecure_channel(first.ranks_address, options=OPTIONS) as channel:
            attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            call = attach(
                handshake.seal(iter([Follow([], has_taken_over=True)])),
                metadata=handshake.metadata(first.token),
                timeout=AGENT_S,
            )
            for _ in handshake.open(call):
                pass
            return True
    return False


class FileCopies:
    """The standby's copies of the leading front's files."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, unless an earlier process has."""
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def files(self) -> list[KeptFile]:
        """Return the present copies, without those that were cut off."""
        self.remove_partial()
        found = []
        for path in self.folder.rglob("*"):
            status = status_of(path)
            if status is not None:
                name = path.relative_to(self.folder).as_posix()
                found.append(KeptFile(name, status.st_size, status.st_mtime_ns))
        return found

    def remove_partial(self) -> None:
        """Remove copies that were cut off."""
        for path in list(self.folder.rglob(_PARTIAL)):
            path.unlink()

    def take(self, message: Any) -> None:
        """Write or remove a file.

        Raises:
            ValueError: The message does not fit the copy, or names a file outside of the folder.
            OSError: The file cannot be written.
        """
        match message:
            case FilePart():
                self._write(message)
            case FileGone(path):
                self._path_of(path).unlink(missing_ok=True)
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    def _write(self, part: FilePart) -> None:
        path = self._path_of(part.path)
        partial = path.with_name(_PARTIAL)
        if part.offset == 0:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
        written = partial if part.offset == 0 or partial.exists() else path
        fd = os.open(written, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if os.fstat(fd).st_size != part.offset:
                raise ValueError(f"the copy of {part.path} has another length than the file had")
            file.write(part.content.tobytes())
        if part.is_last:
            os.utime(written, ns=(time.time_ns(), part.mtime_ns))
            written.replace(path)

    def _path_of(self, path: str) -> Path:
        found = Path(os.path.normpath(self.folder / path))
        if not found.is_relative_to(self.folder) or found == self.folder:
            raise ValueError(f"{path!r} is outside of the folder")
        return found
