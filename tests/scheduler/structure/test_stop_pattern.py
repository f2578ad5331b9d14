"""Stop regexes find the end of their first match wherever the text is split, in bounded time."""

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.structure.compiler import StructureError
from scheduler.structure.stop_pattern import StopPattern, compile_all

REGEXES = [
    "END",
    "[0-9]{3}",
    r"\n\n",
    "a+b",
    "(?i)stop",
    "é|€",
    "(ab|ba){2}",
    r"x.y",
    r"(?s:x.y)",
    "a(?:bc)?d",
]


def first_end(regex: str, text: str) -> int | None:
    """Return the length of the shortest prefix that ends with a match. The oracle."""
    whole = re.compile(f"(?s:.*)(?:{regex.replace('(?i)', '(?i:') + (')' if '(?i)' in regex else '')})")
    return next((end for end in range(1, len(text) + 1) if whole.fullmatch(text[:end])), None)


def pushed(regex: str, pieces: Sequence[str]) -> int | None:
    matcher, before = StopPattern(regex).open(), 0
    for piece in pieces:
        at = matcher.push(piece)
        if at is not None:
            return before + at
        before += len(piece)
    return None


@settings(max_examples=40)
@given(
    st.sampled_from(REGEXES),
    st.lists(st.text("ENDab012\nsStTopPé€xyzcd", max_size=6), max_size=6),
)
def test_the_first_match_ends_a_text_however_it_is_cut(regex: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert (
        pushed(regex, pieces) == pushed(regex, [text]) == pushed(regex, list(text)) == first_end(regex, text)
    )


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(a", "unclosed"),
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("^a", "look"),
        (r"\bword\b", "look"),
        ("(?=a)b", "look"),
        (r"(a)\1", "backreference"),
    ],
)
def test_what_cannot_be_matched_says_why(regex: str, words: str) -> None:
    with pytest.raises(StructureError, match=words):
        compile_all(["END", regex])


def test_choices_have_matchers_of_their_own() -> None:
    [pattern] = compile_all(["ab"])
    one, other = pattern.open(), pattern.open()
    assert one.push("a") is None and other.push("b") is None
    assert one.push("b") == 1 and other.push("ab") == 2


@pytest.mark.parametrize(
    ("regex", "end"), [("(a+a+)+y", None), ("(a?){60}a{60}", 60), ("(.*a){20}b", None), ("(a|aa)+c", None)]
)
def test_a_regex_that_backtracks_forever_elsewhere_is_followed_all_the_same(
    regex: str, end: int | None
) -> None:
    """Python's `re` does not return on the first one."""
    assert StopPattern(regex).open().push("a" * 1000) == end


def test_a_regex_with_too_many_states_ends_its_answer() -> None:
    matcher = StopPattern("[ab]*a[ab]{12}x").open()
    text = "".join(random.Random(1).choices("ab", k=20_000))
    with pytest.raises(StructureError, match="too much work"):
        matcher.push(text)
