"""The front without a model: `wideep front` and ranks without a model, each in a separate process."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Self

from benchmarks.serving.paced_rank import TOKEN_VARIABLE
from benchmarks.serving.processes import exact_cpu_s
from benchmarks.serving.service import BenchServiceError
from server.machine.parent_death import die_with_parent
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
    ) -> None:
        """Start the front and wait until every rank is attached.

        Args:
            model: Directory with a tokenizer.
            flags: Flags of the front, in addition to those set here.
            step_s: Shortest time between a rank's steps.
            root: Checkout with the front and the ranks to run.
            profile: File for the statistics of Python's profiler at the front's end; None runs without it.

        Raises:
            BenchServiceError: The front did not start; the message quotes its log.
        """
        read_fd, write_fd = os.pipe()
        needed = ["--port=0", f"--ranks={num_ranks}", f"--ready-fd={write_fd}"]
        self._root = root
        profiled = () if profile is None else ("cProfile", "-o", str(profile), "-m")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(
                *profiled, "server", "front", str(model), *needed, *flags, log=log, pass_fds=(write_fd,)
            )
            os.close(write_fd)
            with os.fdopen(read_fd) as ready:
                line = ready.readline()
            if not line:
                raise BenchServiceError(
                    f"the front did not start:\n{Path(log.name).read_text(errors='replace')}"
                )
            said = json.loads(line)
            self.front_pid = self._processes[0].pid
            self.port = int(said["http"].rpartition(":")[2])
            os.environ[TOKEN_VARIABLE] = said["token"]
            for rank in range(num_ranks):
                place = (str(rank), str(num_ranks), said["ranks_address"], f"--step-s={step_s}")
                self._start("benchmarks.serving.paced_rank", *place, log=log)
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    @property
    def cpu_s(self) -> float:
        """CPU seconds that all threads of the front have used so far."""
        return exact_cpu_s(self._processes[0].pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the front, and with it the ranks."""
        for process in self._processes[:1]:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *module: str, log: IO[bytes], pass_fds: tuple[int, ...] = ()) -> None:
        """Start a Python module with its arguments."""
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=self._root,
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
