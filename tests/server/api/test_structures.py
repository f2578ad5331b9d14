"""Structured outputs over HTTP: OpenAI's field, vLLM's fields, and refusals."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from scheduler.policy.request import Structure
from tests.server.api.test_refusals import CHAT, COMPLETIONS
from tests.support.service.front_process import FrontProcess

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
LARK = 'start: "x" | "(" start ")"\n'


class Event(BaseModel):
    """The form that the official client's parse() requests."""

    name: str
    days: list[int]
    kind: Literal["party", "work"]
    place: str | None = None


def asked(front: FrontProcess, word: str) -> Structure | None:
    """Return the structure that a rank received with a prompt containing `word`."""
    rank = front.served(word)
    (request,) = [each for each in rank.requests if word in front.decode(each.prompt_ids)]
    return request.params.structure


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": NAMED}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": LARK}}, "grammar", LARK),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"json_object": False, "regex": "b+", "choice": None}}, "regex", "b+"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, "json_schema", SCHEMA),
        ({"guided_regex": "[0-9]{3}"}, "regex", "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"guided_grammar": LARK}, "grammar", LARK),
        ({"guided_json_object": True}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"regex": "[0-9]{3}"}, "regex", "[0-9]{3}"),
        ({"ebnf": LARK, "regex": None}, "grammar", LARK),
        ({"grammar": LARK}, "grammar", LARK),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_reaches_the_rank(
    front: FrontProcess,
    request: pytest.FixtureRequest,
    path: str,
    fields: dict[str, Any],
    kind: str,
    text: Any,
) -> None:
    word = f"f{abs(hash(request.node.name))}"
    prompt = {"messages": [{"role": "user", "content": word}]} if path == CHAT else {"prompt": word}
    response = front.post(path, json={**prompt, "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    structure = asked(front, word)
    assert structure is not None and structure.kind == kind
    assert (json.loads(structure.text) if kind in ("json_schema", "choice") else structure.text) == text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"structured_outputs": {}},
    ],
)
def test_no_form_is_asked_for_by_text_nulls_and_nothing(
    front: FrontProcess, request: pytest.FixtureRequest, fields: dict[str, Any]
) -> None:
    word = f"n{abs(hash(request.node.name))}"
    assert front.post(COMPLETIONS, json={"prompt": word, "max_tokens": 1, **fields}).status_code == 200
    assert asked(front, word) is None


def test_the_official_clients_parse_gives_an_object(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("s-parse", '{"name": "fair", "days": [1, 2], "kind": "party", "place": null}')
    answer = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "s-parse"}], response_format=Event
    )
    assert answer.choices[0].message.parsed == Event(name="fair", days=[1, 2], kind="party")
    structure = asked(front, "s-parse")
    assert structure is not None and structure.kind == "json_schema"


def test_a_form_is_streamed_like_any_answer(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("s-stream", '{"name": "fair", "days": [], "kind": "work", "place": null}')
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "s-stream"}], response_format=Event
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Event(name="fair", days=[], kind="work")
    assert final.choices[0].finish_reason == "stop"


def test_compact_json_leaves_no_room_for_blanks(front: FrontProcess) -> None:
    fields = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    assert front.post(COMPLETIONS, json={"prompt": "s-compact", "max_tokens": 1, **fields}).status_code == 200
    structure = asked(front, "s-compact")
    assert structure is not None and json.loads(structure.text)["x-guidance"] == {
        "whitespace_flexible": False
    }


BINDING = {"type": "json_schema", "schema": SCHEMA}
OWN = {
    CHAT: {"response_format", "structured_outputs"},
    COMPLETIONS: {"response_format", "structured_outputs"},
    "/v1/responses": {"text", "response_format", "structured_outputs"},
    "/v1/messages": {"output_config", "output_format"},
    "/api/chat": {"format"},
    "/api/generate": {"format"},
}
ELSEWHERE: dict[str, Any] = {
    "response_format": NAMED,
    "structured_outputs": {"json": SCHEMA},
    "text": {"format": {"name": "one", **BINDING}},
    "output_config": {"format": BINDING},
    "output_format": BINDING,
    "format": SCHEMA,
}


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_form_under_any_api_s_name_binds_or_is_refused(front: FrontProcess, path: str, name: str) -> None:
    word = f"e{name}{path}".replace("_", "").replace("/", "")
    chat = {"messages": [{"role": "user", "content": word}]}
    of_path: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": word},
        "/v1/messages": chat,
        CHAT: chat,
        "/api/chat": chat,
    }
    body = {"model": "tiny", "max_tokens": 2, "stream": False, **of_path.get(path, {"prompt": word})}
    response = front.post(path, json={**body, name: ELSEWHERE[name]})
    if name in OWN[path]:
        assert response.status_code == 200, response.text
        structure = asked(front, word)
        assert structure is not None and json.loads(structure.text) == SCHEMA
    else:
        assert (
            response.status_code == 400 and f"{name} is not a field of this endpoint; use " in response.text
        )


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"stop_sequences": ["a"]}, "stop_sequences is not a field of this endpoint; use stop."),
        ("/v1/messages", {"stop": ["a"]}, "stop is not a field of this endpoint; use stop_sequences."),
        ("/v1/messages", {"output_format": {"type": "json_object"}}, "output_format must be"),
        (
            "/v1/messages",
            {"output_format": BINDING, "output_config": {"format": BINDING}},
            "output_format and output_config.format cannot both be set",
        ),
        ("/api/chat", {"stop": "a"}, "stop is not a field of this endpoint; use options.stop."),
        (CHAT, {"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn is unknown"),
        (CHAT, {"regex": "a", "response_format": NAMED}, "one kind of constraints"),
        (CHAT, {"json_schema": 5}, "json_schema must be a JSON schema"),
        ("/v1/responses", {"text": {"format": {"name": "one", **BINDING}}, "response_format": NAMED}, "both"),
    ],
)
def test_what_cannot_bind_is_named(
    front: FrontProcess, path: str, fields: dict[str, Any], words: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "tiny", "max_tokens": 2, **({"input": "x"} if path == "/v1/responses" else chat)}
    response = front.post(path, json=body | fields)
    assert response.status_code == 400 and words in response.text, response.text


@pytest.mark.parametrize(
    "fields", [{"text": {"verbosity": "low"}}, {"format": ""}, {"output_config": {"effort": "low"}}]
)
def test_what_binds_nothing_is_no_form(front: FrontProcess, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert front.post(CHAT, json=body | fields).status_code == 200
