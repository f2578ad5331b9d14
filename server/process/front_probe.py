"""Is the front still there? Asked by an engine whose stream to it has ended.

A front that lives may have given this rank up, whose engine is then worth starting again; one that is gone has taken
the service with it. Only the TCP port is asked: its process holds it from its start to its end, whatever else it does.
A refusal is certain; silence may be a cable, so it is waited out for a while.
"""

import errno
import socket
import time

FRONT_IS_GONE = 3  # the exit status of an engine that has nobody left to serve for
PATIENCE_S = 30.0  # of silence: as long as collectives wait
_ATTEMPT_S = 2.0


def front_answers(address: str, *, patience_s: float = PATIENCE_S) -> bool:
    """Return whether the front's process listens at `host:port`; waits while nothing says yes or no."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + patience_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=min(left_s, _ATTEMPT_S)):
                return True
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return False
            time.sleep(min(0.2, max(0.0, deadline_s - time.monotonic())))  # no route fails at once
    return False
