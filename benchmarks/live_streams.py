"""Streams of a running service whose pieces can be counted while they come, and how long each stood still."""

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.service import HOST, ServiceError


class LiveStream:
    """One streamed completion of greedy tokens; `arrivals_s` grows while it is read."""

    def __init__(self, port: int, prompt: Sequence[int], num_tokens: int) -> None:
        """Nothing is sent before `read`."""
        self._port = port
        self._body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._num_tokens = num_tokens
        self.text = ""
        self.arrivals_s: list[float] = []  # time.perf_counter()
        self.has_begun = asyncio.Event()

    async def read(self) -> None:
        """Read to the end.

        Raises:
            ServiceError: the request was refused, failed, or brought another number of tokens.
        """
        reader, writer = await asyncio.open_connection(HOST, self._port, limit=2**20)
        try:
            body = json.dumps(self._body).encode()
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            usage: dict[str, Any] = {}
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    usage = self._take(json.loads(line[6:])) or usage
        finally:
            writer.close()
        if usage.get("completion_tokens") != self._num_tokens:
            raise ServiceError(f"a stream of {self._num_tokens} tokens ended with {usage or 'nothing'}")

    def _take(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in event:
            raise ServiceError(f"a stream failed: {event['error']}")
        if event["choices"]:
            self.arrivals_s.append(time.perf_counter())
            self.text += event["choices"][0]["text"]
            self.has_begun.set()
        return event.get("usage")


def goes_on_after_s(arrivals_s: Sequence[float], from_s: float, until_s: float) -> float | None:
    """Return how long after a moment the longest pause ended; None where nothing came after it.

    A piece that was on its way at that moment is no sign that a stream goes on, so the first one is not what counts.

    Args:
        arrivals_s: of the pieces, ascending.
        from_s: the moment.
        until_s: pauses that begin later have another cause.
    """
    pauses = [(end - begin, end) for begin, end in pairwise(arrivals_s) if end > from_s and begin < until_s]
    return max(pauses)[1] - from_s if pauses else None


def longest_pause_s(arrivals_s: Sequence[float], from_s: float, until_s: float) -> float | None:
    """Return the longest pause that overlaps a time; None where no piece came on both of its sides."""
    return max(
        (end - begin for begin, end in pairwise(arrivals_s) if end > from_s and begin < until_s), default=None
    )
