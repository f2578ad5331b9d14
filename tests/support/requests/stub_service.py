"""A service on an asyncio server with scripted byte-exact answers, and a clock that it moves between the pieces."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.clock import Clock

OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """Frame a part of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def said(text: str, **more: Any) -> bytes:
    """Return a chat's event with some text."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more})


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """Return OpenAI's usage."""
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


class SteppedClock(Clock):
    """A clock that records reads. The client reads it when bytes arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self._was_read.set()
        return super().__call__()

    async def wait_read(self) -> None:
        """Wait until the clock is read again."""
        self._was_read.clear()
        await self._was_read.wait()


class Piece(NamedTuple):
    """Bytes that the service sends after some time."""

    after_s: float
    data: bytes


class StubService:
    """Requests that the service received, and its address."""

    def __init__(self) -> None:
        self.url = ""
        self.port = 0
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.num_connections = 0


@contextlib.asynccontextmanager
async def stub_service(
    answers: Sequence[Sequence[Piece] | bytes],
    *,
    clock: SteppedClock | None = None,
    closes_after: Callable[[int], bool] = lambda _number: False,
    socket: Path | None = None,
) -> AsyncIterator[StubService]:
    """Serve the answers in order, and repeat the last one.

    Args:
        clock: Clock moved before each piece. It must be read before the next one.
        closes_after: Returns whether the connection ends after an answer, given its number from 0.
        socket: Path of a socket to serve on instead of a port.
    """
    service = StubService()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                number = len(service.bodies)
                service.heads.append(head)
                service.bodies.append(json.loads(await reader.readexactly(length)))
                answer = answers[min(number, len(answers) - 1)]
                for piece in [Piece(0.0, answer)] if isinstance(answer, bytes) else answer:
                    if clock is not None:
                        clock.now_s += piece.after_s
                    writer.write(piece.data)
                    if clock is not None:
                        await clock.wait_read()
                if closes_after(number):
                    break
        writer.close()

    if socket is not None:
        server: asyncio.Server = await asyncio.start_unix_server(serve, socket)
        service.url = f"unix:{socket}"
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        service.port = server.sockets[0].getsockname()[1]
        service.url = f"http://127.0.0.1:{service.port}"
    try:
        yield service
    finally:
        server.close()
