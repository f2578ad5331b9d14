"""/v1/responses: conversion of items to chat messages, and of the body to the equivalent chat request."""

from typing import Any

from server.api.openai.responses.request import ResponsesRequest, chat_request, messages_of

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def asked(**fields: Any) -> dict[str, Any]:
    """Return the fields that the chat request sets."""
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return chat_request(body, messages_of(body.input)).model_dump(exclude_unset=True)


def test_the_items_of_one_answer_become_one_message() -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}],
        },
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "so"}],
            "id": "m",
        },
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    ]
    assert messages_of(items) == [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
    ]


def test_two_assistant_messages_stay_two() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [message["content"] for message in messages_of(items)] == ["a", "b"]


def test_instructions_and_system_messages_at_the_head_are_one_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "late"},
    ]
    roles = [
        (message["role"], message["content"]) for message in asked(instructions="a", input=items)["messages"]
    ]
    assert roles == [("system", "a\n\nb"), ("user", "u"), ("system", "late")]


def test_a_system_message_with_an_image_stays_apart_from_the_instructions() -> None:
    image = {"type": "input_image", "image_url": "https://x/a.png"}
    items = [
        {"role": "system", "content": "b"},
        {"role": "system", "content": [{"type": "input_text", "text": "c"}, image]},
        {"role": "user", "content": "u"},
    ]
    first, second, third = asked(instructions="a", input=items)["messages"]
    assert (first["content"], third["content"]) == ("a\n\nb", "u")
    assert second["role"] == "system" and [part["type"] for part in second["content"]] == [
        "text",
        "input_image",
    ]


def test_sampling_fields_and_vllm_s_extras_are_chat_s() -> None:
    fields = asked(
        model="m",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        top_k=3,
        seed=1,
        stop=["x"],
        guided_regex="a+",
    )
    expected = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 7,
        "top_k": 3,
        "seed": 1,
    }
    assert fields | expected == fields and fields["stop"] == ["x"] and fields["guided_regex"] == "a+"
    assert "logprobs" not in fields


def test_tools_and_their_choice_are_nested_as_chat_wants_them() -> None:
    tool = {
        "type": "function",
        "name": "add",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": True,
    }
    fields = asked(tools=[tool], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False)
    assert fields["tools"] == [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    ]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert fields["parallel_tool_calls"] is False
    assert asked(tools=[tool], tool_choice="required")["tool_choice"] == "required"


def test_allowed_tools_leave_the_others_out() -> None:
    tools = [{"type": "function", "name": name} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    fields = asked(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["b"]
    assert fields["tool_choice"] == "required"


def test_the_text_s_format_is_chat_s_response_format() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    nested = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert asked(text={"format": schema})["response_format"] == {"type": "json_schema", "json_schema": nested}
    assert asked(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in asked(text={"format": {"type": "text"}, "verbosity": "low"})


def test_reasoning_effort_reaches_the_template() -> None:
    fields = asked(reasoning={"effort": "low"}, chat_template_kwargs={"k": 1})
    assert (fields["reasoning_effort"], fields["chat_template_kwargs"]) == ("low", {"k": 1})
    assert "reasoning_effort" not in asked(reasoning={"summary": "auto"})


def test_an_answer_that_was_cut_short_is_continued() -> None:
    cut = {"role": "assistant", "content": [{"type": "output_text", "text": "so"}], "status": "incomplete"}
    assert asked(input=[{"role": "user", "content": "u"}, cut])["continue_final_message"] is True
    assert "continue_final_message" not in asked(input=[{**cut, "status": "completed"}])
