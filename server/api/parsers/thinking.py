"""Reasoning that stands before an answer, between <think> and </think>; what follows goes to another parser.

Documented in the chat templates of DeepSeek-R1, Qwen3, GLM-4.5, Kimi-K2-Thinking and MiniMax-M2. Whether the text
begins inside is seen in the prompt, whose template may have written the opening tag, or both tags where thinking is
off. White space around the tags belongs to neither part.
"""

from server.api.parsers.deltas import Delta, TextParser
from server.api.parsers.reader import MarkupParser, Reading

OPENING, CLOSING = "<think>", "</think>"


class ThinkParser(MarkupParser):
    """Splits off the reasoning."""

    def __init__(self, answer: TextParser, *, opened: bool, ends_before: tuple[str, ...] = ()) -> None:
        """Args: opened if the prompt did it; ends_before are marks that end reasoning without its closing tag."""
        super().__init__()
        self._answer = answer
        self._opened = opened
        self._ends_before = ends_before

    def run(self) -> Reading[None]:
        """Read the reasoning, if there is any, then hand everything on."""
        space = yield from self.skip_space()
        opened = (yield from self.accept(OPENING)) or self._opened
        if opened:
            yield from self._reasoning()
        else:
            self.unread = space + self.unread
        while not self._ended:
            self._pass(self._answer.push(self.take(len(self.unread))))
            yield
        self._pass(self._answer.push(self.take(len(self.unread))))
        self._pass(self._answer.finish())

    def _reasoning(self) -> Reading[None]:
        yield from self.skip_space()
        mark = yield from self.stream_until(self.think, CLOSING, *self._ends_before)
        if mark == CLOSING:
            yield from self.skip_space()
        else:
            self.put_back(mark)

    def _pass(self, deltas: list[Delta]) -> None:
        self._deltas += deltas


class WrappedAnswerParser(MarkupParser):
    """Takes an answer out of its tags, as Hunyuan (<answer>) and ERNIE 4.5 (<response>) write them after reasoning."""

    def __init__(self, answer: TextParser, tags: tuple[str, str]) -> None:
        super().__init__()
        self._answer = answer
        self._tags = tags

    def run(self) -> Reading[None]:
        """Read what is in the tags, and what is after them; without tags, everything."""
        space = yield from self.skip_space()
        if (yield from self.accept(self._tags[0])):
            yield from self.skip_space()
            yield from self.stream_until(self._pass, self._tags[1])
            yield from self.skip_space()
        else:
            self.unread = space + self.unread
        while not self._ended:
            self._pass(self.take(len(self.unread)))
            yield
        self._pass(self.take(len(self.unread)))
        self._deltas += self._answer.finish()

    def _pass(self, text: str) -> None:
        self._deltas += self._answer.push(text)


def is_opened(prompt: str) -> bool | None:
    """Tell whether a prompt's end leaves reasoning open; None if it ends with neither tag."""
    end = prompt.rstrip()
    if end.endswith(OPENING):
        return True
    return False if end.endswith(CLOSING) else None
