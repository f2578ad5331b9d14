"""Tools and reasoning through /v1/chat/completions, with the official client and a rank that sends a scripted text."""

import json
from typing import Any

import openai
import pytest

from tests.server.api.openai.test_chat import HELLO, chat, said_of, say
from tests.support.service.front_process import FrontProcess

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_time")
]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
TWO = f"I look.\n{CALL}\n{CALL.replace('weather', 'time')}"
LIST = (
    '[{"name": "get_time", "arguments": {"city": "A"}}, {"name": "get_weather", "arguments": {"city": "B"}}]'
)
THOUGHT = "<think>\nHm.\n</think>\n\nYes."


def add_up(chunks: list[Any]) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """Return a stream's content, reasoning, calls and finish reasons, and check the rules of deltas."""
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    reasons: list[str] = []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        delta = choice.delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function") and call.id.startswith("call_")
                calls.append((call.function.name, ""))
            else:
                assert call.function.name is None
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, reasoning, calls, reasons


def test_the_model_s_own_calls_are_found(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-auto", CALL)
    [choice] = chat(client, "t-auto", tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_") and len(call.id) >= 24 and call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Łódź"})
    prompt = front.decode(front.asked("t-auto").prompt_ids)
    assert prompt.startswith(
        "<|start|>system\nCall with <tool_call>: get_weather get_time<|end|>\n<|start|>user"
    )


