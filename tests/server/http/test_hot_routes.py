"""The short way answers what the long way would, and leaves to it all that is not as it should be."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.errors import ApiError
from server.front.generations import ClientGone
from server.http.app import build_app
from server.http.exchanges import Exchange
from server.http.guards import ApiKeys
from server.http.hot_routes import MOST_BYTES, HotEndpoint
from server.options.table import HttpOptions

JSON = {"content-type": "application/json"}


class Body(BaseModel):
    """What is taken."""

    number: int


def ask(
    content: bytes = b'{"number": 3}',
    *,
    path: str = "/x",
    method: str = "POST",
    headers: Any = JSON,
    answer: Callable[[int], Any] = lambda number: number,
    **options: Any,
) -> tuple[httpx.Response, list[str], Exchange]:
    """Ask an endpoint that has both ways; returns the answer, the ways it was answered on, and the exchange."""
    ways: list[str] = []
    exchanges: list[Exchange] = []
    router = APIRouter()

    @router.post("/x", response_model=None)
    async def long_way(body: Body) -> Response:
        ways.append("long")
        return JSONResponse(answer(body.number))

    async def short_way(body: Body, http: HttpRequest) -> Response:
        ways.append("short")
        return JSONResponse(answer(body.number))

    app = build_app(
        [router],
        version="0",
        keys=ApiKeys(),
        http=HttpOptions(**options),
        hot=[HotEndpoint(path="/x", schema=Body, answer=short_way)],
        observers=[exchanges.append],
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(send()), ways, exchanges[0]


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
def test_a_good_request_takes_the_short_way(kind: str) -> None:
    response, ways, exchange = ask(headers={"content-type": kind})
    assert (response.status_code, response.json(), ways) == (200, 3, ["short"])
    assert (exchange.handler, exchange.status) == ("/x", 200)


def test_a_proxy_s_path_is_taken_off() -> None:
    assert ask(path="/llm/x", root_path="/llm")[1] == ["short"]


@pytest.mark.parametrize("kind", ["Application/JSON", "application/vnd.api+json"])
def test_other_names_of_json_take_the_long_way(kind: str) -> None:
    response, ways, _ = ask(headers={"content-type": kind})
    assert (response.status_code, ways) == (200, ["long"])


@pytest.mark.parametrize(("num_bytes", "way"), [(MOST_BYTES, "short"), (MOST_BYTES + 1, "long")])
def test_long_bodies_take_the_long_way(num_bytes: int, way: str) -> None:
    response, ways, _ = ask(b'{"number": 3}'.ljust(num_bytes))
    assert (response.status_code, ways) == (200, [way])


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"content": b'{"number": "many"}'}, 400, "number is wrong"),
        ({"content": b'{"number": }'}, 400, "not valid JSON"),
        ({"content": b"\xff\xfe{"}, 400, "cannot be read as JSON"),
        ({"content": b"[1]"}, 400, "is wrong"),
        ({"content": b""}, 400, "is missing"),
        ({"headers": {}}, 400, "not announced as JSON"),
        ({"method": "PUT"}, 405, "Method Not Allowed"),
        ({"path": "/y"}, 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_refused_on_the_long_way(change: dict[str, Any], status: int, words: str) -> None:
    response, ways, _ = ask(**change)
    assert (response.status_code, ways) == (status, [])
    assert words in response.json()["error"]["message"]


def raising(error: Exception) -> Callable[[int], Any]:
    """Return an answer that fails."""

    def answer(_number: int) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "status"), [(ApiError(409, "no"), 409), (ClientGone(), 499), (ZeroDivisionError(), 500)]
)
def test_both_ways_answer_failures_alike(error: Exception, status: int) -> None:
    short, ways, _ = ask(answer=raising(error))
    long, others, _ = ask(answer=raising(error), headers={"content-type": "Application/JSON"})
    assert (ways, others) == (["short"], ["long"])
    assert short.status_code == long.status_code == status and short.content == long.content
