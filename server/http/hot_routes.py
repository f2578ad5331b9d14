"""The short way to the endpoints that most requests are for, around FastAPI.

FastAPI's way to an endpoint (nested routers, exit stacks, dependencies) takes an eighth of a short chat's CPU. What can
be read at once, short JSON that the endpoint's schema takes, is answered here; everything else (another method, no JSON, a
wrong value) goes on to FastAPI with its body, and is answered or refused there. So errors are worded in one place, and
/openapi.json comes from the routes that FastAPI has of the same endpoints.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.bodies import replaying
from server.http.errors import route_path

MOST_BYTES = 1 << 18  # of a body; a longer one would gain little here, and a wrong one is parsed twice


@dataclass(frozen=True, kw_only=True)
class HotEndpoint:
    """A POST of JSON."""

    path: str
    schema: type[BaseModel]
    answer: Callable[[Any, HttpRequest], Awaitable[Response]]  # of a valid body


class HotRoutes:
    """Answers hot endpoints; passes the rest on."""

    def __init__(self, app: ASGIApp, endpoints: Sequence[HotEndpoint]) -> None:
        """Args: app is told the whole body in one message, as is this."""
        self._app = app
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST" and _is_plain_json(scope):
            endpoint = self._endpoints.get(route_path(scope))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = _read(endpoint.schema, message.get("body", b""))
        if body is None:
            await self._app(scope, replaying([message], receive), send)
            return
        scope["route"] = endpoint
        response = await endpoint.answer(body, HttpRequest(scope, receive, send))
        await response(scope, receive, send)


def _read(schema: type[BaseModel], body: bytes) -> BaseModel | None:
    """Read a body; None where it is long, no JSON, or not what the schema says."""
    if len(body) > MOST_BYTES:
        return None
    try:
        return schema.model_validate(json.loads(body))
    except ValueError:
        return None


def _is_plain_json(scope: Scope) -> bool:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return bool(kind.partition(b";")[0].strip() == b"application/json")
