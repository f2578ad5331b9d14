"""One JSON value's end is found without reading it, at any split."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.parsers.reader import JsonSpan, decode_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(JSON, st.integers(0, 60), st.sampled_from([" rest", ",", "}", "</tool_call>", "\n{"]))
def test_a_span_ends_where_json_s_own_parser_ends(value: Any, cut: int, rest: str) -> None:
    whole = json.dumps(value) + rest
    _, expected = json.JSONDecoder().raw_decode(whole)
    span = JsonSpan()
    length = span.push(whole[:cut])
    if not span.done:
        assert length == len(whole[:cut])
        length += span.push(whole[cut:])
    assert (length, span.done, span.broken) == (expected, True, False)


def test_a_tag_inside_a_value_breaks_it() -> None:
    span = JsonSpan()
    assert span.push('{"a": [1, </x>') == 10
    assert span.done and span.broken
    assert JsonSpan().push('{"a": "<b>') == 10, "in a string it is text"


@pytest.mark.parametrize("text", ["", "{", "NaN", "-Infinity", "[" * 100_000, "9" * 5000, "{'a': 1}"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode_json(text)


def test_control_characters_in_strings_are_taken() -> None:
    assert decode_json('"a\nb"') == "a\nb"
