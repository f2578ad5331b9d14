"""HTTP on a Unix domain socket (--uds): bound by the front, checked before the start, and polled by `wideep serve`.

The socket file of a killed process remains. It is replaced if no process listens on it. It is rejected if one does, or if the
file is not a socket: a mistyped path must not destroy a file.
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
    """Bind and listen; remove the file at the end.

    Raises:
        OptionsError: `check_path` refuses the path, or the socket cannot be created.
    """
    check_path(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by a killed process
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
    """Check that a service may listen on this path.

    Raises:
        OptionsError: The folder does not exist or is not writable, or the path is taken.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionsError(f"--uds is {path}, but {folder} is not a writable folder")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OptionsError(f"--uds is {path}, which is not a socket; choose another path or remove the file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise OptionsError(f"--uds is {path}, which another program listens on; choose another path")


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a service on a Unix domain socket."""

    def __init__(self, path: str, *, timeout: float) -> None:
        """Prepare a connection to the socket at `path`."""
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the path; the host name serves only for the Host header."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
