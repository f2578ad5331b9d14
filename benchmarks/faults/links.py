"""Cut TCP connections between processes of this machine, as a network that fails does. Their owners do not help."""

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Collection
from pathlib import Path

_PIDFD_GETFD = 438  # Linux' number of the system call, on every processor
_ESTABLISHED = "01"
_LIBC = ctypes.CDLL(None, use_errno=True)


def connections(pid: int, others: Collection[int]) -> list[int]:
    """Return a process's descriptors of its TCP connections to other processes."""
    inodes = _established()
    own = _sockets(pid)
    theirs = {inode for other in others for inode in _sockets(other)}
    return [
        own[inode]
        for (near, far), inode in inodes.items()
        if inode in own and inodes.get((far, near)) in theirs
    ]


def cut(pid: int, descriptors: Collection[int]) -> None:
    """Shut connections of a process down, in both directions. Both ends see the end of the connection.

    Raises:
        OSError: This process may not do that to the other one, or it has ended.
    """
    process = os.pidfd_open(pid)
    try:
        for descriptor in descriptors:
            copy = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
            if copy < 0 and ctypes.get_errno() == errno.EBADF:  # it has just been closed
                continue
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket(fileno=copy) as connection, contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def _established() -> dict[tuple[str, str], str]:
    """Return the inodes of this machine's connections, by own and other address."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, near, far, state, *rest = line.split()
            if state == _ESTABLISHED:
                found[_short(near), _short(far)] = rest[5]
    return found


def _short(address: str) -> str:
    """Return an address in hexadecimal, the same for IPv4 and for IPv4 inside of IPv6."""
    host, _, port = address.partition(":")
    return f"{host[-8:]}:{port}"


def _sockets(pid: int) -> dict[str, int]:
    """Return the descriptors of a process's sockets, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                if kind == "socket":
                    found[inode.strip("[]")] = int(name)
    return found
