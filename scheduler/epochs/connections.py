"""Shuts down this process's TCP connections to hosts that no longer answer, as after a cut link.

A lost host sends no error, so gloo would wait for it until a collective's timeout. A live host's kernel, however, always
answers data, probes of a full window and keep-alives, even if its processes hang. Keep-alives are therefore enabled
here, once a second. The local kernel reports the age of the last answer. If it is too old, the connection is shut down,
which wakes all that wait in it at once.
Rejected: TCP_USER_TIMEOUT, which also breaks connections to live processes that do not read.

The connections of an epoch's groups (`EpochConnections`) are shut down sooner: if only the network stumbled, the members meet
again, and no rank is lost. While tokens are under way, the kernel repeats them after 0.2 s, 0.6 s and 1.4 s.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator

PROBE_EVERY_S = 1
LEAST_TIMEOUT_S = 3.0  # two probes may be lost
EPOCH_PART = 0.6  # of the timeout: the part after which connections of an epoch are shut down
LEAST_UNANSWERED = 2  # the answer to the newest probe may be on its way
_ESTABLISHED = 1
# From the kernel's tcp_info: state, unanswered retransmissions and probes, and the age of the last ACK in milliseconds.
_TCP_INFO = struct.Struct("=BxBB52xI")


def break_silent(timeout_s: float, *, port: int | None = None, peer_ports: Collection[int] = ()) -> int:
    """Shut down this process's TCP connections to hosts that have not answered for `timeout_s`.

    Call it about once a second. Returns the number of connections shut down.

    Args:
        port: Only check connections to this local port, so that others may be slow. None checks all.
        peer_ports: Check connections to these ports of other hosts, too.
    """
    num_broken = 0
    for connection in _connections():
        if port is None or connection.getsockname()[1] == port or _peer_port(connection) in peer_ports:
            num_broken += _look(connection, max(timeout_s, LEAST_TIMEOUT_S))
    return num_broken


class EpochConnections:
    """The TCP connections of this rank's groups in one epoch. Any thread may call `break_silent`."""

    def __init__(self) -> None:
        self._opened: frozenset[int] = frozenset()  # sockets, by inode
        self._others: frozenset[int] | None = None  # sockets before `opening`, while groups are made

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Count the sockets that this process opens meanwhile as those of the epoch.

        A socket that another thread opens just then is counted too. Its owner then connects again after the epoch.
        """
        self._others = _inodes()
        try:
            yield
        finally:
            self._opened, self._others = self._present(), None

    def break_silent(self, timeout_s: float) -> int:
        """Shut down connections to hosts that have not answered for `timeout_s`. Return their number."""
        present = self._present()
        return sum(_look(each, timeout_s) for each in _connections(present)) if present else 0

    def close(self) -> None:
        """Shut down all connections, which ends all waits in the groups at once, here and on the other ranks."""
        for connection in _connections(self._present()):
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it does not listen
                _shut_down(connection)
        self._opened = frozenset()

    def _present(self) -> frozenset[int]:
        others = self._others
        return self._opened if others is None else self._opened | _inodes() - others


def _connections(inodes: Collection[int] | None = None) -> Iterator[socket.socket]:
    """Yield a duplicate of each of this process's TCP sockets, or of those with these inodes. It is closed afterwards."""
    for descriptor in _descriptors():
        connection = _socket_of(descriptor, inodes)
        if connection is None:
            continue
        with connection:
            is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and connection.type == socket.SOCK_STREAM:
                yield connection


def _peer_port(connection: socket.socket) -> int | None:
    """Return the port at the other end, or None if the connection is not established."""
    try:
        return int(connection.getpeername()[1])
    except OSError:
        return None


def _inodes() -> frozenset[int]:
    """Return the inodes of this process's sockets."""
    found = set()
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            about = os.fstat(descriptor)
            if stat.S_ISSOCK(about.st_mode):
                found.add(about.st_ino)
    return frozenset(found)


def _shut_down(connection: socket.socket) -> bool:
    """Shut a connection down. Return whether it was open."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it was closed meanwhile
        return False
    return True


def is_silent(tcp_info: bytes, timeout_s: float) -> bool:
    """Whether a connection is established and its peer's host has left probes unanswered for `timeout_s`.

    The age of the last answer alone is not enough: a connection may have been idle until keep-alives were enabled, or
    this machine may have been paused. In both cases the first probe is still on its way.
    """
    if len(tcp_info) < _TCP_INFO.size:
        return False
    state, num_repeats, num_probes, answered_ms = _TCP_INFO.unpack_from(tcp_info)
    was_asked = max(num_repeats, num_probes) >= LEAST_UNANSWERED
    return bool(state == _ESTABLISHED and was_asked and answered_ms > timeout_s * 1000)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _socket_of(descriptor: int, inodes: Collection[int] | None = None) -> socket.socket | None:
    """Return a duplicate of a socket, which the caller must close.

    None if it is not a socket, no longer open, or not one of those with these inodes.
    """
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISSOCK(about.st_mode) or not (inodes is None or about.st_ino in inodes):
            return None
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:  # the number now belongs to a file
        os.close(own)
        return None


def _look(connection: socket.socket, timeout_s: float) -> bool:
    try:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return False  # no probes were sent yet
        if not is_silent(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), timeout_s):
            return False
    except OSError:  # it was closed meanwhile
        return False
    return _shut_down(connection)
