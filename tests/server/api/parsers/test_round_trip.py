"""For every family: rendered answers are read back, no text is lost, and only offered functions are called.

The variant in `make test` is fast. The slow one draws many more examples.
"""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.parsers.registry import markup_of
from server.options.parser_names import TOOL_PARSERS
from tests.server.api.parsers.formats import FORMATS, Call, Format
from tests.server.api.parsers.reading import Said, deltas_of, said, without_ids

_FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
_MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
_BY_NAME = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
_WORDS = (
    "x",
    " ",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "]",
    "é",
    "日本",
    "echo 'a'",
    "</",
    "<",
    ">",
    "\\n",
    ", ",
    ":",
    ")",
)


def strict_json(text: str) -> Any:
    """Parse JSON by RFC 8259."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def texts(form: Format) -> st.SearchStrategy[str]:
    """Values: quoted tags of the format, quotes, braces, newlines, and any characters."""
    words = st.sampled_from([*_WORDS, *form.marks]) | st.text(
        st.characters(exclude_categories=["Cs", "Cc"]), max_size=5
    )
    return st.lists(words, max_size=6).map("".join).filter(lambda text: not form.ends_value.search(text))


def values(form: Format) -> st.SearchStrategy[dict[str, Any]]:
    text = texts(form)
    anything = (
        text | st.integers(-9, 9) | st.booleans() | st.none() | st.floats(-5, 5).map(lambda n: round(n, 2))
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "path": text,
            "body": text,
            "n": st.integers(),
            "flag": st.booleans(),
            "tags": st.lists(text, max_size=3),
            "more": st.dictionaries(
                st.sampled_from(["a", "b_c"]), anything | st.lists(anything, max_size=2), max_size=2
            ),
        },
    ).filter(
        lambda arguments: (
            not form.ends_value.search(str(arguments)) and not form.ends_value.search(json.dumps(arguments))
        )
    )


def calls(form: Format) -> st.SearchStrategy[list[Call]]:
    """One or more consecutive calls."""
    call = st.tuples(st.just("save"), values(form)) | st.just(("list_all", dict[str, Any]()))
    return st.lists(call, min_size=1, max_size=form.max_calls)


def split(data: st.DataObject, text: str) -> list[str]:
    """Cut a text at any positions."""
    if data.draw(st.booleans()):
        return list(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(form: Format, data: st.DataObject, text: str) -> Said:
    """Parse a text whole and in pieces, and check that the results are the same."""
    whole = deltas_of(form.parser(), [text])
    assert without_ids(deltas_of(form.parser(), split(data, text))) == without_ids(whole)
    return said(whole)


def check_round_trip(form: Format, data: st.DataObject) -> None:
    thought = data.draw(st.sampled_from(["", "Hm, 2 < 3.\n\nSo."])) if form.think else ""
    content = data.draw(st.sampled_from(["", "I look <b>here</b>: {1} [2] é.", "Use  <tags>\n\nso."]))
    before = form.think(thought) if form.think is not None and (thought or form.prompt) else ""
    wanted = data.draw(calls(form))
    result = read(form, data, before + form.say(content) + form.render(wanted))
    assert [(name, strict_json(arguments)) for name, arguments in result.calls] == wanted
    assert result.content == (content if form.say(content) else "")
    assert result.reasoning == thought


def check_any_text(form: Format, data: st.DataObject) -> None:
    """Parse prose and markup in any order."""
    words = [f"word{number}" for number in range(8)]
    marks = [*form.marks, "save", "unknown", " ", "\n", '"', "{", "}", ",", ":"]
    parts = data.draw(st.lists(st.sampled_from([*words, *marks]), max_size=14))
    text = "".join(parts) + form.closes
    before = form.think("") if form.think is not None and form.prompt else ""
    result = read(form, data, before + text)
    assert {name for name, _ in result.calls} <= {"save", "list_all"}
    everything = result.content + result.reasoning + "".join(arguments for _, arguments in result.calls)
    lost = {word: parts.count(word) - everything.count(word) for word in words}
    assert not {word for word, times in lost.items() if times > 0}, (text, result)
    for _, arguments in result.calls:
        try:
            json.loads(arguments)
        except ValueError:
            continue  # broken off: no client parses it
        strict_json(arguments)


def marks_of(tools: str) -> tuple[str, ...]:
    """Return the markers that distinguish parsers."""
    return markup_of("", tools=tools).markers(with_tools=True)


def test_every_parser_has_a_form_here() -> None:
    assert {marks_of(name) for name in TOOL_PARSERS if name != "none"} == {
        marks_of(form.tools) for form in FORMATS
    }


@pytest.mark.crossed("form", every=2)
@_BY_NAME
@_FEW
@given(data=st.data())
def test_a_rendered_answer_is_read_back(form: Format, data: st.DataObject) -> None:
    check_round_trip(form, data)


@_BY_NAME
@_FEW
@given(data=st.data())
def test_no_text_is_lost_and_no_function_made_up(form: Format, data: st.DataObject) -> None:
    check_any_text(form, data)


@pytest.mark.slow
@_BY_NAME
@_MANY
@given(data=st.data())
def test_many_rendered_answers_are_read_back(form: Format, data: st.DataObject) -> None:
    check_round_trip(form, data)


@pytest.mark.slow
@_BY_NAME
@_MANY
@given(data=st.data())
def test_no_text_is_lost_in_many(form: Format, data: st.DataObject) -> None:
    check_any_text(form, data)
