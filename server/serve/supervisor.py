"""Run one rank's engine and, on one node, the fronts: start them, wait for events, restart them, stop them.

The supervisor never touches a device and never imports torch, so it outlives its engine. It waits on descriptors only: stop
signals, the pidfds of its parent and children, and the pipes on which the children report.

An engine that fails after it has served is restarted, up to a budget; then the service continues without this rank. If an
engine fails before serving, the service ends: the cause (a flag, too little memory) would remain. A front that is killed
after ranks have served is restarted with the same ports and token. The service ends if a front exits by itself, or if an
engine exits with status 0, which only the front requests. `restarts` makes these decisions. The engine starts when all fronts
(`front_processes`) are bound.

Engines and fronts leave waiting copies of themselves (`spare`) that replace them, because imports take seconds.

If a supervisor is killed, its children end with it. If the launcher restarts the supervisor (`launcher`), it reads its state
from a file and starts its children as after a restart. `child_messages` defines the state and the protocol with the children.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import assert_never

from server.front.several.front_map import FrontMap
from server.machine.lines import SCREEN_VARIABLE, say
from server.machine.roots import WIDEEP_COMMAND
from server.options.flag import OptionsError
from server.options.pools import in_words
from server.options.reading import environment_from, handed_on
from server.options.table import Options
from server.serve.child_messages import (
    Beat,
    CacheBytes,
    FromChild,
    FrontAddresses,
    Leaving,
    MessagePipe,
    Ready,
    ServiceUrl,
    SupervisorState,
)
from server.serve.children import (
    DRAIN_SIGNAL,
    END_NOW_SIGNAL,
    PARENT_END_SIGNAL,
    READY_VARIABLE,
    SUPERVISOR_STATE_VARIABLE,
    Child,
    StopSignals,
    adopt_orphans,
    describe_end,
    ended_children,
    has_ended,
    start_child,
    stop_children,
)
from server.serve.error_file import ERROR_FILE, LAST, write_absence, write_failure
from server.serve.front_processes import FrontKind, FrontProcesses
from server.serve.restarts import Next, RestartPolicy
from server.serve.spare import SPARE_VARIABLE, Spare, StartOrder
from server.serve.store.rendezvous import RESTARTS_VARIABLE, Place
from server.serve.watchdog import Watchdog

UNDER_SERVE = "WIDEEP_UNDER_SERVE"  # set by `wideep serve`, which reports events itself
_FRONT_END_S = 1.5  # for a front to end after it has stopped the engine
STOP_GRACE_S = 2.2  # from the stop signal to SIGKILL; serve promises to end within 5 s
DRAIN_GRACE_S = 3.0  # for the front and the ranks to end after the timeout of open requests


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands that start the children, without MODEL and flags."""

    engine: tuple[str, ...] = (*WIDEEP_COMMAND, "engine")
    front: tuple[str, ...] = (*WIDEEP_COMMAND, "front")


