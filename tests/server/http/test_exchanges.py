"""Exchanges: every answer has an id, and every end is reported once, for any cause."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.types import Message

from server.http.app import build_app
from server.http.exchanges import (
    CLIENT_GONE,
    ExchangeWatch,
    HttpExchange,
    asker_of_exchange,
    current_exchange,
)
from server.http.guards import ApiKeys
from server.http.routes import new_router
from server.options.table import HttpOptions
from tests.support.requests.asgi import ask


def routed() -> APIRouter:
    router = new_router()

    @router.get("/items/{name}")
    async def show(name: str) -> str:
        exchange = current_exchange()
        assert exchange is not None
        return exchange.request_id

    @router.get("/session")
    async def show_session() -> str:
        return asker_of_exchange().session

    @router.get("/bug")
    async def break_down() -> None:
        raise RuntimeError("a bug")

    return router


def exchanges_of(
    *requests: dict[str, Any], http: HttpOptions | None = None
) -> list[tuple[HttpExchange, httpx.Response]]:
    """Send requests in order, and return the observed exchanges with the responses."""
    told: list[HttpExchange] = []
    app = build_app([routed()], version="0", keys=ApiKeys(), http=http, observers=[told.append])
    answers = [ask(app, **{"method": "GET", **request}) for request in requests]
    return list(zip(told, answers, strict=True))


def test_a_client_s_id_comes_back_and_others_get_one_of_their_own() -> None:
    (first, given), (second, own), (third, other) = exchanges_of(
        {"path": "/items/a", "headers": {"X-Request-Id": "mine-1"}},
        {"path": "/items/a"},
        {"path": "/items/a"},
    )
    assert given.headers["x-request-id"] == given.json() == first.request_id == "mine-1"
    assert own.headers["x-request-id"] == own.json() == second.request_id
    assert own.headers["x-request-id"] != other.headers["x-request-id"] == third.request_id


@pytest.mark.parametrize("given", [b"", b"two words", b"x" * 129, b"line\tfeed", "\u00e9".encode()])
def test_an_id_that_could_break_a_log_is_replaced(given: bytes) -> None:
    ((exchange, response),) = exchanges_of({"path": "/items/a", "headers": {b"X-Request-Id": given}})
    assert response.headers["x-request-id"] == exchange.request_id != given.decode("latin-1")
    assert len(exchange.request_id) == 32


@pytest.mark.parametrize("given", [b"", b"x" * 257, b"line\tfeed", "\u00e9".encode()])
def test_a_session_that_cannot_be_one_is_refused_by_its_name(given: bytes) -> None:
    (_, response), (_, fine), (_, none) = exchanges_of(
        {"path": "/session", "headers": {b"X-Session-Id": given}},
        {"path": "/session", "headers": {b"X-Session-Id": b"user 17"}},
        {"path": "/session"},
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-session-id")
    assert f"({len(given)} bytes)" in response.json()["error"]["message"]
    # The key's id, before the slash, is empty because no key is needed.
    assert (fine.json(), none.json()) == ("/user 17", "")


def test_the_end_is_told_with_route_status_and_time() -> None:
    found = exchanges_of(
        {"path": "/items/a%0Ab?key=secret"},
        {"path": "/none"},
        {"path": "/bug"},
        {"path": "/items/a", "method": "POST"},
    )
    facts = [(exchange.handler, exchange.path, exchange.status) for exchange, _ in found]
    assert facts == [
        ("/items/{name}", "/items/a%0Ab", 200),
        ("none", "/none", 404),
        ("/bug", "/bug", 500),
        ("/items/{name}", "/items/a", 405),
    ]
    assert all(response.headers["x-request-id"] == exchange.request_id for exchange, response in found)
    assert all(exchange.duration_s > 0 and not exchange.answers for exchange, _ in found)


def test_browsers_of_allowed_origins_may_ask_and_read_the_id() -> None:
    preflight = {
        "method": "OPTIONS",
        "path": "/items/a",
        "headers": {
            "Origin": "https://chat.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    }
    simple = {"path": "/items/a", "headers": {"Origin": "https://chat.example"}}
    other = {"path": "/items/a", "headers": {"Origin": "https://evil.example"}}
    options = HttpOptions(allowed_origins=("https://chat.example",))
    leave, answer, foreign = [
        response for _, response in exchanges_of(preflight, simple, other, http=options)
    ]
    assert leave.status_code == 200
    assert leave.headers["access-control-allow-origin"] == "https://chat.example"
    assert leave.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in foreign.headers
    (_, closed), (_, refused) = exchanges_of(simple, preflight)
    assert "access-control-allow-origin" not in closed.headers, "an origin must be named to be allowed"
    assert refused.status_code == 405


def test_a_client_that_was_sent_nothing_is_499_and_the_header_list_is_not_shared() -> None:
    told: list[HttpExchange] = []
    shared: list[tuple[bytes, bytes]] = []
    sent: list[Message] = []
    answers = [lambda: {"type": "http.response.start", "status": 200, "headers": shared}, lambda: None]

    async def app(_scope: object, _receive: object, send: Any) -> None:
        message = answers.pop(0)()
        if message is not None:
            await send(message)

    async def send(message: Message) -> None:
        sent.append(message)

    watch = ExchangeWatch(app, [told.append])
    for _ in range(2):
        scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "headers": []}
        asyncio.run(watch(scope, None, send))  # type: ignore[arg-type]
    assert [exchange.status for exchange in told] == [200, CLIENT_GONE]
    assert shared == [] and len(sent) == 1
