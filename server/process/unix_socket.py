"""HTTP on a Unix domain socket (--uds): bound by the front, checked before the start, and asked by `wideep serve`.

A file of a socket outlives a process that was killed. It is taken over if nobody answers on it, and refused if somebody
does or if it is no socket: a path that was mistyped must not cost a file.
"""

import contextlib
import http.client
import os
import socket
import stat
from collections.abc import Iterator

from server.options.flag import OptionsError


@contextlib.contextmanager
def listening_at(path: str) -> Iterator[socket.socket]:
    """Bind and listen; the file is removed at the end.

    Raises:
        OptionsError: as `check_path`, or the file cannot be made.
    """
    check_path(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
            listener.listen(2048)
        except OSError as error:
            raise OptionsError(f"cannot listen on --uds {path}: {error.strerror}") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def check_path(path: str) -> None:
    """Check that a service may listen there.

    Raises:
        OptionsError: there is no such folder, or the path is taken.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionsError(f"--uds is {path}; {folder} is no folder that can be written to")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OptionsError(f"--uds is {path}, which is there and no socket; give another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise OptionsError(f"--uds is {path}, which another program listens on; give another path")


class UnixConnection(http.client.HTTPConnection):
    """A connection to a service that listens on a socket of the file system."""

    def __init__(self, path: str, *, timeout: float) -> None:
        """Args: path is the socket's."""
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the path; the host is for the Host header only."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
