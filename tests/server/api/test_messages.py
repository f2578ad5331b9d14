"""A chat's messages reach the template in one form."""

from typing import Any

import pytest

from server.api.parsers.registry import Markup
from server.api.parsers.token_calls import DEEPSEEK
from server.api.prompts import (
    as_text,
    mentions_tools,
    tell,
    template_messages,
    tool_text,
    with_parts,
    with_text_arguments,
)
from server.api.schemas import Message
from server.errors import ApiError
from tests.server.api.parsers.reading import read
from tests.server.api.parsers.texts import TYPES

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def messages(*sent: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([Message.model_validate(each) for each in sent])


def test_a_whole_history_reaches_the_template() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assistant = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "bot"}
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    asked, called, answered = messages(user, assistant, tool)
    assert asked == {"role": "user", "content": "a\nb"}
    assert called == {
        "role": "assistant",
        "name": "bot",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert answered == tool


def test_reasoning_beside_calls_has_gpt_oss_name_too() -> None:
    [message] = messages({"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"})
    assert message["thinking"] == "hm"


def test_reasoning_has_both_names() -> None:
    for field in ("reasoning", "reasoning_content"):
        [message] = messages({"role": "assistant", "content": "x", field: "hm"})
        assert message["reasoning"] == message["reasoning_content"] == "hm"


@pytest.mark.parametrize("sent", [[], None])
def test_no_calls_are_no_calls(sent: Any) -> None:
    assert messages({"role": "assistant", "content": "x", "tool_calls": sent}) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(None, {}), ("", {}), ({"a": 1}, {"a": 1}), ('{"a"', '{"a"'), ("[1]", "[1]"), ("[" * 5000, "[" * 5000)],
)
def test_arguments_are_objects_where_they_can_be(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = messages({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": [{"type": "refusal"}]}, "messages.0.content.0.refusal"),
        ({"tool_calls": {}}, "messages.0.tool_calls"),
        ({"tool_calls": ["f"]}, "messages.0.tool_calls.0.function"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "messages.0.tool_calls.0.function"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_a_wrong_message_says_where(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages({"role": "assistant", **message})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_parts_and_text_arguments_are_other_spellings() -> None:
    history = messages({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]})
    assert [each["content"] for each in with_parts(history)] == [[{"type": "text", "text": "a"}], []]
    assert with_text_arguments(history)[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_template_that_knows_no_calls_gets_them_as_text() -> None:
    history = messages(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
    )
    user, assistant, tool = as_text(history)
    assert user == {"role": "user", "content": "a"}
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": text}
    assert tool == {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}
    assert mentions_tools(history) and not mentions_tools(history[:1])


def test_the_model_is_told_at_the_beginning() -> None:
    user, system = messages({"role": "user", "content": "a"}, {"role": "system", "content": "b"})
    assert tell([user], "T") == [{"role": "system", "content": "T"}, user]
    assert tell([system, user], "T") == [{"role": "system", "content": "b\n\nT"}, user]
    assert tell([user], "T", role="user") == [{"role": "user", "content": "T\n\na"}]


def test_a_model_is_told_of_tools_in_the_form_that_is_read() -> None:
    for form in ("hermes", "deepseek_v3", "deepseek_v31"):
        shown = tool_text([TOOL], form)
        assert '"object"' in shown
        call = shown[shown.index("<tool_call>" if form == "hermes" else DEEPSEEK.section[0]) :]
        call = call.replace("NAME", "f").replace("ARGUMENTS", "{}").replace("{...}", "{}")
        assert read(lambda form=form: Markup(tools=form).parser("", TYPES), call).calls == [("f", "{}")]  # type: ignore[misc]