def test_calls_stream_with_one_id_and_one_name_each(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-stream", TWO)
    content, _, calls, reasons = add_up(list(chat(client, "t-stream", tools=TOOLS, stream=True)))
    assert content == "I look." and reasons == ["tool_calls"]
    assert [name for name, _ in calls] == ["get_weather", "get_time"]
    assert [json.loads(arguments) for _, arguments in calls] == [{"city": "Łódź"}] * 2


def test_the_client_s_own_stream_helper_puts_calls_together(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("t-helper", TWO)
    tools: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    messages: Any = [{"role": "user", "content": "t-helper"}]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "I look." and message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [{"city": "Łódź"}] * 2


def test_logprobs_come_with_every_token_of_a_call(front: FrontProcess, client: openai.OpenAI) -> None:
    script = front.script("t-logprobs", CALL)
    chunks = list(chat(client, "t-logprobs", tools=TOOLS, stream=True, logprobs=True))
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert len(entries) == len(script.token_ids)
    assert add_up(chunks)[2] == [("get_weather", '{"city": "Łódź"}')]


def test_without_tools_markup_is_content(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-plain", "a<|noise|>b")
    assert chat(client, "t-plain").choices[0].message.content == "ab"
    front.script("t-none", "just text")
    answer = chat(client, "t-none", tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("just text", None)
    assert "get_weather" not in front.decode(front.asked("t-none").prompt_ids)


def test_special_tokens_that_are_no_markup_stay_hidden(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-noise", f"a<|noise|>b{CALL}<|noise|>")
    [choice] = chat(client, "t-noise", tools=TOOLS).choices
    assert choice.message.content == "ab" and len(choice.message.tool_calls) == 1
    shown = chat(client, "t-noise", tools=TOOLS, extra_body={"skip_special_tokens": False}).choices[0]
    assert shown.message.content == "a<|noise|>b<|noise|>"


def test_one_call_at_most_where_the_client_wants_one(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-single", TWO)
    answer = chat(client, "t-single", tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]
    chunks = list(chat(client, "t-single", tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert [name for name, _ in add_up(chunks)[2]] == ["get_weather"]


def test_a_call_that_is_cut_off_ends_with_length(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-length", CALL)
    [choice] = chat(client, "t-length", tools=TOOLS, max_tokens=40).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "calls", "reason", "content"),
    [
        ("required", LIST, [("get_time", '{"city": "A"}'), ("get_weather", '{"city": "B"}')], "tool_calls", None),
        (NAMED, '{"city": "A"}', [("get_time", '{"city": "A"}')], "stop", ""),
    ],
    ids=["required: a list of calls", "named: its arguments"],
)  # fmt: skip
def test_calls_that_must_be_made_are_bound_to_their_form(
    front: FrontProcess,
    client: openai.OpenAI,
    streamed: bool,
    choice: Any,
    text: str,
    calls: list[tuple[str, str]],
    reason: str,
    content: str | None,
) -> None:
    word = f"t-{reason}{streamed}"
    front.script(word, text)
    answer = chat(client, word, tools=TOOLS, tool_choice=choice, stream=streamed)
    if streamed:
        assert add_up(list(answer)) == ("", "", calls, [reason])
    else:
        [one] = answer.choices
        assert (one.finish_reason, one.message.content) == (reason, content)
        assert [(call.function.name, call.function.arguments) for call in one.message.tool_calls] == calls
    structure = front.asked(word).params.structure
    assert structure is not None
    schema = json.loads(structure.text)
    assert schema == TOOLS[1]["function"]["parameters"] if choice is NAMED else schema["type"] == "array"


def test_an_answer_in_the_client_s_own_form_has_no_calls(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-form", CALL)
    [choice] = chat(client, "t-form", tools=TOOLS, response_format={"type": "json_object"}).choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_is_told_from_content(front: FrontProcess, client: openai.OpenAI, streamed: bool) -> None:
    word = f"t-think{streamed}"
    front.script(word, THOUGHT)
    answer = chat(client, word, stream=streamed)
    if streamed:
        content, reasoning, _, reasons = add_up(list(answer))
        assert reasons == ["stop"]
    else:
        message = answer.choices[0].message
        content, reasoning = message.content, message.reasoning_content
        assert message.reasoning == reasoning
    assert (content, reasoning) == ("Yes.", "Hm.")


def test_reasoning_can_be_left_out(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-quiet", THOUGHT)
    how = {"extra_body": {"include_reasoning": False}}
    message = chat(client, "t-quiet", **how).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", None)
    assert add_up(list(chat(client, "t-quiet", stream=True, **how)))[:2] == ("Yes.", "")


def test_the_template_may_have_opened_the_reasoning(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-open", "Hm.\n</think>\n\nYes.")
    how: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = chat(client, "t-open", **how).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    front.script("t-bound", 'Hm.\n</think>\n\n{"city": "A"}')
    [choice] = chat(client, "t-bound", tools=TOOLS, tool_choice=NAMED, **how).choices
    assert choice.message.reasoning_content == "Hm."
    assert choice.message.tool_calls[0].function.arguments == '{"city": "A"}'
    structure = front.asked("t-bound").params.structure
    assert structure is not None and structure.after == "</think>"


def test_a_whole_history_is_rendered(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-history", "5 degrees.")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "t-history"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},  # type: ignore[list-item, typeddict-unknown-key]
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
        ],
        tools=TOOLS,
    )
    assert answer.choices[0].message.content == "5 degrees." and answer.choices[0].finish_reason == "stop"
    prompt = front.decode(front.asked("t-history").prompt_ids)
    called = '<think>Hm.</think><tool_call>f{"a": 1}</tool_call><|end|>'
    assert f"<|start|>assistant\n{called}\n<|start|>tool\n5<|end|>" in prompt


def test_n_choices_have_their_own_calls(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("t-n", CALL)
    choices = chat(client, "t-n", tools=TOOLS, n=2).choices
    ids = {choice.message.tool_calls[0].id for choice in choices}
    assert len(ids) == 2


# The tests below follow vLLM's published tests (tests/tool_use).


def test_no_tool_choice_is_as_null(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script(
        "p-null", '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
    )
    for choice in ({}, {"tool_choice": None}):
        answer = say(client, said_of("p-null"), tools=TOOLS, max_completion_tokens=200, **choice)
        assert answer.choices[0].finish_reason == "tool_calls"
    assert say(client, extra_body={"tool_choice": None, "structured_outputs": {"regex": "a+"}}).choices


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
            say(client, said_of("p-reason"), stream=True, stream_options={"include_usage": True}, **how)
        )
        usage = chunks[-1].usage
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        answer = say(client, said_of("p-reason"), **how)
        usage, message = answer.usage, answer.choices[0].message
        reasoning, content = message.reasoning or "", message.content
    assert content.strip() == "two" and bool(reasoning) is (shown is not False)
    num_thoughts = len(front.encode("hm, so and so"))
    assert num_thoughts <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


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
    answer = say(client, history, tools=TOOLS)
    assert answer.choices[0].finish_reason != "tool_calls" and answer.choices[0].message.content is not None


@pytest.mark.parametrize(
    ("choice", "text"), [("required", '[{"name": "get_time", "arguments": {"city": "A'), (NAMED, "{")]
)
def test_a_call_that_must_be_made_and_is_cut_off_is_none(
    front: FrontProcess, client: openai.OpenAI, choice: Any, text: str
) -> None:
    word = f"t-cut{len(text)}"
    front.script(word, f"{text} and more")
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": len(front.encode(text))}
    [answer] = chat(client, word, **how).choices
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
