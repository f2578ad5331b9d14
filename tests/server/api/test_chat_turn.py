"""A chat's prompt for templates of every kind, and the parsing of one choice."""

from pathlib import Path
from typing import Any

import pytest

from server.api.parsers.deltas import ContentDelta, ReasoningDelta, ToolCallDelta, merge
from server.front.errors import ApiError
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.requests.chats import rendered

TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
PASTES = (  # as DeepSeek's own template does
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ tools | length }}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
KWARGS = "{{ reasoning_effort }} {{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"


def render(directory: Path, template: str, **fields: Any) -> str:
    return rendered(directory, template, **{"messages": HISTORY, **fields})


def test_a_template_that_wants_parts_gets_parts(tmp_path: Path) -> None:
    assert render(tmp_path, PARTS, messages=HISTORY[:1]) == "[text:x]"


def test_a_template_that_pastes_arguments_gets_them_as_text(tmp_path: Path) -> None:
    assert render(tmp_path, PASTES, tools=TOOLS) == '1now{"a": 1}'


def test_a_template_that_knows_no_tools_is_told_of_them(tmp_path: Path) -> None:
    prompt = render(tmp_path, CHAT_TEMPLATE, tools=TOOLS)
    assert prompt.startswith("<|start|>system\nYou can call these functions") and '"name": "now"' in prompt
    assert (
        '<|start|>assistant\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call><|end|>'
        in prompt
    )
    assert "<|start|>user\n<tool_response>\n5\n</tool_response><|end|>" in prompt


def test_a_template_that_takes_no_system_message_is_told_in_the_user_s(tmp_path: Path) -> None:
    strict = CHAT_TEMPLATE.replace("'system', ", "")
    prompt = render(tmp_path, strict, tools=TOOLS)
    assert prompt.startswith("<|start|>user\nYou can call these functions") and "\n\nx<|end|>" in prompt
    with pytest.raises(ApiError, match="unknown role system"):
        render(tmp_path, strict, tools=TOOLS, messages=[{"role": "system", "content": "x"}])


def test_a_chat_without_tools_is_left_alone(tmp_path: Path) -> None:
    prompt = render(tmp_path, CHAT_TEMPLATE, messages=HISTORY[:1], tools=TOOLS, tool_choice="none")
    assert prompt == "<|start|>user\nx<|end|>\n<|start|>assistant\n"


def test_effort_and_the_client_s_own_words_reach_the_template(tmp_path: Path) -> None:
    assert render(tmp_path, KWARGS, messages=HISTORY[:1], reasoning_effort="low") == "low x"
    assert render(tmp_path, KWARGS, messages=HISTORY[:1], reasoning_effort="none") == "none Falsex"
    own = {
        "reasoning_effort": "high",
        "chat_template_kwargs": {"reasoning_effort": "my", "enable_thinking": 1},
    }
    assert render(tmp_path, KWARGS, messages=HISTORY[:1], **own) == "my 1x"


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize"])
def test_the_client_s_words_cannot_be_the_server_s(tmp_path: Path, name: str) -> None:
    with pytest.raises(ApiError, match=name):
        render(tmp_path, KWARGS, messages=HISTORY[:1], chat_template_kwargs={name: []})


CALLS = [ToolCallDelta(0, "{}", "id", "f"), ToolCallDelta(1, "{}", "id2", "g")]


def test_documents_reach_the_template(tmp_path: Path) -> None:
    cites = "{% for each in documents or [] %}[{{ each.title }}]{% endfor %}"
    documents = [{"title": "t", "text": "x"}]
    assert render(tmp_path, cites, messages=HISTORY[:1], documents=documents) == "[t]"
    assert render(tmp_path, cites, messages=HISTORY[:1]) == ""


def test_neighbours_of_one_kind_merge() -> None:
    deltas = [
        ContentDelta("a"),
        ContentDelta("b"),
        CALLS[0],
        ToolCallDelta(0, "x"),
        CALLS[1],
        ReasoningDelta("c"),
    ]
    merged = [ContentDelta("ab"), ToolCallDelta(0, "{}x", "id", "f"), CALLS[1], ReasoningDelta("c")]
    assert merge(deltas) == merged and merge([]) == []
