"""A call that a limit or the client's stop cuts off is not reported as a complete one, in any of the four APIs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.service.front_process import FrontProcess

SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "cwd": {"type": "string"}},
    "required": ["command", "cwd"],
}
FUNCTION = {"name": "run", "parameters": SCHEMA}
WHOLE = {"command": "rm -rf /tmp/build```; ls", "cwd": "/"}
CALL = f'{{"name": "run", "arguments": {json.dumps(WHOLE)}}}'
STOP = "```"
Json = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A client's view of an answer."""

    calls: list[Any]  # arguments, decoded if they are JSON
    reason: str


@dataclass(frozen=True)
class Api:
    """An API: a request's body, and how to read whole and streamed answers."""

    path: str
    body: Callable[[str, list[str], int], Json]  # from the user's text, stops and the token limit
    seen: Callable[[Json], Seen]
    seen_in: Callable[[list[Json]], Seen]
    required: Any  # the tool_choice that requires a call
    reasons: tuple[str, str, str]  # for a complete call, a stop and a limit


def messages(word: str) -> list[Json]:
    return [{"role": "user", "content": word}]


def decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def chat_body(word: str, stop: list[str], limit: int) -> Json:
    tools = [{"type": "function", "function": FUNCTION}]
    return {"messages": messages(word), "tools": tools, "stop": stop, "max_tokens": limit}


def chat_seen(answer: Json) -> Seen:
    [choice] = answer["choices"]
    calls = choice["message"].get("tool_calls", [])
    return Seen([decoded(call["function"]["arguments"]) for call in calls], choice["finish_reason"])


def chat_seen_in(events: list[Json]) -> Seen:
    choices = [choice for event in events for choice in event["choices"]]
    grown = [
        call["function"]["arguments"] for each in choices for call in each["delta"].get("tool_calls", [])
    ]
    return Seen([decoded("".join(grown))] if grown else [], choices[-1]["finish_reason"])


def message_body(word: str, stop: list[str], limit: int) -> Json:
    tools = [{"name": "run", "input_schema": SCHEMA}]
    return {"messages": messages(word), "tools": tools, "stop_sequences": stop, "max_tokens": limit}


def message_seen(answer: Json) -> Seen:
    calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    return Seen(calls, answer["stop_reason"])


def message_seen_in(events: list[Json]) -> Seen:
    grown = [
        event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"
    ]
    return Seen([decoded("".join(grown))] if grown else [], events[-2]["delta"]["stop_reason"])


def response_body(word: str, stop: list[str], limit: int) -> Json:
    tools = [{"type": "function", **FUNCTION}]
    return {"input": word, "tools": tools, "stop": stop, "max_output_tokens": limit}


def response_seen(answer: Json) -> Seen:
    calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
    return Seen([decoded(arguments) for arguments in calls], answer["status"])


def response_seen_in(events: list[Json]) -> Seen:
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    completed = [item["arguments"] for item in done if item["status"] == "completed"]
    whole = response_seen(events[-1]["response"])
    assert whole.calls == [decoded(arguments) for arguments in completed]
    return whole


def ollama_body(word: str, stop: list[str], limit: int) -> Json:
    tools = [{"type": "function", "function": FUNCTION}]
    options = {"stop": stop, "num_predict": limit}
    return {"model": "tiny", "messages": messages(word), "tools": tools, "options": options, "stream": False}


def ollama_seen(answer: Json) -> Seen:
    return ollama_seen_in([answer])


def ollama_seen_in(events: list[Json]) -> Seen:
    calls = [call for event in events for call in event["message"].get("tool_calls", [])]
    return Seen([call["function"]["arguments"] for call in calls], events[-1]["done_reason"])


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        chat_body,
        chat_seen,
        chat_seen_in,
        "required",
        ("tool_calls", "stop", "length"),
    ),
    "messages": Api(
        "/v1/messages",
        message_body,
        message_seen,
        message_seen_in,
        {"type": "any"},
        ("tool_use", "stop_sequence", "max_tokens"),
    ),
    "responses": Api(
        "/v1/responses",
        response_body,
        response_seen,
        response_seen_in,
        "required",
        ("completed", "completed", "incomplete"),
    ),
    "ollama": Api("/api/chat", ollama_body, ollama_seen, ollama_seen_in, None, ("stop", "stop", "length")),
}


def ask(front: FrontProcess, api: Api, body: Json, *, streamed: bool) -> Seen:
    answer = front.post(api.path, json={**body, "stream": streamed})
    assert answer.status_code == 200, answer.text
    if not streamed:
        return api.seen(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return api.seen_in([json.loads(line) for line in lines if line.startswith("{")])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("name", "is_required"),
    [
        (name, required)
        for name, api in APIS.items()
        for required in (False, True)
        if api.required or not required
    ],
)
def test_a_stop_inside_a_call_leaves_no_complete_call(
    front: FrontProcess, name: str, is_required: bool, streamed: bool
) -> None:
    api, word = APIS[name], f"cut-{name}-{is_required}"
    front.script(word, f"[{CALL}]" if is_required else f"<tool_call>\n{CALL}\n</tool_call>")
    choice = {"tool_choice": api.required} if is_required else {}
    whole = ask(front, api, {**api.body(word, [], 200), **choice}, streamed=streamed)
    assert whole == Seen([WHOLE], api.reasons[0])
    cut = ask(front, api, {**api.body(word, [STOP], 200), **choice}, streamed=streamed)
    # Streams of chat and messages have sent the beginning of the arguments before the stop.
    sent = ['{"command": "rm -rf /tmp/build'] if streamed and name in ("chat", "messages") else []
    assert cut == Seen(sent, api.reasons[1])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["responses", "ollama"])
def test_a_limit_inside_a_call_leaves_no_call(front: FrontProcess, name: str, streamed: bool) -> None:
    api, word = APIS[name], f"limit-{name}"
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    front.script(word, text)
    limit = len(front.encode(text[: text.index(STOP)]))
    assert ask(front, api, api.body(word, [], limit), streamed=streamed) == Seen([], api.reasons[2])


@pytest.mark.parametrize("name", APIS)
def test_a_stop_after_the_arguments_leaves_the_call_complete(front: FrontProcess, name: str) -> None:
    api, word = APIS[name], f"after-{name}"
    front.script(word, f"<tool_call>\n{CALL}\n</tool_call>")
    assert ask(front, api, api.body(word, ["</tool_call>"], 200), streamed=False) == Seen(
        [WHOLE], api.reasons[0]
    )


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_a_stop_token_inside_a_call_leaves_no_complete_call(front: FrontProcess, name: str) -> None:
    api, word = APIS[name], f"token-{name}"
    token_ids = front.encode(f"<tool_call>\n{CALL[: CALL.index(STOP) + 1]}")
    front.script(word, token_ids)
    body = {**api.body(word, [], 200), "stop_token_ids": token_ids[-1:]}
    assert ask(front, api, body, streamed=False) == Seen([], api.reasons[1])


def test_a_complete_call_before_a_cut_one_stays(front: FrontProcess) -> None:
    front.script(
        "cut-second", f"<tool_call>{CALL.replace(STOP, '')}</tool_call><tool_call>{CALL}</tool_call>"
    )
    first = {**WHOLE, "command": "rm -rf /tmp/build; ls"}
    for api in APIS.values():
        cut = ask(front, api, api.body("cut-second", [STOP], 200), streamed=False)
        assert cut == Seen([first], api.reasons[1])
