"""The worst possible structures and tools over HTTP, by name. Each is answered in time, or refused with a 400 that names the field.

tests/server/front/structure tests their cost in the checker process, which may die of them.
"""

import json
import time
from typing import Any, NamedTuple

import pytest

from benchmarks.serving.processes import cpu_s
from server.api.structure import MAX_CHARS, MAX_CHOICES, MAX_DEPTH
from tests.support.requests.hostile_values import PLANES
from tests.support.service.paced_front import PacedFront
from tests.support.service.process_figures import peak_rss_bytes, reset_peak, rss_bytes

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
MOST_S = 20.0  # per request, on a loaded machine; a structure's CPU time is limited to 2 s
MOST_CPU_S = 2.0  # of the front
GROWTH_BYTES = 128 << 20


class Form(NamedTuple):
    """A hostile structure and the expected result."""

    fields: dict[str, Any]
    param: str = ""  # named by the error; empty if the structure is valid and answered
    words: str = ""  # part of the error's message


def of_schema(schema: Any, **how: str) -> Form:
    field = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return Form({"response_format": field}, **how)


def of_field(name: str, value: Any, **how: str) -> Form:
    return Form({"structured_outputs": {name: value}}, **how)


def of_tool(parameters: Any, **how: str) -> Form:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return Form({"tools": [tool], "tool_choice": "required"}, **how)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(count)}}


FORMAT, SCHEMA = "response_format", "response_format.json_schema.schema"  # fields of compile and parse errors
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
LARGE = f"the maximum is {MAX_CHARS}"
FORMS: dict[str, Form] = {
    "30,000 properties": of_schema(properties(30_000), param=FORMAT, words=LARGE),
    "60,000 required properties": of_schema(
        {"type": "object", "required": [f"p{number}" for number in range(60_000)]}, param=FORMAT, words=LARGE
    ),
    "an enum of 60,000": of_schema({"enum": list(range(60_000))}, param=FORMAT, words=LARGE),
    "an enum of too many": of_schema({"enum": [1] * 100_001}, param=SCHEMA, words="more than 100000 values"),
    "a reference to itself": of_schema({"$ref": "#"}, param=FORMAT, words="no token"),
    "references in a circle": of_schema(CIRCLE, param=FORMAT, words="no token"),
    "a tree of any depth": of_schema(TREE),
    "one level too many": of_schema(nested(MAX_DEPTH), param=SCHEMA, words=f"deeper than {MAX_DEPTH} levels"),
    "a schema that is a number": of_schema(5, param=SCHEMA),
    "a schema that is a list": of_schema([{}], param=SCHEMA),
    "a schema of an unknown kind": of_schema({"type": "banana"}, param=FORMAT),
    "a reference into a file": of_schema({"$ref": "file:///etc/passwd"}, param=FORMAT),
    "a reference to a host": of_schema({"$ref": "http://127.0.0.1:9/x.json"}, param=FORMAT),
    "NaN in a schema": of_field("json", '{"const": NaN}', param="structured_outputs.json", words="NaN"),
    "keys of every plane": of_schema({"type": "object", "properties": {PLANES[:1] + "\U0010ffff": {}}}),
    "half a surrogate pair in a key": of_schema(
        {"type": "object", "properties": {"\ud800": {}}}, param=FORMAT
    ),
    "half a surrogate pair in a regex": of_field("regex", "a\ud800", param="structured_outputs.regex"),
    "an unclosed group": of_field("regex", "(a", param="structured_outputs.regex", words="unclosed"),
    "a lookaround": of_field("regex", "(?=a)b", param="structured_outputs.regex"),
    "a backreference": of_field("regex", r"(a)\1", param="structured_outputs.regex"),
    "a regex of 1 MB": of_field("regex", "a" * 1_000_000, param="structured_outputs.regex", words=LARGE),
    "nested stars": of_field("regex", "(a+)+b"),
    "ambiguous branches": of_field("regex", "(a|aa)*(a|aa)*c"),
    "100,000 choices": of_field("choice", ["x"] * (10 * MAX_CHOICES), param="structured_outputs.choice"),
    "a choice of 1 MB": of_field("choice", ["x" * 1_000_000], param="structured_outputs.choice", words=LARGE),
    "no choice": of_field("choice", [], param="structured_outputs.choice"),
    "an empty choice": of_field("choice", ["", "a"], param="structured_outputs.choice"),
    "text that is not a grammar": of_field("grammar", "start: (", param="structured_outputs.grammar"),
    "a grammar without rules for it": of_field("grammar", "start: other", param="structured_outputs.grammar"),
    "a grammar of a number": of_field("grammar", 5, param="structured_outputs.grammar"),
    "a tool of 30,000 properties": of_tool(properties(30_000), param="tools", words=LARGE),
    "a tool of too many values": of_tool(
        {"enum": [1] * 100_001}, param="tools", words="more than 100000 values"
    ),
    "a tool that nests too deep": of_tool(nested(MAX_DEPTH), param="tools.0"),
    "a tool that refers to itself": of_tool(TREE),
    "100,000 tools": Form({"tools": [{}] * 100_000}, param="tools"),
    "two forms": Form(
        {"guided_regex": "a", "response_format": {"type": "json_object"}}, param="guided_regex"
    ),
}


def check(front: PacedFront, form: Form) -> None:
    """Request the structure. Check the answer, its time, and the front's CPU time."""
    pid = front.process.pid
    body = json.dumps({"messages": HELLO, "max_tokens": 2, **form.fields})
    reset_peak(pid)
    before, before_cpu_s, before_s = rss_bytes(pid), cpu_s(pid), time.monotonic()
    response = front.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert time.monotonic() - before_s < MOST_S
    assert cpu_s(pid) - before_cpu_s < MOST_CPU_S
    assert peak_rss_bytes(pid) - before < GROWTH_BYTES
    if not form.param:
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == form.param and form.words in error["message"] and len(response.content) < 6000


@pytest.mark.parametrize("name", FORMS)
def test_a_hostile_form_is_refused_by_name_or_answered(hard_front: PacedFront, name: str) -> None:
    check(hard_front, FORMS[name])


def test_after_all_this_a_form_is_answered(hard_front: PacedFront) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}"}}
    assert hard_front.post(CHAT, json=body).status_code == 200
