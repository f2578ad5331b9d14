"""Every family's parser: documented answers, any split into pieces, and broken text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.parsers.deltas import Delta, ToolCallDelta
from server.api.parsers.registry import Markup
from tests.server.api.parsers.reading import Said, deltas_of, read, said, without_ids
from tests.server.api.parsers.texts import BROKEN, TEXTS, TYPES, Text, parser_of

FAMILIES = sorted({each.family for each in TEXTS})
_MARKS = sorted(
    {
        mark
        for each in TEXTS
        for mark in each.text.replace(">", "> ").replace("<", " <").split()
        if "<" in mark
    }
)


def ids_of(deltas: list[Delta]) -> list[str]:
    return [each.call_id for each in deltas if isinstance(each, ToolCallDelta) and each.call_id is not None]


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def name_of(text: Text) -> str:
    return f"{text.family}-{text.text[:24]!r}"


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_an_answer_says_what_the_format_means(text: Text) -> None:
    assert read(parser_of(text.family), text.text) == Said(text.content, "", list(text.calls))
    for _, arguments in text.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("text", BROKEN, ids=name_of)
def test_what_is_no_call_is_content(text: Text) -> None:
    assert read(parser_of(text.family), text.text) == Said(text.content, "", list(text.calls))


@settings(max_examples=60)
@given(st.sampled_from(TEXTS + BROKEN), st.data())
def test_no_split_of_the_text_changes_what_it_says(text: Text, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text.text)), max_size=12)))
    pieces = [text.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text.text)], strict=True)]
    make = parser_of(text.family)
    assert without_ids(deltas_of(make(), pieces)) == without_ids(deltas_of(make(), [text.text]))


@settings(max_examples=60)
@given(
    st.sampled_from(FAMILIES),
    st.lists(
        st.sampled_from(
            [*_MARKS, '{"name": "f", "arguments": {', '"a": 1}}', "{", "}", '"', "\\", "]", " ", "é"]
        )
    ),
    st.integers(0, 200),
)
def test_no_text_at_all_breaks_a_parser(family: str, words: list[str], cut: int) -> None:
    text = "".join(words)
    make = parser_of(family)
    whole = deltas_of(make(), [text])
    said(whole)
    assert without_ids(deltas_of(make(), [text[:cut], text[cut:]])) == without_ids(whole)


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_an_answer_that_is_cut_off_says_a_part_of_the_whole(text: Text) -> None:
    whole = read(parser_of(text.family), text.text)
    for end in range(len(text.text)):
        part = said(deltas_of(parser_of(text.family)(), [text.text[:end]]))
        assert [name for name, _ in part.calls] == [name for name, _ in whole.calls[: len(part.calls)]]
        for (_, some), (_, everything) in zip(part.calls, whole.calls, strict=False):
            assert everything.startswith(some.removesuffix("}"))


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_a_call_that_a_limit_cuts_off_never_looks_complete(text: Text) -> None:
    whole = read(parser_of(text.family), text.text)
    for end in range(len(text.text)):
        part = said(deltas_of(parser_of(text.family)(), [text.text[:end]], cut_at=""))
        for place, (_, arguments) in enumerate(part.calls):
            assert not is_object(arguments) or arguments == whole.calls[place][1], text.text[:end]


@pytest.mark.parametrize(
    ("family", "text", "stop"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n", "</function>"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n", "</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "}"),
    ],
)
def test_a_stop_at_a_call_s_end_leaves_it_complete(family: str, text: str, stop: str) -> None:
    assert said(deltas_of(parser_of(family)(), [text], cut_at=stop)).calls == [("f", '{"a": 1}')]
    in_reasoning = Markup(tools=family, reasoning="glm45").parser("<think>", TYPES)
    assert said(deltas_of(in_reasoning, [text], cut_at=stop)).calls == [("f", '{"a": 1}')]


def test_arguments_in_json_stream_as_they_come() -> None:
    parser = parser_of("hermes")()
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "long')
    [delta] = parser.push(" text")
    assert delta.arguments == " text" and delta.name is None  # type: ignore[union-attr]


def test_text_arguments_in_tags_stream_as_they_come() -> None:
    for family, head in (
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nlong"),
        ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>long"),
    ):
        parser = parser_of(family)()
        parser.push(head)
        [delta] = parser.push(' "text"')
        assert delta.arguments == ' \\"text\\"' and delta.name is None  # type: ignore[union-attr]


def test_text_before_a_mark_is_not_held_back() -> None:
    for family in FAMILIES:
        parser = parser_of(family)()
        first = said(parser.push("Good morning, <")).content
        assert first in ("Good morning,", "Good morning, <")
        assert first + said(parser.push("b>x")).content == "Good morning, <b>x"


def test_kimi_s_calls_keep_their_own_ids() -> None:
    text = next(each for each in TEXTS if each.family == "kimi_k2" and each.calls)
    ids = ids_of(deltas_of(parser_of("kimi_k2")(), [text.text]))
    assert ids == ["functions.get_weather:0", "functions.now:1"]


def test_an_id_that_a_model_writes_twice_is_drawn_the_second_time() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = ids_of(deltas_of(parser_of("kimi_k2")(), [f"<|tool_calls_section_begin|>{call}{call}"]))
    assert first == "functions.f:0" and second.startswith("call_")


def test_other_calls_get_ids_in_openai_s_form() -> None:
    first = deltas_of(parser_of("hermes")(), ['<tool_call>{"name": "f"}</tool_call>'])[0]
    assert first.call_id.startswith("call_") and len(first.call_id) == 29  # type: ignore[union-attr]


def test_mistral_s_ids_are_what_its_template_takes() -> None:
    first = deltas_of(parser_of("mistral")(), ["[TOOL_CALLS]now[ARGS]{}"])[0]
    assert len(first.call_id) == 9 and first.call_id.isalnum()  # type: ignore[union-attr]


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    half = "\\ud800"
    for family, text in (
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": "{{\\"a\\": \\"\\{half}\\"}}"}}</tool_call>',
        ),
        ("glm45", f'<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>["{half}"]</arg_value>\n</tool_call>'),
    ):
        [(name, arguments)] = read(parser_of(family), text).calls
        assert name == "f"
        arguments.encode()
        assert json.loads(arguments)["a"][-1] == "\ud800"
