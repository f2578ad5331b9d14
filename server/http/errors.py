"""Errors as HTTP responses, in the shape that clients of the endpoint parse.

Errors are raised and answered in many places (validation, keys, limits, routes, streams before their first byte). The path
alone determines the client's API, so the shape is chosen here, when the response is sent.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.front.errors import ApiError
from server.front.generations import ClientGone
from server.http.json_writer import json_response
from server.http.routes import refusal

ANTHROPIC_PATH = "/v1/messages"  # errors under it have Anthropic's shape
OLLAMA_PATH = "/api/"  # errors under it have Ollama's shape
_SHOWN_CHARACTERS = 200  # of a path in a message
_DEFAULT_DETAIL = {404: "Not Found", 405: "Method Not Allowed"}  # Starlette's texts
_GENERATES = "serves text generation only"
_NO_TENSORS = (
    "loads LoRA adapters from directories only; write the adapter to disk and use /load_lora_adapter"
)
# Unsupported endpoints of OpenAI, vLLM and SGLang, by path prefix.
_NOT_SERVED = {
    **dict.fromkeys(
        (
            "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/score", "/v1/score", "/pooling", "/classify",
            "/v1/audio", "/v1/images", "/v1/videos", "/v1/moderations", "/v1/realtime", "/v1/fine_tuning", "/encode",
        ),
        _GENERATES,
    ),
    "/load_lora_adapter_from_tensors": _NO_TENSORS,
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores"), "has no assistants; use /v1/responses"),
}  # fmt: skip


class ErrorResponse(Response):
    """An error as a response."""

    def __init__(self, failure: ApiError) -> None:
        super().__init__(status_code=failure.status)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in the shape for the path."""
        failure = self._failure
        path = route_path(scope)
        if path.startswith(ANTHROPIC_PATH):
            body = failure.anthropic_body()
        else:
            body = failure.ollama_body() if path.startswith(OLLAMA_PATH) else failure.body()
        await json_response(body, failure.status, failure.headers)(scope, receive, send)


def route_path(scope: Scope) -> str:
    """Return the path without the root path, which a proxy may or may not have removed.

    Starlette's router does the same. A guard that looked at the whole path could be bypassed.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return ErrorResponse(error)


async def _on_invalid(_: HttpRequest, error: Exception) -> Response:
    """Answer a path or query parameter that violates the endpoint's schema."""
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    return ErrorResponse(refusal(first, first["loc"][1:]))  # without "query"


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException), error
    path, detail = route_path(request.scope), str(error.detail)
    if error.status_code == 404 and detail == _DEFAULT_DETAIL[404]:
        detail = _why_not_found(path, [str(getattr(route, "path", "")) for route in request.app.routes])
    elif error.status_code == 405 and detail == _DEFAULT_DETAIL[405]:
        allowed = (error.headers or {}).get("Allow", "other methods")
        detail = f"{path[:_SHOWN_CHARACTERS]} does not support {request.method}; it supports {allowed}."
    return ErrorResponse(ApiError(error.status_code, detail, headers=error.headers))


def _why_not_found(path: str, known: Sequence[str]) -> str:
    """Explain why a path does not exist, or suggest a similar one."""
    shown = path[:_SHOWN_CHARACTERS]
    for beginning, what in _NOT_SERVED.items():
        if path.startswith(beginning):
            return f"{shown} is not available: WideEP {what}."
    if len(path) > _SHOWN_CHARACTERS:
        return f"There is no endpoint {shown}...; GET /docs lists the endpoints."
    alike = (
        [f"/v1{path}"] if f"/v1{path}" in known else difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    )
    question = f" Did you mean {alike[0]}?" if alike else ""
    return f"There is no endpoint {shown}.{question} GET /docs lists the endpoints."


async def _on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; the client is gone


async def _on_bug(_: HttpRequest, error: Exception) -> Response:
    return ErrorResponse(ApiError(500, f"The server failed on this request: {type(error).__name__}."))


ERROR_HANDLERS: Mapping[Any, Any] = {
    ApiError: _on_api_error,
    RequestValidationError: _on_invalid,
    HTTPException: _on_http_error,
    ClientGone: _on_client_gone,
    Exception: _on_bug,
}
