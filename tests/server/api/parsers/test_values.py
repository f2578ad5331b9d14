"""Text between tags becomes JSON by the function's schema."""

import json

import pytest

from server.api.parsers.tag_calls import ArgumentTypes

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
