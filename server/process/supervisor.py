"""Keep one rank's engine running, and on one node the front: start them, wait for what happens to them, stop them.

Never touches a device and never imports torch, so that it outlives its engine. It waits on descriptors alone: stop
signals, its parent's and its children's pidfds, and the pipes on which the children report.

An engine that ends after it had served is started again, as often as its budget allows; then the rank stays away and
the others serve without it. An engine that never served ends the service: its cause (a flag, the memory) would stay.
A front that is killed once ranks have served is started again too, with the ports and the token of the one before; one that
ends by itself ends the service, and so does an engine that ends in order, which the front has asked for.

An engine leaves a copy of itself that waits (`spare`) and takes its place: importing torch again would take seconds.

A supervisor that is killed takes its children along. Where its launcher starts it again (`launcher`), it finds what it has to know
in the file WIDEEP_SUPERVISOR_STATE, and starts them as it would have started them again.

What kills an engine once (the kernel short of memory, an operator, a cosmic ray) does not kill it again at once; what
does, a broken device or a request that no rank survives, would otherwise cost the others a pause every half minute.
Rejected: waiting longer before every further start, which leaves the service without a rank that would have worked.

What the children are told, besides the command line: the front gets `--ready-fd` and writes one JSON line with its
addresses, which goes to this rank's engine as WIDEEP_FRONT, and to the front that replaces it; a front also gets WIDEEP_KEPT,
a folder of what outlives a front (answers that may be asked for again, files); an engine that is started again gets WIDEEP_RESTARTS, how
often that has happened, and WIDEEP_RESTARTABLE_IN_S, how soon it may happen again. The engine gets WIDEEP_READY_FD and writes {"http": URL} when it knows the address,
{"kv_cache_bytes": n}, which its successors get as a flag, {"ready": true} when it serves, {"beat": n} several times a second from
then until {"leaving": true}: one that stops to do so is hung (`watchdog`), is killed, and is started again as any other.
"""

