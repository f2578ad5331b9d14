"""An `ApiError` as an HTTP response, in the shape that the asked endpoint's clients parse.

Errors are raised, and answered, in many places (validation, keys, limits, routes, streams before their first byte);
the path alone says whose client is waiting, so the shape is chosen here, when the response is sent.
"""

import json

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.http.route_path import route_path

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
