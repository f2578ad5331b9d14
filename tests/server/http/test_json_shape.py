"""How JSON nests, told without parsing it, is how it parses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.bodies import MAX_JSON_DEPTH, json_shape


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
