"""Two ranks on one device, for correctness only, because they share it. Their exchanges must have the same bits as on CPUs.

Each unit starts two processes with a group over gloo; `checks` has their work. In the interpreter, shared memory
replaces the device's symmetric memory, and nothing can be captured. Two NCCL ranks need two devices, so NCCL's bits are not
checked here.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.checks import CHECKS, WAIT_S
from benchmarks.gpu.results import Row, Setting
from server.machine.parent_death import die_with_parent

_TIMEOUT_S, _INTERPRETED_TIMEOUT_S = 180.0, 500.0  # both ranks compile kernels and CPU code in this time


def units(setting: Setting) -> list[str]:
    """Return the checks."""
    return list(CHECKS)


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Run a check on two ranks. Equal rows of both are merged."""
    timeout_s = _INTERPRETED_TIMEOUT_S if setting.is_interpreted else _TIMEOUT_S
    first, second = run_pair(unit, setting, timeout_s=timeout_s)
    for row, other in zip(first, second, strict=True):
        yield Row(
            name=row.name,
            figures=row.figures,
            is_right=row.is_right and other.is_right,
            note=row.note or other.note,
        )


def run_pair(check: str, setting: Setting, *, timeout_s: float) -> list[list[Row]]:
    """Run a check on both ranks. Return the rows of each.

    Raises:
        RuntimeError: A rank failed or timed out; both have been stopped.
    """
    # In the interpreter, the ranks of all checks share one import of torch. A device needs new processes.
    context: Any = multiprocessing.get_context("forkserver" if setting.is_interpreted else "spawn")
    context.set_forkserver_preload([__name__])
    parent_pid = None if setting.is_interpreted else os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=_serve, args=(check, setting, rank, folder, pipe[1], parent_pid))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, ours in pipes:
            ours.close()
        try:
            return [_answer(rank, pipe, timeout_s) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _answer(rank: int, pipe: Connection, timeout_s: float) -> list[Row]:
    if not pipe.poll(timeout_s):
        raise RuntimeError(f"rank {rank} did not end within {timeout_s:.0f} s")
    try:
        rows: list[Row] = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended before its check was complete; see the log") from None
    return rows


def _serve(
    check: str, setting: Setting, rank: int, folder: str, pipe: Connection, parent_pid: int | None
) -> None:
    """Run a rank's process until it is killed, so that the other rank can finish."""
    die_with_parent(parent_pid=parent_pid)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    bench = Bench.of(setting)
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=WAIT_S)
    )
    pipe.send(list(CHECKS[check](setting, bench)))
    pipe.poll(None)
