"""What vLLM's published tests of /v1/chat/completions assert of tools and reasoning, of ours."""

import json
from typing import Any

import openai
import pytest

from tests.server.api.endpoints.peer_chat import HELLO, NAMED, WEATHER, chat, said_of
from tests.support.front_process import FrontProcess


def test_no_tool_choice_is_as_null(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script(
        "p-null", '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
    )
    for choice in ({}, {"tool_choice": None}):
        answer = chat(client, said_of("p-null"), tools=[WEATHER], max_completion_tokens=200, **choice)
        assert answer.choices[0].finish_reason == "tool_calls"
    assert chat(client, extra_body={"tool_choice": None, "structured_outputs": {"regex": "a+"}}).choices


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("shown", [True, False, None])
def test_reasoning_is_counted_whether_it_is_shown_or_not(
    front: FrontProcess, client: openai.OpenAI, streams: bool, shown: bool | None
) -> None:
    front.script("p-reason", "<think>hm, so and so</think>\n\ntwo")
    wish = {} if shown is None else {"include_reasoning": shown}
    how: dict[str, Any] = {"max_completion_tokens": 60, "extra_body": wish}
    if streams:
        chunks = list(
            chat(client, said_of("p-reason"), stream=True, stream_options={"include_usage": True}, **how)
        )
        usage = chunks[-1].usage
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        answer = chat(client, said_of("p-reason"), **how)
        usage, message = answer.usage, answer.choices[0].message
        reasoning, content = message.reasoning or "", message.content
    assert content.strip() == "two" and bool(reasoning) is (shown is not False)
    num_thoughts = len(front.encode("hm, so and so"))
    assert num_thoughts <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_effort_none_turns_thinking_off_for_the_template(front: FrontProcess, client: openai.OpenAI) -> None:
    for effort in ("none", "low", "high"):
        assert chat(client, reasoning_effort=effort).choices


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_s_arguments_are_json_and_the_same_in_a_stream(
    front: FrontProcess, client: openai.OpenAI, streams: bool
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Dallas, TX"}}\n</tool_call>'
    front.script("p-call", f"{call}\n{call}")
    answer = chat(client, said_of("p-call"), tools=[WEATHER], max_completion_tokens=300, stream=streams)
    calls: list[tuple[str, str, str]] = []
    if streams:
        for choice in (choice for chunk in answer for choice in chunk.choices):
            assert not choice.delta.tool_calls or len(choice.delta.tool_calls) == 1
            for each in choice.delta.tool_calls or ():
                if each.id:
                    calls.append((each.id, each.function.name, ""))
                head = calls[each.index]
                calls[each.index] = (*head[:2], head[2] + (each.function.arguments or ""))
            assert choice.finish_reason in (None, "tool_calls")
    else:
        message = answer.choices[0].message
        calls = [(each.id, each.function.name, each.function.arguments) for each in message.tool_calls]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert len({call_id for call_id, _, _ in calls}) == 2 and all(
        len(call_id) > 16 for call_id, _, _ in calls
    )
    assert [name for _, name, _ in calls] == ["get_weather"] * 2
    assert [json.loads(text) for _, _, text in calls] == [{"location": "Dallas, TX"}] * 2


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_goes_back_into_the_history(client: openai.OpenAI, arguments: str) -> None:
    call = {"id": "call_12345678901234567", "type": "function"}
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "98 degrees"},
    ]
    answer = chat(client, history, tools=[WEATHER])
    assert answer.choices[0].finish_reason != "tool_calls" and answer.choices[0].message.content is not None


def test_a_named_call_has_empty_content(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-named", '{"location": "Paris"}')
    how: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED, "max_completion_tokens": 50}
    message = chat(client, said_of("p-named"), **how).choices[0].message
    assert message.content == "" and json.loads(message.tool_calls[0].function.arguments) == {
        "location": "Paris"
    }
    reasons = []
    for chunk in chat(client, said_of("p-named"), stream=True, **how):
        assert not chunk.choices[0].delta.content
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert len(reasons) == 1


def test_a_call_that_is_cut_off_before_its_name_is_none(client: openai.OpenAI) -> None:
    choice = chat(client, tools=[WEATHER], tool_choice="required", max_completion_tokens=1).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
