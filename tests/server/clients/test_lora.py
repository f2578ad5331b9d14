"""`wideep lora`: the requests to the service, the output, and the exit status."""

import json
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from server.cli import build_parser, main
from server.clients.commands import LORA
from server.clients.lora import run_lora
from server.front.adapters.places import LOAD_TIMEOUT_S
from server.front.adapters.registry import FOLLOW_S
from server.http.client import ServiceClient, ServiceError

ADAPTER = {
    "name": "sql", "path": "/adapters/sql", "digest": "0f", "pinned": False, "state": "resident", "running": 2,
    "waiting": False, "requests": 7, "bytes": 3 << 20,
}  # fmt: skip
FOUND = {"max_loras": 8, "adapters": [ADAPTER, {**ADAPTER, "name": "a", "state": "registered", "running": 0}]}


def run(
    *words: str, refusal: str = "", found: dict[str, Any] = FOUND
) -> tuple[int, list[tuple[str, str, Any]]]:
    """Run a command line against a service that records requests."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        asked.append((request.method, request.url.path, body))
        if refusal:
            return httpx.Response(400, json={"error": {"message": refusal}})
        return httpx.Response(200, json=found)

    (args,) = LORA.prepare(build_parser().parse_args(["lora", *words]))
    http = httpx.Client(transport=httpx.MockTransport(answer))
    return run_lora(args, environment={}, client=ServiceClient("http://s", http=http)), asked


def test_adapters_are_shown_with_their_state_and_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == (0, [("GET", "/adapters", None)])
    assert capsys.readouterr().out.splitlines() == [
        "sql  resident    2 running, 7 so far, 3.0 MiB per rank  /adapters/sql",
        "a    registered  0 running, 7 so far, 3.0 MiB per rank  /adapters/sql",
    ]
    assert run("list", "--json")[0] == 0 and json.loads(capsys.readouterr().out) == FOUND
    run(found={"max_loras": 8, "adapters": []})
    assert capsys.readouterr().out == "no adapter is loaded; up to 8 can be used at once\n"


def test_an_adapter_is_loaded_and_unloaded(capsys: pytest.CaptureFixture[str]) -> None:
    status, asked = run("load", "sql", "/adapters/sql", "--replace")
    assert (status, asked[-1]) == (0, ("GET", "/adapters", None))
    body = {"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": True}
    assert asked[0] == ("POST", "/v1/load_lora_adapter", body), "a replaced adapter keeps its pin"
    assert run("load", "sql", "/adapters/sql", "--pin")[1][0][2]["pinned"] is True
    assert run("unload", "sql")[1][0] == ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})
    status, _ = run("load", "sql", "/a", refusal="'sql' is loaded already")
    assert status == 1 and "wideep lora: " in (said := capsys.readouterr().err) and "loaded already" in said


@pytest.mark.parametrize(
    ("words", "least_s"),
    [(["load", "sql", "/adapters/sql"], LOAD_TIMEOUT_S + FOLLOW_S), (["unload", "sql"], FOLLOW_S), ([], 1.0)],
)
def test_a_command_waits_for_longer_than_the_service(
    words: list[str], least_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(side_effect=ServiceError("away"))
    monkeypatch.setattr("server.clients.lora.ServiceClient", made)
    (args,) = LORA.prepare(build_parser().parse_args(["lora", *words]))
    assert run_lora(args, environment={}) == 1
    assert made.call_args.kwargs["answer_timeout_s"] > least_s


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["load", "sql"], "wideep lora: load takes NAME and PATH"),
        (["unload"], "wideep lora: unload takes NAME"),
        (["list", "sql"], "wideep lora: list takes no name"),
    ],
)
def test_missing_names_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", *words]) == 2
    assert capsys.readouterr().err.startswith(says)


def test_a_url_may_follow_the_action() -> None:
    (args,) = LORA.prepare(build_parser().parse_args(["lora", "unload", "sql", "http://h:1"]))
    assert (args.name, args.url) == ("sql", "http://h:1")
