"""Processes that do one kind of work for the front: they read and write lines, and are killed because they have nothing to save."""

import asyncio
import contextlib
from collections.abc import Sequence


async def start_helper(command: Sequence[str], *, shows_errors: bool = False) -> asyncio.subprocess.Process:
    """Start a process with pipes for its input and output.

    Args:
        shows_errors: Let its standard error go to the front's. Otherwise the output of dying libraries stays out of the log.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if shows_errors else asyncio.subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the front only
    )


async def kill_helper(process: asyncio.subprocess.Process | None) -> None:
    """Kill a process, which may have ended, and wait for its end. None means that it was never started."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
