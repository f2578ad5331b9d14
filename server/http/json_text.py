"""A body's JSON: its nesting, measured without parsing, and its value, parsed in pieces.

Depth is limited because every later step, down to chat templates and schemas, walks the value recursively. The number of
arrays, objects, keys and values is limited because each costs a Python object and time while the GIL is held.
Keys cost most: 1.9 million of them take 1.5 s to parse and 0.7 s to validate, but two million token ids only 0.1 s.

`json.loads` holds the GIL until it is done. A thread that parses 10 MB with it stops the event loop as if it ran there.
`parse_json` finds the structural characters with numpy, a megabyte at a time and mostly without the GIL, cuts the
text at commas and parses pieces of 64 KiB, which take 8 ms at worst. Rejected: a child process (unpickling its result
holds the GIL as long), walking the bytes in Python (a second per 10 MB), and a regular expression over the strings (5 s for
five million of them, with the GIL held).
"""

import json
import math
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from server.front.errors import ApiError, bad_request

MAX_JSON_DEPTH = 100  # pydantic fails at 255, Python at 1,000
MAX_JSON_VALUES = 2_000_000  # 128 prompts of 15,000 token ids
MAX_JSON_NODES = 250_000  # arrays and objects; 10,000 messages with parts and calls are 60,000
MAX_JSON_KEYS = 100_000  # 10,000 messages with parts and calls have 55,000
PIECE_BYTES = 1 << 16  # parsed in one go
_CHUNK_BYTES = 1 << 20  # searched in one go
_SHOWN_CHARS = 32  # of a number in an error
PARSED = "wideep.json"  # key of an ASGI message for the value of its body

_QUOTE, _OPEN_LIST, _OPEN_OBJECT, _CLOSE_LIST, _CLOSE_OBJECT, _COMMA, _COLON = range(1, 8)
_CODES = bytearray(256)  # a byte -> its code, 0 for all other characters
for _code, _mark in enumerate(b'"[{]},:', start=1):
    _CODES[_mark] = _code
_Places = NDArray[np.int64]
_STEPS = np.array([0, 0, 1, 1, -1, -1, 0, 0], np.int8)  # a code -> change of depth
_CLOSING = {_OPEN_LIST: _CLOSE_LIST, _OPEN_OBJECT: _CLOSE_OBJECT}
_BLANKS = b" \t\n\r"


class JsonShape(NamedTuple):
    """The nesting of a JSON text."""

    depth: int  # of arrays and objects
    num_nodes: int  # arrays and objects
    num_commas: int  # outside strings, one per value
    num_keys: int  # colons outside strings


class _Marks(NamedTuple):
    """Structural characters outside strings, in order."""

    places: _Places  # in the text, bytes
    codes: NDArray[np.uint8]
    levels: NDArray[np.int64]  # depth after each


def json_shape(body: bytes) -> JsonShape:
    """Measure the nesting of a JSON text. The result is arbitrary if the text is not JSON."""
    depth = num_nodes = num_commas = num_keys = 0
    for marks in _marks_in(_as_utf8(body)):
        depth = max(depth, int(marks.levels.max(initial=0)))
        num_nodes += int(np.count_nonzero(_STEPS[marks.codes] > 0))
        num_commas += int(np.count_nonzero(marks.codes == _COMMA))
        num_keys += int(np.count_nonzero(marks.codes == _COLON))
    return JsonShape(depth, num_nodes, num_commas, num_keys)


