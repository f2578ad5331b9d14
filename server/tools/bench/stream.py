"""Send requests for streams and record the arrival times of their bytes: the client of `wideep bench`.

It implements HTTP/1.1 with httptools' parser on asyncio's sockets, because it runs on the cores that it measures: a single
token costs 30 to 45 us of CPU here, and about 370 us with OpenAI's client over httpx (measured). The time of a chunk is taken
when its bytes arrive, before they are parsed. Connections are reused.

A failed request is an answer with a reason, so that the load generator continues. The module does not depend on loads or
figures. Times are in seconds, on the given clock.
"""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools
import httpx

from server.http.client import ServiceAddress, complaint_of

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}  # fields of a body
_KEPT_BYTES = 2000  # of a body that is not a stream, to quote its error
_QUOTED_CHARS = 300
_CONNECT_TIMEOUT_S = 30.0  # a loaded service is slow to accept
_DECODER = json.JSONDecoder()


@dataclass(kw_only=True, slots=True)
class StreamedAnswer:
    """A request and its answer. It grows while the answer is read."""

    start_s: float  # when the request was sent, or its connection was requested
    end_s: float = 0.0  # of the last chunk with text or with a finish reason
    arrivals_s: list[float] = field(default_factory=list)  # of chunks with text, reasoning or calls
    counts: list[int] = field(default_factory=list)  # of tokens up to each of them, if the service reports it
    prompt_tokens: int = 0
    output_tokens: int = 0  # from usage; without usage, the number of chunks with text
    cached_tokens: int = 0  # of the prompt, from usage
    has_usage: bool = False
    failure: str = ""  # empty if there was no error
    late_s: float = 0.0  # delay after the scheduled time

    @property
    def first_s(self) -> float:
        """Return the time of the first text, or of the end if all tokens are hidden."""
        return self.arrivals_s[0] if self.arrivals_s else self.end_s


