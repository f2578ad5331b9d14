"""Write JSON: compact, in UTF-8, at once or in many small parts for a thread next to an event loop.

The library's encoder holds the GIL until it is done: a thread that encodes 2 MB at once stops the loop for 30 ms, as if
it ran there. Here a part is a row of a matrix or a plain value.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A list of items that are already JSON, so that parts that occur several times are encoded once."""

    items: Sequence[str]


LONG_CHARS = 1 << 16  # encoding more takes milliseconds, so a thread does it
# Each JSON value counts as this many characters more: encoding or rendering it takes as long.
_VALUE_CHARS = 16
_PIECE_CHARS = 1 << 18
_BATCH = 1024  # maximum number of parts in a piece
_ITEMS = 64  # encoded items per part
_PLAIN_ITEMS = 4096  # plain items, such as numbers, per part
_NESTED = (dict, list, tuple, np.ndarray, EncodedList)
# Unicode's line ends. Clients that split a stream's text at them (httpx's iter_lines) would split an event.
_LINE_ENDS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})


class _EncodedWithinError(Exception):
    """A value contains an encoded list, which the library cannot write."""


def _refuse(value: object) -> NoReturn:
    if isinstance(value, EncodedList):
        raise _EncodedWithinError
    raise TypeError(f"{type(value).__name__} is not JSON")


# json.dumps makes an encoder per call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_refuse).encode


def encode_json(content: Any) -> str:
    """Return JSON in one line, without Unicode line ends that a client might split at. May contain encoded lists."""
    try:
        text = _encode(content)
    except _EncodedWithinError:
        return "".join(json_parts(content))
    return text if text.isascii() else text.translate(_LINE_ENDS)


def is_larger(value: Any, most_chars: int) -> bool:
    """Return whether a JSON value has more than `most_chars` of text. Stops counting there."""
    return num_chars_of(value, most_chars) > most_chars


def num_chars_of(value: Any, most_chars: float = math.inf) -> int:
    """Estimate the size of a JSON value, in characters. Stops counting above `most_chars`."""
    size, waiting = 0, [value]
    while waiting and size <= most_chars:
        each = waiting.pop()
        size += _VALUE_CHARS
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += _VALUE_CHARS * len(each)
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, EncodedList):
            size += sum(map(len, each.items))
    return size


def json_bytes(content: Any) -> bytes:
    """Return JSON in UTF-8. A lone surrogate (echoed from a client) becomes its escape, which is valid JSON."""
    return encode_json(content).encode("utf-8", "backslashreplace")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(json_bytes(content), status, headers, media_type="application/json")


def long_json_bytes(value: Any) -> bytes:
    """Encode dicts, sequences, arrays of up to two dimensions, encoded lists, and plain values."""
    return b"".join(long_json_pieces(value))


def long_json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the result of `long_json_bytes` in pieces, so that a hundred megabytes are never copied or freed at once."""
    batch, num_chars = list[str](), 0
    for part in json_parts(value):
        batch.append(part)
        num_chars += len(part)
        if num_chars >= _PIECE_CHARS or len(batch) >= _BATCH:
            yield "".join(batch).encode("utf-8", "backslashreplace")
            batch, num_chars = [], 0
    yield "".join(batch).encode("utf-8", "backslashreplace")


def json_parts(value: Any) -> Iterator[str]:
    """Yield the text in parts. Joined, they equal `encode_json` of the value with arrays as lists."""
    if isinstance(value, EncodedList):
        yield "["
        for start in range(0, len(value.items), _ITEMS):
            yield "," * bool(start) + ",".join(value.items[start : start + _ITEMS])
        yield "]"
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        yield encode_json(value.tolist())
    elif isinstance(value, dict) and any(isinstance(item, _NESTED) for item in value.values()):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else ''}{encode_json(key)}:"
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, np.ndarray) or (
        isinstance(value, list | tuple) and any(isinstance(item, _NESTED) for item in value)
    ):
        yield "["
        for index, item in enumerate(value):
            yield "," * bool(index)
            yield from json_parts(item)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > _PLAIN_ITEMS:
        yield "["
        for start in range(0, len(value), _PLAIN_ITEMS):
            yield "," * bool(start) + encode_json(value[start : start + _PLAIN_ITEMS])[1:-1]
        yield "]"
    else:
        yield encode_json(value)
