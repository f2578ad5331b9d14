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
from server.http.json_parts import encode
from server.http.json_text import PIECE_BYTES, parse_json

CONNECT_TIMEOUT_S = 30.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before each retry
LONGEST_PAUSE_S = 60.0  # limit for Retry-After
_PASSING = (429, 503)  # temporary: too many requests, not ready

Job = TypeVar("Job")


class ServiceLostError(RuntimeError):
    """The service is unreachable or refuses requests; the message has the reason and what to do."""


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
        try:
            return str(self.body["error"]["message"])
        except (LookupError, TypeError):
            return str(self.body)[:200]


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
            url: URL of the service, with or without http:// and /v1.
            concurrency: Maximum number of connections.
            why_gone: Returns why retries are useless, or None while they may help.
            sleep, transport: Replaced in tests.

        Raises:
            ServiceLostError: The URL is invalid.
        """
        self.url = _root(url)
        self.concurrency = concurrency
        self._why_gone = why_gone
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
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
        content = await asyncio.to_thread(encode, body)  # ASCII, so that lone surrogates can be sent
        for pause_s in PAUSES_S:
            answer = await self._try("POST", path, content)
            if not isinstance(answer, Trouble):
                return answer
            if gone := self._why_gone():
                raise ServiceLostError(gone)
            await self._sleep(min(max(pause_s, answer.asked_pause_s), LONGEST_PAUSE_S))
        answer = await self._try("POST", path, content)
        if isinstance(answer, Trouble):
            raise ServiceLostError(f"{answer.reason}; stopped after {len(PAUSES_S) + 1} attempts")
        return answer

    async def _try(self, method: str, path: str, content: bytes | None) -> Reply | Trouble:
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            response = await self._http.request(method, path, content=content, headers=headers)
        except httpx.ConnectError as error:
            return Trouble(f"no service answers at {self.url} ({_words(error)})")
        except httpx.TransportError as error:
            return Trouble(f"lost the connection to {self.url} ({_words(error)})")
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


def _root(url: str) -> str:
    """Return the root of a service's URL, which may lack http:// or end with /v1."""
    root = url if "://" in url else f"http://{url}"
    root = root.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(root)
        is_service = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        is_service = False
    if not is_service:
        raise ServiceLostError(f"{url!r} is not a URL of a service; try http://127.0.0.1:8000")
    return root


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


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
