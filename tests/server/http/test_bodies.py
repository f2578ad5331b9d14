"""Bodies: what is too long or too deep is refused in bounded time and memory, all else arrives as it was sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from server.http.app import build_app
from server.http.bodies import (
    LEAST_BYTES_PER_S,
    MAX_JSON_DEPTH,
    MAX_JSON_NODES,
    MAX_JSON_VALUES,
    BodyGuard,
    json_shape,
)
from server.http.guards import ApiKeys
from server.http.routes import new_router
from server.options.table import HttpOptions
from tests.support.requests.asgi import ask

MAX_BYTES = 1000


def length_of(
    content: Any, *, path: str = "/length", max_bytes: int = MAX_BYTES, **headers: str
) -> httpx.Response:
    """Send a body to a route that answers its length."""
    router = new_router()

    @router.post(path)
    async def tell_length(http: HttpRequest) -> int:
        return len(await http.body())

    app = build_app([router], version="0", keys=ApiKeys(), http=HttpOptions(max_request_bytes=max_bytes))
    return ask(app, "POST", path, content=content, headers=headers)


async def chunks(*sizes: int) -> Any:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize("sizes", [(MAX_BYTES,), (MAX_BYTES - 1, 1), (0,)])
def test_what_just_fits_arrives(sizes: tuple[int, ...]) -> None:
    assert length_of(b"x" * sum(sizes)).json() == sum(sizes)
    assert length_of(chunks(*sizes)).json() == sum(sizes)


@pytest.mark.parametrize("sizes", [(MAX_BYTES + 1,), (MAX_BYTES, 1), (600, 600, 10_000)])
def test_what_is_too_long_is_a_413_that_names_the_flag(sizes: tuple[int, ...]) -> None:
    for content in (b"x" * sum(sizes), chunks(*sizes)):
        response = length_of(content)
        assert response.status_code == 413
        error = response.json()["error"]
        assert error["type"] == "RequestTooLargeError" and error["code"] == 413
        assert f"longer than {MAX_BYTES} bytes" in error["message"]
        assert "--max-request-bytes" in error["message"]


def test_what_is_too_deep_is_a_400() -> None:
    deep = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
    response = length_of(deep, **{"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")
    assert "nests deeper than 100" in response.json()["error"]["message"]
    assert length_of(deep, **{"content-type": "text/plain"}).status_code == 200, (
        "brackets in a text nest nothing"
    )


def test_ollama_s_routes_read_json_whatever_its_type() -> None:
    deep = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = length_of(deep, path="/api/chat", **form)
    assert response.status_code == 400 and "nests deeper than 100" in response.text


@pytest.mark.parametrize("order", [1, -1])
def test_a_second_content_type_hides_no_json(order: int) -> None:
    """Who parses the body looks at the first."""
    kinds = [(b"content-type", b"application/json"), (b"content-type", b"text/plain")][::order]
    deep = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)

    async def receive() -> Message:
        return {"type": "http.request", "body": deep}

    async def app(*_: object) -> None:
        raise AssertionError("not reached")

    assert call(BodyGuard(app, MAX_BYTES), kinds, receive)[0]["status"] == 400


def test_what_has_too_many_arrays_and_objects_is_a_400() -> None:
    many = b"[" + b"[]," * MAX_JSON_NODES + b"0]"
    response = length_of(many, max_bytes=len(many), **{"content-type": "application/json"})
    assert response.status_code == 400
    assert f"has {MAX_JSON_NODES + 1} arrays and objects" in response.json()["error"]["message"]
    fits = b"[" + b"[]," * (MAX_JSON_NODES - 1) + b"0]"
    assert length_of(fits, max_bytes=len(many), **{"content-type": "application/json"}).json() == len(fits)


def test_what_has_too_many_values_is_a_400_and_commas_in_a_text_are_none() -> None:
    many, text = b"[0" + b",0" * (MAX_JSON_VALUES + 1) + b"]", b'["' + b"," * (MAX_JSON_VALUES + 1) + b'"]'
    response = length_of(many, max_bytes=len(many), **{"content-type": "application/json"})
    assert response.status_code == 400
    assert f"has {MAX_JSON_VALUES + 1} values and more" in response.json()["error"]["message"]
    for fits in (b"[0" + b",0" * MAX_JSON_VALUES + b"]", text):
        assert length_of(fits, max_bytes=len(many), **{"content-type": "application/json"}).json() == len(
            fits
        )


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
    messages: list[Message] = [
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
    messages: list[Message] = [{"type": "http.request", "body": b"all"}, {"type": "http.disconnect"}]
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


def test_a_body_that_comes_too_slowly_is_a_408() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    async def app(*_: object) -> None:
        raise AssertionError("not reached")

    start, body = call(BodyGuard(app, MAX_BYTES, grace_s=0.01), [], receive)
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert b"RequestTimeoutError" in body["body"]


def test_what_has_come_of_a_body_gives_it_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Limit:
        """Notes where the end of waiting is moved to."""

        async def __aenter__(self) -> "Limit":
            return self

        async def __aexit__(self, *_: object) -> None:
            """End it."""

        def reschedule(self, when_s: float) -> None:
            limits.append(when_s)

    def begin(when_s: float) -> Limit:
        limits.append(when_s)
        return Limit()

    monkeypatch.setattr(asyncio, "timeout_at", begin)
    messages = [
        {"type": "http.request", "body": b"x" * LEAST_BYTES_PER_S, "more_body": n < 3} for n in range(4)
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def app(*_: object) -> None:
        """Take it."""

    call(BodyGuard(app, 100 * LEAST_BYTES_PER_S), [], receive)
    assert [round(limit - limits[0], 6) for limit in limits] == [0, 1, 2, 3]


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


def nodes_in(value: Any) -> int:
    """The slow way."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(nodes_in, inner))


def commas_in(value: Any) -> int:
    """The slow way."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(commas_in, inner))


@given(JSON, st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"]))
def test_a_shape_is_that_of_the_parsed_value(value: Any, encoding: str) -> None:
    text = json.dumps({"": value}, ensure_ascii=False)
    assert json_shape(text.encode(encoding)) == (
        1 + depth_of(value),
        1 + nodes_in(value),
        commas_in(value),
    )


@pytest.mark.parametrize(
    "body", [b"[" * 10_000_000, b"[" * 5_000_000 + b"]" * 5_000_000, b'{"a":' * 200 + b"1" + b"}" * 200]
)
def test_what_nests_without_end_is_too_deep(body: bytes) -> None:
    assert json_shape(body).depth > MAX_JSON_DEPTH


@pytest.mark.parametrize("body", [b"", b"[]" * 10_000, b'"' + b"[" * 10_000 + b'"', b"]" * 10_000])
def test_what_is_flat_is_not(body: bytes) -> None:
    assert json_shape(body).depth <= 1


def test_strings_are_followed_from_chunk_to_chunk() -> None:
    value = ["[" * 700_000, ["]" * 700_000, [[]]], {"a\\": '"['}]
    assert json_shape(json.dumps(value).encode()) == (4, 5, 3)
