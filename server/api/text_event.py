"""A streamed event in which nothing but one text changes from piece to piece.

Most of a stream's events are such. They are worded and encoded once, with a mark in the text's place; then only the
text is encoded, which takes 0.2 us where the whole object takes 4.5 (measured).
"""

import json
from collections.abc import Callable
from typing import Any

_MARK = "\ue000text\ue000"  # of Unicode's private use: in no name
encode_json = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode  # json.dumps makes one per call


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode_json(content).encode() + b"\n\n"


class TextEvent:
    """The event, without its text."""

    def __init__(self, word: Callable[[str], dict[str, Any]]) -> None:
        """Args: word returns the event's content with a given text, which occurs in it once."""
        self._before, self._after = event(word(_MARK)).split(encode_json(_MARK).encode())

    def of(self, text: str) -> bytes:
        """Return the event with this text: the bytes that `event` makes of it."""
        return self._before + encode_json(text).encode() + self._after
