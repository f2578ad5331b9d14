"""`wideep serve`: start the workers, wait until the service answers, and stop all processes at the end.

Serve is the root of the process tree: serve > launcher > one worker per rank > engine, and the front.
Each process ends when its parent does, even if the parent was killed. Serve adopts the orphans of a killed launcher, so no
process outlives it. Rejected: torchrun as the launcher, because it stops all workers when one is killed.

Every local program can connect to the store and to the front's port for ranks. Each start therefore creates a cluster key and
passes it to its own processes only, in their environment. Without it, another program could take a rank's place and receive prompts.
"""

import math
import os
import secrets
import select
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dispatch.ports import free_port
from server.machine.interrupts import terminate_as_interrupt
from server.machine.lines import SCREEN_VARIABLE, say
from server.machine.report import count
from server.machine.roots import WIDEEP_COMMAND
from server.options.flag import OptionsError
from server.options.pools import rank_pool_sizes
from server.options.reading import environment_from, handed_on
from server.options.table import Options
from server.serve.children import (
    DRAIN_SIGNAL,
    Child,
    StopSignals,
    adopt_orphans,
    describe_end,
    kill_orphans,
    signal_children_of,
    start_child,
    stop_children,
)
from server.serve.error_file import absences, first_failure
from server.serve.greeting import greeting, ranks_in_words, summary
from server.serve.launcher import num_rank_folders
from server.serve.preflight.checkpoint import with_checkpoint
from server.serve.preflight.checks import check_start, say_notes
from server.serve.preflight.device import ChosenDevice, choose_device, on_device
from server.serve.preflight.machine import problems_at_start, say_problems
from server.serve.preflight.memory import usable_cores
from server.serve.preflight.model import PreflightError
from server.serve.preflight.probe import capacity_of, is_healthy
from server.serve.preflight.tiers import with_hand_over
from server.serve.rank.loading import LoadingScreen, has_screen
from server.serve.supervisor import DRAIN_GRACE_S, UNDER_SERVE

AGENT_GRACE_S = 3.2  # the launcher waits for workers, which kill their children after STOP_GRACE_S
ORPHAN_GRACE_S = 0.5  # before remaining processes are killed; both together stay below the promised 5 s
FAILURE_GRACE_S = 1.5  # for the launcher to exit and to report a killed supervisor
_POLL_S = 0.2  # interval between checks of /health (during the start) and of failures


@dataclass(frozen=True, kw_only=True)
class ServeCommands:
    """Commands that start the launcher and a worker."""

    agent: tuple[str, ...] = (*WIDEEP_COMMAND, "launcher")
    worker: tuple[str, ...] = (*WIDEEP_COMMAND, "worker")


def run_serve(options: Options, *, commands: ServeCommands | None = None) -> int:
    """Serve until a signal arrives or the service fails.

    Returns:
        The exit status: 0 after Ctrl-C (immediate) or SIGTERM (after open requests finish), 1 if the start failed or a process died.
    """
    started_s, asked = time.monotonic(), options
    try:
        with terminate_as_interrupt():
            options = _prepare(options)
    except (OptionsError, PreflightError) as error:
        say(f"wideep serve: {error}", error=True)
        return 1
    except KeyboardInterrupt:
        say("wideep: stopped before the service started")
        return 0
    spared = adopt_orphans()
    with StopSignals() as stop_signals, tempfile.TemporaryDirectory(prefix="wideep_") as log_directory:
        screen = LoadingScreen(Path(log_directory), options.data_parallel_size or 1) if has_screen() else None
        agent = _start_agent(options, commands or ServeCommands(), log_directory, draws=screen is not None)
        start = _Start(asked, options, started_s, Path(log_directory), screen)
        try:
            return _Watch(agent, start, stop_signals).run()
        finally:
            stop_children([agent], grace_s=AGENT_GRACE_S)
            kill_orphans(spared=spared, grace_s=ORPHAN_GRACE_S)


