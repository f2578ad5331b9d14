"""Chat histories for templates of every kind: instructions, parts of content, calls that were cut off."""

from pathlib import Path
from typing import Any

import pytest

from server.front.errors import ApiError
from tests.support.requests.chats import rendered

ANY_ROLE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
# A template that silently drops unknown roles, as Qwen3's does. It shows a system message at any position.
DROPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)
# A template that rejects unknown roles and late system messages, as Qwen3.5's does.
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role not in ('user', 'assistant') %}{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
# A template that uses its first message as the system message and drops later ones, as MiniMax-M2's does.
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}[system:{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
KNOWS = (  # as gpt-oss: one instruction, first, in either role
    "{% if messages[0].role in ('system', 'developer') %}[{{ messages[0].role }}:{{ messages[0].content }}]"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
NAMES_ONLY = DROPS + "{% if messages[0].role == 'developer' %}{% endif %}"  # names the role, and drops it


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


ALONE = chat(("developer", "D"), ("user", "u"))
BOTH = chat(("system", "S"), ("developer", "D"), ("user", "u"))
LATE = chat(("user", "u"), ("assistant", "a"), ("developer", "D"), ("user", "v"))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (ANY_ROLE, ALONE, "[system:D][user:u]"),
        (DROPS, ALONE, "[system:D][user:u]"),
        (REFUSES, ALONE, "[system:D][user:u]"),
        (FIRST_ONLY, ALONE, "[system:D][user:u]"),
        (NAMES_ONLY, ALONE, "[system:D][user:u]"),
        (KNOWS, ALONE, "[developer:D][user:u]"),
        (DROPS, BOTH, "[system:S][system:D][user:u]"),
        (REFUSES, BOTH, "[system:S\n\nD][user:u]"),
        (FIRST_ONLY, BOTH, "[system:S\n\nD][user:u]"),
        (KNOWS, BOTH, "[system:S\n\nD][user:u]"),
        (DROPS, LATE, "[user:u][assistant:a][system:D][user:v]"),
        (REFUSES, LATE, "[system:D][user:u][assistant:a][user:v]"),
        (FIRST_ONLY, LATE, "[system:D][user:u][assistant:a][user:v]"),
        (KNOWS, LATE, "[developer:D][user:u][assistant:a][user:v]"),
        (FIRST_ONLY, chat(("system", "S"), ("system", "T"), ("user", "u")), "[system:S\n\nT][user:u]"),
    ],
)
def test_an_instruction_is_in_every_prompt(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert rendered(tmp_path, template, messages=messages) == expected


def test_a_developer_s_tools_are_for_templates_that_know_the_role(tmp_path: Path) -> None:
    shows_tools = "{% for m in messages %}{{ m.role }}{{ m.tools }}{% endfor %}"
    messages = [{"role": "developer", "content": "D", "tools": ["t"]}]
    assert rendered(tmp_path, shows_tools, messages=messages) == "system"


TAKES_EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
THROUGH_A_MACRO = (  # as in Qwen3.5
    "{% macro show(content) %}{% if content is string %}{{ content }}{% elif content is iterable %}"
    "{% for item in content %}{{ item.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
ONLY_PARTS = "{% for m in messages %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endfor %}"
CALLS_IN_CONTENT = (  # one name for content and for calls, as in vLLM's two templates for Mistral
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls is defined %}"
    "{% set tool_calls = m.tool_calls %}{% else %}{% set tool_calls = m.content %}{% endif %}"
    "{% if tool_calls is string %}{{ ' ' + m.content }}{% else %}"
    "{% for tool_call in tool_calls %}{{ tool_call.function.name }}{% endfor %}{% endif %}"
    "{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
USER_PARTS_ONLY = (  # of users only, as in Gemma 4 and MiniMax-M1
    "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}({{ part.text }}){% endfor %}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
TWO = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANY_ROLE, "[system:a\nb][user:a\nb][user:c]"),
        (TAKES_EITHER, "ababc"),
        (THROUGH_A_MACRO, "ababc"),
        (ONLY_PARTS, "(a)(b)(a)(b)(c)"),
        (CALLS_IN_CONTENT, "[INST]a\nb[/INST][INST]a\nb[/INST][INST]c[/INST]"),
        (USER_PARTS_ONLY, "<a\nb>(a)(b)(c)"),
    ],
)
def test_a_template_that_takes_parts_joins_them_in_its_own_way(
    tmp_path: Path, template: str, expected: str
) -> None:
    messages = chat(("system", TWO), ("user", TWO), ("user", "c"))
    assert rendered(tmp_path, template, messages=messages) == expected


def test_a_variable_that_is_content_here_and_calls_there_makes_no_list_of_content(tmp_path: Path) -> None:
    messages = chat(("user", "u"), ("assistant", "a"), ("user", "v"))
    assert rendered(tmp_path, CALLS_IN_CONTENT, messages=messages) == "[INST]u[/INST] a[INST]v[/INST]"


def cut(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "user", "content": "v"},
    ]


PAIRS = (  # mappings only, as in Qwen3.5, Qwen3-Coder and Gemma 4
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% for name, value in call.function.arguments | items %}"
    "{{ name }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
)
PASTES = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ '' + call.function.arguments }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (PAIRS, '{"city": "Pa', "city=Pa;"),
        (PAIRS, '{"city": "Paris", "da', "city=Paris;"),
        (PAIRS, '{"n": 1', "n=1;"),
        (PAIRS, '{"ci', ""),
        (PAIRS, "[1, 2]", "arguments=[1, 2];"),
        (PAIRS, "Paris", "arguments=Paris;"),
        (PAIRS, "[" * 200, f"arguments={'[' * 200};"),
        (PASTES, '{"city": "Pa', '{"city": "Pa'),
    ],
)
def test_a_call_that_was_cut_off_stays_in_the_history(
    tmp_path: Path, template: str, arguments: str, expected: str
) -> None:
    assert rendered(tmp_path, template, messages=cut(arguments)) == expected


def test_a_template_s_own_refusal_is_the_one_that_is_said(tmp_path: Path) -> None:
    refuses = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ApiError, match="no calls"):
        rendered(tmp_path, refuses, messages=cut("{}"))
