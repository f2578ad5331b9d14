"""Endpoints that show a call's arguments as an object send valid JSON, even if the model did not write it."""

import json

import pytest

from tests.support.service.front_process import FrontProcess

PARAMETERS = {"type": "object", "properties": {"n": {"type": "number"}}}
FUNCTION = {"name": "set", "parameters": PARAMETERS}
BODIES = {
    "/v1/messages": {"max_tokens": 99, "tools": [{"name": "set", "input_schema": PARAMETERS}]},
    "/api/chat": {"stream": False, "tools": [{"type": "function", "function": FUNCTION}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_a_number_that_json_cannot_hold_is_text(front: FrontProcess, path: str, number: str) -> None:
    front.script("a-number", f'<tool_call>\n{{"name": "set", "arguments": {{"n": {number}}}}}\n</tool_call>')
    messages = [{"role": "user", "content": "a-number"}]
    answer = front.post(
        path, json={"model": "tiny", "messages": messages, **BODIES[path]}, headers=front.headers
    )
    assert answer.status_code == 200, answer.text
    body = json.loads(answer.text, parse_constant=pytest.fail)
    if path == "/v1/messages":
        [arguments] = [block["input"] for block in body["content"] if block["type"] == "tool_use"]
    else:
        arguments = body["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"n": number}
