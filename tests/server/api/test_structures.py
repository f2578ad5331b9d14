"""Forms over HTTP: OpenAI's field, vLLM's fields, and what is refused."""

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
    """What the official client's parse() is asked for."""

    name: str
    days: list[int]
    kind: Literal["party", "work"]
    place: str | None = None


def asked(front: FrontProcess, word: str) -> Structure | None:
    """The form that a rank was given with a prompt that holds `word`."""
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
