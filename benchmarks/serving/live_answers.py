"""Answers of a running service, streamed or whole, with the time of every piece, to measure pauses.

Answers are compared by values that must not depend on faults: text, logprobs and finish reason of each choice, and the tokens.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.serving.service import HOST

RETRY_S = 0.2  # after a 503 that did not accept the request
POLL_S = 0.02
_BEGUN_PIECES = 10


class Said(NamedTuple):
    """Content of an answer, streamed or whole."""

    texts: dict[int, str]  # by choice
    logprobs: dict[int, list[float]]
    finish_reasons: dict[int, str]
    num_tokens: int


class LostAnswerError(RuntimeError):
    """An accepted request got an error, or its connection ended before the answer was complete."""


class CutOffError(LostAnswerError):
    """The connection ended before the answer was complete."""


@dataclass(kw_only=True, eq=False)
class LiveAnswer:
    """One request to /v1/completions. `arrivals_s` grows while the answer is read."""

    port: int
    body: Mapping[str, Any]
    is_streamed: bool
    key: str | None = None  # Idempotency-Key of the request and its retries
    session: str | None = None
    may_ask_again: Callable[[], bool] = lambda: False  # whether a request that was cut off may be retried
    asked_s: float = 0.0  # time.perf_counter() of the last try
    arrivals_s: list[float] = field(default_factory=list)  # time.perf_counter()
    num_refused: int = 0  # 503 responses before it was accepted
    num_cut_off: int = 0  # retries after it was cut off
    _said: Said = field(default_factory=lambda: Said({}, {}, {}, 0))

    async def read(self) -> Said:
        """Send the request and read the answer to its end. Retry after a 503 and, if allowed, after a cut. No error is retried.

        Raises:
            LostAnswerError: An accepted request failed, or it was refused with another status.
        """
        while True:
            try:
                if await self._read_once():
                    return self._said
                self.num_refused += 1
            except CutOffError:
                if not self.may_ask_again():
                    raise
                self.num_cut_off += 1
                self._said = Said({}, {}, {}, 0)
            await asyncio.sleep(RETRY_S)

    @property
    def first_wait_s(self) -> float | None:
        """Seconds from the last try to the first piece of a stream. None if it brought none, or for a whole answer."""
        first = next((each for each in self.arrivals_s if each > self.asked_s), None)
        return first - self.asked_s if self.is_streamed and first is not None else None

    async def _read_once(self) -> bool:
        """Send the request and read the answer to its end; return False after a 503."""
        self.asked_s = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port, limit=2**22)
        except OSError as error:
            raise CutOffError(f"cannot connect: {error}") from error
        try:
            await self._send(writer)
            status = await self._read_head(reader)
            if status == 503:
                return False
            if status != 200:
                raise LostAnswerError(f"status {status}: {(await reader.read(500)).decode(errors='replace')}")
            async for event in self._events(reader):
                self._take(event)
        except (OSError, ValueError) as error:  # ValueError: a body that was cut off
            raise CutOffError(f"the connection broke: {error}") from error
        finally:
            writer.close()
        if len(self._said.finish_reasons) != self.body.get("n", 1) or not self._said.num_tokens:
            raise CutOffError(f"incomplete after {sum(map(len, self._said.texts.values()))} characters")
        return True

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        extra = {"stream": True, "stream_options": {"include_usage": True}} if self.is_streamed else {}
        body = json.dumps({**self.body, **extra}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        head += f"Idempotency-Key: {self.key}\r\n" if self.key else ""
        head += f"x-session-id: {self.session}\r\n" if self.session else ""
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()

    async def _read_head(self, reader: asyncio.StreamReader) -> int:
        words = (await reader.readline()).split()
        if not words:
            raise CutOffError("the connection closed without an answer")
        while (await reader.readline()).strip():
            pass
        return int(words[1])

    async def _events(self, reader: asyncio.StreamReader) -> Any:
        """Yield a stream's events, or the single body of a whole answer."""
        if not self.is_streamed:
            body = await reader.read()
            yield json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])
            return
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def _take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise LostAnswerError(f"an error event: {event['error']}")
        texts, logprobs, finish_reasons, _ = self._said
        if event["choices"]:
            self.arrivals_s.append(time.perf_counter())
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice.get("logprobs"):
                logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                finish_reasons[index] = choice["finish_reason"]
        if usage := event.get("usage"):
            self._said = self._said._replace(num_tokens=usage["completion_tokens"])


def longest_pause_s(arrivals_s: Sequence[float], from_s: float, until_s: float) -> float | None:
    """Return the longest pause that overlaps the interval, or None if no pause between two pieces does."""
    return max(
        (end - begin for begin, end in pairwise(arrivals_s) if end > from_s and begin < until_s), default=None
    )


@asynccontextmanager
async def running_streams(
    port: int, *, count: int, prompt_tokens: int, num_tokens: int
) -> AsyncIterator[list[LiveAnswer]]:
    """Yield greedy streams once all have begun, and end them with the block. Each has its own prompt."""
    streams = []
    for number in range(count):
        prompt = [100 + (7 * number + place) % 4000 for place in range(prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        streams.append(LiveAnswer(port=port, body=body, is_streamed=True))
    reading = [asyncio.create_task(each.read()) for each in streams]
    try:
        while not all(len(each.arrivals_s) > _BEGUN_PIECES for each in streams):
            await asyncio.sleep(POLL_S)
        yield streams
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def wait_for_pieces_after(streams: Sequence[LiveAnswer], moment_s: float) -> None:
    """Wait until every stream has a piece that arrived after a time.perf_counter()."""
    while not all(each.arrivals_s[-1] > moment_s for each in streams):
        await asyncio.sleep(POLL_S)


def longest_pause_of_all_s(streams: Sequence[LiveAnswer], from_s: float, until_s: float) -> float:
    """Return the longest pause of any stream that overlaps the interval; 0 if there was none."""
    return max(longest_pause_s(each.arrivals_s, from_s, until_s) or 0.0 for each in streams)
