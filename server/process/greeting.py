"""What `wideep serve` says when the service answers: where it is, how to ask it, and what it has room for."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from server.options.reading import API_KEY_VARIABLE
from server.options.table import Options


class Capacity(NamedTuple):
    """What all ranks together have room for."""

    kv_tokens: int
    requests: int  # that run at once, if they are short
    max_len: int  # of one request, in tokens


def reachable_host(host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _pages(url: str) -> str:
    return f"""
  {_wideep_script()} chat {url}

  {url}/dashboard  ranks, throughput and experts, live
  {url}/docs       every endpoint
  {url}/metrics    for Prometheus
"""


def greeting(
    options: Options,
    capacity: Capacity | None,
    *,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return what the user needs once the service answers: its URL, a curl line, the chat command, pages and capacity."""
    host = reachable_host(options.host)
    url = f"{options.http.scheme}://{f'[{host}]' if ':' in host else host}:{options.port}"
    at, curl, pages = url, "curl", _pages(url)
    if options.uds is not None:  # `wideep chat` and browsers speak to ports
        at, url, pages = options.uds, "http://localhost", ""
        curl = f"curl --unix-socket {shlex.quote(options.uds)}"
    name = options.served_model_names[0]
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    body = json.dumps({"model": name, "messages": messages, "max_tokens": 100})
    key = _KeyHint.of(options, environment)
    ranks = count(options.data_parallel_size, "rank")
    log = " Below is a line per request (--disable-access-log: none)." if options.log.access else ""
    return f"""
wideep: serving {name} on {ranks} at {at} ({seconds:.0f} s after the start)
{key.export}
  {curl} {url}/v1/chat/completions{key.header} -H 'Content-Type: application/json' -d {shlex.quote(body)}
{pages}{_in_words(capacity)}
Ctrl-C stops everything.{log}
"""


class _KeyHint(NamedTuple):
    """How the commands of the greeting come to a key; the key itself is never printed."""

    export: str = ""  # a line to run before; empty: the shell that started the service has one
    header: str = ""  # of the curl line

    @classmethod
    def of(cls, options: Options, environment: Mapping[str, str]) -> "_KeyHint":
        if not options.needs_key:
            return cls()
        named = environment.get(API_KEY_VARIABLE, "")
        if not named.split():
            source = "of --api-key" if options.api_keys else f"of {options.http.api_key_file}"
            export = f"\nFirst, with a key {source} in place of KEY:\n\n  export {API_KEY_VARIABLE}=KEY\n"
            return cls(export, f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"')
        first = f"${{{API_KEY_VARIABLE}%% *}}" if len(named.split()) > 1 else f"${API_KEY_VARIABLE}"
        return cls("", f' -H "Authorization: Bearer {first}"')


def _in_words(capacity: Capacity | None) -> str:
    if capacity is None:
        return ""
    at_once = min(capacity.requests, capacity.kv_tokens / capacity.max_len)
    return (
        f"\nKV cache: {capacity.kv_tokens:,} tokens; {at_once:.1f} requests of {capacity.max_len:,} tokens at once, up to "
        f"{capacity.requests} shorter ones.\n"
    )


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
