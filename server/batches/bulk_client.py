"""Many requests to one service at once: as many as the service can use, tried again where that can help.

What may pass by itself (a full queue, a start or restart, a lost connection) is waited out for about a minute in all,
with the service's Retry-After where it gives one; what is left then is an error of the whole bulk, because the next
request would fare no better. Every other answer, good or bad, is the caller's. Requests are not cut off by time: one
may wait in the service's queue for as long as the others take.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from server.errors import ApiError
from server.http.json_parts import encode
from server.http.json_text import PIECE_BYTES, parse_json

CONNECT_TIMEOUT_S = 30.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before each new try
LONGEST_PAUSE_S = 60.0  # of what Retry-After may ask for
_PASSING = (429, 503)  # too many requests, not ready

Job = TypeVar("Job")


class ServiceLostError(RuntimeError):
    """The service cannot be reached or takes nothing any more; the message says which and what to do."""


class Reply(NamedTuple):
    """A service's answer, good or bad."""

    status: int
    request_id: str
    body: Any  # JSON

    @property
    def is_good(self) -> bool:
        """Whether it is an answer and no refusal."""
        return self.status == 200

    @property
    def complaint(self) -> str:
        """The service's own words for a refusal."""
        try:
            return str(self.body["error"]["message"])
        except (LookupError, TypeError):
            return str(self.body)[:200]


class Trouble(NamedTuple):
    """Why a try failed, in a way that may pass."""

    reason: str
    asked_pause_s: float = 0.0  # by the service's Retry-After


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
        """Connect when asked first.

        Args:
            url: the service's, with or without http:// and /v1.
            concurrency: the most connections.
            why_gone: says why no further try can help, None while one can.
            sleep, transport: replaced in tests.

        Raises:
            ServiceLostError: it is not a URL.
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
            trust_env=False,  # no proxy stands between a batch and its service
        )

    async def get(self, path: str) -> Reply:
        """GET, once: it tells early whether there is a service.

        Raises:
            ServiceLostError: nobody answers.
        """
        answer = await self._try("GET", path, None)
        if isinstance(answer, Trouble):
            raise ServiceLostError(answer.reason)
        return answer

    async def post(self, path: str, body: Any) -> Reply:
        """POST a JSON body, again and again while the trouble is one that passes.

        Raises:
            ServiceLostError: the last try failed as well.
        """
        content = await asyncio.to_thread(encode, body)  # ASCII: half surrogates travel, too
        for pause_s in PAUSES_S:
            answer = await self._try("POST", path, content)
            if not isinstance(answer, Trouble):
                return answer
            if gone := self._why_gone():
                raise ServiceLostError(gone)
            await self._sleep(min(max(pause_s, answer.asked_pause_s), LONGEST_PAUSE_S))
        answer = await self._try("POST", path, content)
        if isinstance(answer, Trouble):
            raise ServiceLostError(f"{answer.reason}; gave up after {len(PAUSES_S) + 1} tries")
        return answer

    async def _try(self, method: str, path: str, content: bytes | None) -> Reply | Trouble:
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            response = await self._http.request(method, path, content=content, headers=headers)
        except httpx.ConnectError as error:
            return Trouble(f"no service answers at {self.url} ({_words(error)})")
        except httpx.TransportError as error:
            return Trouble(f"lost the connection to {self.url} ({_words(error)})")
        is_long = len(response.content) > PIECE_BYTES  # log-probabilities may be megabytes
        reply = await asyncio.to_thread(_reply, response) if is_long else _reply(response)
        if reply.status not in _PASSING:
            return reply
        asked = response.headers.get("retry-after", "")  # or a date, which we do not wait for
        return Trouble(
            f"{self.url} takes no requests ({reply.status}): {reply.complaint}",
            float(asked) if asked.isdecimal() else 0.0,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _root(url: str) -> str:
    """Return a service's root, whether the user wrote it with or without http:// and /v1."""
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
    """Work on every job, on at most `concurrency` at once, taking the next only when there is room for it.

    Raises:
        Exception: what the first failing job raised; the others are cancelled.
    """
    waiting = iter(jobs)

    async def take() -> None:
        for job in waiting:  # one iterator for all: each job is taken once
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
