"""A TCP port for a process that is told it now and listens on it in a moment.

What the kernel hands out for port 0 it hands out to outgoing connections too: such a port may be taken before the
process listens. The ports below that range are taken only by who asks for them by number.
"""

import errno
import random
import socket
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000  # below it are the ports that people choose
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of a host that nothing listens on, outside the range of outgoing connections if there is room.

    Raises:
        OSError: the host is no address of this machine.
    """
    first_handed_out = int(_HANDED_OUT.read_text().split()[0])
    for _ in range(_TRIES if first_handed_out > _FIRST else 0):
        try:
            return _bound_port(host, random.SystemRandom().randrange(_FIRST, first_handed_out))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _bound_port(host, 0)


def _bound_port(host: str, port: int) -> int:
    """Listen on a port, or on any for 0, and leave it again."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
