"""Background tasks of a front: an exception in one is logged when it happens.

asyncio logs an exception that was not retrieved only when the task is freed, and a front holds its tasks until it ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

_LOG = logging.getLogger("wideep.front")


def start_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a background task. If an exception ends it, the log has its name and the traceback."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_error)
    return task


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("the background task %s has ended with an error", task.get_name(), exc_info=error)


@contextlib.contextmanager
def logging_errors(text: str) -> Iterator[None]:
    """Log an exception of the block after `text`, so that the loop around it goes on with its next turn."""
    try:
        yield
    except Exception:  # noqa: BLE001 - nothing else handles errors of a background task
        _LOG.exception("%s", text)
