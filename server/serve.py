"""`wideep serve`: one command that runs torchrun, waits until the service answers, and ends all of it.

Serve is the root of the process tree: serve > torchrun (server.agent) > worker per rank > engine, and the front.
Each level ends when the one above does, however that ended. Serve adopts what a killed torchrun leaves behind, so
that nothing is left when serve has ended. Rejected: starting the workers ourselves; one way of starting, torchrun's,
serves a laptop and a cluster alike (DESIGN.md D7).
"""

import contextlib
import http.client
import json
import math
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from server.children import (
    WIDEEP_COMMAND,
    Child,
    StopSignals,
    adopt_orphans,
    describe_end,
    kill_orphans,
    say,
    start_child,
    stop_children,
)
from server.error_file import ERROR_FILE, first_failure
from server.machine import usable_cores
from server.model_source import resolve_model
from server.options import API_KEY_VARIABLE, Options, arguments_from, environment_from
from server.preflight import PreflightError, check_start
from server.worker import UNDER_SERVE

DEFAULT_RANKS = 2  # on CPU
AGENT_GRACE_S = 3.2  # torchrun waits for workers, which kill their children after STOP_GRACE_S
ORPHAN_GRACE_S = 0.5  # then all that is left is killed: together below the 5 s that the user is promised
FAILURE_GRACE_S = 1.5  # torchrun's, to end by itself and name a supervisor that was killed
_POLL_S = 0.2  # how often /health is asked during the start, and failures are looked for


@dataclass(frozen=True, kw_only=True)
class ServeCommands:
    """How to start torchrun and, for it, a worker."""

    agent: tuple[str, ...] = (*WIDEEP_COMMAND, "torchrun")
    worker: tuple[str, ...] = (*WIDEEP_COMMAND, "worker")


def run_serve(options: Options, *, commands: ServeCommands | None = None) -> int:
    """Serve until told to stop.

    Returns:
        The exit status: 0 after Ctrl-C or SIGTERM, 1 if the service could not start or a process of it died.
    """
    started_s = time.monotonic()
    try:
        with terminate_as_interrupt():
            options = _prepare(options)
    except PreflightError as error:
        say(f"wideep serve: {error}", error=True)
        return 1
    except KeyboardInterrupt:
        say("wideep: stopped before the start")
        return 0
    spared = adopt_orphans()
    with StopSignals() as stop_signals, tempfile.TemporaryDirectory(prefix="wideep_") as log_directory:
        agent = _start_agent(options, commands or ServeCommands(), log_directory)
        try:
            return _watch(agent, options, stop_signals.fd, started_s, Path(log_directory))
        finally:
            stop_children([agent], grace_s=AGENT_GRACE_S)
            kill_orphans(spared=spared, grace_s=ORPHAN_GRACE_S)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end what runs inside, such as the making of a model, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(options: Options) -> Options:
    """Find the model, fill in what the ranks share, and check that it can work."""
    ranks = options.data_parallel_size or DEFAULT_RANKS
    options = replace(
        options,
        model=str(resolve_model(options.model)),
        data_parallel_size=ranks,
        threads=options.threads or max(1, usable_cores() // ranks),
    )
    check_start(options, num_ranks=ranks, num_local_ranks=ranks, has_front=True)
    return options if options.port else replace(options, port=free_port(options.host))


def free_port(host: str) -> int:
    """Return a port that is free now; another program may be faster to take it.

    Raises:
        OSError: the host is no address of this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def _start_agent(options: Options, commands: ServeCommands, log_directory: str) -> Child:
    torchrun_flags = [
        "--standalone",
        f"--nproc-per-node={options.data_parallel_size}",
        f"--log-dir={log_directory}",
        "--no-python",
    ]
    say(
        f"wideep: starting {', '.join(options.served_model_names)} on {_count(options.data_parallel_size, 'rank')} with "
        f"{_count(options.threads, 'thread')} each"
    )
    return start_child(
        "torchrun",
        [*commands.agent, *torchrun_flags, *commands.worker, *arguments_from(options)],
        environment={
            **os.environ,
            **environment_from(options),
            UNDER_SERVE: "1",
            ERROR_FILE: os.path.join(log_directory, "error.json"),
        },
    )


def _watch(agent: Child, options: Options, stop_fd: int, started_s: float, log_directory: Path) -> int:
    """Wait for the first of: a stop signal, the service's end; greet in between, once it answers.

    torchrun may take long to end after a failure (it gives each worker 30 s), so serve looks for failures itself.
    """
    poll = select.poll()
    poll.register(stop_fd, select.POLLIN)
    poll.register(agent.pidfd, select.POLLIN)
    is_ready = False
    given_up_s = math.inf
    while time.monotonic() < given_up_s:
        ready_fds = {fd for fd, _ in poll.poll(_POLL_S * 1000)}
        if stop_fd in ready_fds:
            say("\nwideep: stopping")
            return 0
        if agent.pidfd in ready_fds:
            break
        if given_up_s == math.inf and first_failure(log_directory) is not None:
            given_up_s = time.monotonic() + FAILURE_GRACE_S
        if not is_ready and is_healthy(options.host, options.port):
            is_ready = True
            say(greeting(options, seconds=time.monotonic() - started_s))
    say(f"wideep serve: {_cause_of_end(agent, log_directory)}. The service has ended.", error=True)
    return 1


def _cause_of_end(agent: Child, log_directory: Path) -> str:
    """Say why the service ends: torchrun was killed, a process failed, or everything ended in order."""
    status = agent.process.poll()
    failure = first_failure(log_directory)
    if failure is not None and (
        status is None or status >= 0
    ):  # else the workers know only that torchrun is gone
        return failure
    return "all ranks ended although nobody asked serve to stop" if status == 0 else describe_end(agent)


def is_healthy(host: str, port: int) -> bool:
    """Return whether GET /health answers 200."""
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=1.0)
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
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    name = options.served_model_names[0]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello! Who are you?"}]})
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if options.api_keys else ""
    ranks = _count(options.data_parallel_size, "rank")
    return f"""
wideep: serving {name} on {ranks} at {url} ({seconds:.0f} s after the start)

  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}

  {_wideep_script()} chat {url}

Ctrl-C stops everything.
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


def _count(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
