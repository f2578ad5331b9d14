"""Reasoning is separated by its tags, with any part of them in the prompt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.parsers.registry import Markup
from server.api.parsers.thinking import is_opened
from tests.server.api.parsers.reading import Said, deltas_of, read, without_ids
from tests.server.api.parsers.texts import TYPES, WEATHER

CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER[1]}}}\n</tool_call>'
QWEN = Markup(tools="hermes", reasoning="qwen3")


@pytest.mark.parametrize(
    "prompt, text, expected",
    [
        ("<|im_start|>assistant\n", "<think>\nHm, 2 < 3.\n</think>\n\nYes.", Said("Yes.", "Hm, 2 < 3.")),
        ("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", Said("Yes.", "Hm.")),
        ("<think>\n\n</think>\n\n", "Yes.", Said("Yes.")),
        ("<think>", "</think>Yes.", Said("Yes.")),
        ("", " Yes <think>no</think>", Said(" Yes <think>no</think>")),
        ("<think>", "cut off </thi", Said("", "cut off </thi")),
        ("", "", Said()),
        ("", "<think>\nHm.\n</think>\n" + CALL, Said("", "Hm.", [WEATHER])),
        ("", CALL, Said("", "", [WEATHER])),
        ("", "<think>a</think> b <think>c</think>", Said("b <think>c</think>", "a")),
    ],
)
def test_reasoning_content_and_calls_are_told_apart(prompt: str, text: str, expected: Said) -> None:
    assert read(lambda: QWEN.parser(prompt, TYPES), text) == expected


@pytest.mark.parametrize(("name", "tag"), [("hunyuan_a13b", "answer"), ("ernie45", "response")])
def test_an_answer_in_tags_of_its_own_is_taken_out(name: str, tag: str) -> None:
    markup = Markup(tools="hermes", reasoning=name)
    thought = "<think>\nHm.\n</think>\n"
    for answer in (f"<{tag}>\nYes.\n</{tag}>\n", "Yes."):
        assert read(lambda: markup.parser("", TYPES), thought + answer) == Said("Yes.", "Hm.")
    wrapped = read(lambda: markup.parser("", TYPES), f"{thought}<{tag}>\nYes.\n</{tag}>\n{CALL}")
    assert wrapped == Said("Yes.", "Hm.", [WEATHER])


def test_without_tools_calls_are_content() -> None:
    assert read(lambda: QWEN.parser("", None), "<think>a</think>" + CALL) == Said(CALL, "a")


def test_families_that_always_think_need_no_opening_tag() -> None:
    for name in ("deepseek_r1", "minimax_m2"):
        markup = Markup(reasoning=name)
        assert read(lambda markup=markup: markup.parser("Hi", None), "Hm.</think>Yes.") == Said("Yes.", "Hm.")  # type: ignore[misc]
        off = read(lambda markup=markup: markup.parser("<think></think>\n", None), "Yes.")  # type: ignore[misc]
        assert off == Said("Yes."), "the prompt has closed the thinking"


def test_a_call_ends_reasoning_where_the_family_writes_no_closing_tag() -> None:
    markup = Markup(tools="kimi_k2", reasoning="kimi_k2")
    text = (
        "<think>Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{WEATHER[1]}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert read(lambda: markup.parser("", TYPES), text) == Said("", "Hm.", [WEATHER])
    assert read(lambda: markup.parser("", None), text).reasoning == text.removeprefix("<think>")


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", " ", "\n", "x", "<", CALL, CALL[:20]])),
    st.integers(0, 80),
)
def test_no_split_changes_what_is_reasoning(words: list[str], cut: int) -> None:
    text = "".join(words)
    for prompt in ("", "<think>"):
        whole = without_ids(deltas_of(QWEN.parser(prompt, TYPES), [text]))
        assert without_ids(deltas_of(QWEN.parser(prompt, TYPES), [text[:cut], text[cut:]])) == whole


def test_the_prompt_s_end_tells_whether_reasoning_is_open() -> None:
    assert is_opened("x<think>\n") is True
    assert is_opened("<think>\n\n</think>\n\n") is False
    assert is_opened("<think>a</think>assistant\n") is None


def test_a_bound_answer_begins_after_reasoning_or_at_once() -> None:
    assert QWEN.bound("<think>\n") == ("", "</think>")
    assert QWEN.bound("assistant\n") == ("", "")
    assert QWEN.bound("<think></think>") == ("", "")
    harmony = Markup(tools="openai", reasoning="openai")
    assert harmony.bound("<|start|>assistant") == ("<|channel|>final<|message|>", "")
    assert harmony.bound("<|channel|>final<|message|>") == ("", "")
