"""Bodies: too long or too deep ones are refused in bounded time and memory, and all others arrive unchanged."""

import asyncio
import json
from collections.abc import Callable
from threading import get_ident
from typing import Any

import httpx
import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from server.http import bodies, routes
from server.http.app import build_app
from server.http.bodies import LEAST_BYTES_PER_S, SMALL_BODY, BodyBudget, BodyGuard
from server.http.guards import ApiKeys
from server.http.json_text import MAX_JSON_DEPTH, MAX_JSON_KEYS, MAX_JSON_NODES, MAX_JSON_VALUES
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
        "brackets in a text do not nest"
    )


def test_ollama_s_routes_read_json_whatever_its_type() -> None:
    deep = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = length_of(deep, path="/api/chat", **form)
    assert response.status_code == 400 and "nests deeper than 100" in response.text


@pytest.mark.parametrize("num_items", [10, 100_000])
def test_a_long_body_is_parsed_once_and_not_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_items: int
) -> None:
    threads: list[int] = []

    def noting(body: bytes) -> Any:
        threads.append(get_ident())
        return json.loads(body)

    for module in (bodies, routes):
        monkeypatch.setattr(module, "parse_json", noting)
    router = new_router()

    @router.post("/sum")
    async def tell_sum(body: list[int]) -> int:
        return sum(body)

    app = build_app([router], version="0", keys=ApiKeys())
    assert ask(app, "POST", "/sum", json=list(range(num_items))).json() == sum(range(num_items))
    assert len(threads) == 1 and (threads[0] != get_ident()) is (num_items > 10)


@pytest.mark.parametrize("order", [1, -1])
def test_a_second_content_type_hides_no_json(order: int) -> None:
    """The parser of the body uses the first header."""
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
    assert f"has {MAX_JSON_VALUES + 1} values or more" in response.json()["error"]["message"]
    for fits in (b"[0" + b",0" * MAX_JSON_VALUES + b"]", text):
        assert length_of(fits, max_bytes=len(many), **{"content-type": "application/json"}).json() == len(
            fits
        )


def test_what_has_too_many_keys_is_a_400_and_colons_in_a_text_are_none() -> None:
    def keys(count: int) -> bytes:
        return json.dumps({"x": {str(key): 1 for key in range(count - 1)}, "text": ":" * 200_000}).encode()

    json_type, most = {"content-type": "application/json"}, 4 << 20
    response = length_of(keys(MAX_JSON_KEYS), max_bytes=most, **json_type)
    assert response.status_code == 400
    assert (
        f"has {MAX_JSON_KEYS + 1} keys; the limit is {MAX_JSON_KEYS}" in response.json()["error"]["message"]
    )
    fits = keys(MAX_JSON_KEYS - 1)
    assert length_of(fits, max_bytes=most, **json_type).json() == len(fits)


def call(guard: BodyGuard, headers: list[tuple[bytes, bytes]], receive: Callable[[], Any]) -> list[Message]:
    """Run the guard on a hand-made request."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(guard(scope, receive, send))
    return sent


def test_a_client_that_waits_for_leave_is_refused_before_it_sends() -> None:
    async def receive() -> Message:
        raise AssertionError("reading triggers a 100 Continue")

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
        """Record each new deadline."""

        async def __aenter__(self) -> "Limit":
            return self

        async def __aexit__(self, *_: object) -> None:
            """Do nothing."""

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
        """Answer nothing."""

    call(BodyGuard(app, 100 * LEAST_BYTES_PER_S), [], receive)
    assert [round(limit - limits[0], 6) for limit in limits] == [0, 1, 2, 3]


MB = 1 << 20


class Uploads:
    """Bodies that arrive in chunks, on the test's command, at one guard."""

    def __init__(self, max_bytes: int) -> None:
        self.budget = BodyBudget(max_bytes)
        self.guard = BodyGuard(self._app, 32 * MB, self.budget)
        self.may_answer = asyncio.Event()
        self.num_passed = 0

    async def _app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.num_passed += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def begin(self, *, announced: int | None = None, path: str = "/") -> "Upload":
        return Upload(self.guard, announced, path)


class Upload:
    """One body in transit."""

    def __init__(self, guard: BodyGuard, announced: int | None, path: str) -> None:
        self._chunks: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        headers = [(b"content-type", b"application/octet-stream")]
        headers += [] if announced is None else [(b"content-length", b"%d" % announced)]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        self._task = asyncio.create_task(guard(scope, self._chunks.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def send(self, num_bytes: int, *, is_last: bool = False) -> "Upload":
        """Send a chunk, and return when the guard waits for the next one."""
        self._chunks.put_nowait({"type": "http.request", "body": b"x" * num_bytes, "more_body": not is_last})
        for _ in range(5):
            await asyncio.sleep(0)
        return self

    async def status(self) -> int:
        """Disconnect, and return the status of the answer, or 0."""
        self._chunks.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(self._task, 30)
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def is_open(self) -> bool:
        return not self._task.done()


def test_bodies_that_do_not_fit_together_are_a_503_and_small_ones_always_fit() -> None:
    async def scenario() -> None:
        uploads = Uploads(4 * MB)
        first = await uploads.begin().send(4 * MB)
        second = await uploads.begin().send(MB)  # of unknown length: refused while it arrives
        assert await second.status() == 503
        error = json.loads(second.sent[1]["body"])["error"]
        assert "--max-inflight-request-bytes" in error["message"]
        assert (b"retry-after", b"1") in second.sent[0]["headers"]
        announced = uploads.begin(announced=2 * MB)  # refused before it arrives
        assert await announced.status() == 503
        small = [await uploads.begin().send(SMALL_BODY, is_last=True) for _ in range(100)]
        assert uploads.num_passed == 100, "small bodies have separate room"
        uploads.may_answer.set()
        assert {await each.status() for each in small} == {200}
        await first.status()
        assert uploads.budget.num_bytes == 0

    asyncio.run(scenario())


def test_a_body_counts_until_the_application_has_read_it() -> None:
    async def scenario() -> None:
        uploads = Uploads(4 * MB)
        await uploads.begin().send(4 * MB, is_last=True)
        assert uploads.num_passed == 1 and uploads.budget.num_bytes == 4 * MB - SMALL_BODY
        uploads.may_answer.set()
        await asyncio.sleep(0.01)
        assert uploads.budget.num_bytes == 0

    asyncio.run(scenario())


def test_slow_bodies_make_room_for_others_and_quick_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(bodies, "_now_s", lambda: now_s)

    async def scenario() -> None:
        nonlocal now_s
        uploads = Uploads(8 * MB)
        slow = await uploads.begin().send(2 * MB)
        quick = await uploads.begin().send(6 * MB)
        now_s = 4.0
        late = await uploads.begin(announced=MB).send(MB, is_last=True)
        assert uploads.num_passed == 1 and quick.is_open
        assert await slow.status() == 408
        assert "more slowly" in json.loads(slow.sent[1]["body"])["error"]["message"]
        uploads.may_answer.set()
        assert await late.status() == 200

    asyncio.run(scenario())


def test_a_ping_s_body_is_not_read() -> None:
    async def scenario() -> None:
        uploads = Uploads(4 * MB)
        uploads.may_answer.set()
        ping = uploads.begin(announced=32 * MB, path="/ping")
        await asyncio.sleep(0.01)
        assert uploads.num_passed == 1 and uploads.budget.num_bytes == 0
        assert await ping.status() == 200

    asyncio.run(scenario())
