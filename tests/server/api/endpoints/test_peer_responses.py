"""What vLLM's published tests of /v1/responses assert, of ours.

After tests/entrypoints/openai/responses and tests/tool_use/test_responses_request_validations.py of vLLM; what depends
on a real model, on built-in tools or on websockets is left out. Background and storage have tests of their own.
"""

from typing import Any

import openai
import openai.types.responses as types
import pytest

from tests.support.front_process import FrontProcess

KEY = {"Authorization": "Bearer sesame"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get current weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
NAMED = {"type": "function", "name": "get_weather"}
PAIRS = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}
CALL = (
    '<think>hm</think>\n<tool_call>\n{"name": "get_weather", "arguments": {"location": "Rome"}}\n</tool_call>'
)


def create(client: openai.OpenAI, given: Any, **how: Any) -> Any:
    return client.responses.create(input=given, **{"model": "tiny", **how})


def refused(front: FrontProcess, **fields: Any) -> dict[str, Any]:
    response = front.post("/v1/responses", json={"model": "tiny", "input": "Hello", **fields}, headers=KEY)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_no_model_is_the_served_one(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("q-none", "<think>hm</think>\n\nok")
    response = client.responses.create(input="q-none")
    assert (response.status, response.model, response.incomplete_details) == ("completed", "tiny", None)
    assert [item.type for item in response.output] == ["reasoning", "message"]


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}],
        [
            {"role": "system", "content": "Finish with QED."},
            {"role": "user", "content": "What is 5 * 3?"},
            {"role": "assistant", "content": "15. QED."},
            {"role": "user", "content": "Multiply the result by 2."},
        ],
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Be concise."}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Acknowledged."}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "encrypted_content": None,
                "status": "completed",
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Reply."}]},
        ],
        [
            {"type": "message", "role": "user", "content": "Hello."},
            {
                "type": "reasoning",
                "id": "lol",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "We need to respond: greeting."}],
            },
        ],
        [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be concise."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        ],
    ],
)
def test_histories_of_every_shape_are_taken(client: openai.OpenAI, given: Any) -> None:
    response = create(client, given, max_output_tokens=5)
    assert response.status in ("completed", "incomplete") and response.output_text is not None


def test_sampling_extras_are_taken(client: openai.OpenAI) -> None:
    extras = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "stop": ["END"], "ignore_eos": True}
    response = create(client, "Hi", max_output_tokens=5, temperature=0.7, top_p=0.9, extra_body=extras)
    assert response.status == "incomplete" and response.output[0].content[0].text
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("script", ["<think>hm</think>\n\nA cat.", "plain", CALL])
def test_a_stream_s_events_open_and_close_in_order(
    front: FrontProcess, client: openai.OpenAI, script: str
) -> None:
    front.script("q-stack", script)
    how: dict[str, Any] = {"tools": [WEATHER]} if script == CALL else {"tools": []}
    events = list(create(client, "q-stack", stream=True, background=False, **how))
    assert isinstance(events[0], types.ResponseCreatedEvent)
    assert isinstance(events[-1], types.ResponseCompletedEvent)
    stack: list[str] = []
    for event in events:
        if event.type in PAIRS:
            assert stack.pop() == PAIRS[event.type], event.type
        elif event.type in PAIRS.values() and not (event.type.endswith("delta") and stack[-1] == event.type):
            stack.append(event.type)
    assert not stack
    shown = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert shown == events[-1].response.output_text
    items = {event.item.id for event in events if event.type == "response.output_item.added"}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == items


def test_logprobs_come_with_every_piece_of_text(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("q-logprobs", "hello")
    include: Any = ["message.output_text.logprobs"]
    events = list(create(client, "q-logprobs", stream=True, top_logprobs=3, include=include))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(event.logprobs for event in deltas)
    assert all(len(each.top_logprobs) == 3 for event in deltas for each in event.logprobs)
    whole = create(client, "q-logprobs", top_logprobs=5, include=include)
    assert len(whole.output[-1].content[-1].logprobs[0].top_logprobs) == 5


@pytest.mark.parametrize("streams", [True, False])
def test_reasoning_tokens_are_counted(front: FrontProcess, client: openai.OpenAI, streams: bool) -> None:
    front.script("q-reason", "<think>hm, so</think>\n\nA cat.")
    answer = create(client, "q-reason", reasoning={"effort": "low"}, stream=streams)
    response = list(answer)[-1].response if streams else answer
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_effort_none_is_taken(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("q-effort", "56088")
    assert create(client, "q-effort", reasoning={"effort": "none"}).status == "completed"


@pytest.mark.parametrize("choice", ["auto", NAMED])
def test_a_call_goes_back_as_an_item(front: FrontProcess, client: openai.OpenAI, choice: Any) -> None:
    word = f"q-back{choice == 'auto'}"
    front.script(word, CALL if choice == "auto" else '{"location": "Rome"}')
    history: list[Any] = [{"role": "user", "content": word}]
    response = create(client, history, tools=[WEATHER], tool_choice=choice)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.arguments.replace(" ", "")) == ("get_weather", '{"location":"Rome"}')
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}]
    assert create(client, history, max_output_tokens=5).status


def test_a_call_that_is_cut_off_is_no_call(client: openai.OpenAI) -> None:
    response = create(client, "x", tools=[WEATHER], tool_choice="required", max_output_tokens=10)
    assert not [item for item in response.output if item.type == "function_call"]
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("value", [True, False, None])
def test_parallel_tool_calls_null_is_true(client: openai.OpenAI, value: bool | None) -> None:
    response = create(client, "x", max_output_tokens=1, parallel_tool_calls=value)
    assert response.parallel_tool_calls is (value is not False)


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}]
)
def test_a_choice_without_tools_is_none(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert create(client, "x", max_output_tokens=1, **fields).status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "Tool choice 'required' must be specified"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "Tool choice 'required' must be specified"),
        ({"tool_choice": NAMED}, "tool_choice", "not found in 'tools' parameter"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "not found in 'tools' parameter"),
        (
            {"tool_choice": {"type": "function"}, "tools": [WEATHER]},
            "tool_choice.name",
            "not found in 'tools' parameter",
        ),
        (
            {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]},
            "tool_choice",
            "not found in 'tools' parameter",
        ),
        ({"seed": -(2**63) - 1}, "seed", "greater_than_equal"),
        ({"seed": 2**63}, "seed", "less_than_equal"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
            },
            "structured_outputs",
            "Cannot specify both structured_outputs and text.format",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/nowhere"}}}},
            "text.format",
            "text.format cannot be compiled",
        ),
        (
            {"background": True, "store": False},
            "background",
            "background can only be used when `store` is true",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "tools.0.name"),
        ({"previous_response_id": 5}, "previous_response_id", "previous_response_id"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "reasoning.effort"),
    ],
)
def test_an_error_has_the_words_that_are_looked_for(
    front: FrontProcess, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(front, **fields)
    assert words in error["message"] and error["param"] == param


def test_an_unknown_previous_response_is_a_404(front: FrontProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        create(client, "x", previous_response_id="resp_unknown")