def _prepare(options: Options) -> Options:
    """Resolve the model, fill in the options that all ranks share, and run the preflight checks."""
    if options.join is not None:
        raise OptionsError("`wideep serve` does not accept --join; use `wideep worker` under torchrun")
    if options.standby is not None:
        raise OptionsError(
            "`wideep serve` runs on one node, so it does not accept --standby; use `wideep worker` under torchrun"
        )
    if options.has_own_pool:
        raise OptionsError(
            "`wideep serve` starts all pools, so it does not accept --pool, --role or flags that mean a role (--kv-transfer-config, "
            "--disaggregation-mode); use --pools prefill:1,decode:1, or `wideep worker` with a torchrun for each pool"
        )
    device, given = choose_device(options.device), options
    ranks = _num_ranks(options, device)
    pools = options.pools_among(ranks)
    options = replace(
        with_checkpoint(on_device(with_hand_over(options), device, num_local_ranks=ranks)),
        data_parallel_size=ranks,
        own_cluster_key="" if options.cluster_key_file else secrets.token_hex(32),
    ).with_engine(threads=options.engine.threads or max(1, usable_cores() // ranks))
    check_start(
        options, pool_sizes=rank_pool_sizes(pools, range(ranks)), has_front=True, gpu_bytes=device.free_bytes
    )
    say(f"wideep: computing on {device.in_words}")
    say_problems(problems_at_start(options, num_ranks=ranks, has_other_nodes=False))
    say_notes(given, options, pools)
    return options if options.port or options.uds else replace(options, port=free_port(options.host))


def _num_ranks(options: Options, device: ChosenDevice) -> int:
    """Return the number of ranks of all pools, or of the only one.

    Raises:
        OptionsError: --data-parallel-size and --pools differ.
    """
    ranks = options.given_ranks or device.ranks
    if options.data_parallel_size not in (None, ranks):
        raise OptionsError(
            f"--data-parallel-size is {options.data_parallel_size}, but --pools {options.pools} has {ranks} ranks; remove "
            "--data-parallel-size"
        )
    return ranks


def _start_agent(options: Options, commands: ServeCommands, log_directory: str, *, draws: bool) -> Child:
    flags = [
        f"--workers={options.data_parallel_size}",
        f"--directory={log_directory}",
        f"--max-restarts={options.max_rank_restarts}",
    ]
    say(
        f"wideep: starting {', '.join(options.served_model_names)} on {ranks_in_words(options)} with "
        f"{count(options.engine.threads, 'thread')} each"
    )
    return start_child(
        "the launcher",
        [*commands.agent, *flags, *commands.worker, *handed_on(options)],
        environment={
            **{name: value for name, value in os.environ.items() if name != SCREEN_VARIABLE},
            **environment_from(options),
            UNDER_SERVE: f"{os.getpid()} {log_directory}",
            **({SCREEN_VARIABLE: log_directory} if draws else {}),
        },
    )


class _Start(NamedTuple):
    """The given options, the resolved options, the start time, and the folder that ranks write to."""

    asked: Options
    options: Options
    started_s: float  # time.monotonic()
    log_directory: Path
    screen: LoadingScreen | None  # None without a terminal


class _Watch:
    """Wait for the end of the service or a stop signal; print the greeting when the service first answers.

    The launcher may take seconds to exit after a failure, so this class also looks for failures itself.
    """

    def __init__(self, agent: Child, start: _Start, stop_signals: StopSignals) -> None:
        self._agent, self._start, self._stop_signals = agent, start, stop_signals
        self._options, self._log_directory, self._screen = start.options, start.log_directory, start.screen
        self._is_ready = self._is_draining = False
        self._until_s = math.inf  # time.monotonic()

    def run(self) -> int:
        """Wait for the end and return the exit status."""
        poll = select.poll()
        poll.register(self._stop_signals.fd, select.POLLIN)
        poll.register(self._agent.pidfd, select.POLLIN)
        while time.monotonic() < self._until_s:
            ready_fds = {fd for fd, _ in poll.poll(_POLL_S * 1000)}
            if self._stop_signals.fd in ready_fds and not self._drains(self._stop_signals.take()):
                if not self._is_ready:
                    self._end_screen()
                say("\nwideep: stopping")
                return 0
            if self._agent.pidfd in ready_fds:
                break
            self._look()
        return self._end()

    def _drains(self, numbers: list[int]) -> bool:
        """Begin to drain on the first SIGTERM of a ready service. Returns whether to keep waiting."""
        timeout_s = self._options.http.shutdown_timeout_s
        is_gentle = numbers in ([signal.SIGTERM], [DRAIN_SIGNAL]) and timeout_s > 0
        if is_gentle and not self._is_ready:
            self._look()  # the service may have become ready since the last look
        if not is_gentle or not self._is_ready or self._is_draining:
            return False
        self._is_draining = True
        self._until_s = time.monotonic() + timeout_s + DRAIN_GRACE_S
        say(f"wideep: finishing open requests, for up to {timeout_s:g} s; a second signal stops at once")
        # Signal the workers directly: the launcher stops immediately on any signal.
        signal_children_of(self._agent.process.pid, DRAIN_SIGNAL)
        return True

    def _look(self) -> None:
        """Check for a failure and, during the start, for readiness."""
        now_s = time.monotonic()
        if self._until_s - now_s > FAILURE_GRACE_S and self._failure() is not None:
            self._until_s = now_s + FAILURE_GRACE_S
        if not self._is_ready and self._screen is not None:
            self._screen.update()
        if not self._is_ready and self._is_healthy():
            self._is_ready = True
            say(self._greet(now_s - self._start.started_s))

    def _greet(self, seconds: float) -> str:
        """Return the summary for a terminal, or the greeting for a log."""
        capacity = capacity_of(self._options)
        if self._screen is None:
            return greeting(self._options, capacity, seconds=seconds)
        self._end_screen()
        return summary(self._options, self._start.asked, capacity, self._screen.facts(), seconds=seconds)

    def _end_screen(self) -> None:
        """Close the loading screen before further output."""
        if self._screen is not None:
            self._screen.update()
            self._screen.close()

    def _is_healthy(self) -> bool:
        options = self._options
        return is_healthy(options.host, options.port, scheme=options.http.scheme, uds=options.uds)

    def _failure(self) -> str | None:
        """Return why the service must end: a process failed, or all ranks are absent. None if neither is recorded."""
        away = absences(self._log_directory)
        if away and len(away) == num_rank_folders(self._log_directory):
            return f"{away[-1]}: no rank is left"
        return first_failure(self._log_directory)

    def _end(self) -> int:
        failure = self._failure()
        if not self._is_ready:
            self._end_screen()
        if self._is_draining and failure is None and self._agent.process.poll() in (None, 0):
            say("wideep: stopped")
            return 0
        say(f"wideep serve: {_cause_of_end(self._agent, failure)}. The service has stopped.", error=True)
        return 1


def _cause_of_end(agent: Child, failure: str | None) -> str:
    """Describe why the service ended: the launcher was killed, a process failed, or all ranks exited."""
    status = agent.process.poll()
    # If the launcher was killed, the workers' own reports only describe the consequence.
    if failure is not None and (status is None or status >= 0):
        return failure
    return "all ranks exited unexpectedly" if status == 0 else describe_end(agent)
