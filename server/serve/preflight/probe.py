"""Query the health and the capacity of a service on this machine, with the standard library only."""

import http.client
import json
import ssl
from typing import NamedTuple

from server.options.table import Options
from server.serve.preflight.unix_socket import UnixConnection


class Capacity(NamedTuple):
    """Capacity of all ranks together."""

    kv_tokens: int
    requests: int  # limit of concurrent requests
    max_len: int  # of one request, in tokens


def reachable_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_healthy(host: str, port: int, *, scheme: str = "http", uds: str | None = None) -> bool:
    """Return whether GET /health answers 200, over a Unix domain socket if `uds` is given."""
    return _get(host, port, "/health", scheme, uds) is not None


def capacity_of(options: Options) -> Capacity | None:
    """Return a service's capacity. Returns None if it does not answer, or reports none because a rank was just lost."""
    content = _get(options.host, options.port, "/server_info", options.http.scheme, options.uds)
    found = {} if content is None else json.loads(content)
    if not found.get("max_total_num_tokens"):
        return None
    return Capacity(found["max_total_num_tokens"], found["max_running_requests"], found["context_length"])


def _get(host: str, port: int, path: str, scheme: str, uds: str | None) -> bytes | None:
    """Return the body of a 200 response, or None for any other outcome."""
    address = (reachable_host(host), port)
    connection: http.client.HTTPConnection
    if uds is not None:
        connection = UnixConnection(uds, timeout=1.0)
    elif scheme == "http":
        connection = http.client.HTTPConnection(*address, timeout=1.0)
    else:  # the certificate is issued for the clients' name, so it is not verified here
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(*address, timeout=1.0, context=context)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
