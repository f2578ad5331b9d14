"""Whether HTTP can listen where it is told to."""

import errno
import socket

from server.process.preflight.preflight_error import PreflightError


def check_port(host: str, port: int) -> None:
    """Check that HTTP can listen on host:port (port 0: on any)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PreflightError(
            f"--host is {host!r}, which is no address of this machine: {error.strerror}"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # A port in TIME_WAIT is free, as for uvicorn.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise PreflightError(_why_not_bound(host, port, error)) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; give another --port (0 takes a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host is {host!r}, which is no address of this machine; give one that is, or 0.0.0.0 for all"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}; give another --host or --port"
