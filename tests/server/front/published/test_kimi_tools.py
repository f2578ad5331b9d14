"""Tools are declared as in Kimi's published tool_declaration_ts.py. The expected texts were recorded from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.front.published.kimi_tools import prepared, sorted_keys, typescript_of
from server.front.tokenizer import Tokenizer
from tests.support.models.tiktoken_files import write_tiktoken

RECORDED: dict[str, tuple[dict[str, Any], str | None]] = {
    'nested, required first': (
        {'type': 'object', 'properties': {'user': {'type': 'object', 'properties': {'name': {'type': 'string'}, 'age': {'type': 'integer'}}, 'required': ['name']}, 'at': {'type': 'number', 'description': 'When.\n\nIn UTC.', 'minimum': 0, 'maximum': 9.5, 'default': 1.5}}, 'required': ['user']},
        '# Tools\n\n## functions\nnamespace functions {\n// Do it.\ntype f = (_: {\n  user: {\n    name: string,\n    age?: number\n  },\n  // When.\n\n  // In UTC.\n  // maximum: 9.5, minimum: 0\n  // Default: 1.5\n  at?: number\n}) => any;\n}\n',
    ),
    'enums, unions and lists': (
        {'type': 'object', 'properties': {'a': {'enum': ['x', 1, None, True]}, 'b': {'type': ['string', 'null']}, 'c': {'type': 'array', 'items': {'type': 'string', 'description': 'One.', 'maxLength': 3}, 'minItems': 1}, 'd': {'type': 'array'}, 'e': {'anyOf': [{'type': 'string'}, {'type': 'array', 'items': {'type': 'integer'}}], 'default': 'é'}, 'f': True, 'g': {}}},
        '# Tools\n\n## functions\nnamespace functions {\n// Do it.\ntype f = (_: {\n  a?: "x" | 1 | None | True,\n  b?: string | null,\n  // minItems: 1\n  c?: Array<\n    // One.\n    // maxLength: 3\n    string\n  >,\n  d?: Array<any>,\n  // Default: "é"\n  e?: string | Array<number>,\n  f?: any,\n  g?: any\n}) => any;\n}\n',
    ),
    'open objects': (
        {'type': 'object', 'properties': {'a': {'type': 'object', 'additionalProperties': {'type': 'integer'}}, 'b': {'type': 'object', 'additionalProperties': False}}, 'additionalProperties': True},
        '# Tools\n\n## functions\nnamespace functions {\n// Do it.\ntype f = (_: {\n  a?: {\n    [k: string]: number\n  },\n  b?: {\n    [k: string]: never\n  },\n  [k: string]: any\n}) => any;\n}\n',
    ),
    'references': (
        {'$defs': {'Node': {'type': 'object', 'description': 'A node.', 'properties': {'next': {'$ref': '#/$defs/Node'}, 'root': {'$ref': '#'}}}}, 'type': 'object', 'properties': {'first': {'$ref': '#/$defs/Node'}, 'whole': {'$ref': '#'}}, 'required': ['first']},
        '# Tools\n\n## functions\nnamespace functions {\ninterface parameters {\n  first: Node,\n  whole?: parameters\n}\n// A node.\ninterface Node {\n  next?: Node,\n  root?: parameters\n}\n// Do it.\ntype f = (_: parameters) => any;\n}\n',
    ),
    'no parameters': (
        {},
        '# Tools\n\n## functions\nnamespace functions {\n// Do it.\ntype f = (_: {}) => any;\n}\n',
    ),
    'a schema without a form': (
        {'type': 'object', 'properties': {'a': {'description': 'no type'}}},
        None,
    ),
    'an enum of other values': (
        {'type': 'object', 'properties': {'a': {'type': 'string', 'enum': [1]}}},
        None,
    ),
    'an unknown reference': (
        {'type': 'object', 'properties': {'a': {'$ref': '#/definitions/A'}}},
        None,
    ),
}  # fmt: skip
TEMPLATE = (
    "{% if tools_ts_str is defined %}{{ tools_ts_str }}{% elif tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": parameters}}


@pytest.mark.parametrize("case", RECORDED)
def test_parameters_become_the_published_types(case: str) -> None:
    parameters, expected = RECORDED[case]
    in_order, variables = prepared([tool(parameters)])
    assert variables.get("tools_ts_str") == expected
    assert json.dumps(in_order) == json.dumps([tool(parameters)], sort_keys=True)


def test_tools_of_other_kinds_are_not_declared() -> None:
    assert typescript_of([{"type": "_plugin"}]) == ""
    assert sorted_keys({"b": [{"d": 1, "c": 2}], "a": None}) == {"a": None, "b": [{"c": 2, "d": 1}]}


def test_a_template_with_the_variable_gets_it_and_another_one_gets_sorted_json(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    declared, covered = RECORDED["no parameters"][1], [tool({})]
    made = Tokenizer(str(write_tiktoken(tmp_path, chat_template=TEMPLATE)))
    assert made.render_chat(chat, tools=covered) == f"{declared}hi"
    assert made.render_chat(chat) == "hi"
    not_covered = [tool(RECORDED["an enum of other values"][0])]
    wanted = json.dumps(not_covered, sort_keys=True) + "hi"
    assert made.render_chat(chat, tools=not_covered) == wanted, "the published code's fallback"
    plain = Tokenizer(str(write_tiktoken(tmp_path, chat_template="{{ tools | tojson }}")))
    assert plain.render_chat(chat, tools=[tool({"b": 1, "a": 2})]) == json.dumps(
        [tool({"a": 2, "b": 1})], sort_keys=True
    )
