"""The front's client of the checker process: sends structures, limits waits, caches answers, restarts a dead process.

Everything here runs in the front's event loop and waits only for the process. Answers are cached by digest, so that a
schema that every request carries is compiled once. A structure that compiles quickly never waits for a slow one:
each is tried with little processor time first, and slow ones queue separately.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from scheduler.policy.request import Structure
from scheduler.structure.compiler import LoadVocabulary, vocabulary_to_json
from server.front.errors import ApiError
from server.front.helper_processes import kill_helper, start_helper
from server.machine.roots import WIDEEP_COMMAND
from server.machine.tasks import logging_errors

CHECKER_COMMAND = (*WIDEEP_COMMAND, "structure-checker")
QUICK_CPU_S = 0.05  # most compile in a millisecond, a schema of 500 properties in twenty
MOST_CPU_S = 2.0
MAX_KNOWN = 4096  # cached answers
START_S = 60.0  # for the process to be ready
TURN_S = 60.0  # for a structure to wait for those before it
_SLOW = "it takes too long to compile"
_UNKNOWN = "The structure could not be checked, because the machine is short of time or memory. Try again."
_NOT_STARTED = "The process that checks structures failed to start."


class _Answer(NamedTuple):
    """The answer of the process."""

    why_not: str | None  # None if it can be compiled or `is_slow`
    is_slow: bool = False


class StructureChecks:
    """Checks whether structures can be compiled."""

    def __init__(self, load_vocabulary: LoadVocabulary, command: Sequence[str] = CHECKER_COMMAND) -> None:
        """Args: load_vocabulary is called in a thread for the first structure."""
        self._load_vocabulary = load_vocabulary
        self._command = command
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._quick, self._slow, self._starting = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def why_not(self, structure: Structure, param: str | None = None) -> str | None:
        """Return why a structure cannot be compiled, or None if it can.

        Args:
            param: The field to name in errors.

        Raises:
            ApiError: 429 if too many slow structures are waiting; 503 if no process starts, or the machine ended it.
        """
        key = hashlib.sha256("\0".join((structure.kind, structure.after, structure.text)).encode()).digest()
        if key not in self._known:
            answer = await self._ask_in_turn(self._quick, structure, QUICK_CPU_S, key, param)
            if answer.is_slow:
                answer = await self._ask_in_turn(self._slow, structure, MOST_CPU_S, key, param)
            self._known[key] = _SLOW if answer.is_slow else answer.why_not
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    async def close(self) -> None:
        """Kill the process and wait for its end."""
        process, self._process = self._process, None
        await kill_helper(process)
        if self._reader is not None:
            await self._reader
            self._reader = None

    async def _ask_in_turn(
        self, line: asyncio.Lock, structure: Structure, cpu_s: float, key: bytes, param: str | None
    ) -> _Answer:
        async with _turn(line, param):
            if key in self._known:  # another request has checked the same one meanwhile
                return _Answer(self._known[key])
            return await self._ask(structure, cpu_s)

    async def _ask(self, structure: Structure, cpu_s: float) -> _Answer:
        process = await self._running()
        number = next(self._numbers)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        assert process.stdin is not None, "it was started with a pipe"
        asked = {"number": number, "cpu_s": cpu_s, **asdict(structure)}
        with contextlib.suppress(OSError):  # the process has died, and `_read` answers
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reader is None or self._reader.done():
                await self.close()
                await self._start()
            assert self._process is not None, "it has just been started"
            return self._process

    async def _start(self) -> None:
        vocabulary = vocabulary_to_json(await asyncio.to_thread(self._load_vocabulary))
        self._process = process = await start_helper(self._command)
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        try:
            async with asyncio.timeout(START_S):
                process.stdin.write(vocabulary.encode() + b"\n")
                await process.stdin.drain()
                is_ready = bool(await process.stdout.readline())
        except (TimeoutError, OSError):
            is_ready = False
        if not is_ready:
            await self.close()
            raise ApiError(503, _NOT_STARTED)
        self._reader = asyncio.create_task(self._read(process.stdout))

    async def _read(self, answers: asyncio.StreamReader) -> None:
        """Distribute answers until the process ends. Requests that still wait then fail and are not retried."""
        with logging_errors("an answer of the process that checks structures is invalid"):
            while line := await answers.readline():
                self._distribute(json.loads(line))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ApiError(503, "The process that checks structures ended. Try again."))

    def _distribute(self, told: dict[str, Any]) -> None:
        waiting = self._waiting.pop(told["number"], None)
        if waiting is None or waiting.done():
            return
        if told.get("is_unknown"):  # not cached: it may be valid
            waiting.set_exception(ApiError(503, _UNKNOWN, headers={"Retry-After": "1"}))
        else:
            waiting.set_result(_Answer(told["why_not"], told["is_slow"]))


@contextlib.asynccontextmanager
async def _turn(line: asyncio.Lock, param: str | None) -> AsyncIterator[None]:
    """Wait for a turn, for a bounded time."""
    try:
        async with asyncio.timeout(TURN_S):
            await line.acquire()
    except TimeoutError:
        raise ApiError(
            429, "Too many slow structures are waiting to be compiled. Try again later.", param=param
        ) from None
    try:
        yield
    finally:
        line.release()
