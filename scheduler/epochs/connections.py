"""Shuts down this process's TCP connections to hosts that no longer answer, as after a cut link.

A lost host sends no error, so gloo would wait for it until a collective's timeout. A live host's kernel, however, always
answers data, probes of a full window and keep-alives, even if its processes hang. Keep-alives are therefore enabled
here, once a second. The local kernel reports the age of the last answer. If it is too old, the connection is shut down,
which wakes all that wait in it at once.
Rejected: TCP_USER_TIMEOUT, which also breaks connections to live processes that do not read.
"""

import os
import socket
import stat
import struct

PROBE_EVERY_S = 1
LEAST_TIMEOUT_S = 3.0  # two probes may be lost
LEAST_UNANSWERED = 2  # the answer to the newest probe may be on its way
_ESTABLISHED = 1
# From the kernel's tcp_info: state, unanswered retransmissions and probes, and the age of the last ACK in milliseconds.
_TCP_INFO = struct.Struct("=BxBB52xI")


def break_silent(timeout_s: float, *, port: int | None = None) -> int:
    """Shut down this process's TCP connections to hosts that have not answered for `timeout_s`.

    Call it about once a second. Returns the number of connections shut down.

    Args:
        port: Only check connections to this local port, so that others may be slow. None checks all.
    """
    num_broken = 0
    for descriptor in _descriptors():
        connection = _socket_of(descriptor)
        if connection is None:
            continue
        with connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
                and (port is None or connection.getsockname()[1] == port)
            ):
                num_broken += _look(connection, max(timeout_s, LEAST_TIMEOUT_S))
    return num_broken


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


def _socket_of(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a socket, which the caller must close. None if it is not a socket or no longer open."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
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
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it was closed meanwhile
        return False
    return True