class Supervisor:
    """The children of one rank and the event loop that watches them."""

    def __init__(
        self, options: Options, place: Place, commands: Commands, environment: Mapping[str, str]
    ) -> None:
        self._options = options
        self._place = place
        self._commands = commands
        self._environment = {
            **environment,
            **environment_from(options),
            "OMP_NUM_THREADS": str(options.engine.threads),
            # A spinning thread burns its whole time slice when another process has the core: steps of 500 ms
            # instead of 60 (docs/LOG.md). Sleeping costs 10 us per parallel region.
            "OMP_WAIT_POLICY": "PASSIVE",
            # gRPC's own lines ("Got goaway") add nothing to our messages.
            "GRPC_VERBOSITY": environment.get("GRPC_VERBOSITY", "NONE"),
        }
        self._selector = selectors.DefaultSelector()
        self._engine: Child | None = None
        self._spare: Spare | None = None  # of the current engine
        self._policy = RestartPolicy(
            max_restarts=options.max_rank_restarts, num_fronts=options.api_server_count
        )
        self._ended_s: float | None = None  # time.monotonic() of the previous engine's end, during a restart
        self._http = ""
        self.has_lost_front = False
        self._is_serving = False  # the current engine
        self._watchdog: Watchdog | None = None  # of the current engine
        self._why_killed: str | None = None  # why we killed the current engine
        path = environment.get(SUPERVISOR_STATE_VARIABLE)
        self._state_path = Path(path) if path else None
        self._fronts = FrontProcesses(
            options,
            num_ranks=place.world_size,
            environment=environment,
            start=partial(self._start_or_wake, commands.front, stop_signal=END_NOW_SIGNAL),
            kept=None if self._state_path is None else self._state_path.with_name("kept"),
        )
        if self._state_path is not None and self._state_path.exists():
            self._take_over(SupervisorState.read(self._state_path))

    def _take_over(self, state: SupervisorState) -> None:
        """Take over from a supervisor of this rank that was killed together with its children."""
        self._keep_port(state.port)
        self._keep_cache(state.kv_cache_bytes)
        self._policy.has_served = True
        if self._place.world_size == 1:  # no other rank has state for a new front: start from scratch
            return
        self._fronts.announced = state.announced
        self._policy.engine.num_taken = state.num_restarts + 1
        self._ended_s = time.monotonic()
        self._write_state()  # with the new count

    def _write_state(self) -> None:
        """Write the state for a replacement supervisor."""
        if self._state_path is None or not self._policy.has_served:
            return
        num_bytes = self._options.engine.kv_cache_bytes
        num_restarts, announced = self._policy.engine.num_taken, self._fronts.announced
        state = SupervisorState(self._options.port, num_bytes, announced, num_restarts)
        state.write(self._state_path)

    def _keep_port(self, port: int) -> None:
        self._options = replace(self._options, port=port)

    def _keep_cache(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._options = replace(self._options, gpu_memory_utilization=None).with_engine(
                kv_cache_bytes=num_bytes
            )

    def run(
        self,
        front_host: str | None,
        *,
        stop_signals: StopSignals,
        parent_fd: int,
        fronts: FrontKind = FrontKind.ONLY,
        returning: FrontMap | None = None,
    ) -> int:
        """Start the children, wait until the service ends, stop them, and return the exit status.

        Args:
            front_host: How other nodes reach the front that runs here; None if none does.
            fronts: Which fronts run here.
            returning: The map of the fronts that this node had before it was lost.
        """
        adopt_orphans()  # the spares of engines and fronts
        self._watch(stop_signals.fd, lambda: self._on_stop(stop_signals.take()))
        self._watch(parent_fd, self._on_parent_end)
        try:
            if front_host is None:
                self._start_engine()
            else:
                try:
                    starting = self._fronts.begin(front_host, fronts, returning)
                except OptionsError as error:
                    return self._fail(str(error))
                for number in starting:
                    self._start_front(number)
                if self._fronts.announced:
                    self._start_engine()
            return self._wait(stop_signals.fd)
        finally:
            stop_children(self._children(), grace_s=STOP_GRACE_S)
            if self._spare is not None:
                self._spare.close()
            self._selector.close()
            self._fronts.close()

    def _wait(self, stop_fd: int) -> int:
        while self._policy.drained_s is None or time.monotonic() < self._policy.drained_s:
            ready = {key.fd: key.data for key, _ in self._selector.select(self._time_left_s())}
            # Stop signals come first: a child that ends because everything stops has not failed.
            for _, callback in sorted(ready.items(), key=lambda each: each[0] != stop_fd):
                if (status := callback()) is not None:
                    return int(status)
            self._kill_if_hung()
        return 0

    def _time_left_s(self) -> float | None:
        """Return the time until the next deadline that no descriptor announces."""
        left_s = []
        if self._policy.drained_s is not None:
            left_s.append(max(0.0, self._policy.drained_s - time.monotonic()))
        if self._watchdog is not None and (watch_s := self._watchdog.left_s()) is not None:
            left_s.append(watch_s)
        return min(left_s, default=None)

    def _kill_if_hung(self) -> None:
        """Kill a hung engine. Its connections close, so the other ranks notice immediately."""
        if self._engine is None or self._watchdog is None or (why := self._watchdog.why_hung()) is None:
            return
        self._why_killed, self._watchdog = why, None
        self._engine.process.kill()

    def _on_parent_end(self) -> int:
        """End. With a standby, kill the front: one that ends in order would end the service."""
        for front in self._fronts.running.values() if self._options.standby is not None else ():
            front.process.kill()
        return self._fail(f"the parent process of rank {self._place.rank} is gone")

    def _on_stop(self, numbers: Sequence[int]) -> int | None:
        """Handle a stop signal: drain on a first gentle signal, otherwise stop now.

        Under serve, the launcher sends SIGTERM to stop everything after a failure; serve drains with another signal.
        """
        if PARENT_END_SIGNAL in numbers:
            return self._on_parent_end()
        gentle = [DRAIN_SIGNAL] if UNDER_SERVE in self._environment else [DRAIN_SIGNAL, signal.SIGTERM]
        timeout_s = self._options.http.shutdown_timeout_s
        is_gentle = len(numbers) == 1 and numbers[0] in gentle and timeout_s > 0
        if not is_gentle or self._policy.drained_s is not None or not self._policy.has_served:
            return 0
        # The front on another node does not know an engine that starts, and would not stop it.
        if not self._fronts.running and not self._is_serving:
            return 0
        for front in self._fronts.running.values():  # the leading one stops the engines when all have ended
            front.process.terminate()
        self._policy.drained_s = time.monotonic() + timeout_s + DRAIN_GRACE_S
        return None

    def _children(self) -> list[Child]:
        return [*self._fronts.running.values(), *([self._engine] if self._engine else [])]

    def _watch(self, fd: int, callback: Callable[[], int | None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _start_front(self, number: int) -> None:
        front, pipe = self._fronts.start(number)
        self._watch(front.pidfd, lambda: self._on_front_end(number, front))
        self._watch(pipe.fd, lambda: self._read(pipe, front.name, number))

    def _start_engine(self) -> None:
        """Start the rank's engine: wake the spare of the last one, or start a new process."""
        pipe = MessagePipe()
        extra = {
            "WIDEEP_RESTARTABLE_IN_S": str(self._policy.engine.allowed_in_s()),
            **self._fronts.for_engine(),
        }
        num_restarts = int(self._environment.get(RESTARTS_VARIABLE, "0")) + self._policy.engine.num_taken
        if num_restarts:
            extra[RESTARTS_VARIABLE] = str(num_restarts)
        if self._place.rank == 0 and not num_restarts and SCREEN_VARIABLE not in self._environment:
            say("wideep: loading torch and transformers")
        name = f"rank {self._place.rank}'s engine"
        engine, self._spare = self._start_or_wake(
            self._commands.engine, name, extra, pipe.child_fd, self._spare
        )
        pipe.close_child_end()
        self._engine, self._why_killed = engine, None
        self._watchdog = Watchdog(engine.process.pid, self._options.engine.heartbeat_timeout_s)
        read = partial(self._read, pipe, name)
        self._watch(engine.pidfd, lambda: self._on_engine_end(engine, read))
        self._watch(pipe.fd, read)

    def _start_or_wake(
        self,
        command: tuple[str, ...],
        name: str,
        extra: Mapping[str, str],
        ready_fd: int,
        before: Spare | None,
        *,
        flags: tuple[str, ...] = (),
        kept_fds: tuple[int, ...] = (),
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> tuple[Child, Spare | None]:
        """Start a child with its own spare. The spare of the process before it, if there is one, becomes the child.

        Args:
            extra: Its variables besides the supervisor's.
            ready_fd: The descriptor on which it reports.
            flags, kept_fds: Of a new process; a spare has them already.
        """
        spare = Spare() if self._options.max_rank_restarts else None
        fds = {READY_VARIABLE: ready_fd} | ({SPARE_VARIABLE: spare.childs_fd} if spare else {})
        options, child = handed_on(self._options), None
        if before is not None:
            child = before.start(name, StartOrder(options[1], dict(extra)), tuple(fds.values()))
            before.close()
        if child is None:
            child = start_child(
                name,
                [*command, *options, *flags],
                environment={**self._environment, **extra, **{each: str(fd) for each, fd in fds.items()}},
                kept_fds=(*fds.values(), *kept_fds),
            )
        if spare is not None:
            spare.close_childs_end()
        return child._replace(stop_signal=stop_signal), spare

    def _on_end(self, child: Child) -> int:
        if child.process.wait() == 0:
            self._say(f"{describe_end(child)}: stopping the service")
            return 0
        return self._fail(describe_end(child))

    def _on_front_end(self, number: int, front: Child) -> int | None:
        """Restart a front that was killed. Otherwise end the service, if it is the last one or has failed."""
        ending, allowed = describe_end(front), self._policy.front.describe()
        status = front.process.wait()
        follows = self._policy.after_front(status)
        if follows is Next.EXHAUSTED:
            return self._fail(f"{ending}; not restarting it (already restarted {allowed})")
        is_drained = status == 0 and self._policy.drained_s is not None and len(self._fronts.running) > 1
        if follows is not Next.RESTART and not is_drained:
            return self._on_end(front)
        self._selector.unregister(front.pidfd)
        os.close(front.pidfd)
        del self._fronts.running[number]
        if follows is Next.RESTART:
            lost = "Answers in progress" if self._options.api_server_count == 1 else "Its answers"
            say(f"wideep: {ending}; restarting it (at most {allowed}). {lost} are lost", error=True)
            self._start_front(number)
        return None

    def _on_engine_end(self, engine: Child, read: Callable[[], int | None]) -> int | None:
        """Restart the engine if that may help. Otherwise end the service, or continue without this rank."""
        read()  # its last messages: it may have served briefly
        ending = self._describe_end_of(engine)
        self._watchdog = None
        # An engine exits with 0 when a front ends the service. The front ends right after it, and its status counts.
        status = engine.process.wait()
        within_s = _FRONT_END_S if status == 0 else 0.0
        for front in self._fronts.running.values():
            has_front_ended = has_ended(front, within_s=within_s)
            if has_front_ended and not self._policy.may_front_return(front.process.wait()):
                return self._on_end(front)  # the cause
        follows = self._policy.after_engine(status)
        if follows is Next.LEAVE:
            self.has_lost_front = True
            return self._fail(self._describe_lost_front(), follows=True)
        if follows is Next.END:
            return self._on_end(engine)
        self._selector.unregister(engine.pidfd)
        os.close(engine.pidfd)
        self._engine, self._is_serving = None, False
        if follows is Next.STOPPING:
            say(f"wideep: {ending}; the service is stopping", error=True)
            return None if self._fronts.running else 0
        allowed = self._policy.engine.describe()
        if follows is Next.EXHAUSTED:
            return self._give_up(f"{ending}; not restarting it (already restarted {allowed})")
        say(f"wideep: {ending}; restarting it (at most {allowed})", error=True)
        self._ended_s = self._ended_s or time.monotonic()
        self._write_state()
        self._start_engine()
        return None

    def _describe_lost_front(self) -> str:
        """Return the message for a rank that lost its service; on another node, with the command to rejoin."""
        text = f"rank {self._place.rank} lost its connection to the front and left the service"
        options = self._options
        if UNDER_SERVE in self._environment or self._place.is_alone(options):
            return text
        pools = f" --pools {options.pools}" if options.pools else ""
        if options.has_own_pool:
            pools = f" --pool {options.pool_name} --role {options.pool_role.value}"
        return (
            f"{text}. If the service still runs and can be reached, rejoin it from this node with: torchrun --nnodes 1 "
            f"--nproc-per-node {self._place.local_world_size} --rdzv-backend wideep --rdzv-endpoint localhost:0 "
            f"--no-python wideep worker {options.model}{pools} --join {self._environment.get('MASTER_ADDR')}:"
            f"{self._environment.get('MASTER_PORT')}"
        )

    def _describe_end_of(self, engine: Child) -> str:
        if self._why_killed is None:
            return describe_end(engine)
        return f"{engine.name} (pid {engine.process.pid}) hung and was killed: {self._why_killed}"

    def _give_up(self, text: str) -> int | None:
        """Leave the service to the other ranks. They need no message: the front has seen this rank go."""
        if self._place.world_size == 1 and not self._options.has_own_pool:
            return self._fail(text)
        say(f"wideep: {text}: the service continues without rank {self._place.rank}", error=True)
        if path := self._environment.get(ERROR_FILE):
            write_absence(Path(path), self._place.rank, text)
        return None

    def _read(self, pipe: MessagePipe, name: str, number: int = 0) -> int | None:
        """Handle a child's messages. The end of the pipe is not handled: the child's end is."""
        if pipe.at_end:  # another event has closed it
            return None
        try:
            messages = pipe.read()
        except ValueError as error:
            return self._fail(f"{name} sent a malformed message: {error}")
        if pipe.at_end:
            self._selector.unregister(pipe.fd)
            pipe.close()
        for message in messages:
            self._on_message(message, number)
        return None

    def _reap_orphans(self) -> None:
        """Reap ended orphans of a killed front. We adopt orphans because of the spares."""
        ours = frozenset(child.process.pid for child in self._children())
        spares = [*self._fronts.spares.values(), *([self._spare] if self._spare else [])]
        for pid in ended_children(spared=ours | {spare.pid for spare in spares if spare.pid}):
            os.waitpid(pid, 0)

    def _on_message(self, message: FromChild, number: int) -> None:
        """Handle a child's message; of a front, with its number."""
        match message:
            case FrontAddresses():
                self._reap_orphans()
                self._on_front_addresses(message, number)
            case ServiceUrl(http):
                self._http = http
            case CacheBytes(num_bytes):
                self._keep_cache(num_bytes)
            case Ready():
                self._beat()
                self._on_ready()
            case Beat():
                self._beat()
            case Leaving():
                self._watchdog = None
            case _:
                assert_never(message)

    def _on_front_addresses(self, addresses: FrontAddresses, number: int) -> None:
        if self._fronts.announced:
            return  # a replacement front reuses the first one's ports and token
        starting = self._fronts.note_bound(number, addresses)
        if self._options.uds is None:  # the other fronts and replacements bind the same port
            self._keep_port(int(addresses.http.rpartition(":")[2]))
        for other in starting:
            self._start_front(other)
        if self._fronts.announced:
            self._start_engine()

    def _describe_service(self) -> str:
        if self._options.has_own_pool:
            return f"{self._place.pool_in(self._options).in_words} serves"
        pools = in_words(self._options.pools_among(self._place.world_size))
        of_pools = f" ({pools})" if self._options.pools else ""
        return f"serving on {self._place.world_size} ranks{of_pools}"

    def _beat(self) -> None:
        if self._watchdog is not None:
            self._watchdog.beat()

    def _on_ready(self) -> None:
        if self._ended_s is not None:
            seconds, self._ended_s = time.monotonic() - self._ended_s, None
            say(
                f"wideep: rank {self._place.rank} serves again, after {seconds:.0f} s",
                error=True,
                level="info",
            )
        elif self._place.local_rank == 0:
            self._say(f"{self._describe_service()} at {self._http}")
        self._policy.has_served = self._is_serving = True
        self._fronts.prepare_spares()
        self._write_state()

    def _say(self, text: str) -> None:
        if UNDER_SERVE not in self._environment:
            say(f"wideep: {text}")

    def _fail(self, text: str, *, follows: bool = False) -> int:
        report_failure(text, self._environment, follows=follows)
        return 1


def report_failure(text: str, environment: Mapping[str, str], *, follows: bool = False) -> None:
    """Report why this worker fails: to torchrun through its error file and, unless serve reads that file, to the user.

    Args:
        follows: Whether the failure is a consequence of another process's failure, which takes precedence if known.
    """
    path = environment.get(ERROR_FILE)
    if path:
        write_failure(Path(path), text, time_ns=LAST if follows else None)
    if not path or UNDER_SERVE not in environment:
        say(f"wideep: {text}", error=True)
