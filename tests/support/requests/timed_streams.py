"""Streams that record the arrival of each piece, and a callback that runs once all of them have started."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

TIMEOUT_S = 300.0  # of all streams, on a loaded machine


def open_streams(client: httpx.Client, url: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Return the responses of completions that have begun, unread. Close each one."""
    requests = (
        client.build_request("POST", f"{url}/v1/completions", json={**body, "stream": True})
        for body in bodies
    )
    return [client.send(request, stream=True) for request in requests]


@dataclass(kw_only=True)
class TimedStream:
    """Pieces and times of one streamed completion."""

    body: dict[str, Any]
    arrivals_s: list[float] = field(default_factory=list)  # time.monotonic()
    text: dict[int, str] = field(default_factory=dict)  # by choice
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    has_ended: bool = False

    def take(self, line: str) -> None:
        """Process a line of the stream."""
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        assert "error" not in event, event
        if event["choices"]:
            self.arrivals_s.append(time.monotonic())
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                assert index not in self.finish_reasons, "a choice finished twice"
                self.finish_reasons[index] = choice["finish_reason"]

    @property
    def said(self) -> tuple[object, ...]:
        """Return all parts that must not depend on faults of ranks."""
        tokens = {key: self.usage and self.usage[key] for key in ("prompt_tokens", "completion_tokens")}
        return self.text, self.logprobs, self.finish_reasons, tokens

    def goes_on_after(self, moment_s: float) -> float:
        """Return the seconds from a moment to the end of the longest pause after it. Pieces may be in flight at the moment.

        Returns 0 if the stream had ended.
        """
        pauses = [
            (end_s - begin_s, end_s) for begin_s, end_s in pairwise(self.arrivals_s) if end_s > moment_s
        ]
        return max(pauses)[1] - moment_s if pauses else 0.0


def stream_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    pieces: int = 0,
    then: Callable[[], object] = lambda: None,
    headers: Mapping[str, str] | None = None,
) -> list[TimedStream]:
    """Run completions at once and read the streams to their ends.

    Args:
        headers: Headers of all requests.
        then: Called once, when every stream has brought this many pieces or has ended. A piece may hold many tokens.

    Raises:
        TimeoutError: A stream did not end.
    """
    streams = [TimedStream(body=body) for body in bodies]
    asyncio.run(_stream_all(url, streams, pieces, then, headers or {}))
    return streams


async def _stream_all(
    url: str,
    streams: list[TimedStream],
    pieces: int,
    then: Callable[[], object],
    headers: Mapping[str, str],
) -> None:
    grown = asyncio.Condition()
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(TIMEOUT_S),
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=headers, verify=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for stream in streams:
            tasks.create_task(_stream(client, url, stream, grown))
        async with grown:
            await grown.wait_for(
                lambda: all(each.has_ended or len(each.arrivals_s) >= pieces for each in streams)
            )
        await asyncio.to_thread(then)


async def _stream(client: httpx.AsyncClient, url: str, stream: TimedStream, grown: asyncio.Condition) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, **stream.body}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            stream.take(line)
            async with grown:
                grown.notify_all()
    stream.has_ended = True
    async with grown:
        grown.notify_all()
