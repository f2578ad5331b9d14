"""The ASGI application: routes together, keys checked, exchanges counted, every error in OpenAI's shape."""

import hmac
import reprlib
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.described import ERROR_RESPONSES
from server.errors import ApiError, bad_request, shorten
from server.generations import ClientGone
from server.metrics import Metrics
from server.openai.streaming import error_response

_GUARDED = "/v1"
_OPEN_POSTS = ("/ping",)
_SEEN_CHARS = 80  # of a wrong value, quoted
_QUOTE = reprlib.Repr()  # of megabytes it looks at the ends only
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SEEN_CHARS


def build_app(
    routers: Sequence[APIRouter], *, version: str, api_keys: tuple[str, ...], metrics: Metrics
) -> ASGIApp:
    """Put the application together.

    Args:
        api_keys: any of them opens /v1 and what changes something; none leaves all open.
    """
    app = FastAPI(title="WideEP", version=version, redoc_url=None, responses=ERROR_RESPONSES)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    guarded: ASGIApp = KeyGuard(app, api_keys) if api_keys else app
    return Meter(guarded, metrics)


class KeyGuard:
    """Lets requests to /v1, and whatever changes something, through if they carry a known key."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if not _is_guarded(scope) or self._opens(_key_of(scope)):
            await self._app(scope, receive, send)
            return
        failure = ApiError(
            401,
            "This server wants an API key: send the header 'Authorization: Bearer KEY' with one it knows.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(failure)(scope, receive, send)

    def _opens(self, key: bytes) -> bool:
        # Every key is compared, in constant time: the time taken says nothing about which was near.
        known = [hmac.compare_digest(key, each) for each in self._keys]
        return any(known)


def _key_of(scope: Scope) -> bytes:
    """Return the key a request carries: OpenAI's clients send a bearer, Anthropic's x-api-key."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return bytes(key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] == "OPTIONS":
        return False
    changes = scope["method"] not in ("GET", "HEAD") and scope["path"] not in _OPEN_POSTS
    return changes or scope["path"].startswith(_GUARDED)


class Meter:
    """Counts and times exchanges by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on and note the outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.perf_counter()
        status = 499  # nothing was sent: the client had left

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            handler = getattr(scope.get("route"), "path", "none")  # the pattern: raw paths are without bound
            self._metrics.note_http(scope["method"], handler, status, time.perf_counter() - begun_s)


async def _on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return error_response(error)


async def _on_invalid(_: HttpRequest, error: Exception) -> Response:
    """A body that is not what the schema says: name the field, the trouble and the value."""
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return error_response(
            bad_request(f"The body is not valid JSON: {reason} (character {first['loc'][-1]}).")
        )
    param = _field_name(first["loc"])
    if first["type"] == "missing":
        return error_response(bad_request(f"{param or 'The body'} is missing.", param))
    if isinstance(first.get("input"), bytes):  # it was not parsed: JSON was not announced
        return error_response(
            bad_request(
                "The body is not announced as JSON: send the header 'Content-Type: application/json'."
            )
        )
    seen = shorten(_QUOTE.repr(first.get("input")), _SEEN_CHARS)
    return error_response(bad_request(f"{param or 'The body'} is wrong: {first['msg']}; got {seen}.", param))


def _field_name(location: Sequence[Any]) -> str | None:
    """Return a dotted path such as messages.0.role, without the "body" that it starts with."""
    return ".".join(str(step) for step in location[1:]) or None


async def _on_http_error(_: HttpRequest, error: Exception) -> Response:
    """A path or method that does not exist, or a body that could not be read."""
    assert isinstance(error, HTTPException), error
    detail = str(error.detail)
    if isinstance(error.__cause__, ValueError):  # FastAPI keeps to itself what it tripped over
        detail = f"The body cannot be read as JSON: {error.__cause__}."
    return error_response(ApiError(error.status_code, detail, headers=error.headers))


async def _on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; nobody reads it


async def _on_bug(_: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, f"The server failed on this request: {type(error).__name__}."))
