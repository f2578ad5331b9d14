"""A whole service in tests: a tiny real model with a tokenizer on disk, `wideep serve` or torchrun, and its shutdown."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from dispatch.ports import free_port
from tests.support.models.families import write_checkpoint
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from tests.support.requests import plain_http
from tests.support.service.forked import WIDEEP, Forked, Kind, can_fork_services
from tests.support.service.service_processes import command_of, wait_until
from tests.support.service.torchruns import Torchrun

REPOSITORY = Path(__file__).parents[3]
START_S = 1200.0  # kernels may have to be compiled first, on a busy machine
STOP_S = 90.0  # far beyond the promised time: the machine may be busy
TREE = re.compile(r"\(.*\) \w (\d+)")


def write_tiny_model(
    directory: Path, family: str = "qwen3_moe", *, chat_template: str = CHAT_TEMPLATE
) -> Path:
    """Write a tiny checkpoint with the vocabulary and chat template of the tiny tokenizer."""
    write_tokenizer(directory, chat_template=chat_template)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    write_checkpoint(family, directory, vocab_size=320)
    return directory


class RealService:
    """One or more commands that form a service. A context manager that ends all of them."""

    def __init__(self, port: int, commands: Sequence[Sequence[str] | Torchrun], log: Path) -> None:
        """Start the commands. `wait_ready` waits for them."""
        self.port, self._log = port, log
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("w") as output:
            self.processes = [_start(command, output.fileno(), environment) for command in commands]

    @classmethod
    def serve(cls, model: Path, log: Path, *flags: str) -> Self:
        """Run `wideep serve`."""
        port = free_port()
        command = [*WIDEEP, "serve", str(model), "--port", str(port), "--kv-cache-memory", "16M", *flags]
        return cls(port, [command], log)

    @property
    def url(self) -> str:
        """Return the root URL of the endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Self:
        """Wait until /health is 200."""
        wait_until(self._is_ready, lambda: f"the service did not come up:\n{self.output()}", within_s=START_S)
        return self

    def get(self, path: str, *, timeout_s: float = 60.0) -> httpx.Response:
        return plain_http.get(self.url + path, timeout=timeout_s)

    def post(self, path: str, *, timeout_s: float = 60.0, **body: Any) -> httpx.Response:
        return plain_http.post(self.url + path, timeout=timeout_s, **body)

    def status(self) -> dict[str, Any]:
        """Return which ranks serve, and the losses so far."""
        return dict(self.get("/v1/fault_tolerance/status").json())

    def wait_whole(self, num_ranks: int = 2) -> None:
        """Wait until all ranks serve together."""

        def is_whole() -> bool:
            try:
                now = self.status()
            except httpx.TransportError:  # the front is away
                return False
            return (now["phase"], now["members"]) == ("serving", list(range(num_ranks)))

        wait_until(is_whole, self.output, within_s=START_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition. Fail if a command ends before it holds."""

        def holds_while_running() -> bool:
            self.check_runs()
            return holds()

        wait_until(holds_while_running, self.output, within_s=START_S)

    def check_runs(self) -> None:
        """Fail if a command has ended."""
        ended = [process.returncode for process in self.processes if process.poll() is not None]
        assert not ended, f"ended with {ended}:\n{self.output()}"

    def check_any_runs(self) -> None:
        """Fail if all commands have ended: nothing is worth waiting for."""
        if all(process.poll() is not None for process in self.processes):
            self.check_runs()

    def _is_ready(self) -> bool:
        self.check_runs()
        try:
            return self.get("/health", timeout_s=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def output(self) -> str:
        """Return the output of all commands."""
        return self._log.read_text()

    def descendants(self, number: int | None = None) -> list[int]:
        """Return the pids of all descendants of the commands, or of command `number`, from /proc."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    found = TREE.search((entry / "stat").read_text())
                except OSError:  # ended in between
                    continue
                parents[int(entry.name)] = int(found.group(1)) if found else 0
        roots = {process.pid for at, process in enumerate(self.processes) if number is None or at == number}
        below = [pid for pid in parents if pid not in roots and _is_below(pid, roots, parents)]
        return sorted(below)

    def find(self, word: str) -> int:
        """Return the first descendant with a word in its command line."""
        for pid in self.descendants():
            if word in command_of(pid):
                return pid
        raise LookupError(f"no process of the service has {word!r} in its command line")

    def engines(self) -> dict[int, int]:
        """Return the pids of the running engines by rank."""
        found = {}
        for pid in self.descendants():
            try:
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:  # ended in between
                continue
            if "engine" in command_of(pid):
                rank = next(word for word in environment if word.startswith("RANK="))
                found[int(rank.removeprefix("RANK="))] = pid
        return found

    def wait_ended(self) -> list[int]:
        """Wait until every command has ended. Return their statuses."""
        return [process.wait(STOP_S) for process in self.processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = self.descendants()
        for process in self.processes:
            process.send_signal(signal.SIGINT)
        try:
            self.wait_ended()
        finally:
            for pid in [*left, *(process.pid for process in self.processes)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _start(
    command: Sequence[str] | Torchrun, output_fd: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | Forked:
    """Start a command in a new session, `wideep serve` and torchrun as forks if the kernel allows it."""
    forked = partial(Forked, Kind.SERVICE, stdout_fd=output_fd, stderr_fd=output_fd, cwd=Path.cwd())
    if isinstance(command, Torchrun):
        environment = {**environment, **command.environment}
        if command.program == WIDEEP and can_fork_services():
            return forked(
                command.command(),
                environment=environment,
                network=command.network,
                host_name=command.host_name,
            )
        command = command.command_with_namespaces()
    elif tuple(command[: len(WIDEEP) + 1]) == (*WIDEEP, "serve") and can_fork_services():
        return forked(command, environment=environment)
    return subprocess.Popen(
        command, stdout=output_fd, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def _is_below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid in parents and pid > 1:
        pid = parents[pid]
        if pid in roots:
            return True
    return False
