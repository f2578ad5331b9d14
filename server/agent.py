"""Run torchrun inside this process, so that `wideep serve` needs nothing but Python, and quietly.

torchrun's own account of a failure (a table, a traceback, warnings about signals) says less than ours and buries it,
and it warns of an OMP_NUM_THREADS that we set per rank. Here its log is off unless LOGLEVEL asks for it, and its
exceptions become an exit status; what happened is in the error files under its --log-dir. torch is imported inside
the function, because the command line that dispatches here must start without it.
"""
# ruff: noqa: PLC0415

import logging
import os
from pathlib import Path

from server.error_file import ERROR_FILE, FIRST, write_failure

_NO_FILE = "<N/A>"  # torchrun's word for a worker that wrote none


def run_agent(arguments: list[str]) -> int:
    """Run torchrun with its own arguments until its workers have ended; 0 if all of them did with status 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # its own default without its warning; a worker sets its engine's
    try:
        torchrun(arguments)
    except SignalException:  # it has passed the signal on and waited for the workers
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.error_file == _NO_FILE and (path := os.environ.get(ERROR_FILE)):
            ending = (
                f"killed by {failure.signal_name()}"
                if failure.exitcode < 0
                else f"gone, status {failure.exitcode}"
            )
            text = f"rank {rank}'s supervisor (pid {failure.pid}) was {ending}"
            write_failure(Path(path), text, time_ns=FIRST)  # what others report then follows from it
        return 1
    return 0
