"""The launcher of `wideep serve`, in torchrun's place: it hosts the store, starts a worker per rank, and restarts killed ones.

torchrun stops all workers when it loses one, so a killed supervisor would end a service on one host. This launcher restarts a
killed supervisor within the same budget as an engine. The supervisor finds its state in a file (`Supervisor`) and restarts its
engine and its front, which died with it, while the other ranks serve. Workers get the same variables as from torchrun, so
they behave the same on one host and on many.

The store needs torch, which takes seconds to import. A separate thread hosts it, on a socket that accepts connections from
the beginning. The thread starts after the workers, because a fork during an import may run only half of the hooks that the
import registers (logging's lock). The service ends with this process, which holds its store.
"""
# ruff: noqa: PLC0415

import argparse
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from server.machine.lines import say
from server.serve.children import (
    SUPERVISOR_STATE_VARIABLE,
    Child,
    StopSignals,
    adopt_orphans,
    describe_end,
    kill_orphans,
    raise_descriptor_limit,
    start_child,
    stop_children,
)
from server.serve.error_file import ERROR_FILE, FIRST, write_failure
from server.serve.restarts import RestartBudget

STOP_GRACE_S = 2.7  # workers kill their children after 2.2 s, and serve kills the launcher after 3.2 s
ORPHAN_GRACE_S = 1.0  # for killed processes to disappear
_HOST = "127.0.0.1"


def host_store(listener: socket.socket) -> object:
    """Serve torch's store on a socket until this process ends. Returns an object that the caller must keep."""
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def run_launcher(
    arguments: Sequence[str], *, host_store: Callable[[socket.socket], object] = host_store
) -> int:
    """Run the workers until they end. Returns 0 if all ended with status 0 or after a stop signal."""
    parser = argparse.ArgumentParser(prog="wideep launcher", allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--max-restarts", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    adopt_orphans()  # of killed workers
    raise_descriptor_limit()
    listener = socket.create_server((_HOST, 0))
    kept: list[object] = []

    def host() -> None:
        try:
            kept.append(host_store(listener))
        except Exception as error:  # noqa: BLE001 - workers would wait in vain for the store
            write_failure(args.directory / "error.json", f"the launcher cannot host the store: {error}")

    launcher = _Launcher(
        args.workers, args.directory, args.command, listener.getsockname()[1], args.max_restarts
    )
    with StopSignals() as stop_signals:
        return launcher.run(stop_signals, when_started=threading.Thread(target=host, daemon=True).start)


class _Launcher:
    """The workers of one host."""

    def __init__(
        self, num_workers: int, directory: Path, command: Sequence[str], port: int, max_restarts: int
    ) -> None:
        self._num_workers, self._directory, self._command = num_workers, directory, command
        self._port = port
        self._max_restarts = max_restarts
        self._budgets = [RestartBudget(max_restarts=max_restarts) for _ in range(num_workers)]
        self._workers: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, stop_signals: StopSignals, *, when_started: Callable[[], None]) -> int:
        """Start the workers; return the exit status when all have ended or one has failed."""
        self._selector.register(stop_signals.fd, selectors.EVENT_READ, lambda: 0)
        try:
            for rank in range(self._num_workers):
                self._start(rank)
            when_started()
            while self._workers:
                for key, _ in self._selector.select():
                    if (status := key.data()) is not None:
                        return int(status)
            return 0
        finally:
            stop_children(self._workers.values(), grace_s=STOP_GRACE_S)
            self._selector.close()

    def _start(self, rank: int) -> None:
        directory = self._directory / f"rank_{rank}"
        directory.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_workers),
            "LOCAL_WORLD_SIZE": str(self._num_workers),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._port),
            ERROR_FILE: str(directory / "error.json"),
            SUPERVISOR_STATE_VARIABLE: str(directory / "state.json"),
        }
        worker = start_child(f"rank {rank}'s supervisor", list(self._command), environment=environment)
        self._workers[rank] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_end, rank))

    def _on_end(self, rank: int) -> int | None:
        """Restart a worker that was killed after it had served. Any other failure ends the service."""
        worker = self._workers.pop(rank)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        status = worker.process.wait()
        if status == 0:
            return None
        directory = self._directory / f"rank_{rank}"
        if status < 0:
            ending, budget = describe_end(worker), self._budgets[rank]
            if (directory / "state.json").exists() and budget.take():
                say(f"wideep: {ending}; restarting it (at most {budget.describe()})", error=True)
                # Its children die with it. Their ports and memory are free when they are gone.
                living = frozenset(each.process.pid for each in self._workers.values())
                kill_orphans(spared=living, grace_s=ORPHAN_GRACE_S)
                self._start(rank)
                return None
            write_failure(directory / "error.json", ending, time_ns=FIRST)
        return 1
