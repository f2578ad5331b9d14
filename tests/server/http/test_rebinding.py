"""After DNS rebinding to a service without keys, a page cannot read contents from any endpoint."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

EVIL = {"Host": "evil.example:8000"}  # as a page's request to its own site: without an Origin
MONITORED = {"/", "/health", "/ping", "/version", "/metrics", "/load", "/throughput"}
MONITORED |= {"/v1/fault_tolerance/status"}


@pytest.fixture(scope="module")
def http(front: FrontProcess) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as made:
        yield made


def test_every_endpoint_that_shows_contents_wants_a_name_of_the_service(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["paths"]
    paths = {re.sub(r"\{[^}]*\}", "x", path) for path, methods in described.items() if "get" in methods}
    assert len(paths) > 20 and paths > MONITORED - {"/"}
    for path in paths | {"/docs", "/openapi.json", "/dashboard", "/v1/files/x/content"}:
        status = http.get(path, headers=EVIL).status_code
        assert (status == 403) == (path not in MONITORED), path


def test_stored_files_and_responses_are_not_read_under_a_foreign_name(http: httpx.Client) -> None:
    file = http.post("/v1/files", files={"file": b"a secret"}, data={"purpose": "batch"}).json()["id"]
    body = {"model": "tiny", "input": "a secret", "max_output_tokens": 2}
    response = http.post("/v1/responses", json=body).json()["id"]
    for path in ("/v1/files", f"/v1/files/{file}/content", f"/v1/responses/{response}"):
        refused = http.get(path, headers=EVIL)
        assert (
            refused.status_code == 403 and "secret" not in refused.text and "--allowed-hosts" in refused.text
        )
        assert http.get(path).status_code == 200
    assert http.delete(f"/v1/files/{file}").status_code == 200
