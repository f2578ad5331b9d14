"""Start a fake service as processes, find their pids, and wait for conditions with timeouts."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.service.forked import FAKE_SERVICE, Forked, Kind, can_fork_services

HEARS_CTRL_C = (
    "env",
    "--default-signal=INT",
)  # before a command: the shell makes background commands ignore it
TIME_OUT_S = 120.0  # a loaded machine of two cores; a working service never takes that long


class Service:
    """A running `fake_service.py` and the files of its processes."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        is_forked: bool = True,
        terminal_fd: int | None = None,
    ) -> None:
        """Start the service.

        Args:
            is_forked: Fork it and its processes, if the kernel allows that. Otherwise, each starts a new interpreter, and this
                process is the parent of the first.
            terminal_fd: The terminal for its input and output. None: its output goes to a file.
        """
        self.directory = directory
        self._output = (directory / "output.txt").open("w+")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("WIDEEP_", "FAKE_"))}
        environment = {**clean, "FAKE_DIRECTORY": str(directory), "TMPDIR": str(directory), **environment}
        command, output = [*FAKE_SERVICE, *arguments], terminal_fd or self._output.fileno()
        self.process: Forked | subprocess.Popen[bytes]
        if is_forked and can_fork_services():
            self.process = Forked(
                Kind.FAKES, command, environment=environment, cwd=Path.cwd(), stdin_fd=terminal_fd,
                stdout_fd=output, stderr_fd=output,
            )  # fmt: skip
        else:
            self.process = subprocess.Popen(
                command, env=environment, stdin=terminal_fd, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in {self.process.pid, *self.pids().values()}:
            kill(pid, signal.SIGKILL)
        self.process.wait(TIME_OUT_S)
        self._output.close()

    def facts(self, name: str) -> dict[str, Any]:
        """Wait for the facts file of a process, and return it."""
        path = self.directory / f"{name}.json"
        wait_until(
            lambda: path.exists() or self._has_ended(), lambda: f"{name} did not start:\n{self.output()}"
        )
        return dict(json.loads(path.read_text()))

    def facts_after(self, name: str, restarts: int) -> dict[str, Any]:
        """Wait for the facts of a process after this many restarts."""
        wait_until(
            lambda: self.facts(name)["env"]["WIDEEP_RESTARTS"] == str(restarts) or self._has_ended(),
            lambda: f"{name} did not start again:\n{self.output()}",
        )
        return self.facts(name)

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def pid(self, name: str) -> int:
        return int(self.facts(name)["pid"])

    def pids(self) -> dict[str, int]:
        """Return all pids reported so far."""
        return {path.stem: json.loads(path.read_text())["pid"] for path in self.directory.glob("*-*.json")}

    def output(self) -> str:
        return (self.directory / "output.txt").read_text()

    def wait_for_output(self, text: str) -> None:
        wait_until(
            lambda: text in self.output() or self._has_ended(),
            lambda: f"waited in vain for {text!r} in:\n{self.output()}",
        )
        assert text in self.output(), f"{text!r} not in:\n{self.output()}"

    def end(self) -> tuple[int, float]:
        """Wait for the process to end. Return its exit status and the wait in seconds."""
        started_s = time.monotonic()
        return self.process.wait(TIME_OUT_S), time.monotonic() - started_s

    def wait_for_nobody(self, within_s: float) -> None:
        """Check that every process with a reported pid has ended, or ends within this time."""
        deadline = time.monotonic() + within_s
        for name, pid in self.pids().items():
            assert has_ended(pid, deadline - time.monotonic()), f"{name} (pid {pid}) is still running"


@contextlib.contextmanager
def running_command(
    command: Sequence[str], output: Path, *, end_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a new session, with its output in a file. On exit, it ends within `end_s` of SIGTERM."""
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(end_s)
        finally:
            process.kill()


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def has_ended(pid: int, within_s: float) -> bool:
    """Wait for the end of a process that need not be our child. A zombie has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(0.0, within_s))[0])
    finally:
        os.close(descriptor)


def wait_until(
    holds: Callable[[], bool], complaint: Callable[[], str], *, within_s: float = TIME_OUT_S
) -> None:
    """Wait for a condition that no descriptor announces."""
    begun_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - begun_s
        assert waited_s < within_s, complaint()
        select.select([], [], [], min(max(0.01, waited_s / 20), 0.1))  # leave the cores to those it waits for
