"""Run many streamed completions in one event loop: read to the end, left early, or read slowly."""

import asyncio
import json
import socket
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

TIMEOUT_S = 600.0  # of one stream, on a loaded machine
SMALL_BUFFER = 4096  # bytes of a slow reader's socket; the kernel's minimum is about half
SLOW_LIMIT = 1 << 14  # bytes that a slow reader buffers; a line must fit


class Manner(Enum):
    """How a client reads."""

    WHOLE = "whole"
    LEAVES = "leaves"  # after some events
    SLOW = "slow"  # reads nothing until the others have ended, then slowly


@dataclass(kw_only=True)
class Streamed:
    """Request and result of one client."""

    body: dict[str, Any]
    manner: Manner = Manner.WHOLE
    leaves_after: int = 0  # events
    status: int = 0
    text: dict[int, str] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    is_done: bool = False  # [DONE] arrived

    def take(self, line: bytes) -> bool:
        """Process a line of the stream. Return whether it was an event."""
        if line.startswith(b"data: [DONE]"):
            self.is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                index = choice["index"]
                self.text[index] = self.text.get(index, "") + choice["text"]
                if choice["finish_reason"]:
                    assert index not in self.finish_reasons, "a choice finished twice"
                    self.finish_reasons[index] = choice["finish_reason"]
            return True
        return False


async def run(url: str, asked: list[Streamed]) -> None:
    """Run all streams at once. Slow readers start to read when all others have ended.

    Raises:
        TimeoutError: A stream did not end.
    """
    others_ended = asyncio.Event()
    slow = [
        asyncio.create_task(_stream(url, each, others_ended)) for each in asked if each.manner is Manner.SLOW
    ]
    try:
        fast = [_stream(url, each, others_ended) for each in asked if each.manner is not Manner.SLOW]
        await asyncio.gather(*fast)
        others_ended.set()
        await asyncio.gather(*slow)
    finally:
        for task in slow:
            task.cancel()


async def _stream(url: str, asked: Streamed, may_read: asyncio.Event) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await _connect(url, is_slow=asked.manner is Manner.SLOW)
        try:
            body = json.dumps({**asked.body, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            if asked.manner is Manner.SLOW:
                await may_read.wait()
            await _read(reader, asked)
        finally:
            writer.transport.abort()  # at once, like a client that is killed


async def _read(reader: asyncio.StreamReader, asked: Streamed) -> None:
    words = (await reader.readline()).split()
    asked.status = int(words[1]) if words else 0
    num_events = 0
    while line := await reader.readline():
        num_events += asked.take(line)
        if asked.manner is Manner.LEAVES and num_events >= asked.leaves_after:
            return


async def _connect(url: str, *, is_slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    if is_slow:  # before connecting: it bounds the advertised window
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    limit = SLOW_LIMIT if is_slow else 1 << 16
    return await asyncio.open_connection(sock=connection, limit=limit)
