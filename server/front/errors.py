"""Errors of requests in OpenAI's format, {"error": {message, type, param, code}}, in Anthropic's and in Ollama's.

Clients map errors by status. `type` and `code` are vLLM's; Anthropic's types are those of
https://docs.anthropic.com/en/api/errors. An `ApiError` is raised at the cause and converted in one place (`app`) to a
response or, if a stream has begun, to an event.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
MAX_MESSAGE_CHARS = 2000  # messages quote the request, which may have megabytes
MAX_PARAM_CHARS = 200  # a path to a field contains the client's own keys


class ApiError(Exception):
    """A request that fails or is refused."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.message = shorten(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else shorten(param, MAX_PARAM_CHARS)
        super().__init__(self.message)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error object that OpenAI's clients parse."""
        kind = _TYPES.get(self.status, HTTPStatus(self.status).phrase.replace(" ", "") + "Error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def ollama_body(self) -> dict[str, Any]:
        """Return the error object that Ollama's clients parse."""
        return {"error": self.message}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error object that Anthropic's clients parse."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class FrontCutOffError(ApiError):
    """A request of a front that does not hear of the leading one any more. Others may continue a background response."""


def shorten(text: str, most_chars: int) -> str:
    """Return a text without its middle if it is too long; the beginning has the cause, the end the advice."""
    if len(text) <= most_chars:
        return text
    half = (most_chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return a 400 for an error that the client can fix; `param` is the field's name."""
    return ApiError(400, message, param=param)


@contextlib.contextmanager
def named_by(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field in errors about a request that was converted from another API's, for the client.

    Args:
        names: The client's names by pattern: of a field of the converted request, or of its beginning.
    """
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        pattern = next((each for each in names if re.match(each, param)), None)
        if pattern is None:
            raise
        name = re.sub(pattern, names[pattern], param, count=1)
        is_first = error.message.startswith(param)
        message = name + error.message.removeprefix(param) if is_first else error.message
        raise ApiError(error.status, message, param=name, headers=error.headers) from error


def trouble_in(found: Mapping[str, Any]) -> str:
    """Return a text for a pydantic error. It ends in the error's type in brackets, which vLLM's clients look for."""
    return f"{found['msg']} ({found['type']})"


def not_served(model: str, served: tuple[str, ...]) -> ApiError:
    """Return a 404 for an unknown model name."""
    names = ", ".join(repr(name) for name in served)
    return ApiError(404, f"The model {model!r} does not exist. This server has: {names}.", param="model")


def too_long(
    num_prompt_tokens: int, max_model_len: int, max_tokens: int | None, param: str, *, is_least: bool = False
) -> ApiError:
    """Return a 400 that clients recognise as a context-window error. With `is_least`, counting stopped at this number."""
    least = "at least " if is_least else ""
    asked = "" if max_tokens is None else f" and {max_tokens} output tokens"
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{least}{num_prompt_tokens} prompt tokens{asked}. Shorten the prompt or ask for fewer output tokens.",
        param,
    )


def not_ready(reason: str) -> ApiError:
    """Return a 503 that clients retry."""
    return ApiError(503, f"The service is not ready: {reason}.", headers={"Retry-After": "1"})


def draining() -> ApiError:
    """Return a 503 for requests during shutdown, which another service may accept."""
    return ApiError(
        503, "The service is shutting down and accepts no new requests.", headers={"Retry-After": "5"}
    )


def failed(reason: str) -> ApiError:
    """Return a 500 for a request that its rank could not serve."""
    return ApiError(500, f"Internal server error: {reason.rstrip('.') or 'the request failed on its rank'}.")


def left_unread(num_tokens: int, unread_s: float) -> ApiError:
    """Return a 408 for a client that does not read its stream, which accumulates in memory."""
    return ApiError(
        408,
        f"The client left more than {num_tokens} tokens with log-probabilities unread for {unread_s:g} s. Read the stream "
        "faster, or request fewer log-probabilities.",
    )


def timed_out(timeout_s: float) -> ApiError:
    """Return a 504 for a request that exceeded its deadline."""
    return ApiError(504, f"The request did not finish within {timeout_s:g} s (--request-timeout).")
