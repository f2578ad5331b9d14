"""Breaks this process's TCP connections to hosts that do not answer any more, which is what a cut link looks like.

A host that is gone sends no error, so that gloo waits for it until a collective's time-out. Its kernel, though, answers
whatever its processes do: data, probes of a full window, and keep-alives, which are asked for here every second. The
kernel here says how long ago the last answer came; where that is too long, the connection is shut down, and whoever
waits in it is told at once.
Rejected: TCP_USER_TIMEOUT, which also breaks connections to processes that are alive and do not read.
"""

import os
import socket
import stat
import struct

PROBE_EVERY_S = 1
LEAST_TIMEOUT_S = 3.0  # two probes may be lost
LEAST_UNANSWERED = 2  # the newest question may be on its way
_ESTABLISHED = 1
# Of the kernel's tcp_info: the state, repeats and probes that were not answered, and the age of the last ACK in milliseconds.
_TCP_INFO = struct.Struct("=BxBB52xI")


def break_silent(timeout_s: float, *, port: int | None = None) -> int:
    """Look at TCP connections of this process, and shut down those whose host has not answered for so long.

    To be called every second or so. Returns how many were shut down.

    Args:
        port: only connections to this port of ours, where others may be as slow as they like; None: all.
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
    """Whether a connection stands and its other end's host has been asked, and has not answered for so long.

    The age alone says nothing of a connection that was idle until keep-alives were asked for a moment ago, or of a machine
    that was paused: the first question after that is on its way for as long as the other host is away.
    """
    if len(tcp_info) < _TCP_INFO.size:
        return False
    state, num_repeats, num_probes, answered_ms = _TCP_INFO.unpack_from(tcp_info)
    was_asked = max(num_repeats, num_probes) >= LEAST_UNANSWERED
    return bool(state == _ESTABLISHED and was_asked and answered_ms > timeout_s * 1000)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _socket_of(descriptor: int) -> socket.socket | None:
    """A second descriptor of a socket, to be closed; None: it is no socket, or gone by now."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:  # meanwhile the number is a file's
        os.close(own)
        return None


def _look(connection: socket.socket, timeout_s: float) -> bool:
    try:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return False  # it has not been asked for answers yet
        if not is_silent(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), timeout_s):
            return False
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has been closed meanwhile
        return False
    return True
