"""An `ApiError` as an HTTP response, in the shape that the asked endpoint's clients parse.

Errors are raised, and answered, in many places (validation, keys, limits, routes, streams before their first byte);
the path alone says whose client is waiting, so the shape is chosen here, when the response is sent.
"""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"  # below it errors have Anthropic's shape


class ErrorResponse(Response):
    """An error as a response of its own."""

    def __init__(self, failure: ApiError) -> None:
        super().__init__(status_code=failure.status)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, worded for the path; plain ASCII, because it may quote half a surrogate pair."""
        failure = self._failure
        body = failure.anthropic_body() if route_path(scope).startswith(ANTHROPIC_PATH) else failure.body()
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


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            },
        }
    },
}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": _error("The request cannot be answered as it is; the error names the field and the value."),
    "5XX": _error("The service cannot answer now: 503 is to be tried again, 504 is the request's time-out."),
}
STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream=true as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}},
    }
}
