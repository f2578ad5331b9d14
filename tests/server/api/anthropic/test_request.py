"""/v1/messages: conversion of content blocks to chat messages, and of the body to the equivalent chat request."""

import json
from typing import Any

import pytest

from server.api.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    messages_of,
    prompt_request,
)
from server.front.errors import ApiError

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"properties": {"a": {"type": "integer"}}}}


def body_of(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": HELLO} | fields)


def asked(**fields: Any) -> dict[str, Any]:
    """Return the fields that the chat request sets."""
    return chat_request(body_of(**fields)).model_dump(exclude_unset=True)


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def test_a_conversation_with_tools_is_a_chat_with_tools() -> None:
    messages = [
        {"role": "user", "content": text("1", "2")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                *text("I ", "add"),
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": "ä"}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
                {"type": "tool_result", "tool_use_id": "t2", "content": text("4", "5"), "is_error": True},
                *text("go on"),
            ],
        },
    ]
    chat = messages_of(body_of(messages=messages, system=text("be", "brief")))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": "ä"}'}}
    assert chat == [
        {"role": "system", "content": "be\n\nbrief"},
        {"role": "user", "content": text("1", "2")},
        {
            "role": "assistant",
            "content": "I add",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", **call},
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": "4\n5"},
        {"role": "user", "content": text("go on")},
    ]


def test_system_messages_between_the_turns_join_the_first() -> None:
    messages = [{"role": "system", "content": "b"}, *HELLO, {"role": "system", "content": text("c")}]
    assert messages_of(body_of(messages=messages, system="a"))[0] == {
        "role": "system",
        "content": "a\n\nb\n\nc",
    }


def test_a_block_that_differs_in_every_request_does_not_spoil_the_prefix() -> None:
    system = text("x-anthropic-billing-header: cch=1234", "be brief")
    assert messages_of(body_of(system=system))[0]["content"] == "be brief"


def test_a_call_without_text_has_no_content() -> None:
    blocks = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    assert messages_of(body_of(messages=[{"role": "assistant", "content": blocks}]))[0]["content"] is None


def test_a_conversation_of_nothing_is_a_400() -> None:
    with pytest.raises(ApiError, match="messages contains no text"):
        asked(messages=[{"role": "system", "content": ""}])


def test_an_empty_user_message_is_a_400() -> None:
    with pytest.raises(ApiError, match=r"messages\.0\.content is empty"):
        messages_of(body_of(messages=[{"role": "user", "content": []}]))


def test_sampling_is_chat_s() -> None:
    fields = asked(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], stream=True, metadata={"user_id": "u"}
    )
    expected = {"model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["x"], "stream": True}
    assert fields | expected == fields and fields["max_tokens"] == 9


def test_tools_and_their_choice_are_chat_s() -> None:
    fields = asked(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "description": "adds", "parameters": parameters}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == ("required", False)
    assert asked(tools=[TOOL], tool_choice={"type": "none"})["tool_choice"] == "none"
    named = asked(tools=[TOOL], tool_choice={"type": "tool", "name": "add"})["tool_choice"]
    assert named == {"type": "function", "function": {"name": "add"}}


def test_thinking_effort_and_format_are_passed_on() -> None:
    assert (
        asked(thinking={"type": "enabled", "budget_tokens": 1024})["chat_template_kwargs"]["enable_thinking"]
        is True
    )
    assert asked(thinking={"type": "disabled"})["chat_template_kwargs"]["enable_thinking"] is False
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    fields = asked(output_config=config)
    assert fields["reasoning_effort"] == "low"
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "chat_template_kwargs" not in asked()


def test_a_last_message_of_the_assistant_s_is_continued() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    assert asked(messages=begun)["continue_final_message"] is True
    called = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    ]
    assert "continue_final_message" not in asked(messages=called)


def test_counting_needs_no_max_tokens_and_asks_for_the_same_prompt() -> None:
    fields = {"model": "m", "messages": HELLO, "system": "s", "tools": [TOOL]}
    counted = prompt_request(CountTokensRequest.model_validate(fields))
    answered = chat_request(MessagesRequest.model_validate(fields | {"max_tokens": 5}))
    assert counted.messages == answered.messages
    assert json.dumps(counted.model_dump()["tools"]) == json.dumps(answered.model_dump()["tools"])
