"""One choice of a chat, read as its pieces come, and what it says once it is whole."""

from dataclasses import dataclass, field

from scheduler.policy.request import FinishReason
from server.api.parsers.deltas import Delta, ReasoningDelta, TextParser, ToolCallDelta
from server.api.reasoning_tokens import ReasoningCount
from server.api.streaming import finish_word
from server.front.generations import Piece


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    call_id: str
    name: str
    arguments: str = ""  # JSON text


@dataclass(slots=True)
class ChatMessage:
    """What a whole choice says."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class MessageParser:
    """Reads one choice as its pieces come."""

    def __init__(
        self, parser: TextParser, reasoning: ReasoningCount, *, max_calls: int | None, shows_reasoning: bool
    ) -> None:
        """Args: max_calls is how many calls are passed on; None is all."""
        self._parser = parser
        self._reasoning = reasoning
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning, shown or not."""
        return self._reasoning.num_tokens

    def push(self, piece: Piece) -> list[Delta]:
        """Return what a piece adds."""
        return self._passed(self._parser.push(piece.text), len(piece.token_ids))

    def finish(self) -> list[Delta]:
        """Return what was held back: the choice has ended. May be called again."""
        return self._passed(self._parser.finish(), 0)

    def finish_word(self, reason: FinishReason | None) -> str | None:
        """Return OpenAI's word for how the choice ended, None while it goes on.

        A call that was cut off has "length", as text has. (With a function that the request names OpenAI and vLLM
        say "stop"; that is `ChatTurn.finish_word`'s matter.)
        """
        return "tool_calls" if self.num_calls and reason is FinishReason.STOP else finish_word(reason)

    def _passed(self, deltas: list[Delta], num_tokens: int) -> list[Delta]:
        self._reasoning.note(deltas, num_tokens)
        return [delta for delta in deltas if self._passes(delta)]

    def _passes(self, delta: Delta) -> bool:
        if isinstance(delta, ReasoningDelta):
            return self._shows_reasoning
        if isinstance(delta, ToolCallDelta):
            if self._max_calls is not None and delta.index >= self._max_calls:
                return False
            self.num_calls = max(self.num_calls, delta.index + 1)
        return True
