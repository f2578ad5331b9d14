"""Run torchrun inside this process, so that `wideep serve` needs nothing but Python, and quietly.

torchrun's own account of a failure (a table, a traceback, warnings about signals) says less than ours and buries it,
and it warns of an OMP_NUM_THREADS that we set per rank. Here its log is off unless LOGLEVEL asks for it, and its
exceptions become an exit status; what happened is in the error files under its --log-dir. torch is imported inside
the function, because the command line that dispatches here must start without it.
"""
# ruff: noqa: PLC0415

import logging
import os
import signal
import socket
from pathlib import Path

from server.process.children import describe_status
from server.process.error_file import ERROR_FILE, FIRST, write_failure

_NO_FILE = "<N/A>"  # torchrun's word for a worker that wrote none


def run_agent(arguments: list[str]) -> int:
    """Run torchrun with its own arguments until its workers have ended; 0 if all of them did with status 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    # Its table of failures names the host, which nobody sees here, and DNS may take 20 s to not know it.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # its own default, without its warning
    try:
        torchrun(arguments)
    except SignalException:  # it has passed the signal on and waited for the workers
        return 0
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if (
                failure.error_file == _NO_FILE and failure.exitcode != -signal.SIGTERM
            ):  # that is torchrun's doing
                _write_supervisor_end(rank, failure.pid, failure.exitcode)
        return 1
    return 0


def _write_supervisor_end(rank: int, pid: int, status: int) -> None:
    """Say for a supervisor that could not say it how it ended; what others report follows from it."""
    if path := os.environ.get(ERROR_FILE):
        ending = describe_status(f"rank {rank}'s supervisor", pid, status)
        write_failure(Path(path), ending, time_ns=FIRST)
