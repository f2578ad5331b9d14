"""JSON of large answers in many small parts, for a thread beside an event loop.

The library's encoder keeps the interpreter's lock until it is done: a thread that encodes 2 MB at once stops the loop
for 30 ms as if it ran there. Here a part is a row of a matrix or a plain value.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A list whose items are JSON already: what occurs in several places of an answer, or in several answers, is encoded once."""

    items: Sequence[str]


_NESTED = (dict, list, tuple, np.ndarray, EncodedList)


def encode(value: Any) -> bytes:
    """Encode dicts, sequences, arrays of up to two dimensions, encoded lists, and plain values."""
    return "".join(json_parts(value)).encode()


def json_parts(value: Any) -> Iterator[str]:
    """The text in parts; joined, it is what `json.dumps` makes of lists in the arrays' place."""
    if isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{', ' if index else ''}{json.dumps(key)}: "
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, EncodedList):
        yield f"[{', '.join(value.items)}]"
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        yield json.dumps(value.tolist())
    elif isinstance(value, list | tuple) and not any(isinstance(item, _NESTED) for item in value):
        yield json.dumps(value)
    elif isinstance(value, list | tuple | np.ndarray):
        yield "["
        for index, item in enumerate(value):
            yield ", " * bool(index)
            yield from json_parts(item)
        yield "]"
    else:
        yield json.dumps(value)
