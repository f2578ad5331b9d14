"""Keep one rank's engine running, and on one node the front: start them, wait for what happens to them, stop them.

Never touches a device and never imports torch, so that it outlives its engine. It waits on descriptors alone: stop
signals, its parent's and its children's pidfds, and the pipes on which the children report. For now the end of any
child ends the service (DESIGN.md D7, D8 will replay instead).

What the children are told, besides the command line: the front gets `--ready-fd` and writes one JSON line with its
addresses, which goes to this rank's engine as WIDEEP_FRONT; the engine gets WIDEEP_READY_FD and writes
{"http": URL} when it knows the address and {"ready": true} when it serves.
"""

import json
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.options.command_line import Options, arguments_from, environment_from
from server.processes.children import (
    DRAIN_SIGNAL,
    WIDEEP_COMMAND,
    Child,
    MessagePipe,
    StopSignals,
    describe_end,
    say,
    start_child,
    stop_children,
)
from server.processes.error_file import ERROR_FILE, write_failure
from server.processes.rendezvous import Place

UNDER_SERVE = "WIDEEP_UNDER_SERVE"  # set by `wideep serve`, which says itself what happens
STOP_GRACE_S = 2.2  # from the wish to SIGKILL; serve has promised that all is over in 5 s
DRAIN_GRACE_S = 3.0  # for the front and the ranks to end, after the time that open requests have


@dataclass(frozen=True, kw_only=True)
class Commands:
    """How to start the children, up to MODEL and the flags."""

    engine: tuple[str, ...] = (*WIDEEP_COMMAND, "engine")
    front: tuple[str, ...] = (*WIDEEP_COMMAND, "front")


class Supervisor:
    """The children of one rank and the loop that waits for something to happen to them."""

    def __init__(
        self, options: Options, place: Place, commands: Commands, environment: Mapping[str, str]
    ) -> None:
        self._options = options
        self._place = place
        self._commands = commands
        self._environment = {
            **environment,
            **environment_from(options),
            "OMP_NUM_THREADS": str(options.threads),
            # A spinning thread burns its whole time slice when another process has the core: steps of 500 ms
            # instead of 60 (docs/LOG.md). Sleeping costs 10 us per parallel region.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._http = ""
        self._is_serving = False
        self._drained_s: float | None = None  # when draining: until when, on time.monotonic()

    def run(self, front_host: str | None, *, stop_signals: StopSignals, parent_fd: int) -> int:
        """Start the children, wait until the service ends, and stop them; return the exit status."""
        self._watch(stop_signals.fd, lambda: self._on_stop(stop_signals.take()))
        self._watch(parent_fd, lambda: self._fail(f"the torchrun of rank {self._place.rank} is gone"))
        try:
            if front_host is None:
                self._start_engine({})
            else:
                self._start_front(front_host)
            return self._wait(stop_signals.fd)
        finally:
            stop_children(self._children, grace_s=STOP_GRACE_S)
            self._selector.close()

    def _wait(self, stop_fd: int) -> int:
        while (left_s := self._time_left_s()) is None or left_s > 0:
            ready = {key.fd: key.data for key, _ in self._selector.select(left_s)}
            # The wish to stop before all else: a child that ends because all are told to is no failure.
            for _, callback in sorted(ready.items(), key=lambda each: each[0] != stop_fd):
                if (status := callback()) is not None:
                    return int(status)
        return 0

    def _time_left_s(self) -> float | None:
        return None if self._drained_s is None else self._drained_s - time.monotonic()

    def _on_stop(self, numbers: Sequence[int]) -> int | None:
        """Take the wish to stop: gently, or (and when it is the second) at once.

        Under serve, SIGTERM is torchrun's way of ending all when one has failed; serve itself sends another signal.
        """
        gentle = [DRAIN_SIGNAL] if UNDER_SERVE in self._environment else [DRAIN_SIGNAL, signal.SIGTERM]
        timeout_s = self._options.http.shutdown_timeout_s
        is_gentle = len(numbers) == 1 and numbers[0] in gentle and timeout_s > 0
        if not is_gentle or self._drained_s is not None or not self._is_serving:
            return 0
        self._drained_s = time.monotonic() + timeout_s + DRAIN_GRACE_S
        for child in self._children:
            if (
                child.stop_signal != signal.SIGTERM
            ):  # the front, which ends the ranks' engines when it has ended
                child.process.terminate()
        return None

    def _watch(self, fd: int, callback: Callable[[], int | None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _start_front(self, host: str) -> None:
        pipe = MessagePipe()
        flags = (
            "--ranks",
            str(self._place.world_size),
            "--ready-fd",
            str(pipe.child_fd),
            "--ranks-host",
            host,
        )
        self._start("the front", self._commands.front, flags, {}, pipe, stop_signal=signal.SIGINT)
        self._watch(pipe.fd, lambda: self._read(pipe, "the front", self._on_front_message))

    def _start_engine(self, extra: Mapping[str, str]) -> None:
        pipe = MessagePipe()
        extra = {**extra, "WIDEEP_READY_FD": str(pipe.child_fd)}
        name = f"rank {self._place.rank}'s engine"
        self._start(name, self._commands.engine, (), extra, pipe)
        self._watch(pipe.fd, lambda: self._read(pipe, name, self._on_engine_message))

    def _start(
        self,
        name: str,
        command: tuple[str, ...],
        flags: tuple[str, ...],
        extra: Mapping[str, str],
        pipe: MessagePipe,
        *,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        child = start_child(
            name,
            [*command, *arguments_from(self._options), *flags],
            environment={**self._environment, **extra},
            kept_fds=(pipe.child_fd,),
            stop_signal=stop_signal,
        )
        pipe.close_child_end()
        self._children.append(child)
        self._watch(child.pidfd, lambda: self._on_end(child))

    def _on_end(self, child: Child) -> int:
        if child.process.wait() == 0:
            self._say(f"{describe_end(child)}: the service ends")
            return 0
        return self._fail(describe_end(child))

    def _read(
        self, pipe: MessagePipe, name: str, on_message: Callable[[dict[str, object]], None]
    ) -> int | None:
        """Hand on what a child reported. The pipe's end is no event of its own: the child's end is."""
        try:
            messages = pipe.read()
        except ValueError as error:
            return self._fail(f"{name} reported what cannot be understood: {error}")
        if pipe.at_end:
            self._selector.unregister(pipe.fd)
            pipe.close()
        for message in messages:
            on_message(message)
        return None

    def _on_front_message(self, message: dict[str, object]) -> None:
        self._start_engine({"WIDEEP_FRONT": json.dumps(message)})

    def _on_engine_message(self, message: dict[str, object]) -> None:
        self._http = str(message.get("http", self._http))
        self._is_serving = self._is_serving or bool(message.get("ready"))
        if message.get("ready") and self._place.local_rank == 0:
            self._say(f"serving on {self._place.world_size} ranks at {self._http}")

    def _say(self, text: str) -> None:
        if UNDER_SERVE not in self._environment:
            say(f"wideep: {text}")

    def _fail(self, text: str) -> int:
        report_failure(text, self._environment)
        return 1


def report_failure(text: str, environment: Mapping[str, str]) -> None:
    """Say why this worker fails: to torchrun through its error file and, unless serve reads that, to the user."""
    path = environment.get(ERROR_FILE)
    if path:
        write_failure(Path(path), text)
    if not path or UNDER_SERVE not in environment:
        say(f"wideep: {text}", error=True)
