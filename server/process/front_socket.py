"""The front's listening socket, and how the supervisor learns of it."""

import errno
import json
import os
import socket

from server.options.checks import OptionsError
from server.options.command_line import Options


def bind_http(host: str, port: int) -> socket.socket:
    """Bind and listen.

    Raises:
        OptionsError: the port is taken or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionsError(f"--host {host!r} is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # at once: bind alone does not claim a port that others may reuse
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionsError(f"port {port} on {host} is in use; choose another with --port") from error
        raise OptionsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def announce(
    ready_fd: int, listener: socket.socket, options: Options, ranks_address: str, token: str
) -> None:
    """Write the addresses for the supervisor."""
    port = listener.getsockname()[1]
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{options.http.scheme}://{shown}:{port}"
    line = json.dumps({"http": url, "ranks_address": ranks_address, "token": token})
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(line + "\n")
