"""Responses that clients may come back to: the last ones, in memory, within a bound.

OpenAI keeps responses for a month unless store=false; vLLM forgets them unless told otherwise and then never drops
one. Here the last ones are kept, so that previous_response_id works in a conversation and memory stays bounded; after
a restart, or once newer ones have pushed it out, a response is a plain 404.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.api.responses_input import ChatMessage
from server.errors import ApiError

MAX_RESPONSES = 1000
MAX_CHARS = 64 << 20  # over all stored, each with its whole history


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A response and the conversation up to its end, without instructions: those do not carry over."""

    response: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    num_chars: int


class ResponseStore:
    """The last responses, by id; the least recently used go first."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._num_chars = 0
        self._by_id: OrderedDict[str, Stored] = OrderedDict()

    def put(self, response: dict[str, Any], messages: Sequence[ChatMessage]) -> None:
        """Keep a response, in the place of what it was before; one larger than the whole bound is not kept."""
        num_chars = len(json.dumps(response)) + sum(len(json.dumps(message)) for message in messages)
        if num_chars > self._max_chars:
            return
        self._drop(response["id"])
        stored = Stored(response=response, messages=tuple(messages), num_chars=num_chars)
        self._by_id[response["id"]] = stored
        self._num_chars += num_chars
        while len(self._by_id) > self._max_responses or self._num_chars > self._max_chars:
            self._drop(next(iter(self._by_id)))

    def has(self, response_id: str) -> bool:
        """Whether a response is kept."""
        return response_id in self._by_id

    def get(self, response_id: str, param: str) -> Stored:
        """Return a response.

        Raises:
            ApiError: 404, naming `param`: never stored, deleted, or pushed out.
        """
        stored = self._by_id.get(response_id)
        if stored is None:
            raise ApiError(
                404,
                f"Response with id {response_id!r} not found. This server keeps the last {self._max_responses} "
                "responses in memory, and none that was asked for with store=false.",
                param=param,
            )
        self._by_id.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404, as `get`.
        """
        self.get(response_id, "response_id")
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        stored = self._by_id.pop(response_id, None)
        self._num_chars -= 0 if stored is None else stored.num_chars
