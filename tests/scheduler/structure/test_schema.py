"""Schemas as trees: references that stay valid after a move, and mutually exclusive branches of a oneOf."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from scheduler.policy.request import Structure
from scheduler.structure.compiler import StructureError
from scheduler.structure.grammar import compile_structure
from scheduler.structure.schema import Document, enforceable, excludes, relocated
from tests.support.requests.structures import TOKENIZER, accepts

DEFS = {
    "Int": {"type": "integer"},
    "Word": {"type": "string"},
    "A B": {"type": "null"},
    "x/y": {"type": "boolean"},
    "Cat": {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "n": {"$ref": "#/$defs/Int"}},
        "required": ["kind"],
    },
    "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
    "Named": {"$anchor": "named", "type": "string"},
}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


# Branches, and a text that matches exactly one of them. None: they overlap, or it cannot be decided.
BRANCHES: list[tuple[list[Any], str | None]] = [
    ([{"type": "null"}, ref("Cat")], '{"kind": "cat"}'),
    ([ref("Int"), ref("Word")], "5"),
    ([ref("A%20B"), ref("x~1y")], "true"),
    ([{"$ref": "#named"}, ref("Int")], '"a"'),
    ([ref("A B"), ref("Int")], "null"),
    ([{"const": 1}, {"const": 2}], "2"),
    ([{"const": 1}, {"const": True}], "true"),
    ([{"enum": ["a", "b"]}, {"const": "c"}], '"c"'),
    ([{"enum": ["a", "b"], "type": "string"}, {"enum": [1, "a"], "type": "integer"}], "1"),
    ([ref("Cat"), ref("Dog")], '{"kind": "wolf"}'),
    ([ref("Cat"), ref("Dog"), {"type": "null"}, ref("Tree")], "[[]]"),
    ([{"allOf": [ref("Int")]}, {"anyOf": [ref("Word"), {"type": "null"}]}], "null"),
    ([{"type": "integer", "maximum": 4}, {"type": "integer", "minimum": 5}], "5"),
    (
        [
            {"type": "object", "required": ["a"]},
            {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
        ],
        '{"b": 1}',
    ),
    ([{"type": "string"}], '"a"'),
    ([{"type": "string"}, False], '"a"'),
    ([{"const": 1}, {"const": 1.0}], None),
    ([{"type": "integer"}, {"type": "number"}], None),
    ([ref("Int"), {"type": ["string", "integer"]}], None),
    ([ref("Loop"), ref("Int")], None),
    ([ref("missing"), ref("Int")], None),
    ([{"$ref": "https://example.com/a.json"}, ref("Int")], None),
    ([{"required": ["a"]}, {"required": ["b"]}], None),
    (
        [
            {"type": "object", "properties": {"k": {"const": 1}}},
            {"type": "object", "properties": {"k": {"const": 2}}},
        ],
        None,
    ),
    ([True, {"type": "null"}], None),
]


@pytest.mark.parametrize(("branches", "text"), BRANCHES, ids=[json.dumps(each)[:60] for each, _ in BRANCHES])
def test_a_one_of_is_taken_if_its_branches_exclude_each_other(branches: list[Any], text: str | None) -> None:
    schema = {"oneOf": branches, "$defs": DEFS}
    assert excludes(branches, Document(schema)) is (text is not None)
    form = Structure("json_schema", json.dumps(schema))
    if text is not None:
        assert accepts(form, text)
        return
    with pytest.raises(StructureError) as caught:
        compile_structure(form, TOKENIZER)
    if not any(
        name in json.dumps(branches) for name in ("missing", "example.com", "Loop")
    ):  # which have errors of another kind
        assert "two branches of a oneOf" in str(caught.value)


POOL: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        1.0,
        2,
        2.5,
        -3,
        "",
        "a",
        "b",
        "cat",
        [],
        [1],
        {},
        {"k": 1},
        {"k": 2},
        {"k": "a"},
        {"j": 1},
    ),
    *({"k": 1, "j": 1}, {"k": None}, {"kind": "cat"}, {"kind": "dog"}, {"kind": "cat", "n": 1}, [[]], 5, 4),
)
PIECES: tuple[Any, ...] = (
    *(branch for branches, _ in BRANCHES for branch in branches if "missing" not in json.dumps(branch)),
    {"properties": {"k": {"type": "integer"}}, "required": ["k"], "type": "object"},
    {"properties": {"k": {"type": ["string", "null"]}}, "type": "object"},
    {"properties": {"k": {"enum": [1, 2]}}, "required": ["k", "j"], "type": "object"},
    {"type": "object", "properties": {"k": True}, "additionalProperties": False},
    {"allOf": [{"type": ["integer", "string"]}, {"enum": ["a", 1, None]}]},
    {"minimum": 3},
    {"oneOf": [{"const": "a"}, {"type": "object", "required": ["j"]}]},
)


def test_branches_that_exclude_each_other_share_no_value() -> None:
    pieces = [
        each for each in PIECES if "example.com" not in json.dumps(each) and "Loop" not in json.dumps(each)
    ]
    fits = [
        {
            place
            for place, value in enumerate(POOL)
            if jsonschema.Draft202012Validator({"allOf": [each], "$defs": DEFS}).is_valid(value)
        }
        for each in pieces
    ]
    document = Document({"$defs": DEFS})
    proven = 0
    for left, right in itertools.combinations(range(len(pieces)), 2):
        if excludes([pieces[left], pieces[right]], document):
            proven += 1
            assert not fits[left] & fits[right], (pieces[left], pieces[right])
    assert proven > 200, "most of these differ by type, which must be detected"


def test_hundreds_of_branches_are_compared_in_one_pass() -> None:
    names = [f"k{number}" for number in range(2000)]
    document = Document({})
    assert excludes([{"const": name} for name in names], document)
    tagged = [
        {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in names
    ]
    assert excludes(tagged, document)
    assert not excludes([*tagged, tagged[0]], document)


def test_unions_that_refer_to_each_other_take_a_bounded_number_of_looks() -> None:
    union = [{"$ref": f"#/$defs/{number}"} for number in range(12)]
    defs = {str(number): {"anyOf": union, "properties": {"a": {"oneOf": union}}} for number in range(12)}
    schema = {"oneOf": union, "$defs": defs}
    assert enforceable(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://[", "$id": "http://["},
        {"$ref": "#/\ud800", "oneOf": [{"type": "null"}, 5, "x"]},
        {"oneOf": [], "anyOf": 5, "allOf": 5, "required": 5, "type": [{}], "enum": 5, "properties": []},
        {"oneOf": [{"enum": [1e400, -(10**400)]}, {"minimum": 10**400}], "anyOf": [], "allOf": 5},
        {"oneOf": [{"type": {"a": 1}}, {"required": [{}], "properties": {"": {"$anchor": 5}}}]},
        False,
        5,
    ],
)
def test_what_is_no_schema_is_somebody_else_s_to_refuse(schema: Any) -> None:
    enforceable(schema)
    relocated(schema, "#/$defs/0")


def test_what_is_beside_a_one_of_still_counts() -> None:
    schema = {
        "type": "object",
        "anyOf": [{"required": ["a"]}],
        "oneOf": [ref("Cat"), ref("Dog")],
        "$defs": DEFS,
    }
    form = Structure("json_schema", json.dumps(schema))
    assert accepts(form, '{"kind": "cat", "a": 1}') and not accepts(form, '{"kind": "cat"}')
    assert not accepts(form, '{"kind": "cow", "a": 1}')


def test_data_that_looks_like_a_schema_is_left_alone() -> None:
    data = {"oneOf": [{"const": 1}, {"const": 2}], "$ref": "#", "$id": "x"}
    schema = {
        "properties": {"oneOf": {"const": data}, "$ref": {"enum": [data]}},
        "default": data,
        "examples": [data],
    }
    assert enforceable(schema) == schema and relocated(schema, "#/$defs/0") == schema


def test_a_resource_with_a_name_of_its_own_is_left_alone() -> None:
    inner = {
        "$id": "https://example.com/inner",
        "oneOf": [{"$ref": "#/$defs/A"}, {"const": 1}],
        "$defs": {"A": {}},
    }
    schema = {"properties": {"a": inner}, "$defs": {"A": {"const": 2}}}
    assert enforceable(schema) == schema and relocated(schema, "#/$defs/0") == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#"}, {"$ref": "#/$defs/0"}),
        ({"$id": "https://e.com/a.json", "$ref": "a.json#/$defs/x"}, {"$ref": "#/$defs/0/$defs/x"}),
        ({"$id": "https://e.com/a.json", "$ref": "b.json#/$defs/x"}, {"$ref": "b.json#/$defs/x"}),
        ({"$ref": "#/$defs/a%20b~1c%25"}, {"$ref": "#/$defs/0/$defs/a%20b~1c%25"}),
        (
            {"items": {"$ref": "#here"}, "$defs": {"x": {"$anchor": "here", "type": "null"}}},
            {"items": {"$ref": "#/$defs/0/$defs/x"}, "$defs": {"x": {"type": "null"}}},
        ),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, {"type": "null"}),
        ({"properties": {"$ref": {"type": "string"}}}, {"properties": {"$ref": {"type": "string"}}}),
        (
            {"dependencies": {"a": ["b"], "c": {"$ref": "#"}}},
            {"dependencies": {"a": ["b"], "c": {"$ref": "#/$defs/0"}}},
        ),
        (True, True),
    ],
)
def test_references_hold_after_a_move(schema: Any, expected: Any) -> None:
    assert relocated(schema, "#/$defs/0") == expected


def test_a_moved_schema_takes_what_it_took() -> None:
    schema = {
        "oneOf": [
            ref("Cat"),
            {"$ref": "#/$defs/x~1y"},
            {"$ref": "#/$defs/A%20B"},
            {"type": "array", "items": {"$ref": "#"}},
        ],
        "$defs": DEFS,
    }
    moved = {
        "type": "array",
        "items": {"$ref": "#/$defs/a~1%20b"},
        "$defs": {"a/ b": relocated(schema, "#/$defs/a~1%20b")},
    }
    form = Structure("json_schema", json.dumps(moved))
    assert accepts(form, '[{"kind": "cat", "n": 1}, true, null, [true, []]]')
    assert not accepts(form, '[{"kind": "cat", "n": "x"}]') and not accepts(form, "[1]")