class StreamClient:
    """Connections to one service, as many as there are concurrent requests."""

    def __init__(
        self, url: str, api_key: str | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Prepare; connections open with the first requests.

        Args:
            url: URL of the service, in a form that `ServiceAddress.of` parses.
        """
        self._clock = clock
        address = ServiceAddress.of(url)
        self._socket, parsed = address.socket, httpx.URL(address.root)
        self._host, self._path = parsed.host, parsed.raw_path.decode("ascii").rstrip("/")
        self._ssl = httpx.create_ssl_context() if parsed.scheme == "https" else None
        self._port = parsed.port or (443 if self._ssl else 80)
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"Host: {parsed.netloc.decode('ascii')}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{authorization}"
        )
        self._idle: list[_Connection] = []

    async def ask(self, path: str, body: Mapping[str, Any]) -> StreamedAnswer:
        """Post a body and read its stream; errors are stored in the answer."""
        content = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        request = head.encode() + content
        answer = StreamedAnswer(start_s=self._clock())
        try:
            while True:
                connection, is_new = await self._connection()
                if await connection.read(request, answer) or is_new:
                    break
                answer.failure, answer.end_s = "", 0.0  # the service had closed the idle connection
        except (OSError, TimeoutError) as error:
            answer.failure = f"no connection: {error or type(error).__name__}"
            answer.end_s = self._clock()
            return answer
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def _connection(self) -> tuple["_Connection", bool]:
        """Return an idle connection or a new one, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        return await self._connect(), True

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        make = functools.partial(_Connection, self._clock)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            if self._socket:
                _, connection = await loop.create_unix_connection(make, self._socket)
            else:
                _, connection = await loop.create_connection(make, self._host, self._port, ssl=self._ssl)
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.hang_up()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """A connection that reads one answer at a time. httptools defines the names of the `on_` methods."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_open = False
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._reading: _Reading | None = None
        self._ended: asyncio.Future[bool] | None = None  # its result: whether any bytes arrived
        self._now_s = 0.0
        self._has_begun, self._status = False, 0

    async def read(self, request: bytes, answer: StreamedAnswer) -> bool:
        """Send a request and read its answer. Returns False if the service had already closed the connection."""
        self._reading, self._has_begun, self._status = _Reading(answer), False, 0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        finally:
            if not self._ended.done() or self._ended.cancelled():
                self.hang_up()
            self._reading = self._ended = None

    def hang_up(self) -> None:
        """Close at once, which cancels the request in the service."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport), "sockets have one"
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        """Record the time, then parse."""
        self._now_s = self._clock()
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.hang_up()
            self._end(f"invalid HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """End the current answer."""
        self.is_open = False
        self._now_s = self._clock()
        is_whole = self._reading is not None and self._reading.has_end
        if is_whole or self._status not in (0, 200):
            self._end()  # the end of an answer without a length
        else:
            self._end(f"the connection was lost: {error or 'the service closed it'}")

    def on_headers_complete(self) -> None:
        """Store the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read a part of the answer."""
        if self._reading is not None:
            self._reading.take(body, self._now_s)

    def on_message_complete(self) -> None:
        """End the answer."""
        if self._status < 200:
            return  # 100 Continue
        if not self._parser.should_keep_alive():
            self.is_open = False
            self._transport.close()
        self._end()

    def _end(self, failure: str = "") -> None:
        if self._reading is None or self._ended is None or self._ended.done():
            return
        self._reading.finish(self._status or 200, failure, self._now_s)
        self._ended.set_result(self._has_begun)


class _Reading:
    """Parser for the events of one answer, as their bytes arrive."""

    def __init__(self, answer: StreamedAnswer) -> None:
        self.has_end = False
        self._has_finished = False  # a choice had a finish reason
        self._answer = answer
        self._rest = b""
        self._kept = b""  # bytes that are not events
        self._usage: Mapping[str, Any] | None = None

    def take(self, body: bytes, now_s: float) -> None:
        """Read complete lines; the rest is kept for the next call."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now_s)
            elif line and len(self._kept) < _KEPT_BYTES and not line.startswith((b"event:", b"id:", b":")):
                self._kept += line

    def _take_event(self, text: bytes, now_s: float) -> None:
        if text == b"[DONE]":
            self.has_end = True
            return
        try:
            event, _ = _DECODER.raw_decode(text.decode())  # half the time of json.loads
            if event.get("error"):
                self._answer.failure = complaint_of(event)[:_QUOTED_CHARS]
            usage = event.get("usage")
            for choice in event.get("choices") or ():
                self._take_choice(choice, usage, now_s)
        except (ValueError, LookupError, TypeError, AttributeError):
            self._answer.failure = (
                f"an event is not a chunk of an answer: {text[:_QUOTED_CHARS].decode(errors='replace')}"
            )
            return
        self._usage = usage or self._usage

    def _take_choice(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None, now_s: float) -> None:
        answer = self._answer
        has_text = _has_text(choice)
        if has_text:
            answer.arrivals_s.append(now_s)
            if usage:
                answer.counts.append(usage["completion_tokens"])
        has_reason = bool(choice.get("finish_reason"))
        self._has_finished |= has_reason
        if has_text or has_reason:
            answer.end_s = now_s

    def finish(self, status: int, failure: str, now_s: float) -> None:
        """Store the result.

        Args:
            status: HTTP status of the answer.
            failure: Failure of the connection; empty without one.
        """
        answer = self._answer
        answer.end_s = answer.end_s or now_s
        if status != 200:
            body = (self._kept + self._rest)[:_KEPT_BYTES]
            answer.failure = f"the service refused ({status}): {_quoted(body)}"
        elif failure:
            answer.failure = answer.failure or failure
        elif not answer.failure and not answer.arrivals_s and self._usage is None:
            body = (self._kept + self._rest)[:_KEPT_BYTES]
            answer.failure = f"the answer is not a stream of tokens: {_quoted(body) or 'it is empty'}"
        elif not answer.failure and not (self.has_end or self._has_finished):
            answer.failure = "the stream ended before the answer was complete"
        answer.output_tokens = len(answer.arrivals_s)
        if self._usage is not None:
            self._count(self._usage)

    def _count(self, usage: Mapping[str, Any]) -> None:
        answer = self._answer
        try:
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = int(details.get("cached_tokens") or 0)
            answer.has_usage = True
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            answer.failure = answer.failure or f"usage is not in OpenAI's format: {usage!r}"[:_QUOTED_CHARS]


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Return whether a chunk's choice has generated content."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return bool(
        delta
        and (
            delta.get("content")
            or delta.get("reasoning_content")
            or delta.get("reasoning")
            or delta.get("tool_calls")
        )
    )


def _quoted(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    try:
        return complaint_of(json.loads(text))[:_QUOTED_CHARS]
    except ValueError:
        return text[:_QUOTED_CHARS]
