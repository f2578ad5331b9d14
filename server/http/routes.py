"""Routes: how a request becomes a call of an endpoint, and how /openapi.json describes it.

An endpoint is declared on an `APIRouter` and described by FastAPI. If it takes only `body` (JSON, checked by pydantic) and
the HTTP request, as most of ours do, this module calls it directly. FastAPI's own way to an endpoint (exit stacks,
dependencies, telemetry) takes 100 us of CPU more, a tenth of a short chat's. It remains for endpoints with
parameters in the path or the query.
"""

import inspect
import logging
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.front.errors import ApiError, bad_request, shorten, trouble_in
from server.front.generations import ClientGone
from server.http.json_text import PARSED, parse_json
from server.http.json_writer import json_response

_Body = TypeVar("_Body")
_LOG = logging.getLogger("wideep.fields")
_MOST_UNKNOWN = 100  # names that are logged per endpoint, because clients choose them
_SEEN_CHARS = 80  # of a wrong value, quoted
_QUOTE = reprlib.Repr()  # which reads only the ends of long values
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SEEN_CHARS
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


_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _error_responses(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    descriptions = {
        "4XX": "The request is invalid or refused. The error names the field and the value.",
        "5XX": "The service cannot answer now. Retry after a 503; 504 is the timeout of the request.",
    }
    content = {"application/json": {"schema": schema}}
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream=true as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def new_router() -> APIRouter:
    """Return a router for JSON endpoints."""
    return APIRouter(route_class=ShortRoute, responses=_error_responses(_ERROR))


def new_ollama_router() -> APIRouter:
    """Return a router for Ollama's endpoints, which report errors as text and accept JSON of any Content-Type."""
    return APIRouter(route_class=_AnyTypeRoute, responses=_error_responses(_OLLAMA_ERROR))


class ShortRoute(APIRoute):
    """A route that calls its endpoint directly if possible. A body must come whole, in one message."""

    wants_json_type = True  # a body needs a JSON Content-Type

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        parameters = inspect.signature(endpoint, eval_str=True).parameters
        self._call = endpoint
        self._unknown: set[str] = set()  # the first _SEEN_CHARS characters of fields that were logged
        self._body = parameters.get("body")
        self._request = next(
            (name for name, each in parameters.items() if each.annotation is HttpRequest), None
        )
        if self._body is not None:
            self._schema: TypeAdapter[Any] = TypeAdapter(self._body.annotation)
        is_short = not parameters.keys() - {"body", self._request}
        self.app = self._answer if is_short else AsyncExitStackMiddleware(self.app)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        arguments: dict[str, Any] = {}
        if self._body is not None:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            arguments["body"] = self._read(message, scope)
            del message  # an answer takes long, so free the request's text
        if self._request is not None:
            arguments[self._request] = HttpRequest(scope, receive, send)
        answer = await self._call(**arguments)
        response = answer if isinstance(answer, Response) else json_response(answer)
        await response(scope, receive, send)

    def _read(self, message: Message, scope: Scope) -> Any:
        """Return a body that was validated by the endpoint's schema.

        Raises:
            ApiError: It is invalid.
        """
        assert self._body is not None, "the endpoint has no body"
        content: bytes = message.get("body", b"")
        if content and self.wants_json_type:
            _check_type(scope)
        # A long body is already parsed.
        value = message[PARSED] if PARSED in message else parse_json(content) if content else None
        if value is None:
            if self._body.default is inspect.Parameter.empty:
                raise bad_request("The body is missing.")
            return self._body.default
        body = validated(self._schema.validate_python, value)
        self._note_unknown(getattr(body, "model_extra", None) or ())
        return body

    def _note_unknown(self, names: Iterable[str]) -> None:
        """Log each unknown field once: a misspelled `temprature` is ignored, and the client does not notice."""
        for name in names:
            begin = name[:_SEEN_CHARS]
            if len(self._unknown) < _MOST_UNKNOWN and begin not in self._unknown:
                self._unknown.add(begin)
                _LOG.info("%s ignores the unknown field %s", self.path, _QUOTE.repr(name))


class _AnyTypeRoute(ShortRoute):
    """A route for JSON sent with the Content-Type of a form, as by curl -d and Ollama's own examples.

    Pages of other origins can send that without a preflight. Their origin keeps them out (`guards`).
    """

    wants_json_type = False


def _check_type(scope: Scope) -> None:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    main, _, sub = kind.partition(b";")[0].strip().lower().partition(b"/")
    if main != b"application" or not (sub == b"json" or sub.endswith(b"+json")):
        raise bad_request(
            "The body is not announced as JSON. Send the header 'Content-Type: application/json'."
        )


def validated(validate: Callable[[Any], _Body], value: Any) -> _Body:
    """Validate a body.

    Args:
        validate: `model_validate` of the body's class, or another function of pydantic.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return validate(value)
    except ValidationError as error:
        found = error.errors()[0]
        raise refusal(found, found["loc"]) from error


def refusal(found: Mapping[str, Any], location: Sequence[Any]) -> ApiError:
    """Return the error for pydantic's finding: the field as a dotted path such as messages.0.role, the reason, the value."""
    param = ".".join(str(step) for step in location) or None
    if found["type"] == "missing":
        return bad_request(f"{param or 'The body'} is missing.", param)
    seen = shorten(_QUOTE.repr(found.get("input")), _SEEN_CHARS)
    return bad_request(f"{param or 'The body'} is invalid: {trouble_in(found)}; got {seen}.", param)
