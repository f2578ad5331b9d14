"""Send many requests to one service concurrently, and retry temporary failures.

Temporary failures (a full queue, a start or restart, a lost connection) are retried for about a minute in all, or for longer if
the service's Retry-After demands it. If they persist, `ServiceLostError` is meant to end the whole job, because the next request
would fail, too. All other answers, good or bad, go to the caller. Requests have no timeout: one may wait in the service's queue
until the others are finished.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from server.front.errors import ApiError
from server.http.client import ServiceAddress, ServiceError, complaint_of, headers_with
from server.http.json_text import PIECE_BYTES, parse_json
from server.http.json_writer import long_json_bytes

CONNECT_TIMEOUT_S = 30.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before each retry
LONGEST_PAUSE_S = 60.0  # limit for Retry-After
_PASSING = (429, 503)  # temporary: too many requests, not ready

Job = TypeVar("Job")


class ServiceLostError(ServiceError):
    """The service is unreachable or refuses all requests; the message has the reason and what to do."""


class Reply(NamedTuple):
    """A service's answer, good or bad."""

    status: int
    request_id: str
    body: Any  # JSON

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 200

    @property
    def complaint(self) -> str:
        """The service's error message."""
        return complaint_of(self.body)


class Trouble(NamedTuple):
    """A temporary failure of one attempt."""

    reason: str
    asked_pause_s: float = 0.0  # from Retry-After


class BulkClient:
    """Many connections to one service. An asynchronous context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        concurrency: int,
        why_gone: Callable[[], str | None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Create the client. It connects with the first request.

        Args:
            url: URL of the service, in a form that `ServiceAddress.of` parses.
            concurrency: Maximum number of connections.
            why_gone: Returns why retries are useless, or None while they may help.
            sleep, transport: Replaced in tests.

        Raises:
            ServiceError: The URL or the API key is invalid.
        """
        self._address = ServiceAddress.of(url)
        self.url, path = self._address.shown, self._address.socket
        self.concurrency = concurrency
        self._why_gone = why_gone
        self._sleep = sleep
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        if path is not None:
            transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
        self._http = httpx.AsyncClient(
            headers=headers_with(api_key),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=limits,
            transport=transport,
            trust_env=False,  # use no proxy between a batch and its service
        )

    async def get(self, path: str) -> Reply:
        """Send a GET without retries, to find out early whether the service is reachable.

        Raises:
            ServiceLostError: The service does not answer.
        """
        answer = await self._try("GET", path, None)
        if isinstance(answer, Trouble):
            raise ServiceLostError(answer.reason)
        return answer

    async def post(self, path: str, body: Any) -> Reply:
        """POST a JSON body, with retries after temporary failures.

        Raises:
            ServiceLostError: The last attempt failed, or retries are useless.
        """
        content = await asyncio.to_thread(long_json_bytes, body)
        for pause_s in PAUSES_S:
            answer = await self._try("POST", path, content)
            if not isinstance(answer, Trouble):
                return answer
            if gone := self._why_gone():
                raise ServiceLostError(gone)
            await self._sleep(min(max(pause_s, answer.asked_pause_s), LONGEST_PAUSE_S))
        answer = await self._try("POST", path, content)
        if isinstance(answer, Trouble):
            raise ServiceLostError(f"stopped after {len(PAUSES_S) + 1} attempts: {answer.reason}")
        return answer

    async def _try(self, method: str, path: str, content: bytes | None) -> Reply | Trouble:
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            with self._address.explaining():
                url = self._address.root + path
                response = await self._http.request(method, url, content=content, headers=headers)
        except ServiceError as error:
            return Trouble(str(error))
        is_long = len(response.content) > PIECE_BYTES  # log-probabilities may take megabytes
        reply = await asyncio.to_thread(_reply, response) if is_long else _reply(response)
        if reply.status not in _PASSING:
            return reply
        asked = response.headers.get("retry-after", "")  # a date is ignored
        return Trouble(
            f"{self.url} refuses requests ({reply.status}): {reply.complaint}",
            float(asked) if asked.isdecimal() else 0.0,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


async def for_each(jobs: Iterable[Job], work: Callable[[Job], Awaitable[None]], *, concurrency: int) -> None:
    """Process all jobs, at most `concurrency` at once. Takes the next job only when it can start.

    Raises:
        Exception: The exception of the first job that failed. The others are cancelled.
    """
    waiting = iter(jobs)

    async def take() -> None:
        for job in waiting:  # a shared iterator: each job is taken once
            await work(job)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(take())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _reply(response: httpx.Response) -> Reply:
    try:
        body = parse_json(response.content)
    except ApiError:
        body = response.text
    request_id = response.headers.get("x-request-id") or (body.get("id") if isinstance(body, dict) else None)
    return Reply(response.status_code, str(request_id or ""), body)
