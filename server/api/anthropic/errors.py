"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}}.

The names are those of https://docs.anthropic.com/en/api/errors; clients map errors by status.
"""

from typing import Any

from server.errors import ApiError

PATH = "/v1/messages"  # below it errors have this shape
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(failure: ApiError) -> dict[str, Any]:
    """Return the object that clients parse."""
    other = "api_error" if failure.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(failure.status, other)
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
