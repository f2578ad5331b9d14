"""What `wideep serve` asks of a service that starts, and what it tells the user once it answers."""

import http.client
import json
import os
import shlex
import shutil
import ssl
import sys
from pathlib import Path

from server.options.command_line import API_KEY_VARIABLE, Options


def is_healthy(host: str, port: int, *, scheme: str = "http") -> bool:
    """Return whether GET /health answers 200."""
    address = (reachable_host(host), port)
    if scheme == "http":
        connection = http.client.HTTPConnection(*address, timeout=1.0)
    else:  # its own certificate, for the name that clients use: nothing to check here
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(*address, timeout=1.0, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def reachable_host(host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def greeting(options: Options, *, seconds: float) -> str:
    """Return what the user needs once the service answers: its URL, a curl line, the chat command."""
    host = reachable_host(options.host)
    url = f"{options.http.scheme}://{f'[{host}]' if ':' in host else host}:{options.port}"
    name = options.served_model_names[0]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello! Who are you?"}]})
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if options.needs_key else ""
    ranks = count(options.data_parallel_size, "rank")
    log = " Below is a line per request (--disable-access-log: none)." if options.log.access else ""
    return f"""
wideep: serving {name} on {ranks} at {url} ({seconds:.0f} s after the start)

  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}

  {_wideep_script()} chat {url}

Ctrl-C stops everything.{log}
"""


def _wideep_script() -> str:
    """Return how the user can call `wideep` from where they are: by name, or by path where it is not on PATH."""
    beside_python = Path(sys.executable).with_name("wideep")
    on_path = shutil.which("wideep")
    if on_path is not None and os.path.samefile(
        on_path, beside_python if beside_python.exists() else on_path
    ):
        return "wideep"
    return shlex.quote(os.path.relpath(beside_python)) if beside_python.exists() else "wideep"


def count(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
