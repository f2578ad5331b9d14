"""The ASGI application: the layers around the routes, and every error in OpenAI's shape.

From outside in: the exchange is opened and, at its end, told to observers; CORS; keys; bodies; hot routes; routes.
"""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import ApiError, bad_request, shorten, trouble_in
from server.front.generations import ClientGone
from server.http.bodies import BodyGuard
from server.http.errors import ERROR_RESPONSES, ErrorResponse
from server.http.exchanges import Exchange, ExchangeWatch
from server.http.guards import ApiKeys, KeyGuard
from server.http.hot_routes import HotEndpoint, HotRoutes
from server.options.table import HttpOptions

_SEEN_CHARS = 80  # of a wrong value, quoted
_QUOTE = reprlib.Repr()  # of megabytes it looks at the ends only
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SEEN_CHARS


def build_app(
    routers: Sequence[APIRouter],
    *,
    version: str,
    keys: ApiKeys,
    http: HttpOptions | None = None,
    hot: Sequence[HotEndpoint] = (),
    observers: Sequence[Callable[[Exchange], None]] = (),
) -> ASGIApp:
    """Put the application together.

    Args:
        keys: any of them opens /v1 and what changes something; none leaves all open.
        http: None is the defaults.
        hot: endpoints of the routers that are asked most.
        observers: told of every exchange at its end.
    """
    http = http or HttpOptions()
    app = FastAPI(title="WideEP", version=version, redoc_url=None, responses=ERROR_RESPONSES)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    layered: ASGIApp = _answering_errors(HotRoutes(app, hot)) if hot else app
    layered = BodyGuard(layered, http.max_request_bytes)
    if keys.are_needed:
        layered = KeyGuard(layered, keys)
    if http.allowed_origins:
        layered = CORSMiddleware(
            layered,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return ExchangeWatch(layered, observers, root_path=http.root_path)


def _answering_errors(app: ASGIApp) -> ASGIApp:
    """Return an application that answers, as FastAPI's does, what a valid request's endpoint raises."""
    handled = ExceptionMiddleware(app, handlers={ApiError: _on_api_error, ClientGone: _on_client_gone})
    return ServerErrorMiddleware(handled, handler=_on_bug)


async def _on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return ErrorResponse(error)


async def _on_invalid(_: HttpRequest, error: Exception) -> Response:
    """A body that is not what the schema says: name the field, the trouble and the value."""
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ErrorResponse(
            bad_request(f"The body is not valid JSON: {reason} (character {first['loc'][-1]}).")
        )
    param = _field_name(first["loc"])
    if first["type"] == "missing":
        return ErrorResponse(bad_request(f"{param or 'The body'} is missing.", param))
    if isinstance(first.get("input"), bytes):  # it was not parsed: JSON was not announced
        return ErrorResponse(
            bad_request(
                "The body is not announced as JSON: send the header 'Content-Type: application/json'."
            )
        )
    seen = shorten(_QUOTE.repr(first.get("input")), _SEEN_CHARS)
    return ErrorResponse(
        bad_request(f"{param or 'The body'} is wrong: {trouble_in(first)}; got {seen}.", param)
    )


def _field_name(location: Sequence[Any]) -> str | None:
    """Return a dotted path such as messages.0.role, without the "body" that it starts with."""
    return ".".join(str(step) for step in location[1:]) or None


async def _on_http_error(_: HttpRequest, error: Exception) -> Response:
    """A path or method that does not exist, or a body that could not be read."""
    assert isinstance(error, HTTPException), error
    detail = str(error.detail)
    if isinstance(error.__cause__, ValueError):  # FastAPI keeps to itself what it tripped over
        detail = f"The body cannot be read as JSON: {error.__cause__}."
    return ErrorResponse(ApiError(error.status_code, detail, headers=error.headers))


async def _on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; nobody reads it


async def _on_bug(_: HttpRequest, error: Exception) -> Response:
    return ErrorResponse(ApiError(500, f"The server failed on this request: {type(error).__name__}."))
