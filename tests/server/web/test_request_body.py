"""Bodies: what is too long or too deep is refused in bounded time and memory, all else arrives as it was sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from server.options.http_options import HttpOptions
from server.web.api_keys import ApiKeys
from server.web.app import build_app
from server.web.request_body import MAX_JSON_DEPTH, BodyGuard, json_depth_exceeds

MAX_BYTES = 1000


def depth_of(value: Any) -> int:
    """The slow way."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


TEXT = st.text(alphabet='[]{}"\\,:ab\n', max_size=6)
JSON = st.recursive(
    TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.integers(0, 8))
def test_depth_is_that_of_the_parsed_value(value: Any, depth: int) -> None:
    assert json_depth_exceeds(json.dumps(value).encode(), depth) == (depth_of(value) > depth)


@pytest.mark.parametrize(
    "body", [b"[" * 10_000_000, b"[" * 5_000_000 + b"]" * 5_000_000, b'{"a":' * 200 + b"1" + b"}" * 200]
)
def test_what_nests_without_end_is_too_deep(body: bytes) -> None:
    assert json_depth_exceeds(body, MAX_JSON_DEPTH)


@pytest.mark.parametrize("body", [b"", b"[]" * 10_000, b'"' + b"[" * 10_000 + b'"', b"]" * 10_000])
def test_what_is_flat_is_not(body: bytes) -> None:
    assert not json_depth_exceeds(body, MAX_JSON_DEPTH)


def ask(content: Any, **headers: str) -> httpx.Response:
    """Send a body to a route that answers its length."""
    router = APIRouter()

    @router.post("/length")
    async def tell_length(http: HttpRequest) -> int:
        return len(await http.body())

    app = build_app([router], version="0", keys=ApiKeys(), http=HttpOptions(max_request_bytes=MAX_BYTES))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            return await client.post("/length", content=content, headers=headers)

    return asyncio.run(send())


async def chunks(*sizes: int) -> Any:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize("sizes", [(MAX_BYTES,), (MAX_BYTES - 1, 1), (0,)])
def test_what_just_fits_arrives(sizes: tuple[int, ...]) -> None:
    assert ask(b"x" * sum(sizes)).json() == sum(sizes)
    assert ask(chunks(*sizes)).json() == sum(sizes)


@pytest.mark.parametrize("sizes", [(MAX_BYTES + 1,), (MAX_BYTES, 1), (600, 600, 10_000)])
def test_what_is_too_long_is_a_413_that_names_the_flag(sizes: tuple[int, ...]) -> None:
    for content in (b"x" * sum(sizes), chunks(*sizes)):
        response = ask(content)
        assert response.status_code == 413
        error = response.json()["error"]
        assert error["type"] == "RequestTooLargeError" and error["code"] == 413
        assert f"longer than {MAX_BYTES} bytes" in error["message"]
        assert "--max-request-bytes" in error["message"]


def test_what_is_too_deep_is_a_400() -> None:
    deep = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
    response = ask(deep, **{"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")
    assert "nests deeper than 100" in response.json()["error"]["message"]
    assert ask(deep, **{"content-type": "text/plain"}).status_code == 200, "brackets in a text nest nothing"


def call(guard: BodyGuard, headers: list[tuple[bytes, bytes]], receive: Callable[[], Any]) -> list[Message]:
    """Run the guard on a request by hand."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(guard(scope, receive, send))
    return sent


def test_a_client_that_waits_for_leave_is_refused_before_it_sends() -> None:
    async def receive() -> Message:
        raise AssertionError("reading asks the client to send")

    async def app(*_: object) -> None:
        raise AssertionError("not reached")

    headers = [(b"content-length", b"1001"), (b"expect", b"100-continue")]
    assert call(BodyGuard(app, MAX_BYTES), headers, receive)[0]["status"] == 413


def test_a_client_that_leaves_halfway_is_told_on_as_gone() -> None:
    messages = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]
    seen: list[str] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(_scope: object, receive: Callable[[], Any], _send: object) -> None:
        seen.append((await receive())["type"])

    call(BodyGuard(app, MAX_BYTES), [], receive)
    assert seen == ["http.disconnect"]


def test_after_the_body_the_client_s_leaving_is_still_heard() -> None:
    messages = [{"type": "http.request", "body": b"all"}, {"type": "http.disconnect"}]
    seen: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(_scope: object, receive: Callable[[], Any], _send: object) -> None:
        seen.extend([await receive(), await receive()])

    call(BodyGuard(app, MAX_BYTES), [], receive)
    assert seen == [
        {"type": "http.request", "body": b"all", "more_body": False},
        {"type": "http.disconnect"},
    ]
