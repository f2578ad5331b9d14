"""Processes that act as ranks in tests: a pool that is spawned once and runs many functions.

Each rank has a gloo group over the whole pool as `torch.distributed`'s default group and torch with one thread. It
runs module-level functions of the tests. The store is hosted here, outside the ranks, so that the other ranks survive
the kill of one. Ranks are forked from a server that has imported torch and loaded the compiled kernels (`preload`, and
`preload_engines` if tests have engines): eight of them start in about a second. They die with the process that started them.

    with RankPool(2) as pool:
        assert pool.run(rank_plus, 10) == [10, 11]        # def rank_plus(n): return dist.get_rank() + n
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GROUP_TIMEOUT_S = 30.0


class RankDied(NamedTuple):
    """Result of a rank that ended before it answered."""

    exitcode: int | None


class RankError(Exception):
    """A rank's function raised, died or did not answer in time. The message holds the report of every rank."""


class _Raised(NamedTuple):
    text: str


class _Skipped(NamedTuple):
    reason: str


def rank_context() -> ForkServerContext:
    """Return the context that forks ranks. If tests have imported transformers, all ranks share one import of it."""
    context = multiprocessing.get_context("forkserver")
    has_engines = "transformers" in sys.modules and not torch.cuda.is_available()
    name = "preload_engines" if has_engines else "preload"
    context.set_forkserver_preload([f"tests.support.{name}"])
    return context


class RankPool:
    """`world_size` processes that run the same function in parallel. A context manager.

    Args:
        world_size: Number of ranks.
        timeout_s: Seconds that `run` and `collect` wait for all ranks before they kill them.
        threads: Torch threads per rank.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60.0, threads: int = 1) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = rank_context()
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._store.port, rank, world_size, threads)
            process = context.Process(target=_serve_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.collect()

    @property
    def pids(self) -> list[int]:
        """Return the process id of every rank, dead or alive."""
        return [process.pid or -1 for process in self._processes]

    @property
    def is_whole(self) -> bool:
        """Return whether every rank is alive. A pool that lost a rank must be replaced."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `function(*args)` on every rank at once and return the results by rank.

        The function must be at module level; arguments and results are pickled. Its rank is `dist.get_rank()`.

        Raises:
            RankError: A rank raised, died or did not answer within `timeout_s` (then all are killed).
            pytest.skip.Exception: A rank skips the test.
        """
        self.start(function, *args)
        return self.collect(timeout_s=timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Send the call to every rank and return at once. `collect` waits for the answers."""
        call = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(call)

    def collect(
        self,
        *,
        ranks: Sequence[int] | None = None,
        may_die: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Wait for the answers of `ranks` (default: all) and return them in that order.

        Args:
            ranks: Ranks to wait for. The others (for example a stopped one) may answer a later call.
            may_die: Ranks that may die. The result of a dead rank is a `RankDied`.
            timeout_s: Seconds for all ranks together. Defaults to the pool's.
        """
        asked = list(range(self.world_size)) if ranks is None else list(ranks)
        answers = self._receive(asked, time.monotonic() + (timeout_s or self.timeout_s))
        wrong = {
            rank: answer
            for rank, answer in answers.items()
            if isinstance(answer, _Raised) or (isinstance(answer, RankDied) and rank not in may_die)
        }
        skipped = next((a for a in answers.values() if isinstance(a, _Skipped)), None)
        if skipped is not None:
            pytest.skip(skipped.reason)
        if wrong:
            parts = [a.text if isinstance(a, _Raised) else repr(a) for a in wrong.values()]
            raise RankError("\n".join(f"rank {r}: {part}" for r, part in zip(wrong, parts, strict=True)))
        return [answers[rank] for rank in asked]

    def end_groups(self) -> None:
        """Destroy all groups created by calls, on all ranks, if every rank is alive."""
        if self.is_whole:
            self.run(_end_groups, timeout_s=GROUP_TIMEOUT_S)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank: SIGKILL ends it, SIGSTOP hangs it, SIGCONT wakes it."""
        os.kill(self.pids[rank], number)

    def close(self) -> None:
        """Kill every rank, including stopped ones, and wait until all are gone."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, asked: list[int], deadline: float) -> dict[int, Any]:
        waiting: dict[Any, int] = {self._connections[rank]: rank for rank in asked}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._dump_and_kill()
                late = sorted(waiting.values())
                raise RankError(f"ranks {late} of {self.world_size} did not answer in time; all were killed")
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._read_answer(rank)
        return answers

    def _read_answer(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(10)
            return RankDied(self._processes[rank].exitcode)

    def _dump_and_kill(self) -> None:
        """Let every live rank print its stacks to stderr (faulthandler), then kill all ranks."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
                process.join(0.2)
        self.close()


def _serve_rank(connection: Connection, port: int, rank: int, world_size: int, threads: int) -> None:
    """Join the group, then run calls until the pool closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    connection.send_bytes(pickle.dumps(None))
    gc.freeze()  # collections of the garbage of tests skip objects loaded so far
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(call))


def _end_groups() -> None:
    """Destroy all groups except the default one: the gloo threads of each wake a hundred times a second."""
    made = [group for group in list(distributed_c10d._world.pg_map) if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        gc.collect()  # engines hold their groups in cycles, and the groups hold threads


def _answer(call: bytes) -> bytes:
    try:
        function, args = pickle.loads(call)
        return pickle.dumps(function(*args))
    except pytest.skip.Exception as skip:  # not an Exception: it would end the rank, and the pool with it
        return pickle.dumps(_Skipped(str(skip)))
    except Exception:  # noqa: BLE001 - each exception of a test's function is the test's result
        return pickle.dumps(_Raised(traceback.format_exc()))
