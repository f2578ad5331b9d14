"""Requests that are wrong as HTTP, as JSON or at depth, as a table: status and parameter, and words that say what to do.

Wrong fields are in tests/server/api/test_refusals.py.
"""

import json
from typing import Any, NamedTuple

import pytest

from tests.support.mutations import RawRequest
from tests.support.paced_front import MODEL, PacedFront
from tests.support.raw_http import RawClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = (("Content-Type", "application/json"),)


class Wrong(NamedTuple):
    """A request, and what its error has to say."""

    path: str
    body: Any  # bytes are sent as they are
    param: str | None
    words: str  # in the message
    status: int = 400
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = JSON


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **fields}


def part(value: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, value]}])


TABLE: dict[str, Wrong] = {
    "unknown path": Wrong("/v1/nothing", {}, None, "Not Found", 404),
    "unknown path with GET": Wrong("/nothing", b"", None, "Not Found", 404, "GET"),
    "wrong method": Wrong(CHAT, b"", None, "Method Not Allowed", 405, "GET"),
    "wrong method on models": Wrong("/v1/models", {}, None, "Method Not Allowed", 405),
    "DELETE": Wrong(CHAT, b"", None, "Method Not Allowed", 405, "DELETE"),
    "unknown model by GET": Wrong("/v1/models/gpt-4", b"", "model", "'tiny'", 404, "GET"),
    "unknown model": Wrong(CHAT, chat(model="gpt-4"), "model", "This server has: 'tiny'", 404),
    "a long unknown model": Wrong(CHAT, chat(model="m" * 9999), "model", "does not exist", 404),
    "no content type": Wrong(CHAT, chat(), None, "Content-Type: application/json", headers=()),
    "text": Wrong(
        CHAT, chat(), None, "Content-Type: application/json", headers=(("Content-Type", "text/plain"),)
    ),
    "no body": Wrong(CHAT, b"", None, "body"),
    "cut JSON": Wrong(CHAT, b'{"model": ', None, "not valid JSON: Expecting value (character 10)"),
    "two values": Wrong(CHAT, b"{} {}", None, "not valid JSON: Extra data"),
    "single quotes": Wrong(CHAT, b"{'a': 1}", None, "not valid JSON: Expecting property name"),
    "not UTF-8": Wrong(CHAT, b'{"model": "\xff"}', None, "position 11"),
    "a number of 5,000 digits": Wrong(CHAT, b'{"seed": %s}' % (b"1" * 5000), None, "digits"),
    "a list": Wrong(CHAT, [1], None, "The body"),
    "a string": Wrong(CHAT, "hello", None, "The body"),
    "null": Wrong(CHAT, b"null", None, "The body"),
    "no messages": Wrong(CHAT, {"model": MODEL}, "messages", "messages is missing"),
    "a message without role": Wrong(
        CHAT, chat(messages=[*HELLO, {"content": "a"}]), "messages.1.role", "is missing"
    ),
    "a part with wrong text": Wrong(
        CHAT, part({"type": "text", "text": ["a"]}), "messages.0.content.1.text", "a string"
    ),
    "stream_options at depth": Wrong(
        CHAT, chat(stream_options={"include_usage": "maybe"}), "stream_options.include_usage", "'maybe'"
    ),
    "a wrong number": Wrong(CHAT, chat(temperature="hot"), "temperature", "'hot'"),
    "n times prompts": Wrong(COMPLETIONS, {"prompt": ["a"] * 100, "n": 2}, "n", "128 choices"),
    "a huge token id": Wrong(COMPLETIONS, {"prompt": [10**400]}, "prompt", "0 to 319"),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_error_says_what_is_wrong(hard_front: PacedFront, name: str) -> None:
    wrong = TABLE[name]
    body = wrong.body if isinstance(wrong.body, bytes) else json.dumps(wrong.body).encode()
    connection = RawClient(hard_front.url, timeout_s=60)
    answer = connection.send(
        RawRequest(path=wrong.path, body=body, method=wrong.method, headers=wrong.headers)
    )
    connection.close()
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (wrong.status, wrong.status, wrong.param), error
    assert wrong.words in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"].endswith("Error")
    assert len(error["message"]) <= 2000


def test_a_wrong_method_is_told_the_right_ones(hard_front: PacedFront) -> None:
    assert hard_front.get(CHAT).headers["allow"] == "POST"


def test_head_and_options_are_no_trouble(hard_front: PacedFront) -> None:
    connection = RawClient(hard_front.url, timeout_s=60)
    for method in ("HEAD", "OPTIONS"):
        answer = connection.send(RawRequest(path=CHAT, body=b"", method=method))
        assert answer.status in (405, 200, 204), method
    connection.close()
