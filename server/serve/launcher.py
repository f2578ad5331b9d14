"""The launcher of `wideep serve`, in torchrun's place: it hosts the store, starts a worker per rank, and restarts killed ones.

torchrun stops all workers when it loses one, so a killed supervisor would end a service on one host. This launcher restarts a
killed supervisor within the same budget as an engine. The supervisor finds its state in a file (`Supervisor`) and restarts its
engine and its front, which died with it, while the other ranks serve. Workers get the same variables as from torchrun, so
they behave the same on one host and on many.

A resize starts and stops ranks, as the front requests (`rank_processes`). A new rank that fails before it has joined does not
end the service: the front gets the reason.

The store needs torch, which takes seconds to import. A separate thread hosts it, on a socket that accepts connections from
the beginning. The thread starts after the workers, because a fork during an import may run only half of the hooks that the
import registers (logging's lock). The service ends with this process, which holds its store.
"""
# ruff: noqa: PLC0415

import argparse
import os
import selectors
import shutil
import socket
import threading
import time
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
from server.serve.error_file import (
    ERROR_FILE,
    FIRST,
    mark_joined,
    mark_joining,
    read_failure,
    write_failure,
)
from server.serve.rank_processes import LAUNCHER_VARIABLE, FrontLine, KeepRanks, RankEnded, StartRanks
from server.serve.restarts import RestartBudget
from server.serve.store.rendezvous import RESTARTS_VARIABLE

STOP_GRACE_S = 2.7  # workers kill their children after 2.2 s, and serve kills the launcher after 3.2 s
ORPHAN_GRACE_S = 1.0  # for killed processes to disappear
_HOST = "127.0.0.1"
_FOLDER = "rank_"


def num_rank_folders(directory: Path) -> int:
    """Return the number of ranks that the launcher runs, or ran, in its folder."""
    return len(list(directory.glob(f"{_FOLDER}*")))


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
        self._budgets: dict[int, RestartBudget] = {}
        self._workers: dict[int, Child] = {}
        self._joining: set[int] = set()  # ranks that do not belong to the service yet
        self._newcomers: set[int] = set()  # ranks that a resize has started
        self._leaving: dict[int, float] = {}  # stopped ranks, and when they are killed, on time.monotonic()
        self._line = FrontLine()
        self._selector = selectors.DefaultSelector()

    def run(self, stop_signals: StopSignals, *, when_started: Callable[[], None]) -> int:
        """Start the workers; return the exit status when all have ended or one has failed."""
        self._selector.register(stop_signals.fd, selectors.EVENT_READ, lambda: 0)
        self._selector.register(self._line.fd, selectors.EVENT_READ, self._on_message)
        try:
            for rank in range(self._num_workers):
                self._start(rank)
            when_started()
            while self._workers:
                until_s = min(self._leaving.values(), default=None)
                left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                for key, _ in self._selector.select(left_s):
                    if (status := key.data()) is not None:
                        return int(status)
                self._kill_late()
            return 0
        finally:
            stop_children(self._workers.values(), grace_s=STOP_GRACE_S)
            self._selector.close()
            self._line.close()

    def _on_message(self) -> None:
        for message in self._line.read():
            match message:
                case StartRanks(num_ranks):
                    self._start_more(num_ranks)
                case KeepRanks(num_ranks):
                    self._keep(num_ranks)

    def _start_more(self, num_ranks: int) -> None:
        """Start ranks that are to join the service."""
        for rank in range(self._num_workers, num_ranks):
            if (worker := self._workers.get(rank)) is not None:  # it still stops after an earlier operation
                worker.process.kill()
                self._leaving[rank] = 0.0
                self._on_end(rank, worker)
            shutil.rmtree(self._folder(rank), ignore_errors=True)
            self._folder(rank).mkdir()
            mark_joining(self._folder(rank))
            self._joining.add(rank)
            self._newcomers.add(rank)
            self._start(rank, num_ranks)

    def _keep(self, num_ranks: int) -> None:
        """Stop the ranks beyond a number; the others belong to the service."""
        self._num_workers = num_ranks
        for rank in [rank for rank in self._joining if rank < num_ranks]:
            self._joining.discard(rank)
            mark_joined(self._folder(rank))
        for rank in [rank for rank in self._newcomers if rank < num_ranks and rank not in self._workers]:
            self._start(rank)  # it ended just after it had joined
        for rank in [rank for rank in self._workers if rank >= num_ranks and rank not in self._leaving]:
            self._leaving[rank] = time.monotonic() + STOP_GRACE_S
            self._workers[rank].process.terminate()
        for folder in self._directory.glob(f"{_FOLDER}*"):
            rank = int(folder.name.removeprefix(_FOLDER))
            if rank >= num_ranks and rank not in self._workers:
                shutil.rmtree(folder, ignore_errors=True)

    def _kill_late(self) -> None:
        for rank, until_s in self._leaving.items():
            if rank in self._workers and time.monotonic() >= until_s:
                self._workers[rank].process.kill()
                self._leaving[rank] = time.monotonic() + STOP_GRACE_S

    def _folder(self, rank: int) -> Path:
        return self._directory / f"{_FOLDER}{rank}"

    def _start(self, rank: int, num_ranks: int | None = None) -> None:
        directory, num_ranks = self._folder(rank), num_ranks or self._num_workers
        directory.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._port),
            ERROR_FILE: str(directory / "error.json"),
            SUPERVISOR_STATE_VARIABLE: str(directory / "state.json"),
            # An engine that did not start with the service joins it like a restarted one.
            **({RESTARTS_VARIABLE: "1"} if rank in self._newcomers else {}),
            **({LAUNCHER_VARIABLE: str(self._line.fronts_fd)} if rank == 0 else {}),
        }
        worker = start_child(
            f"rank {rank}'s supervisor",
            list(self._command),
            environment=environment,
            kept_fds=[self._line.fronts_fd] if rank == 0 else [],
        )
        self._workers[rank] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_end, rank, worker))

    def _on_end(self, rank: int, worker: Child) -> int | None:
        """Restart a worker that was killed after it had served. Any other failure of a rank of the service ends the service."""
        if self._workers.get(rank) is not worker:  # handled already
            return None
        del self._workers[rank]
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        status, directory = worker.process.wait(), self._folder(rank)
        if self._leaving.pop(rank, None) is not None:
            self._joining.discard(rank)
            self._reap_orphans()
            if rank >= self._num_workers:
                shutil.rmtree(directory, ignore_errors=True)
            return None
        if rank in self._joining:
            self._joining.discard(rank)
            self._reap_orphans()
            reason = read_failure(directory / "error.json") or describe_end(worker)
            say(f"wideep: rank {rank} could not join the service: {reason}", error=True)
            self._line.send(RankEnded(rank, reason))
            return None
        if status == 0:
            return None
        if status < 0:
            ending = describe_end(worker)
            budget = self._budgets.setdefault(rank, RestartBudget(max_restarts=self._max_restarts))
            if (directory / "state.json").exists() and budget.take():
                say(f"wideep: {ending}; restarting it (at most {budget.describe()})", error=True)
                self._reap_orphans()
                self._start(rank)
                return None
            write_failure(directory / "error.json", ending, time_ns=FIRST)
        return 1

    def _reap_orphans(self) -> None:
        """Wait for the children of an ended worker, which die with it. Their ports and memory are free when they are gone."""
        living = frozenset(each.process.pid for each in self._workers.values())
        kill_orphans(spared=living, grace_s=ORPHAN_GRACE_S)
