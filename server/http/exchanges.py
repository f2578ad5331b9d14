"""One HTTP exchange, from a request's first byte to its answer's last: its id, what it led to, and who is told.

The exchange travels in a context variable, so that whoever accepts the request adds what it asked of the ranks
(`requests`) without every endpoint handing it through; a log record of any module carries its id (`logs`). The
variable is never reset: the server gives every exchange a task, and so a context, of its own, and what it logs after
the application ended still belongs to the exchange.
"""

import contextlib
import functools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.front.errors import bad_request, shorten
from server.front.generations import NOBODY, Answer, Asker

CLIENT_GONE = 499  # nginx's number for a client that left before it was sent anything
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
SESSION_HEADER = "x-session-id"
_SESSION = re.compile(rb"[\x20-\x7e]{1,256}")
_PATH_CHARS = 200  # of a path, in logs
_KEY_ID_CHARS = 16  # 64 bits of a digest: enough to tell keys apart, and no way back to one
_SHOWN_CHARS = 60  # of a session that is none
_HOST = re.compile(r"[0-9A-Za-z.:%_-]{1,64}")  # also as a trusted proxy wrote it
_current: ContextVar["HttpExchange | None"] = ContextVar("exchange", default=None)
_line: ContextVar["BatchLineOf | None"] = ContextVar("line", default=None)


class BatchLineOf(NamedTuple):
    """For whom a line of a batch is answered, inside of the service."""

    owner: str
    most_choices: int  # at ranks at once


@dataclass(slots=True, kw_only=True)
class HttpExchange:
    """What is known about an exchange when it ends."""

    request_id: str  # the client's X-Request-Id, or ours
    method: str
    path: str  # as it came: percent-encoded, without the query, which may hold secrets
    client: str  # host:port
    headers: dict[bytes, bytes]
    begun_s: float  # time.perf_counter()
    begun_ns: int  # time.time_ns()
    handler: str = "none"  # the route's pattern: raw paths are without bound
    status: int = CLIENT_GONE
    duration_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)  # what ranks were asked
    owner: str = (
        ""  # a digest of the API key that opened the service to it (`guards`); empty if none is needed
    )
    line: BatchLineOf | None = None  # None: it is a client's request
    seed: int | None = None  # of a request that brings none but may be made again (`idempotency`)

    @property
    def key_id(self) -> str:
        """A short form of the owner, for ranks and logs."""
        return self.owner[:_KEY_ID_CHARS]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens given to ranks; a prompt with n choices counts n times."""
        return sum(
            len(choice.ask.request.prompt_ids) for answer in self.answers for choice in answer.generations
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens that ranks gave back."""
        return sum(choice.num_tokens for answer in self.answers for choice in answer.generations)

    @property
    def failure(self) -> str:
        """Why generating failed, empty if it did not; a stream may fail after its status 200."""
        failures = (choice.failure for answer in self.answers for choice in answer.generations)
        return next((failure.message for failure in failures if failure is not None), "")


def note_answer(answer: Answer) -> None:
    """Add what was asked of ranks to the exchange that the running task answers."""
    exchange = _current.get()
    if exchange is not None:
        exchange.answers.append(answer)


@contextlib.contextmanager
def answering_line(owner: str, most_choices: int) -> Iterator[None]:
    """Let the exchanges that the running task opens be those of a batch's line."""
    token = _line.set(BatchLineOf(owner, most_choices))
    try:
        yield
    finally:
        _line.reset(token)


def owner_of_exchange() -> str:
    """Return whose the request is that the running task answers; empty if no key is needed."""
    exchange = _current.get()
    return "" if exchange is None else exchange.owner


def current_exchange() -> HttpExchange | None:
    """Return the exchange that the running task answers, if it answers one."""
    return _current.get()


def asker_of_exchange() -> Asker:
    """Return who sent the request that the running task answers.

    Raises:
        ApiError: 400, its session cannot be one.
    """
    exchange = current_exchange()
    if exchange is None:
        return NOBODY
    if exchange.line is not None:
        return Asker(most_choices=exchange.line.most_choices)
    session = exchange.headers.get(SESSION_HEADER.encode())
    if session is None:
        return Asker(exchange.key_id)
    if not _SESSION.fullmatch(session):
        seen = shorten(repr(session.decode("latin-1")), _SHOWN_CHARS)
        raise bad_request(
            f"{SESSION_HEADER} is {seen} ({len(session)} bytes); give 1 to 256 printable ASCII characters.",
            SESSION_HEADER,
        )
    return Asker(
        exchange.key_id, f"{exchange.key_id}/{session.decode()}"
    )  # no key meets another one's sessions


def seeds_from(seed: int | None) -> Callable[[], int]:
    """Return what draws seeds of 64 bits: the same ones in the same order for the same `seed`, others for None."""
    return (
        functools.partial(secrets.randbits, 64)
        if seed is None
        else functools.partial(Random(seed).getrandbits, 64)
    )


def draw_seed(draw: Callable[[], int]) -> int:
    """Return a seed for a request that brings none; where it may be asked for again, it is the same each time."""
    exchange = current_exchange()
    return draw() if exchange is None or exchange.seed is None else exchange.seed


class ExchangeWatch:
    """The outermost layer: opens an exchange, gives its answer the id, and tells the observers when it has ended."""

    def __init__(
        self, app: ASGIApp, observers: Sequence[Callable[[HttpExchange], None]], *, root_path: str = ""
    ) -> None:
        """Args: root_path is where a proxy shows the application, empty or such as "/llm"."""
        self._app, self._observers, self._root_path = app, observers, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on and note the outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._root_path
        exchange = _open(scope)
        _current.set(exchange)
        header = (b"x-request-id", exchange.request_id.encode())

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            exchange.handler = getattr(scope.get("route"), "path", "none")
            exchange.duration_s = time.perf_counter() - exchange.begun_s
            for observer in self._observers:
                observer(exchange)


def _open(scope: Scope) -> HttpExchange:
    headers, line = dict(scope["headers"]), _line.get()
    given = headers.get(b"x-request-id", b"")
    host, port = scope.get("client") or ("unknown", 0)
    return HttpExchange(
        request_id=given.decode("ascii") if _ID.fullmatch(given) else os.urandom(16).hex(),
        method=scope["method"],
        path=scope.get("raw_path", b"").decode("latin-1")[:_PATH_CHARS],
        client=f"{host if _HOST.fullmatch(host) else 'unknown'}:{port}",
        headers=headers,
        begun_s=time.perf_counter(),
        begun_ns=time.time_ns(),
        owner="" if line is None else line.owner,
        line=line,
    )