import json
import math
import os
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from server.lines import SCREEN_VARIABLE, say
from server.options.reading import environment_from, handed_on
from server.options.table import Options
from server.process.children import (
    DRAIN_SIGNAL,
    END_NOW_SIGNAL,
    FRONT_IS_GONE,
    FRONT_VARIABLE,
    KEPT_VARIABLE,
    READY_VARIABLE,
    SUPERVISOR_STATE_VARIABLE,
    Child,
    MessagePipe,
    StopSignals,
    adopt_orphans,
    describe_end,
    ended_children,
    has_ended,
    start_child,
    stop_children,
)
from server.process.error_file import ERROR_FILE, LAST, write_absence, write_failure
from server.process.spare import SPARE_VARIABLE, Spare, StartOrder
from server.process.store.rendezvous import RESTARTS_VARIABLE, Place
from server.process.watchdog import Watchdog
from server.roots import WIDEEP_COMMAND

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
            # gRPC's own lines ("Got goaway") say nothing to a user that we do not say in words.
            "GRPC_VERBOSITY": environment.get("GRPC_VERBOSITY", "NONE"),
        }
        self._selector = selectors.DefaultSelector()
        self._front: Child | None = None
        self._engine: Child | None = None
        self._spare: Spare | None = None  # of the present engine
        self._front_host = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._announced = ""  # by the front, as JSON
        self._told_to_engine: dict[str, str] = {}
        self._front_budget = RestartBudget(max_restarts=options.max_rank_restarts)
        self._budget = RestartBudget(max_restarts=options.max_rank_restarts)
        self._ended_s: float | None = None  # time.monotonic() of the end of the engine whose successor starts
        self._http = ""
        self.has_lost_front = False
        self._has_served = False  # some engine of this rank
        self._is_serving = False  # the present one
        self._watchdog: Watchdog | None = None  # of the present engine
        self._why_killed: str | None = None  # the present engine, by us
        self._drained_s: float | None = None  # when draining: until when, on time.monotonic()
        path = environment.get(SUPERVISOR_STATE_VARIABLE)
        self._state_path = Path(path) if path else None
        if self._state_path is not None and self._state_path.exists():
            self._take_over(json.loads(self._state_path.read_text()))

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Go on where a supervisor of this rank was killed, and its children with it."""
        self._keep_port(state["port"])
        self._keep_cache(state["kv_cache_bytes"])
        self._has_served = True
        if self._place.world_size == 1:  # nobody is left that a front could learn from: all begins anew
            return
        self._announced = state["announced"]
        if self._announced:
            self._told_to_engine = {FRONT_VARIABLE: self._announced}
        self._budget.num_taken = state["num_restarts"] + 1
        self._ended_s = time.monotonic()
        self._write_state()  # the next one counts on

    def _write_state(self) -> None:
        """Leave what a supervisor that replaces this one has to know; whole or not at all."""
        if self._state_path is None or not self._has_served:
            return
        state = {
            "port": self._options.port,
            "kv_cache_bytes": self._options.kv_cache_bytes,
            "announced": self._announced,
            "num_restarts": self._budget.num_taken,
        }
        partial_path = self._state_path.with_suffix(".partial")
        partial_path.write_text(json.dumps(state))
        partial_path.replace(self._state_path)

    def _keep_port(self, port: int) -> None:
        self._options = replace(self._options, port=port)

    def _keep_cache(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._options = replace(self._options, kv_cache_bytes=num_bytes, gpu_memory_utilization=None)

    def run(self, front_host: str | None, *, stop_signals: StopSignals, parent_fd: int) -> int:
        """Start the children, wait until the service ends, and stop them; return the exit status."""
        adopt_orphans()  # the copies that engines leave
        self._watch(stop_signals.fd, lambda: self._on_stop(stop_signals.take()))
        self._watch(parent_fd, lambda: self._fail(f"what started rank {self._place.rank} is gone"))
        try:
            if front_host is None:
                self._start_engine()
            else:
                self._start_front(front_host)
                if self._announced:  # by a front that died with the supervisor before us
                    self._start_engine()
            return self._wait(stop_signals.fd)
        finally:
            stop_children([each for each in (self._front, self._engine) if each], grace_s=STOP_GRACE_S)
            if self._spare is not None:
                self._spare.close()
            self._selector.close()
            if self._folder is not None:
                self._folder.cleanup()

    def _make_folder(self) -> str:
        """Return a folder for what a front leaves to the next one: where our state is, or our own."""
        if self._state_path is not None:
            path = self._state_path.with_name("kept")
            path.mkdir(exist_ok=True)
            return str(path)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="wideep_")
        return self._folder.name

    def _wait(self, stop_fd: int) -> int:
        while self._drained_s is None or time.monotonic() < self._drained_s:
            ready = {key.fd: key.data for key, _ in self._selector.select(self._time_left_s())}
            # The wish to stop before all else: a child that ends because all are told to is no failure.
            for _, callback in sorted(ready.items(), key=lambda each: each[0] != stop_fd):
                if (status := callback()) is not None:
                    return int(status)
            self._kill_if_hung()
        return 0

    def _time_left_s(self) -> float | None:
        """Until something is to be done that no descriptor announces."""
        left_s = [] if self._drained_s is None else [max(0.0, self._drained_s - time.monotonic())]
        if self._watchdog is not None and (watch_s := self._watchdog.left_s()) is not None:
            left_s.append(watch_s)
        return min(left_s, default=None)

    def _kill_if_hung(self) -> None:
        """Kill an engine that does not run any more: then its connections close, and others know within a moment."""
        if self._engine is None or self._watchdog is None or (why := self._watchdog.why_hung()) is None:
            return
        self._why_killed, self._watchdog = why, None
        self._engine.process.kill()

    def _on_stop(self, numbers: Sequence[int]) -> int | None:
        """Take the wish to stop: gently, or (and when it is the second) at once.

        Under serve, SIGTERM is the launcher's way of ending all when one has failed; serve itself sends another signal.
        """
        gentle = [DRAIN_SIGNAL] if UNDER_SERVE in self._environment else [DRAIN_SIGNAL, signal.SIGTERM]
        timeout_s = self._options.http.shutdown_timeout_s
        is_gentle = len(numbers) == 1 and numbers[0] in gentle and timeout_s > 0
        if not is_gentle or self._drained_s is not None or not self._has_served:
            return 0
        if self._front is None:
            if not self._is_serving:  # nobody would tell an engine that the front does not know
                return 0
        else:  # which ends the ranks' engines when it has ended
            self._front.process.terminate()
        self._drained_s = time.monotonic() + timeout_s + DRAIN_GRACE_S
        return None

    def _watch(self, fd: int, callback: Callable[[], int | None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _start_front(self, host: str) -> None:
        pipe = MessagePipe()
        extra = {KEPT_VARIABLE: self._make_folder()}
        if self._announced:
            extra[FRONT_VARIABLE] = self._announced
        flags = (
            "--ranks",
            str(self._place.world_size),
            "--ready-fd",
            str(pipe.child_fd),
            "--ranks-host",
            host,
        )
        front = self._start(
            "the front", self._commands.front, flags, extra, (pipe.child_fd,), stop_signal=END_NOW_SIGNAL
        )
        pipe.close_child_end()
        self._front, self._front_host = front, host
        self._watch(front.pidfd, lambda: self._on_front_end(front))
        self._watch(pipe.fd, lambda: self._read(pipe, "the front", self._on_front_message))

    def _start_engine(self) -> None:
        """Start the rank's engine: the copy that the last one has left, or a new process."""
        pipe = MessagePipe()
        extra = {**self._told_to_engine, "WIDEEP_RESTARTABLE_IN_S": str(self._budget.allowed_in_s())}
        num_restarts = int(self._environment.get(RESTARTS_VARIABLE, "0")) + self._budget.num_taken
        if num_restarts:
            extra[RESTARTS_VARIABLE] = str(num_restarts)
        if self._place.rank == 0 and not num_restarts and SCREEN_VARIABLE not in self._environment:
            say("wideep: loading torch and transformers")
        name = f"rank {self._place.rank}'s engine"
        spare = Spare() if self._options.max_rank_restarts else None
        fds = {READY_VARIABLE: pipe.child_fd} | ({SPARE_VARIABLE: spare.engines_fd} if spare else {})
        engine = self._wake_spare(name, StartOrder(handed_on(self._options)[1], extra), tuple(fds.values()))
        if engine is None:
            extra |= {variable: str(fd) for variable, fd in fds.items()}
            engine = self._start(name, self._commands.engine, (), extra, tuple(fds.values()))
        pipe.close_child_end()
        if spare is not None:
            spare.close_engines_end()
        self._engine, self._spare, self._why_killed = engine, spare, None
        self._watchdog = Watchdog(engine.process.pid, self._options.heartbeat_timeout_s)
        read = partial(self._read, pipe, name, self._on_engine_message)
        self._watch(engine.pidfd, lambda: self._on_engine_end(engine, read))
        self._watch(pipe.fd, read)

    def _wake_spare(self, name: str, order: StartOrder, fds: tuple[int, ...]) -> Child | None:
        if self._spare is None:
            return None
        engine = self._spare.start(name, order, fds)
        self._spare.close()
        return engine

    def _start(
        self,
        name: str,
        command: tuple[str, ...],
        flags: tuple[str, ...],
        extra: Mapping[str, str],
        kept_fds: tuple[int, ...],
        *,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> Child:
        return start_child(
            name,
            [*command, *handed_on(self._options), *flags],
            environment={**self._environment, **extra},
            kept_fds=kept_fds,
            stop_signal=stop_signal,
        )

    def _on_end(self, child: Child) -> int:
        if child.process.wait() == 0:
            self._say(f"{describe_end(child)}: the service ends")
            return 0
        return self._fail(describe_end(child))

    def _on_front_end(self, front: Child) -> int | None:
        """Start a front again that was killed; one that ends by itself has said why, and the service ends."""
        if not self._may_return(front):
            return self._on_end(front)
        ending = describe_end(front)
        allowed = self._front_budget.describe()
        if not self._front_budget.take():
            return self._fail(f"{ending}; it was started again {allowed} and is not started any more")
        say(
            f"wideep: {ending}; it is started again (at most {allowed}); what it was answering is cut off",
            error=True,
        )
        self._selector.unregister(front.pidfd)
        os.close(front.pidfd)
        self._start_front(self._front_host)
        return None

    def _may_return(self, front: Child) -> bool:
        return front.process.wait() < 0 and self._has_served and self._drained_s is None

    def _on_engine_end(self, engine: Child, read: Callable[[], int | None]) -> int | None:
        """Start the engine again where that may help; else end the service, or go on without this rank."""
        read()  # its last words: it may have served for a moment
        status, ending = engine.process.wait(), self._describe_end_of(engine)
        self._watchdog = None
        if self._front is not None and has_ended(self._front) and not self._may_return(self._front):
            return self._on_end(self._front)  # the cause
        if status == FRONT_IS_GONE:
            self.has_lost_front = True
            return self._fail(self._describe_lost_front(), follows=True)
        if status == 0 or not self._has_served:
            return self._on_end(engine)
        self._selector.unregister(engine.pidfd)
        os.close(engine.pidfd)
        self._engine, self._is_serving = None, False
        if self._drained_s is not None:
            say(f"wideep: {ending}; the service is stopping", error=True)
            return None if self._front is not None else 0
        return self._restart(ending)

    def _describe_lost_front(self) -> str:
        """Say that this rank has lost its service, and on another node how to come back to it."""
        text = f"rank {self._place.rank} has lost the front, and so its service"
        if UNDER_SERVE in self._environment or self._place.world_size == self._place.local_world_size:
            return text
        return (
            f"{text}; if that still runs and can be reached again, this node joins it with: torchrun --nnodes 1 "
            f"--nproc-per-node {self._place.local_world_size} --rdzv-backend wideep --rdzv-endpoint localhost:0 "
            f"--no-python wideep worker {self._options.model} --join {self._environment.get('MASTER_ADDR')}:"
            f"{self._environment.get('MASTER_PORT')}"
        )

    def _describe_end_of(self, engine: Child) -> str:
        if self._why_killed is None:
            return describe_end(engine)
        return f"{engine.name} (pid {engine.process.pid}) was hung and has been killed: {self._why_killed}"

    def _restart(self, ending: str) -> int | None:
        allowed = self._budget.describe()
        if not self._budget.take():
            return self._give_up(f"{ending}; it was started again {allowed} and is not started any more")
        say(f"wideep: {ending}; it is started again (at most {allowed})", error=True)
        self._ended_s = self._ended_s or time.monotonic()
        self._write_state()
        self._start_engine()
        return None

    def _give_up(self, text: str) -> int | None:
        """Leave the service to the other ranks. Nobody is told: the front has seen this one go."""
        if self._place.world_size == 1:
            return self._fail(text)
        say(f"wideep: {text}: the service goes on without rank {self._place.rank}", error=True)
        if path := self._environment.get(ERROR_FILE):
            write_absence(Path(path), self._place.rank, text)
        return None

    def _read(
        self, pipe: MessagePipe, name: str, on_message: Callable[[dict[str, object]], None]
    ) -> int | None:
        """Hand on what a child reported. The pipe's end is no event of its own: the child's end is."""
        if pipe.at_end:  # and closed, while its event was waiting
            return None
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

    def _reap_orphans(self) -> None:
        """Reap what a killed front has left and has ended since: orphans come to us, for the sake of engines' copies."""
        ours = frozenset(child.process.pid for child in (self._front, self._engine) if child)
        for pid in ended_children(spared=ours):
            if self._spare is None or pid != self._spare.pid:
                os.waitpid(pid, 0)

    def _on_front_message(self, message: dict[str, object]) -> None:
        self._reap_orphans()
        if self._announced:
            return  # the ports and the token of the one before
        self._announced = json.dumps(message)
        self._told_to_engine = {FRONT_VARIABLE: self._announced}
        if self._options.uds is None:  # for a front that takes this one's place
            self._keep_port(int(str(message["http"]).rpartition(":")[2]))
        self._start_engine()

    def _on_engine_message(self, message: dict[str, object]) -> None:
        if "leaving" in message:
            self._watchdog = None
        elif self._watchdog is not None and "beat" in message:
            self._watchdog.beat()
        self._http = str(message.get("http", self._http))
        if "kv_cache_bytes" in message:  # less memory is free when a successor starts; it gets as many blocks
            self._keep_cache(int(str(message["kv_cache_bytes"])))
        if not message.get("ready"):
            return
        if self._ended_s is not None:
            seconds, self._ended_s = time.monotonic() - self._ended_s, None
            say(f"wideep: rank {self._place.rank} serves again, after {seconds:.0f} s", error=True)
        elif self._place.local_rank == 0:
            self._say(f"serving on {self._place.world_size} ranks at {self._http}")
        self._has_served = self._is_serving = True
        self._write_state()

    def _say(self, text: str) -> None:
        if UNDER_SERVE not in self._environment:
            say(f"wideep: {text}")

    def _fail(self, text: str, *, follows: bool = False) -> int:
        report_failure(text, self._environment, follows=follows)
        return 1


def report_failure(text: str, environment: Mapping[str, str], *, follows: bool = False) -> None:
    """Say why this worker fails: to torchrun through its error file and, unless serve reads that, to the user.

    Args:
        follows: from another process' failure, which is the one to tell the user if it becomes known.
    """
    path = environment.get(ERROR_FILE)
    if path:
        write_failure(Path(path), text, time_ns=LAST if follows else None)
    if not path or UNDER_SERVE not in environment:
        say(f"wideep: {text}", error=True)


MAX_RESTARTS = 3
WINDOW_S = 600.0


class RestartBudget:
    """So many starts within any window of time."""

    def __init__(
        self,
        *,
        max_restarts: int = MAX_RESTARTS,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._taken_s: deque[float] = deque()  # those of the last window
        self.num_taken = 0  # in all

    def allowed_in_s(self) -> float:
        """Return seconds until one more start is allowed; 0: it is now."""
        while self._taken_s and self._clock() - self._taken_s[0] >= self._window_s:
            self._taken_s.popleft()
        if len(self._taken_s) < self._max_restarts:
            return 0.0
        return self._taken_s[0] + self._window_s - self._clock() if self._taken_s else math.inf

    def take(self) -> bool:
        """Return whether one more start is allowed now, and count it if so."""
        if self.allowed_in_s():
            return False
        self._taken_s.append(self._clock())
        self.num_taken += 1
        return True

    def describe(self) -> str:
        """Say what is allowed, for messages."""
        return f"{self._max_restarts} times in {self._window_s / 60:g} minutes"
