"""Choose a free TCP port for a process that will listen on it soon.

The kernel chooses ports for port 0 from the range of outgoing connections. Another connection may take such a port
before the process listens. Ports below that range are only taken by programs that request them by number. Processes that
choose at the same time get different ports: each reserves its newest ones by names of abstract Unix sockets, which belong
to the same network namespace as the ports.
"""

import errno
import random
import socket
from collections import deque
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000  # users choose ports below it
_TRIES = 100
_MAX_RESERVED = 64
_RESERVED: deque[socket.socket] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of a host, outside the range of outgoing connections if possible.

    Raises:
        OSError: The host is not an address of this machine.
    """
    first_handed_out = int(_HANDED_OUT.read_text().split()[0])
    for _ in range(_TRIES if first_handed_out > _FIRST else 0):
        try:
            port = _bound_port(host, random.SystemRandom().randrange(_FIRST, first_handed_out))
            _reserve(port)
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _bound_port(host, 0)


def _bound_port(host: str, port: int) -> int:
    """Bind a port (0: any), release it, and return its number."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def _reserve(port: int) -> None:
    """Reserve a port until this process ends or has chosen _MAX_RESERVED later ones.

    Raises:
        OSError: EADDRINUSE, a process has reserved it.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0wideep-port-{port}")
    except OSError:
        name.close()
        raise
    _RESERVED.append(name)
    if len(_RESERVED) > _MAX_RESERVED:
        _RESERVED.popleft().close()
