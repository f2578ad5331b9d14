"""What goes wrong with a request, in OpenAI's shape, {"error": {message, type, param, code}}, in Anthropic's and in Ollama's.

Clients map errors by status; `type` and `code` are vLLM's, and Anthropic's types those of
https://docs.anthropic.com/en/api/errors. An `ApiError` is raised where the trouble is found and
turned into a response in one place (`app`), or into an event when a stream has begun.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
MAX_MESSAGE_CHARS = 2000  # messages quote what was sent, and that may be megabytes
MAX_PARAM_CHARS = 200  # a path to a field has the client's own keys in it


class ApiError(Exception):
    """A request that is not answered as it asked."""

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


def shorten(text: str, most_chars: int) -> str:
    """Return a text with its middle left out where it is longer; the ends say what was wrong, and what to do."""
    if len(text) <= most_chars:
        return text
    half = (most_chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400: the client can mend it; `param` is the field's name."""
    return ApiError(400, message, param=param)


@contextlib.contextmanager
def named_by(own_name: Callable[[str], str]) -> Iterator[None]:
    """Let errors about a request that another API's became name what the client sent.

    Args:
        own_name: a field of the request -> of the client's.
    """
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        name = own_name(error.param)
        is_first = error.message.startswith(error.param)
        message = name + error.message.removeprefix(error.param) if is_first else error.message
        raise ApiError(error.status, message, param=name, headers=error.headers) from error


def trouble_in(found: Mapping[str, Any]) -> str:
    """Word what pydantic found wrong with a value; its kind, in brackets, is what vLLM's clients look for."""
    return f"{found['msg']} ({found['type']})"


def not_served(model: str, served: tuple[str, ...]) -> ApiError:
    """A 404 for a model of another name."""
    names = ", ".join(repr(name) for name in served)
    return ApiError(404, f"The model {model!r} does not exist. This server has: {names}.", param="model")


def too_long(
    num_prompt_tokens: int, max_model_len: int, max_tokens: int | None, param: str, *, is_least: bool = False
) -> ApiError:
    """A 400 in the words that clients recognise as a context-window error; is_least: nobody counted further."""
    least = "at least " if is_least else ""
    asked = "" if max_tokens is None else f" and {max_tokens} output tokens"
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{least}{num_prompt_tokens} prompt tokens{asked}. Shorten the prompt or ask for fewer output tokens.",
        param,
    )


def not_ready(reason: str) -> ApiError:
    """A 503 that clients retry."""
    return ApiError(503, f"The service is not ready: {reason}.", headers={"Retry-After": "1"})


def draining() -> ApiError:
    """A 503 for what comes after the wish to stop; another service may take it."""
    return ApiError(
        503, "The service is shutting down and takes no new requests.", headers={"Retry-After": "5"}
    )


def failed(reason: str) -> ApiError:
    """A 500: a rank could not serve the request."""
    return ApiError(500, f"Internal server error: {reason.rstrip('.') or 'the request failed on its rank'}.")


def left_unread() -> ApiError:
    """A 408: the client does not read its stream, which grows in memory."""
    return ApiError(
        408,
        "The stream's log-probabilities were not read: this server keeps only a few of them for a slow client.",
    )


def timed_out(timeout_s: float) -> ApiError:
    """A 504: the request's deadline passed."""
    return ApiError(504, f"The request did not end within {timeout_s:g} s (--request-timeout).")
