"""Parsers are chosen from the chat template, or by name."""

from dataclasses import replace

import pytest

from server.api.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Markup, markup_of
from server.api.parsers.thinking import CLOSING
from tests.server.api.parsers.reading import deltas_of
from tests.server.api.parsers.texts import TYPES

DEEPSEEK = "<\uff5ctool\u2581sep\uff5c>"


@pytest.mark.parametrize(
    "template, tools, reasoning",
    [
        ("", "hermes", "none"),
        ("{{ messages }}", "hermes", "none"),
        ("<tool_call>\n{...}</tool_call>", "hermes", "none"),
        ("<think>\n\n</think> <tool_call>", "hermes", "qwen3"),
        ("<tool_call>\n<function=name>", "qwen3_coder", "none"),
        (f"```json {DEEPSEEK} <think>", "deepseek_v3", "qwen3"),
        (f"{DEEPSEEK} </think>", "deepseek_v31", "none"),
        ("<\uff5cDSML\uff5cfunction_calls> <think>", "deepseek_v32", "qwen3"),
        ("<\uff5cDSML\uff5ctool_calls>", "deepseek_v4", "none"),
        ("<tool_call>{{ name }}<arg_key> <think>", "glm45", "glm45"),
        ("<|tool_calls_section_begin|> <think>", "kimi_k2", "kimi_k2"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "none"),
        ("<minimax:tool_call> <think>", "minimax_m2", "minimax_m2"),
        ("<|start|>assistant<|channel|>analysis", "openai", "openai"),
        ("[TOOL_CALLS]", "mistral", "none"),
        ("<tool_calls> <think> <answer>", "hunyuan_a13b", "hunyuan_a13b"),
        ("<tool_call> <think> <response>", "hermes", "ernie45"),
        ("<|tool_call|>", "granite", "none"),
    ],
)
def test_a_template_shows_what_its_model_writes(template: str, tools: str, reasoning: str) -> None:
    assert markup_of(template) == Markup(tools=tools, reasoning=reasoning)


def test_a_name_that_the_user_gives_comes_first() -> None:
    assert markup_of("[TOOL_CALLS]", tools="glm45", reasoning="deepseek_r1") == Markup(
        tools="glm45", reasoning="deepseek_r1"
    )
    assert markup_of("<think>", reasoning="none").reasoning == "none"


def test_every_name_has_a_parser_that_passes_plain_text() -> None:
    for tools in TOOL_PARSERS:
        for reasoning in REASONING_PARSERS:
            parser = markup_of("", tools=tools, reasoning=reasoning).parser("<think></think>", TYPES)
            [*first, last] = deltas_of(parser, ["Hello ", "world"])
            assert "".join(getattr(each, "text", "?") for each in [*first, last]) == "Hello world"


@pytest.mark.parametrize("name", ["minimax_m2", "deepseek_r1"])
def test_an_answer_that_goes_on_is_reasoning_only_where_the_prompt_leaves_it_open(name: str) -> None:
    markup = Markup(reasoning=name)
    assert markup.bound("Assistant:").after == CLOSING, "such models begin with reasoning"
    going_on = replace(markup, continues=True)
    assert going_on.bound("Assistant: The answer is").after == ""
    assert going_on.bound("Assistant: <think>\n").after == CLOSING


def test_markers_are_those_of_the_parsers_in_use() -> None:
    kimi = Markup(tools="kimi_k2", reasoning="kimi_k2")
    assert "<|tool_call_begin|>" in kimi.markers(with_tools=True)
    assert kimi.markers(with_tools=False) == ("<think>", "</think>")
    assert "<|channel|>" in Markup(tools="openai", reasoning="openai").markers(with_tools=False)
    assert Markup().markers(with_tools=True) == ("<tool_call>", "</tool_call>")


def test_the_forms_that_models_can_be_taught() -> None:
    forms = {
        name: Markup(tools=name).taught_form for name in ("hermes", "qwen3", "deepseek_v31", "glm45", "none")
    }
    assert forms == {
        "hermes": "hermes",
        "qwen3": "hermes",
        "deepseek_v31": "deepseek_v31",
        "glm45": None,
        "none": None,
    }
