"""What templates take is read from their code."""

import pytest

from server.front.tokenizer import TemplateFacts, facts_of

PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
NAMED = "{% for m in messages %}{% set c = m.content | list %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
GOT = "{% for m in messages %}{% for part in m.get('content') %}{{ part.text }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
NAMED_BOTH = (  # as Kimi-K2 does
    "{% macro show(m) %}{% set c = m.get('content') %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wants_parts"),
    [(PARTS, True), (NAMED, True), (GOT, True), (BOTH, False), (NAMED_BOTH, False), (TEXT, False)],
)
def test_a_template_that_only_loops_over_content_wants_parts(template: str, wants_parts: bool) -> None:
    assert facts_of(template).wants_parts is wants_parts


def test_a_template_knows_tools_if_it_names_them() -> None:
    assert facts_of("{% if tools %}{{ tools | tojson }}{% endif %}").knows_tools
    assert not facts_of("tools {{ message.tools }}").knows_tools


def test_a_template_may_know_calls_and_not_tools() -> None:
    facts = facts_of("{% for m in messages %}{{ m['tool_calls'] }}{% endfor %}")
    assert facts.knows_calls and not facts.knows_tools


def test_transformers_own_tags_are_no_obstacle() -> None:
    facts = facts_of(
        "{%- generation -%}{{ tools }}{% endgeneration %}{% for x in y %}{% break %}{% endfor %}"
    )
    assert facts.knows_tools


def test_several_templates_count_as_one() -> None:
    facts = facts_of({"default": PARTS, "tool_use": "<tool_call>"})
    assert facts.wants_parts and facts.knows_tools and "<tool_call>" in facts.text


def test_what_cannot_be_read_is_taken_as_text() -> None:
    assert facts_of("{% nonsense tools %}") == TemplateFacts(text="{% nonsense tools %}", knows_tools=True)
    assert facts_of(None) == facts_of("") == TemplateFacts()
