"""Read Python literals, which models write instead of JSON: ['x', True, None], {'a': 1}, "it\\n's".

Supports only JSON's values: no sets, bytes, complex numbers or names. Runs no code. Unambiguous variants are accepted: JSON's
own words, tuples (as arrays), a trailing comma.
"""

import json
import math
import re
from typing import Any, NamedTuple

MAX_DEPTH = 64
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_WORD = re.compile(r"[\w.+-]+")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_PAIRS = {"[": "]", "(": ")", "{": "}"}


class _Read(NamedTuple):
    value: Any
    end: int


def read_literal(text: str) -> Any:
    """Return the value of a text that is one literal. Otherwise return the text itself."""
    try:
        value, end = _value(text, _SPACE.match(text).end(), 0)  # type: ignore[union-attr]
    except ValueError:
        return text
    return value if not text[end:].strip() else text


def word_value(word: str) -> Any:
    """Return the value of an unquoted word.

    Raises:
        ValueError: The word is neither true, false or null nor a number that JSON can represent.
    """
    if word in WORDS:
        return WORDS[word]
    if re.fullmatch(r"[+-]?[0-9][0-9_]*", word):
        return int(word)
    value = float(word) if re.match(r"[+-]?\.?[0-9]", word) else math.inf
    if not math.isfinite(value):
        raise ValueError(f"{word[:80]} is not a number that JSON can represent")
    return value


def unescape(text: str) -> str:
    """Return a string literal's content with its escapes resolved. Unknown escapes stay text, as in Python."""
    return _ESCAPE.sub(_meaning, text)


def _meaning(found: re.Match[str]) -> str:
    *codes, octal, char = found.groups()
    code = next((int(each, 16) for each in codes if each), None)
    if octal:
        code = int(octal, 8)
    if code is not None:
        return chr(code) if code <= 0x10FFFF else found[0]
    return _SIMPLE.get(char, char if char in "\\'\"" else found[0])


def as_json(value: Any) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _value(text: str, at: int, depth: int) -> _Read:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text[at : at + 1] in _PAIRS and at < len(text):
        return _items(text, at, depth)
    if found := _STRING.match(text, at):
        return _Read(unescape(found[1] if found[1] is not None else found[2]), found.end())
    if found := _WORD.match(text, at):
        return _Read(word_value(found[0]), found.end())
    raise ValueError("no literal")


def _items(text: str, at: int, depth: int) -> _Read:
    opening = text[at]
    items: list[Any] = []
    is_tuple = opening != "("
    at += 1
    while True:
        at = _after_space(text, at)
        if text.startswith(_PAIRS[opening], at):
            break
        if items:
            is_tuple = True
            at = _after_space(text, _expect(text, at, ","))
            if text.startswith(_PAIRS[opening], at):
                break
        item, at = _value(text, at, depth + 1)
        if opening == "{":
            value, at = _value(
                text, _after_space(text, _expect(text, _after_space(text, at), ":")), depth + 1
            )
            item = (item if isinstance(item, str) else as_json(item), value)
        items.append(item)
    if opening == "{":
        return _Read(dict(items), at + 1)
    return _Read(items if is_tuple or not items else items[0], at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, mark: str) -> int:
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing")
    return at + len(mark)