def trouble_with_nesting(body: bytes) -> ApiError | None:
    """Return the error for too many or too deep arrays, objects, keys or values, or None."""
    num_brackets, num_colons = body.count(b"[") + body.count(b"{"), body.count(b":")
    if num_brackets <= MAX_JSON_DEPTH and num_colons <= MAX_JSON_KEYS and body.count(b",") <= MAX_JSON_VALUES:
        return None
    shape = json_shape(body)
    if shape.depth > MAX_JSON_DEPTH:
        return bad_request(f"The body nests deeper than {MAX_JSON_DEPTH} arrays and objects.")
    for count, limit, what in (
        (shape.num_nodes, MAX_JSON_NODES, "arrays and objects"),
        (shape.num_keys, MAX_JSON_KEYS, "keys"),
        (shape.num_commas, MAX_JSON_VALUES, "values or more"),
    ):
        if count > limit:
            return bad_request(f"The body has {count} {what}; the limit is {limit}.")
    return None


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN, Infinity and -Infinity, which Python's parser accepts, and which an answer could not repeat."""
    raise ValueError(f"{name} is not JSON")


def finite(number: str) -> float:
    """Return a number, unless it is so large that it would become Infinity."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:_SHOWN_CHARS]} is too large")
    return value


# Shared: `json.loads` with hooks makes a decoder for each text.
decode_strictly = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite).decode


def parse_json(body: bytes) -> Any:
    """Parse a text with nesting within the limits. A long text is parsed in pieces, for a thread next to an event loop.

    Raises:
        ApiError: 400 if the text is not JSON, or has a number that JSON cannot represent.
    """
    try:
        if len(body) <= PIECE_BYTES:
            return decode_strictly(body.decode(json.detect_encoding(body), "surrogatepass"))
        text = _as_utf8(body)
        return _Pieces(text, _joined(list(_marks_in(text)))).whole()
    except RecursionError as error:
        raise bad_request("The body nests too deeply.") from error
    except JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error.msg} (character {error.pos}).") from error
    except ValueError as error:  # invalid UTF, NaN, or a number of thousands of digits
        raise bad_request(f"The body cannot be read as JSON: {error}.") from error


class _Pieces:
    """Parses a text piece by piece. A piece cut at a wrong place is not JSON, so its parser raises."""

    def __init__(self, text: bytes, marks: _Marks) -> None:
        self._text, self._marks = text, marks

    def whole(self) -> Any:
        """Return the value of the whole text."""
        return self._value(0, len(self._text), 0, len(self._marks.places))

    def _value(self, begin: int, end: int, first: int, last: int) -> Any:
        """Return the value of a part of the text, with the marks `first` to `last` (exclusive)."""
        if end - begin <= PIECE_BYTES:
            return self._loads(begin, end)
        begin, end = self._strip(begin, end)
        if first == last:
            return self._loads(begin, end)  # one long string
        places, codes = self._marks.places[first:last], self._marks.codes[first:last]
        levels = self._marks.levels[first:last]
        opening, inside = int(codes[0]), int(levels[0])
        closes_at = int(np.argmax(levels < inside)) if len(levels) > 1 else 0
        if places[0] != begin or codes[closes_at] != _CLOSING.get(opening):
            raise self._error("Expecting value" if places[0] != begin else "Expecting ',' delimiter", begin)
        if closes_at != len(places) - 1 or places[-1] != end - 1:
            raise self._error("Extra data", int(places[closes_at]) + 1)
        commas = np.flatnonzero((codes == _COMMA) & (levels == inside))
        bounds = np.concatenate(([0], commas, [len(places) - 1]))
        edges = places[bounds]  # children are between them
        bounds += first
        return (self._list if opening == _OPEN_LIST else self._object)(edges, bounds)

    def _list(self, edges: _Places, bounds: _Places) -> list[Any]:
        items: list[Any] = []
        for start, stop in self._groups(edges):
            begin, end = int(edges[start]) + 1, int(edges[stop])
            if stop == start + 1 and end - begin > PIECE_BYTES:
                items.append(self._value(begin, end, int(bounds[start]) + 1, int(bounds[stop])))
            else:
                items += self._loads(begin, end, b"[", b"]")
        return items

    def _object(self, edges: _Places, bounds: _Places) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for start, stop in self._groups(edges):
            begin, end = int(edges[start]) + 1, int(edges[stop])
            if stop == start + 1 and end - begin > PIECE_BYTES:
                colon, behind = int(bounds[start]) + 1, int(bounds[stop])
                if colon == behind or self._marks.codes[colon] != _COLON:
                    raise self._error("Expecting ':' delimiter", begin)
                at = int(self._marks.places[colon])
                key = self._loads(begin, at)
                if not isinstance(key, str):
                    raise self._error("Expecting property name enclosed in double quotes", begin)
                found[key] = self._value(at + 1, end, colon + 1, behind)
            else:
                found |= self._loads(begin, end, b"{", b"}")
        return found

    def _groups(self, edges: _Places) -> Iterator[tuple[int, int]]:
        """Yield neighbours to parse in one go, as indexes of their edges. A large child is yielded alone."""
        start = 0
        while start < len(edges) - 1:
            most = edges[start] + 1 + PIECE_BYTES
            stop = max(start + 1, int(np.searchsorted(edges, most, "right")) - 1)
            yield start, stop
            start = stop

    def _loads(self, begin: int, end: int, before: bytes = b"", after: bytes = b"") -> Any:
        piece = self._text[begin:end]
        if not piece.strip(_BLANKS) and (before or after) and self._has_neighbour(begin, end):
            raise self._error("Expecting value", begin)  # between two commas
        try:
            return decode_strictly((before + piece + after).decode("utf-8", "surrogatepass"))
        except JSONDecodeError as error:
            raise JSONDecodeError(
                error.msg, "", self._chars_before(begin) + error.pos - len(before)
            ) from None

    def _has_neighbour(self, begin: int, end: int) -> bool:
        return b"," in (self._text[begin - 1 : begin], self._text[end : end + 1])

    def _strip(self, begin: int, end: int) -> tuple[int, int]:
        piece = self._text[begin:end]
        return end - len(piece.lstrip(_BLANKS)), begin + len(piece.rstrip(_BLANKS))

    def _error(self, message: str, place: int) -> JSONDecodeError:
        return JSONDecodeError(message, "", self._chars_before(place))

    def _chars_before(self, place: int) -> int:
        return len(self._text[:place].decode("utf-8", "replace"))


def _as_utf8(body: bytes) -> bytes:
    """Return the text in UTF-8, without a byte order mark. The parser detects the same encodings."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    return body.decode(encoding, "replace").encode()


