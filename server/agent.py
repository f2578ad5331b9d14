"""Run torchrun inside this process, so that `wideep serve` needs nothing but Python, and quietly.

torchrun's own account of a failure (a table, a traceback, warnings about signals) says less than ours and buries it,
and it warns of an OMP_NUM_THREADS that we set per rank. Here its log is off unless LOGLEVEL asks for it, and its
exceptions become an exit status; what happened is in the error files under its --log-dir. torch is imported inside
the function, because the command line that dispatches here must start without it.
"""
# ruff: noqa: PLC0415

import logging
import os
import sys


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
    except (ChildFailedError, SignalException) as error:
        return 0 if isinstance(error, SignalException) else 1
    finally:
        sys.stdout.flush()
    return 0
