"""A private service for one script or batch: `wideep serve` on this machine, which ends when its owner does.

Its processes are those of `wideep serve`, and the script calls them over HTTP on a loopback port with a random key. Offline
answers therefore equal the service's bit for bit, and the script does not import torch. Rejected: the front in the script's
process, which would need the script's event loop, its signals and a torchrun; an engine in the script's process, which would
be a second engine to maintain.
"""

import collections
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Self

from dispatch.ports import free_port
from server.machine.roots import WIDEEP_COMMAND
from server.options.flag import OptionsError
from server.options.reading import environment_from, handed_on
from server.options.table import Options
from server.serve.children import Child, describe_end, stop_children
from server.serve.preflight.checkpoint import with_checkpoint
from server.serve.preflight.device import CPU_NUM_SEQS, CPU_RANKS
from server.serve.preflight.model import PreflightError
from server.serve.preflight.probe import is_healthy, reachable_host

SERVE_COMMAND = (*WIDEEP_COMMAND, "serve")
STOP_GRACE_S = 8.0  # serve promises to end within 5 s
_POLL_S = 0.1  # interval between checks of /health during the start
_MOST_PLACES = 512  # connections that one client can use efficiently
_BOUND_EXEC = str(Path(__file__).parents[1] / "machine" / "parent_death.py")
_SERVE_SAYS = "wideep serve: "
_KEPT_LINES = 8  # last lines of the service, for the message about its end


class ServiceEndedError(RuntimeError):
    """The private service did not start, or ended early; the message names the cause."""


class PrivateService:
    """A running private `wideep serve`. A context manager: leaving it ends all of its processes."""

    def __init__(
        self,
        options: Options,
        *,
        command: Sequence[str] = SERVE_COMMAND,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Find the model and start the service; `wait_ready` waits until it answers.

        Args:
            options: The options. Port 0 chooses a free one; without API keys, a random key is created.
            command: The `wideep serve` command, up to MODEL.

        Raises:
            OptionsError: An option is not supported by a private service.
            ServiceEndedError: The model or the host does not exist.
        """
        self.options = _completed(options)
        self._closing = threading.Event()
        self._closed = False
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        words = [*command, *handed_on(self.options)]
        self._child = self._start(words, {**environment, **environment_from(self.options)})
        assert self._child.process.stderr is not None, "stderr is a pipe"
        self._reader = threading.Thread(target=self._read, args=(self._child.process.stderr,), daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """The root URL."""
        host = reachable_host(self.options.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.options.port}"

    @property
    def num_places(self) -> int:
        """Number of requests that it runs at once; more would wait in its queue."""
        ranks = self.options.given_ranks or CPU_RANKS
        return min(ranks * (self.options.engine.max_num_seqs or CPU_NUM_SEQS), _MOST_PLACES)

    @property
    def api_key(self) -> str:
        """A valid API key."""
        return self.options.api_keys[0]

    def wait_ready(self) -> Self:
        """Wait until the service answers. There is no timeout: a large model may take long.

        Raises:
            ServiceEndedError: The service has ended instead.
        """
        while not is_healthy(self.options.host, self.options.port):
            if self.has_ended(within_s=_POLL_S):
                raise ServiceEndedError(f"the service did not start: {self.cause_of_end()}")
        return self

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Return whether the service has ended or ends within this time."""
        return self._closed or bool(select.select([self._child.pidfd], [], [], within_s)[0])

    def cause_of_end(self) -> str:
        """Return why the service ended: its own last message, if it printed one."""
        self._reader.join(STOP_GRACE_S)  # until the end of the pipe, so that every line is known
        own = [line for line in self._said if line.startswith(_SERVE_SAYS)]
        return own[-1].removeprefix(_SERVE_SAYS) if own else describe_end(self._child)

    def why_gone(self) -> str | None:
        """Return why the service has ended, or None while it runs."""
        return f"the service has ended: {self.cause_of_end()}" if self.has_ended() else None

    def close(self) -> None:
        """End every process of the service. May be called again."""
        if self._closed:
            return
        self._closed = True
        stop_children([self._child], grace_s=STOP_GRACE_S)
        self._closing.set()
        self._reader.join(STOP_GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start serve from a thread that lives as long as this process.

        The kernel treats the end of the thread that started a child as the parent's end, and a script may create its LLM in
        any thread. The final SIGTERM lets serve end its own processes in order.
        """
        started: list[subprocess.Popen[bytes] | OSError] = []
        is_started = threading.Event()
        bound = [sys.executable, "-P", _BOUND_EXEC, str(os.getpid()), str(int(signal.SIGTERM)), *command]

        def keep() -> None:
            try:
                process = subprocess.Popen(
                    bound,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=0,
                )
                started.append(process)
            except OSError as error:
                started.append(error)
            is_started.set()
            self._closing.wait()

        threading.Thread(target=keep, name="wideep-service", daemon=True).start()
        is_started.wait()
        [process] = started
        if isinstance(process, OSError):
            self._closing.set()
            raise ServiceEndedError(f"the service could not be started: {process}") from process
        return Child("the service", process, os.pidfd_open(process.pid))

    def _read(self, stream: IO[bytes]) -> None:
        """Keep the last lines of stderr and print all except serve's final message, which exceptions carry."""
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                self._said.append(line)
                if not line.startswith(_SERVE_SAYS):
                    print(line, file=sys.stderr, flush=True)


def _completed(options: Options) -> Options:
    """Fill in what the owner needs before the start: the model's folder, the port and an API key."""
    if options.http.ssl_certfile is not None:
        raise OptionsError("--ssl-certfile is not supported for a private service; remove it")
    if options.uds is not None:
        raise OptionsError("--uds is not supported for a private service; remove it")
    try:
        options = with_checkpoint(options)
        port = options.port or free_port(options.host)
    except (PreflightError, OSError) as error:
        raise ServiceEndedError(f"the service did not start: {error}") from None  # the message is complete
    return replace(
        options,
        port=port,
        api_keys=options.api_keys or (secrets.token_urlsafe(32),),
        http=replace(options.http, shutdown_timeout_s=0),  # its owner needs no answers any more
    )
