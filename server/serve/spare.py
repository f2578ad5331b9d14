"""A waiting copy of an engine or a front that replaces it, so that a restart does not wait for imports.

An engine forks after its imports and, on CPUs, those of its model, before it has anything else: no thread, device, connection or weights.
The copy shares the engine's memory until one of them writes to it. A front must bind its sockets soon, so it forks before its imports,
and the copy imports when the service is ready. When the process ends, the supervisor sends the copy the options and the environment of a
new process. The copy forks its own successor and serves. Without a copy (it was killed, or the engine died during its imports), the
supervisor starts a new process.

The copy is the supervisor's child from the start: the process forks twice, and the supervisor adopts orphans
(`children.adopt_orphans`). So the supervisor can wait for it, and the kernel kills it when the supervisor ends. Both communicate
over a socket that the process inherits: the copy sends its pid and receives {"options", "environment"} with the
descriptors of its message pipe and of its successor's socket.

Rejected for engines: a process that imports by itself (seconds of a core, and twice the memory); one server that forks all engines of a node
(supervisors could not wait for them); a fork after loading the weights (moving experts would be held twice, and
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from server.machine.parent_death import die_with_parent
from server.serve.children import READY_VARIABLE, AdoptedProcess, Child

SPARE_VARIABLE = "WIDEEP_SPARE_FD"  # a process's end of the socket for its copy
_ORDER_BYTES = 2**20  # size limit
_PREPARE = b"prepare"


class Words(NamedTuple):
    """Words in the command line, of equal length."""

    running: bytes
    waiting: bytes


ENGINE, FRONT = Words(b"\0engine\0", b"\0backup\0"), Words(b"\0front\0", b"\0spare\0")


class StartOrder(NamedTuple):
    """The message that makes a copy serve."""

    options: str  # as JSON
    environment: dict[str, str]  # the variables that differ from the first process's


def leave_spare(
    environment: Mapping[str, str], words: Words, prepare: Callable[[], object] = lambda: None
) -> StartOrder | None:
    """Fork a waiting copy of this process if the supervisor provides a socket for it. Call before any thread or device exists.

    Args:
        prepare: Called in the copy when the supervisor lets it prepare itself.

    Returns:
        None in the calling process. In the copy, the call blocks until the start order arrives, and returns the order.
    """
    if SPARE_VARIABLE not in environment:
        return None
    supervisor = os.getppid()
    with socket.socket(fileno=int(environment[SPARE_VARIABLE])) as channel:
        gc.freeze()  # a collection would write to the shared memory
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would print the buffer
        if not _fork_orphan():
            return None
        os.close(int(environment[READY_VARIABLE]))
        return _wait_for_order(channel, supervisor, words, prepare)


def _fork_orphan() -> bool:
    """Fork twice. Returns True in the grandchild once its parent has ended, and False here, even if a fork fails."""
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


def _wait_for_order(
    channel: socket.socket, supervisor: int, words: Words, prepare: Callable[[], object]
) -> StartOrder:
    try:
        die_with_parent(parent_pid=supervisor)
        os.setpgid(0, 0)
        _show_as(words.running, words.waiting)
        channel.send(json.dumps({"pid": os.getpid()}).encode())
        while True:
            received, fds, _, _ = socket.recv_fds(channel, _ORDER_BYTES, 2)
            if received != _PREPARE:
                break
            prepare()
            gc.freeze()
    except (OSError, SystemExit):
        _leave()
    if not received:  # the supervisor has closed its end
        _leave()
    _show_as(words.waiting, words.running)
    order = StartOrder(**json.loads(received))
    os.environ.update(order.environment)
    os.environ.update(zip((READY_VARIABLE, SPARE_VARIABLE), map(str, fds), strict=True))
    return order._replace(environment=dict(os.environ))


def _leave() -> NoReturn:
    """Exit without Python's cleanup, which belongs to the first process."""
    os._exit(0)


def _show_as(before: bytes, after: bytes) -> None:
    """Replace a word of the command line in `ps` and `pgrep -f`, so that a copy is not mistaken for an engine."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5): range of the arguments
    at = ctypes.string_at(start, end - start).find(before)
    if at >= 0:
        ctypes.memmove(start + at, after, len(after))


class Spare:
    """The supervisor's end for one process's copy. Whether the copy exists is only checked when it is needed."""

    def __init__(self) -> None:
        self._channel, self._childs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._pid: int | None = None

    @property
    def childs_fd(self) -> int:
        """The descriptor that the process inherits."""
        return self._childs_end.fileno()

    def close_childs_end(self) -> None:
        """Close our copy of the process's end."""
        self._childs_end.close()

    def prepare(self) -> None:
        """Let the copy prepare itself."""
        with contextlib.suppress(OSError):  # it was killed
            self._channel.send(_PREPARE)

    def start(self, name: str, order: StartOrder, fds: tuple[int, ...]) -> Child | None:
        """Make the copy serve. Returns None if it does not exist."""
        if not self._is_there():
            return None
        assert self._pid is not None, "the copy has sent its pid"
        try:
            socket.send_fds(self._channel, [json.dumps(order._asdict()).encode()], fds)
        except OSError:  # it was killed
            return None
        child = Child(name, AdoptedProcess(self._pid), os.pidfd_open(self._pid))
        self._pid = None
        return child

    def close(self) -> None:
        """Kill the copy, if it exists."""
        if self._is_there() and self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # an unreaped child of ours, so the pid is not reused
            os.waitpid(self._pid, 0)
        self._channel.close()

    @property
    def pid(self) -> int | None:
        """The copy's pid, or None if no copy is known."""
        return self._pid if self._is_there() else None

    def _is_there(self) -> bool:
        if self._pid is None:
            with contextlib.suppress(OSError):
                if said := self._channel.recv(_ORDER_BYTES):
                    self._pid = json.loads(said)["pid"]
        return self._pid is not None
