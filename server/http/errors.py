"""Errors as HTTP responses: every one has the shape that the asked endpoint's clients parse.

Errors are raised, and answered, in many places (validation, keys, limits, routes, streams before their first byte);
the path alone says whose client is waiting, so the shape is chosen here, when the response is sent.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.front.generations import ClientGone
from server.http.routes import refusal

ANTHROPIC_PATH = "/v1/messages"  # below it errors have Anthropic's shape
OLLAMA_PATH = "/api/"  # likewise Ollama's


class ErrorResponse(Response):
    """An error as a response of its own."""

    def __init__(self, failure: ApiError) -> None:
        super().__init__(status_code=failure.status)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, worded for the path; plain ASCII, because it may quote half a surrogate pair."""
        failure = self._failure
        path = route_path(scope)
        if path.startswith(ANTHROPIC_PATH):
            body = failure.anthropic_body()
        else:
            body = failure.ollama_body() if path.startswith(OLLAMA_PATH) else failure.body()
        response = Response(
            json.dumps(body), failure.status, headers=failure.headers, media_type="application/json"
        )
        await response(scope, receive, send)


def route_path(scope: Scope) -> str:
    """Return the path without the root path that a proxy may or may not have taken off.

    Starlette's router does the same: a guard that looked at the whole path would be walked around.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return ErrorResponse(error)


async def _on_invalid(_: HttpRequest, error: Exception) -> Response:
    """A parameter of a path or a query that is not what the endpoint says."""
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    return ErrorResponse(refusal(first, first["loc"][1:]))  # without "query"


async def _on_http_error(_: HttpRequest, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException), error
    return ErrorResponse(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; nobody reads it


async def _on_bug(_: HttpRequest, error: Exception) -> Response:
    return ErrorResponse(ApiError(500, f"The server failed on this request: {type(error).__name__}."))


ERROR_HANDLERS: Mapping[Any, Any] = {
    ApiError: _on_api_error,
    RequestValidationError: _on_invalid,
    HTTPException: _on_http_error,
    ClientGone: _on_client_gone,
    Exception: _on_bug,
}
