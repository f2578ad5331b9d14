"""Handle SIGTERM like Ctrl-C: end a command in order, even if Ctrl-C is ignored, as in a script's background job."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM interrupt the code inside, such as the generation of a model, in the same way as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_interruptibly(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` with asyncio.run inside `terminate_as_interrupt`; SIGTERM cancels it, so that connections are closed.

    Raises:
        KeyboardInterrupt: After SIGTERM or Ctrl-C.
    """

    async def cancelled_by_sigterm() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "asyncio.run runs a task"

        def cancel(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGTERM, cancel)
        try:
            await work
        finally:
            signal.signal(signal.SIGTERM, before)

    try:
        asyncio.run(cancelled_by_sigterm())
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
