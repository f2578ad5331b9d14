"""JSON as models write it: where a value ends in a text that is still growing, and reading one that is whole."""

import json
import re

# Outside strings "<" is not JSON: the value is broken there, and a closing tag may begin.
_JSON_MARKS = re.compile(r'["{}\[\]<]')
_JSON_IN_STRING = re.compile(r'["\\]')
_JSON_SCALAR_END = re.compile(r"[,\]}\s<]")


class JsonSpan:
    """Finds where one JSON value ends, without checking what is in it."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def push(self, text: str) -> int:
        """Take more text; return how much of it belongs to the value."""
        at = 0
        while at < len(text) and not self.done:
            if self._in_string:
                at = self._in_text(text, at)
            elif not self._depth and (self._begun or text[at] not in '"{['):
                return self._scalar(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _in_text(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _JSON_IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._depth
        return found.end()

    def _scalar(self, text: str, at: int) -> int:
        """A number or a word ends before what follows it."""
        self._begun = True
        found = _JSON_SCALAR_END.search(text, at)
        self.done = found is not None
        return len(text) if found is None else found.start()

    def _structure(self, text: str, at: int) -> int:
        found = _JSON_MARKS.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "<":
            self.done = self.broken = True
            return found.start()
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.done = not self._depth
        return found.end()


def decode_json(text: str) -> object:
    """Read one JSON value; control characters in strings are taken, NaN and infinities are not.

    Raises:
        ValueError: it is not JSON, or too deep or long to be read.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
