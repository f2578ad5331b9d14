"""`wideep pools`: the requests to the service, the output, and the exit status."""

import json
from typing import Any

import httpx
import pytest

from server.cli import build_parser, main
from server.clients.commands import POOLS
from server.clients.pools import run_pools
from server.http.client import ServiceClient

FOUND = {
    "roles": "auto",
    "pools": [
        {"name": "prefill", "role": "prefill", "ranks": [0], "serving": 1, "requests": 1, "prompt_steps": 0.5, "kv_usage": 0.25},
        {"name": "decode-10", "role": "both", "ranks": [1, 2], "serving": 1, "requests": 0, "prompt_steps": 0, "kv_usage": 0.0},
    ],
}  # fmt: skip


def run(*words: str, refusal: str = "") -> tuple[int, list[tuple[str, str, Any]]]:
    """Run a command line against a service that records requests."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        asked.append((request.method, request.url.path, body))
        if refusal:
            return httpx.Response(409, json={"error": {"message": refusal}})
        return httpx.Response(200, json=FOUND)

    (args,) = POOLS.prepare(build_parser().parse_args(["pools", *words]))
    http = httpx.Client(transport=httpx.MockTransport(answer))
    return run_pools(args, environment={}, client=ServiceClient("http://s", http=http)), asked


def test_pools_are_shown_with_their_roles_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == (0, [("GET", "/pools", None)])
    assert capsys.readouterr().out.splitlines() == [
        "prefill    prefill  rank 0: 1 request, 25% of the KV cache in use",
        "decode-10  both     ranks 1 to 2, 1 of 2 serve: no requests, 0% of the KV cache in use",
        "roles follow the load (--pool-roles auto)",
    ]
    assert run("--json")[0] == 0
    assert json.loads(capsys.readouterr().out) == FOUND


def test_a_role_is_changed_and_a_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("decode-10", "prefill") == (
        0,
        [("POST", "/pools", {"pool": "decode-10", "role": "prefill"})],
    )
    status, _ = run("decode-10", "prefill", refusal="no other pool has the role decode")
    assert status == 1
    assert (
        "wideep pools: " in (said := capsys.readouterr().err) and "no other pool has the role decode" in said
    )


def test_a_url_may_stand_alone_and_a_pool_needs_a_role(capsys: pytest.CaptureFixture[str]) -> None:
    (args,) = POOLS.prepare(build_parser().parse_args(["pools", "http://a:1"]))
    assert (args.name, args.url) == (None, "http://a:1")
    (args,) = POOLS.prepare(build_parser().parse_args(["pools", "decode", "both", "http://a:1"]))
    assert (args.name, args.role, args.url) == ("decode", "both", "http://a:1")
    assert main(["pools", "decode"]) == 2
    assert "give pool decode a role: prefill, decode or both" in capsys.readouterr().err
