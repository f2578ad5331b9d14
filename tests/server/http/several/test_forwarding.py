"""Which front answers a request."""

import json
from typing import Any

import pytest

from server.http.several.forwarding import PASSED_ON, Owners

NUM_FRONTS = 3


def scope(path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": named}


@pytest.mark.parametrize(
    "path",
    [
        "/", "/health", "/ping", "/load", "/docs", "/dashboard", "/dashboard/page.js", "/v1/models", "/v1/models/a/b",
        "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/responses/input_tokens",
        "/api/chat", "/generate", "/tokenize", "/server_info",
    ],
)  # fmt: skip
def test_every_front_answers_these(path: str) -> None:
    assert Owners(2, NUM_FRONTS).owner_of(scope(path), b"{}") is None


@pytest.mark.parametrize(
    "path",
    [
        "/metrics", "/throughput", "/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/b/cancel",
        "/v1/fault_tolerance/status", "/experts/load", "/experts/rebalance", "/pools", "/ranks/drain", "/sleep", "/wake_up",
        "/is_sleeping", "/reset_prefix_cache", "/flush_cache", "/release_memory_occupation", "/a_new_endpoint",
    ],
)  # fmt: skip
def test_the_leading_front_answers_these_and_all_unknown_paths(path: str) -> None:
    assert Owners(2, NUM_FRONTS).owner_of(scope(path, "POST"), b"") == 0
    assert Owners(0, NUM_FRONTS).owner_of(scope(path, "POST"), b"") is None


def owner_as_seen_by_each(path: str, body: bytes = b"", **headers: str) -> set[int]:
    """Return the front that each front names, itself included."""
    asked = scope(path, "POST", **headers)
    owners = [Owners(number, NUM_FRONTS) for number in range(NUM_FRONTS)]
    named = [each.owner_of(asked, body) for each in owners]
    return {each.number if owner is None else owner for each, owner in zip(owners, named, strict=True)}


def test_a_response_belongs_to_the_front_that_made_its_id() -> None:
    for number in range(NUM_FRONTS):
        response_id = Owners(number, NUM_FRONTS).new_response_id()
        for path in ("", "/cancel"):
            assert owner_as_seen_by_each(f"/v1/responses/{response_id}{path}") == {number}
        body = json.dumps({"previous_response_id": response_id, "input": "x"}).encode()
        assert owner_as_seen_by_each("/v1/responses", body) == {number}
        assert owner_as_seen_by_each("/v1/responses", body, idempotency_key="k") == {number}


def test_the_leading_front_answers_for_a_lost_one_and_for_one_that_has_forgotten_a_response() -> None:
    path = f"/v1/responses/{Owners(2, NUM_FRONTS).new_response_id()}"
    other, named = Owners(1, NUM_FRONTS), Owners(2, NUM_FRONTS)
    assert other.owner_of(scope(path), b"") == 2
    other.lost = [2]
    assert other.owner_of(scope(path), b"") == 0
    named.lost = [2]
    assert named.owner_of(scope(path), b"") is None, "it is back, and the others do not know yet"
    named.has_response = lambda _: False
    passed_on = {**scope(path), PASSED_ON: True}
    assert named.owner_of(scope(path), b"") == named.owner_of(passed_on, b"") == 0
    assert Owners(0, NUM_FRONTS).owner_of(passed_on, b"") is None, "it does not ask the lost front"


@pytest.mark.parametrize("path", ["/metrics", "/v1/chat/completions", "/v1/responses"])
def test_a_request_that_another_front_passed_on_is_answered(path: str) -> None:
    for number in range(NUM_FRONTS):
        asked = scope(path, "POST", idempotency_key="k") | {PASSED_ON: True}
        assert Owners(number, NUM_FRONTS).owner_of(asked, b"{}") is None


def test_a_text_that_only_mentions_previous_response_id_stays_where_it_is() -> None:
    for body in (b'{"input": "previous_response_id"}', b'{"previous_response_id": null}', b'["previous_response_id"]', b"{previous_response_id"):  # fmt: skip
        assert Owners(1, NUM_FRONTS).owner_of(scope("/v1/responses", "POST"), body) is None


def test_a_key_belongs_to_one_front_whoever_is_asked_and_keys_spread_over_all() -> None:
    found = set()
    for number in range(40):
        headers = {"idempotency_key": f"key-{number}", "authorization": "Bearer a"}
        [owner] = owner_as_seen_by_each("/v1/chat/completions", b"{}", **headers)
        found.add(owner)
    assert found == set(range(NUM_FRONTS))
    assert Owners(1, NUM_FRONTS).owner_of(scope("/v1/models", idempotency_key="a"), b"") is None
