"""Find the end of one JSON value in a text that is still growing, and return its text as strict JSON (RFC 8259).

Valid JSON passes unchanged while it arrives. Models also write text that is not valid JSON, and clients parse the result. So
line ends in strings and unknown escapes are escaped, True and None become true and null, a trailing comma is omitted, and a
word or number that JSON cannot represent (NaN, 1e999, 0x1F) becomes text. Anything else ends the value: the output up to there
is the beginning of a JSON text, so a broken value never looks like a complete one.
"""

import json
import math
import re

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(rf"{_INTEGER.pattern}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WHOLE_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_MAX_DIGITS = 4300  # limit of Python's json
_CLOSING = {"{": "}", "[": "]"}

# Tokens that may come next, besides whitespace.
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _COMMA = (
    "value",
    "first value",
    "key",
    "first key",
    "colon",
    "comma",
)


class JsonSpan:
    """Process a text piece by piece, up to the end of the value."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []
        self._next = _VALUE
        self._in_string = False
        self._escape = ""  # an incomplete escape
        self._word: list[str] = []
        self._comma = ""  # waits, with the whitespace after it, for a value

    def push(self, text: str) -> tuple[int, str]:
        """Add text. Return the length of its part that belongs to the value, and this part as JSON."""
        at, out = 0, list[str]()
        while at < len(text) and not self.done:
            if self._in_string:
                at = self._string(text, at, out)
            elif self._word:
                at = self._scalar(text, at, out)
            else:
                at = self._structure(text, at, out)
        return at, "".join(out)

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            return self._escaped(text, at, out)
        found = _PLAIN.match(text, at)
        if found is not None:
            out.append(found[0])
            return found.end()
        if text[at] == "\\":
            self._escape = "\\"
        elif text[at] == '"':
            out.append('"')
            self._in_string = False
            if self._next in (_KEY, _FIRST_KEY):
                self._next = _COLON
            else:
                self._end_value()
        else:
            out.append(f"\\u{ord(text[at]):04x}")
        return at + 1

    def _escaped(self, text: str, at: int, out: list[str]) -> int:
        escape = self._escape + text[at]
        if _OPEN_ESCAPE.fullmatch(escape):
            self._escape = escape
            return at + 1
        self._escape, is_quote = "", escape == "\\'"
        if _WHOLE_ESCAPE.fullmatch(escape) or is_quote:
            out.append("'" if is_quote else escape)
            return at + 1
        out.append("\\" + escape[:-1])  # not an escape in JSON: the backslash is text
        return at

    def _scalar(self, text: str, at: int, out: list[str]) -> int:
        found = _WORD.match(text, at)
        if found is not None:
            self._word.append(found[0])
            at = found.end()
        if at < len(text):
            out.append(_as_scalar("".join(self._word)))
            self._word = []
            self._end_value()
        return at

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        space = _SPACE.match(text, at)
        if space is not None:
            if self._comma:
                self._comma += space[0]
            else:
                out.append(space[0])
            return space.end()
        char, takes_value = text[at], self._next in (_VALUE, _FIRST_VALUE)
        if char == '"' and (takes_value or self._next in (_KEY, _FIRST_KEY)):
            self._begin(out, '"')
            self._in_string = True
        elif char in _CLOSING and takes_value:
            self._begin(out, char)
            self._open.append(char)
            self._next = _FIRST_KEY if char == "{" else _FIRST_VALUE
        elif takes_value and _WORD.match(char):
            self._begin(out, "")
            self._word = [char]
        elif char == "," and self._next == _COMMA:
            self._comma = ","
            self._next = _KEY if self._open[-1] == "{" else _VALUE
        elif char == ":" and self._next == _COLON:
            out.append(char)
            self._next = _VALUE
        elif self._open and char == _CLOSING[self._open[-1]] and self._may_close():
            out.append(self._comma.removeprefix(",") + char)
            self._comma = ""
            self._open.pop()
            self._end_value()
        else:
            self.done = self.broken = True
            return at
        return at + 1

    def _may_close(self) -> bool:
        return bool(self._comma) or self._next in (_COMMA, _FIRST_VALUE, _FIRST_KEY)

    def _begin(self, out: list[str], char: str) -> None:
        out.append(self._comma + char)
        self._comma = ""

    def _end_value(self) -> None:
        self.done = not self._open
        self._next = _COMMA


def _as_scalar(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        is_number = len(word) <= _MAX_DIGITS
    else:
        is_number = _NUMBER.fullmatch(word) is not None and math.isfinite(float(word))
    return word if is_number else json.dumps(word, ensure_ascii=False)
