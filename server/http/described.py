"""What /openapi.json says beyond what FastAPI finds out: the errors that every route may answer, and streams."""

from typing import Any

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
