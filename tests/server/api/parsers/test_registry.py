"""The selection of parsers by the chat template or by name."""

from dataclasses import replace

import pytest

from server.api.parsers.registry import (
    Markup,
    markup_of,
    shows_known_calls,
)
from server.api.parsers.thinking import CLOSING
from server.options.parser_names import REASONING_PARSERS, TOOL_PARSERS
from tests.server.api.parsers.reading import Said, deltas_of, said
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
        ("'<|tool_call>call:' + name <|channel>thought", "gemma4", "gemma4"),
        ("<|im_start|> <|tool_call_start|> <think>", "lfm2", "qwen3"),
        ('"List of tools: <|tool_list_start|>[" <|im_start|>', "lfm2", "none"),
        ("<tool_calls> <tool_call> <tool_sep> <arg_key> <think>", "hy_v3", "hy_v3"),
        ("<tool_sep:opensource> <think:opensource>", "hy_v3", "hy_v3"),
        ("<|think|> <|tool_call:begin|>", "solar_open", "solar_open"),
        ("<|START_ACTION|> <|START_THINKING|> <|START_TEXT|>", "cohere_command4", "cohere_command4"),
        ("<|START_ACTION|> <|START_THINKING|> <|START_RESPONSE|>", "cohere_command4", "cohere_command3"),
        ("function call<|role_sep|>", "gigachat3", "none"),
        ("<|start|>assistant to=self<|message|><atem:function_calls>", "muse_glimmer", "muse_glimmer"),
        ("use [func_name1(params_name1=params_value1), func_name2(params)]", "llama4_pythonic", "none"),
        ("{% set mark = '\uff5cDSML\uff5c' %}<{{ mark }}function_calls>", "deepseek_v32", "none"),
    ],
)
def test_a_template_shows_what_its_model_writes(template: str, tools: str, reasoning: str) -> None:
    assert markup_of(template) == Markup(tools=tools, reasoning=reasoning)


def test_a_name_that_the_user_gives_comes_first() -> None:
    assert markup_of("[TOOL_CALLS]", tools="glm45", reasoning="deepseek_r1") == Markup(
        tools="glm45", reasoning="deepseek_r1"
    )
    assert markup_of("<think>", reasoning="none").reasoning == "none"


def test_a_template_that_shows_no_known_calls_is_found_out() -> None:
    assert shows_known_calls("<tool_call>\n<function=name>")
    assert not shows_known_calls("{% for tool in tools %}{{ tool }}{% endfor %}[[call]]")


def test_channels_are_read_with_tools_off_and_left_alone_for_another_parser() -> None:
    channel = "<|start|>assistant<|channel|>analysis"
    assert markup_of(channel, tools="none") == Markup(tools="none", reasoning="openai")
    assert markup_of(channel, tools="hermes") == Markup(tools="hermes", reasoning="none")


def test_names_of_vllm_and_sglang_are_taken() -> None:
    vllm = "gemma4 lfm2 hy_v3 cohere_command3 cohere_command4 gigachat3 muse_glimmer llama4_pythonic pythonic minimax"
    sglang = "deepseekv3 deepseekv31 deepseekv32 deepseekv4 glm qwen qwen25 llama3 minimax-m2 gpt-oss hunyuan muse lfm2"
    assert {*vllm.split(), *sglang.split()} <= set(TOOL_PARSERS)
    reasoning = "gemma4 hy_v3 cohere_command3 cohere_command4 muse_glimmer muse deepseek-r1 deepseek-v3 qwen3-thinking"
    assert {*reasoning.split(), "minimax", "hunyuan", "glm47", "mimo"} <= set(REASONING_PARSERS)


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


@pytest.mark.parametrize(
    ("name", "prompt", "header"),
    [
        ("openai", "<|start|>assistant", "<|channel|>final<|message|>"),
        ("openai", "<|start|>assistant<|channel|>final<|message|>It", ""),
        (
            "openai",
            "<|start|>assistant<|channel|>analysis<|message|>Hm",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        ("solar_open", "<|end|><|begin|>assistant", "<|content|>"),
        ("solar_open", "<|begin|>assistant<|think|>Hm", "<|end|><|begin|>assistant<|content|>"),
        ("solar_open", "<|begin|>assistant<|content|>It", ""),
        ("muse", "<|eot|><|start|>assistant", " to=user<|message|>"),
        ("muse", "<|start|>assistant to=self<|message|>Hm", "<|eom|><|start|>assistant to=user<|message|>"),
        ("muse", "<|start|>assistant to=user<|message|>It", ""),
    ],
)
def test_a_bound_answer_in_channels_begins_with_the_header_that_is_missing(
    name: str, prompt: str, header: str
) -> None:
    assert Markup(tools=name, reasoning=name).bound(prompt) == (header, "")


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("openai", "<|start|>assistant<|channel|>analysis<|message|>Let me go"),
        ("solar_open", "<|begin|>assistant<|think|>Let me go"),
        ("muse", "<|start|>assistant to=self<|message|>Let me go"),
        ("gemma4", "<|turn>model\n<|channel>thought\nLet me go"),
        ("hy_v3", "<think:opensource>Let me go"),
        ("cohere_command4", "<|CHATBOT_TOKEN|><|START_THINKING|>Let me go"),
    ],
)
def test_a_prefill_within_reasoning_goes_on_in_every_family(name: str, prompt: str) -> None:
    parser = Markup(tools=name, reasoning=name, continues=True).parser(prompt, TYPES)
    assert said(deltas_of(parser, [" on."])) in (Said("", " on."), Said("", "on."))
