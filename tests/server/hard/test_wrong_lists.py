"""Every list in our API description, filled with 100,000 invalid items: one error, quickly."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.serving.processes import cpu_s
from tests.server.hard.test_hostile_bodies import check
from tests.support.requests.mutations import RawRequest
from tests.support.requests.raw_http import RawClient
from tests.support.requests.valid_bodies import BODIES
from tests.support.service.paced_front import PacedFront
from tests.support.service.process_figures import peak_rss_bytes, reset_peak, rss_bytes

ITEMS = 100_000
WRONG: tuple[Any, ...] = (None, {"made": "up"}, [], "x", 0.5)
MOST_CPU_S = 2.0
GROWTH_BYTES = 128 << 20  # 100,000 parsed items take some 30 MB; an error for each would take hundreds


def lists_of(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the endpoint and field of every top-level list in a described body."""
    for path, operations in described["paths"].items():
        body = (
            operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        )
        for name, field in _properties(body.get("schema", {}), described).items():
            if any(
                _resolve(each, described).get("type") == "array" for each in [field, *field.get("anyOf", [])]
            ):
                yield path, name


def _properties(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    options = [_resolve(each, described) for each in [schema, *schema.get("anyOf", [])]]
    return {name: field for each in options for name, field in each.get("properties", {}).items()}


def _resolve(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(described["components"]["schemas"][name]) if name else schema


@pytest.mark.slow
def test_one_hundred_thousand_wrong_items_are_one_error(hard_front: PacedFront) -> None:
    pid, connection = hard_front.process.pid, RawClient(hard_front.url, timeout_s=60)
    found = sorted(lists_of(hard_front.get("/openapi.json").json()))
    assert len(found) >= 4, found
    for path, field in found:
        for wrong in WRONG:
            body = json.dumps({**BODIES[path][0], field: [wrong] * ITEMS}).encode()
            reset_peak(pid)
            before, before_s = rss_bytes(pid), cpu_s(pid)
            check(connection.send(RawRequest(path=path, body=body)))
            assert cpu_s(pid) - before_s < MOST_CPU_S, f"{path} {field} with {wrong!r}"
            growth = peak_rss_bytes(pid) - before
            assert growth < GROWTH_BYTES, f"{path} {field} with {wrong!r}: {growth >> 20} MiB"
    connection.close()