def _marks_in(text: bytes) -> Iterator[_Marks]:
    """Yield the structural characters of each chunk of the text."""
    num_quotes = level = start = 0
    while start < len(text):
        end = _end_of_chunk(text, start)
        # Replace escapes by text of the same length, so that every quote begins or ends a string.
        plain = text[start:end].replace(rb"\\", b"__").replace(rb"\"", b"__")
        codes = np.frombuffer(plain.translate(_CODES), np.uint8)
        places = np.flatnonzero(codes)
        codes = codes[places]
        quotes = np.cumsum(codes == _QUOTE, dtype=np.int64) + num_quotes
        is_outside = ((quotes & 1) == 0) & (codes != _QUOTE)
        num_quotes = int(quotes[-1]) if len(quotes) else num_quotes
        places, codes = places[is_outside], codes[is_outside]
        levels = np.cumsum(_STEPS[codes], dtype=np.int64) + level
        level = int(levels[-1]) if len(levels) else level
        yield _Marks(places + start, codes, levels)
        start = end


def _end_of_chunk(text: bytes, start: int) -> int:
    """Return the end of a chunk, which must not be inside an escape."""
    end = min(start + _CHUNK_BYTES, len(text))
    chunk = text[start:end]
    return min(end + (len(chunk) - len(chunk.rstrip(b"\\"))) % 2, len(text))


def _joined(parts: list[_Marks]) -> _Marks:
    return _Marks(*(np.concatenate(each) for each in zip(*parts, strict=True)))
