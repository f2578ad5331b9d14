"""A copy of an engine that waits to take its place, so that a rank which dies is not away for as long as torch takes to import.

An engine forks itself when it has imported all that it needs and has nothing else yet: no thread, no device, no connection, no
weights. The copy shares its memory until one of the two writes to it, and waits. When the engine ends, its supervisor tells the
copy what it would have told a new process; the copy forks a next one and serves. A rank without a copy (it was killed, or the
engine died while it imported) is started as at first.

The copy is its supervisor's child from its first moment on: the engine forks twice, and the supervisor adopts orphans
(`adopt_orphans`). So the supervisor waits for it as for any child, and the kernel kills it when the supervisor ends. Both ends talk
over a socket whose other end the engine inherits: the copy says its pid, and is told {"options", "environment"}, with the
descriptors of its message pipe and of the next copy's socket.

Rejected: a process that imports by itself (seconds of a core, and twice the memory); one server that forks the engines of a node
(the engines' supervisors could not wait for them); forking when the weights are loaded (experts that move would be held twice, and
loading uses threads).
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from server.parent_death import die_with_parent
from server.process.children import READY_VARIABLE, AdoptedProcess, Child

SPARE_VARIABLE = "WIDEEP_SPARE_FD"  # an engine's end of the socket that its copy will use
_ORDER_BYTES = 2**20  # at most
_RUNNING, _WAITING = b"\0engine\0", b"\0backup\0"  # the command in a command line: words of one length


class StartOrder(NamedTuple):
    """What a copy that begins to serve is told."""

    options: str  # as JSON
    environment: dict[str, str]  # what differs from the first engine's


def leave_spare(environment: Mapping[str, str]) -> StartOrder | None:
    """Fork a copy of this process that waits, if the supervisor wants one; to be called before anything has begun.

    Returns:
        None in the process that called. In the copy: what it is told, when its time has come; until then it does not return.
    """
    if SPARE_VARIABLE not in environment:
        return None
    supervisor = os.getppid()
    with socket.socket(fileno=int(environment[SPARE_VARIABLE])) as channel:
        gc.freeze()  # a collection would write to all that the copy shares
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both would print what is in there
        if not _fork_orphan():
            return None
        os.close(int(environment[READY_VARIABLE]))
        return _wait_for_order(channel, supervisor)


def _fork_orphan() -> bool:
    """Fork twice; return True in the grandchild, when its parent has ended, and False here, also where there is no memory for it."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        parent_fd = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    select.select([parent_fd], [], [])
    os.close(parent_fd)
    return True


def _wait_for_order(channel: socket.socket, supervisor: int) -> StartOrder:
    try:
        die_with_parent(parent_pid=supervisor)
        os.setpgid(0, 0)
        _show_as(_RUNNING, _WAITING)
        channel.send(json.dumps({"pid": os.getpid()}).encode())
        received, fds, _, _ = socket.recv_fds(channel, _ORDER_BYTES, 2)
    except (OSError, SystemExit):
        _leave()
    if not received:  # the supervisor has closed its end
        _leave()
    _show_as(_WAITING, _RUNNING)
    order = StartOrder(**json.loads(received))
    os.environ.update(order.environment)
    os.environ.update(zip((READY_VARIABLE, SPARE_VARIABLE), map(str, fds), strict=True))
    return order._replace(environment=dict(os.environ))


def _leave() -> NoReturn:
    """End without what Python does at an end: it is the engine's."""
    os._exit(0)


def _show_as(before: bytes, after: bytes) -> None:
    """Change a word of the command line that `ps` and `pgrep -f` show, so that a copy is not taken for an engine."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5): the arguments' memory
    at = ctypes.string_at(start, end - start).find(before)
    if at >= 0:
        ctypes.memmove(start + at, after, len(after))


class Spare:
    """The place of one engine's copy, as the supervisor sees it; whether a copy is there turns out when it is needed."""

    def __init__(self) -> None:
        self._channel, self._engines_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._pid: int | None = None

    @property
    def engines_fd(self) -> int:
        """For the engine, which inherits it."""
        return self._engines_end.fileno()

    def close_engines_end(self) -> None:
        """Drop our copy of what the engine has got."""
        self._engines_end.close()

    def start(self, name: str, order: StartOrder, fds: tuple[int, ...]) -> Child | None:
        """Let the copy serve; None: there is none."""
        if not self._is_there():
            return None
        assert self._pid is not None, "it has said it"
        try:
            socket.send_fds(self._channel, [json.dumps(order._asdict()).encode()], fds)
        except OSError:  # it was killed
            return None
        child = Child(name, AdoptedProcess(self._pid), os.pidfd_open(self._pid))
        self._pid = None
        return child

    def close(self) -> None:
        """End a copy that is not needed."""
        if self._is_there() and self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # our child, not reaped: no other process can have the pid
            os.waitpid(self._pid, 0)
        self._channel.close()

    @property
    def pid(self) -> int | None:
        """The copy's; None: there is none that we know of."""
        return self._pid if self._is_there() else None

    def _is_there(self) -> bool:
        if self._pid is None:
            with contextlib.suppress(OSError):
                if said := self._channel.recv(_ORDER_BYTES):
                    self._pid = json.loads(said)["pid"]
        return self._pid is not None
