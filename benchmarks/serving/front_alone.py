"""The front without a model: `wideep front` and ranks without a model, each in a separate process."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from benchmarks.serving.paced_rank import TOKEN_VARIABLE
from benchmarks.serving.processes import exact_cpu_s
from benchmarks.serving.service import BenchServiceError
from server.machine.parent_death import die_with_parent
from server.serve.child_messages import FrontAddresses, announcement
from server.serve.children import FRONT_VARIABLE, KEPT_VARIABLE, READY_VARIABLE
from server.serve.preflight.probe import is_healthy

STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_ROOT = Path(__file__).parents[2]


class FrontAlone:
    """A running front with attached ranks, as a context that stops them."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        num_ranks: int,
        step_s: float,
        log: IO[bytes],
        root: Path = _ROOT,
        profile: Path | None = None,
        num_fronts: int = 1,
    ) -> None:
        """Start the front and wait until every rank is attached.

        Args:
            num_fronts: Number of fronts, which share one port.
            model: Directory with a tokenizer.
            flags: Flags of the front, in addition to those set here.
            step_s: Shortest time between a rank's steps.
            root: Checkout with the front and the ranks to run.
            profile: File for the statistics of Python's profiler at the front's end; None runs without it.

        Raises:
            BenchServiceError: The front did not start; the message quotes its log.
        """
        self._root, self._num_fronts = root, num_fronts
        profiled = () if profile is None else ("cProfile", "-o", str(profile), "-m")
        command = (*profiled, "server", "front", str(model), f"--ranks={num_ranks}")
        if num_fronts > 1:
            flags = (*flags, f"--api-server-count={num_fronts}")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kept = tempfile.TemporaryDirectory(prefix="wideep_bench_")
        fronts: list[FrontAddresses] = []
        try:
            for number in range(num_fronts):
                fronts.append(self._start_front(number, fronts, *command, *flags, log=log))
            self.front_pid = self._processes[0].pid
            self.port = int(fronts[0].http.rpartition(":")[2])
            os.environ[TOKEN_VARIABLE] = fronts[0].token
            addresses = [each.ranks_address for each in fronts]
            for rank in range(num_ranks):
                place = (str(rank), str(num_ranks), *addresses, f"--step-s={step_s}")
                self._start("benchmarks.serving.paced_rank", *place, log=log)
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def _start_front(
        self, number: int, before: Sequence[FrontAddresses], *command: str, log: IO[bytes]
    ) -> FrontAddresses:
        """Start a front, and return its addresses."""
        read_fd, write_fd = os.pipe()
        port = before[0].http.rpartition(":")[2] if before else "0"
        environment = {READY_VARIABLE: str(write_fd)}
        if self._num_fronts > 1:
            environment[KEPT_VARIABLE] = self._kept.name
        if before:
            environment[FRONT_VARIABLE] = announcement([before[0]])
        numbered = (f"--front-number={number}",) if number else ()
        needed = (f"--port={port}", *numbered)
        self._start(*command, *needed, log=log, pass_fds=(write_fd,), environment=environment)
        os.close(write_fd)
        with os.fdopen(read_fd) as ready:
            line = ready.readline()
        if not line:
            raise BenchServiceError(f"the front did not start:\n{Path(log.name).read_text(errors='replace')}")
        return FrontAddresses(**json.loads(line))

    @property
    def cpu_s(self) -> float:
        """CPU seconds that all threads of all fronts have used so far."""
        return sum(self.cpu_of_each_s)

    @property
    def cpu_of_each_s(self) -> list[float]:
        """CPU seconds that the threads of each front have used so far."""
        return [exact_cpu_s(process.pid) for process in self._processes[: self._num_fronts]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the fronts, and with them the ranks."""
        for process in self._processes[: self._num_fronts]:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._kept.cleanup()

    def _start(
        self,
        *module: str,
        log: IO[bytes],
        pass_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a Python module with its arguments."""
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=self._root,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                process_group=0,  # Ctrl-C reaches only this process, which stops the others in order
                preexec_fn=functools.partial(die_with_parent, parent_pid=os.getpid()),
            )
        )

    def _wait_until_healthy(self) -> None:
        while not is_healthy("127.0.0.1", self.port):
            for process in self._processes:
                if process.poll() is not None:
                    raise BenchServiceError(f"{process.args!r} ended with {process.returncode}")
            time.sleep(_POLL_S)
