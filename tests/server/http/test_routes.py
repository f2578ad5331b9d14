"""Routes: an endpoint's arguments, refusals before it is called, and answers to its failures."""

import asyncio
import sys
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from server.front.errors import ApiError
from server.front.generations import ClientGone
from server.http.app import build_app
from server.http.exchanges import HttpExchange
from server.http.guards import ApiKeys
from server.http.routes import ShortRoute, new_router
from server.options.table import HttpOptions
from tests.support.requests.asgi import ask

JSON = {"content-type": "application/json"}


class Body(BaseModel):
    """The accepted body."""

    number: int


def asked(
    path: str = "/x",
    content: bytes = b'{"number": 3}',
    *,
    method: str = "POST",
    headers: Any = JSON,
    failure: Exception | None = None,
    **options: Any,
) -> tuple[httpx.Response, HttpExchange]:
    """Send a request to an application, and return the answer and the exchange."""
    exchanges: list[HttpExchange] = []
    router = new_router()

    @router.post("/x")
    async def double(body: Body, http: HttpRequest) -> Response:
        if failure is not None:
            raise failure
        return JSONResponse({"doubled": 2 * body.number, "by": http.method})

    @router.post("/maybe")
    async def maybe(body: Body | None = None) -> dict[str, Any]:
        return {"number": None if body is None else body.number}

    @router.get("/named/{name}")
    async def named(name: str, times: int = 1) -> dict[str, Any]:
        if failure is not None:
            raise failure
        return {"name": name * times}

    app = build_app(
        [router],
        version="0",
        keys=ApiKeys(),
        http=HttpOptions(**options),
        observers=[exchanges.append],
    )
    return ask(app, method, path, content=content, headers=headers), exchanges[0]


@pytest.mark.parametrize(
    "kind",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"],
)
def test_json_by_any_name_reaches_its_endpoint(kind: str) -> None:
    response, exchange = asked(headers={"content-type": kind})
    assert (response.status_code, response.json()) == (200, {"doubled": 6, "by": "POST"})
    assert (exchange.handler, exchange.status) == ("/x", 200)


def test_a_proxys_path_is_taken_off() -> None:
    assert asked("/llm/x", root_path="/llm")[0].json()["doubled"] == 6


@pytest.mark.parametrize(
    ("content", "number"), [(b'{"number": 3}', 3), (b"", None), (b"null", None), (b"{}", "missing")]
)
def test_a_body_that_may_be_left_out(content: bytes, number: Any) -> None:
    response, _ = asked("/maybe", content)
    if number == "missing":
        assert response.json()["error"]["param"] == "number"
    else:
        assert response.json() == {"number": number}


class Known(BaseModel):
    """A body with unknown fields."""

    model_config = ConfigDict(extra="allow")
    number: int = 0


async def take(body: Known) -> dict[str, int]:
    return {"number": body.number}


def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    router = new_router()
    router.post("/x")(take)
    client = TestClient(build_app([router], version="0", keys=ApiKeys()))
    with caplog.at_level("INFO", logger="wideep"):
        for _ in range(2):
            assert client.post("/x", json={"number": 1, "temprature\n": 1}).status_code == 200
    assert [each.getMessage() for each in caplog.records] == [r"/x ignores the unknown field 'temprature\n'"]


def test_long_names_of_unknown_fields_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    route = ShortRoute("/x", take, methods=["POST"])
    router = new_router()
    router.routes.append(route)
    client = TestClient(build_app([router], version="0", keys=ApiKeys()))
    with caplog.at_level("INFO", logger="wideep"):
        for number in range(120):
            assert client.post("/x", json={f"{number}{'x' * 2_000}": 1}).status_code == 200
    assert len(caplog.records) == 100 and all(len(each.getMessage()) < 200 for each in caplog.records)
    assert sum(map(sys.getsizeof, route._unknown)) < 100 * 200


def test_parameters_of_path_and_query_come_too() -> None:
    response, exchange = asked("/named/ab?times=2", b"", method="GET")
    assert (response.json(), exchange.handler) == ({"name": "abab"}, "/named/{name}")
    assert asked("/named/ab?times=x", b"", method="GET")[0].json()["error"]["param"] == "times"


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"content": b'{"number": "many"}'}, 400, "number is invalid"),
        ({"content": b'{"number": }'}, 400, "The body is not valid JSON: Expecting value (character 11)."),
        ({"content": b"\xff\xfe{"}, 400, "cannot be read as JSON"),
        ({"content": b'{"number": ' + b"9" * 5000 + b"}"}, 400, "cannot be read as JSON: Exceeds the limit"),
        ({"content": b"[1]"}, 400, "The body is invalid"),
        ({"content": b"{}"}, 400, "number is missing."),
        ({"content": b""}, 400, "The body is missing."),
        ({"content": b"null"}, 400, "The body is missing."),
        ({"headers": {}}, 400, "not announced as JSON"),
        ({"headers": {"content-type": "text/json"}}, 400, "not announced as JSON"),
        ({"method": "PUT"}, 405, "/x does not support PUT; it supports POST."),
        ({"path": "/y"}, 404, "There is no endpoint /y. GET /docs lists the endpoints."),
        ({"path": "/namd/{name}"}, 404, "Did you mean /named/{name}?"),
        ({"path": "/" + "y" * 5000}, 404, "There is no endpoint /" + "y" * 199 + "..."),
        (
            {"path": "/v1/embeddings"},
            404,
            "/v1/embeddings is not available: WideEP serves text generation only.",
        ),
        ({"path": "/load_lora_adapter_from_tensors"}, 404, "loads LoRA adapters from directories only"),
    ],
)
def test_what_is_wrong_is_refused(change: dict[str, Any], status: int, words: str) -> None:
    response, _ = asked(**change)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "status"), [(ApiError(409, "no"), 409), (ClientGone(), 499), (ZeroDivisionError(), 500)]
)
def test_failures_are_answered_alike_whoever_calls_the_endpoint(failure: Exception, status: int) -> None:
    short, _ = asked(failure=failure)
    long, _ = asked("/named/ab", b"", method="GET", failure=failure)
    assert short.status_code == long.status_code == status and short.content == long.content


def test_a_client_that_left_before_its_body_came_asks_for_nothing() -> None:
    router, called, sent = new_router(), [], []

    @router.post("/x")
    async def note(body: Body) -> dict[str, Any]:
        called.append(body)
        return {}

    app = build_app([router], version="0", keys=ApiKeys())

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    assert not called and sent[0]["status"] == 499
