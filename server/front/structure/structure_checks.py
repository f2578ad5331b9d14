"""The front's end of the checker process: asks, bounds the wait, remembers, and starts another one when it died.

Everything here runs in the front's event loop and waits for nobody but the process. Forms are remembered by digest, so
that a schema that every request carries is compiled once.
"""

import asyncio
import contextlib
import hashlib
import json
import signal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from scheduler.policy.request import Structure
from scheduler.structure.compiler import LoadVocabulary, vocabulary_to_json
from server.errors import ApiError
from server.process.children import WIDEEP_COMMAND

CHECKER_COMMAND = (*WIDEEP_COMMAND, "structure-checker")
MAX_KNOWN = 4096  # answers that are remembered
START_S = 60.0  # for the process to be ready
ANSWER_S = 30.0  # on a busy machine the checker's limit, in processor time, comes late
TURN_S = 60.0  # that a form may wait for those before it
_SLOW = "it takes too long"
_DIED = "it needs more memory or deeper nesting than is allowed"


class StructureChecks:
    """Says of forms why they cannot be compiled."""

    def __init__(self, load_vocabulary: LoadVocabulary, command: Sequence[str] = CHECKER_COMMAND) -> None:
        """Args: load_vocabulary is called in a thread when the first form comes."""
        self._load_vocabulary = load_vocabulary
        self._command = command
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def why_not(self, structure: Structure) -> str:
        """Return why a form cannot be compiled, empty if it can.

        Raises:
            ApiError: 503, too many forms wait, or no process can be started.
        """
        key = hashlib.sha256("\0".join((structure.kind, structure.after, structure.text)).encode()).digest()
        if key not in self._known:
            await self._take_turn()
            try:
                if key not in self._known:
                    self._known[key] = await self._ask(structure)
            finally:
                self._turn.release()
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ApiError(503, "Too many structures are waiting to be checked; try again later.") from None

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def _ask(self, structure: Structure) -> str:
        process = self._process or await self._start()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await _exchange(process, json.dumps(asdict(structure)))
        except TimeoutError:
            await self.close()
            return _SLOW
        except (EOFError, OSError):  # it died of this form
            status = await process.wait()
            await self.close()
            return _SLOW if status == -signal.SIGPROF else _DIED
        except asyncio.CancelledError:  # its answer would be taken for the next form's
            await self.close()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        vocabulary = vocabulary_to_json(await asyncio.to_thread(self._load_vocabulary))
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # what a library says when it dies is not for our log
            process_group=0,  # Ctrl-C is for the front
        )
        try:
            async with asyncio.timeout(START_S):
                await _exchange(process, vocabulary)
        except (TimeoutError, EOFError, OSError):
            await self.close()
            raise ApiError(503, "The process that checks structures does not start.") from None
        return process


async def _exchange(process: asyncio.subprocess.Process, line: str) -> str:
    """Write a line and read the answer.

    Raises:
        EOFError, OSError: the process has died.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()
    answer = await process.stdout.readline()
    if not answer:
        raise EOFError
    return str(json.loads(answer))
