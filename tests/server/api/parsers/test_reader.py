"""Parsing of JSON as models write it, and of arguments by their schemas."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.json_span import JsonSpan
from server.api.parsers.reader import decode_json

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
    length, text = span.push(whole[:cut])
    if not span.done:
        assert length == len(whole[:cut])
        more, rest_of_text = span.push(whole[cut:])
        length, text = length + more, text + rest_of_text
    assert (length, span.done, span.broken) == (expected, True, False)
    assert text == whole[:expected]


@pytest.mark.parametrize("cut", range(24))
def test_line_ends_in_strings_become_escapes(cut: int) -> None:
    written = '{\n"a": "x\ny\t", "b":1}'
    span = JsonSpan()
    text = span.push(written[:cut])[1] + span.push(written[cut:])[1]
    assert json.loads(text) == {"a": "x\ny\t", "b": 1}
    assert text.startswith("{\n"), "newlines between values stay"


def test_a_tag_inside_a_value_breaks_it() -> None:
    span = JsonSpan()
    assert span.push('{"a": [1, </x>')[0] == 10
    assert span.done and span.broken
    assert JsonSpan().push('{"a": "<b>')[0] == 10, "a tag in a string is text"


@pytest.mark.parametrize("text", ["", "{", "NaN", "-Infinity", "[" * 100_000, "9" * 5000, "{'a': 1}"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode_json(text)


def test_control_characters_in_strings_are_taken() -> None:
    assert decode_json('"a\nb"') == "a\nb"


def test_references_that_go_round_in_many_ways_are_followed_once() -> None:
    """Each of a thousand ways leads back to all of them."""
    thing = {"anyOf": [{"$ref": "#/$defs/n"}] * 1000 + [{"type": [{}, "integer"]}]}
    types = ArgumentTypes({"f": {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": thing}}})
    assert types.json_of("f", "a", "5") == "5"


SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "object": {"$ref": "#/$defs/Thing"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "word": {"enum": ["1", "2"]},
        "loop": {"$ref": "#/properties/loop"},
        "odd": 5,
    },
    "$defs": {"Thing": {"type": "object"}},
}
TYPES = ArgumentTypes({"f": SCHEMA, "broken": {"properties": []}})


@pytest.mark.parametrize(
    "argument, text, value",
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", ' "quoted"\n', ' "quoted"\n'),
        ("maybe", "null", None),
        ("maybe", "true", "true"),
        ("number", " 2.5 ", 2.5),
        ("number", "many", "many"),
        ("number", "NaN", "NaN"),
        ("number", "9" * 5000, "9" * 5000),
        ("flag", "True", True),
        ("object", '{"é": [1]}', {"é": [1]}),
        ("object", "[" * 5000, "[" * 5000),
        ("either", "5", "5"),
        ("word", "1", "1"),
        ("loop", "1", 1),
        ("odd", "1", 1),
        ("unknown", "[1]", [1]),
        ("unknown", "one", "one"),
    ],
)
def test_the_schema_decides_what_a_text_is(argument: str, text: str, value: object) -> None:
    assert json.loads(TYPES.json_of("f", argument, text)) == value


def test_a_schema_that_says_nothing_is_no_obstacle() -> None:
    for function in ("broken", "unknown"):
        assert TYPES.json_of(function, "x", "1") == "1"
