"""Parse reasoning before an answer, between tags such as <think> and </think>. Another parser reads the text after it.

Documented in the chat templates of DeepSeek-R1, Qwen3, GLM-4.5, Kimi-K2-Thinking, MiniMax-M2, Hy3, Gemma 4 and Command A
Reasoning. The prompt shows whether the answer begins inside reasoning: its template may have written the opening tag, or both
tags if thinking is off, and its last message may be an answer to continue. Whitespace around the tags belongs to neither part.

Models also call tools without closing their reasoning (Qwen3.5, MiniMax-M2, DeepSeek-V3.2; Kimi and GLM by design), but reasoning
may also contain drafts of calls, followed by more reasoning. So complete calls of offered functions end reasoning if only
calls follow them; in families that do it by design, they end it at once.
"""

import re
from collections.abc import Callable

from server.api.parsers.deltas import ContentDelta, Delta, TextParser, ToolCallDelta
from server.api.parsers.reader import MarkupParser, Reading

OPENING, CLOSING = "<think>", "</think>"
TagPairs = tuple[tuple[str, str], ...]
THINK: TagPairs = ((OPENING, CLOSING),)
_FIRST_SLICE, _LAST_SLICE = 64, 4096  # for a possible call; most non-calls show in a few characters
_LONGEST_TAG = 32
_CALL, _DRAFT, _CLOSED = "call", "draft", "reasoning continues to its closing tag"
_MAX_DRAFTS = 32  # after this many drafts of calls in reasoning, the parser ignores further ones
# Special tokens as chat templates write them. They end or begin a turn, so reasoning opened before them is history.
_TURN = re.compile(
    r"<[|\uff5c][^<>]{1,40}>|<[^<>]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|\[e~\[|\]~b\]|</s>"
)


class ThinkParser(MarkupParser):
    """Separate the reasoning from the answer."""

    def __init__(
        self,
        make_answer: Callable[[], TextParser],
        *,
        opened: bool,
        tags: TagPairs = THINK,
        calls: tuple[str, ...] = (),
        calls_end_it: bool = False,
    ) -> None:
        """Create a parser for one answer.

        Args:
            make_answer: Creates the parser of the answer after reasoning.
            opened: Whether the prompt has opened reasoning.
            tags: Pairs of tags, one of which is used.
            calls: Marks that begin calls, which may occur in reasoning that is never closed.
            calls_end_it: Calls end reasoning, regardless of the text after them.
        """
        super().__init__()
        self._make_answer = make_answer
        self._answer = make_answer()
        self._opened = opened
        self._openings = tuple(opening for opening, _ in tags)
        self._closings = tuple(closing for _, closing in tags)
        self._calls = calls
        self._calls_end_it = calls_end_it
        self._num_drafts = 0

    def run(self) -> Reading[None]:
        """Read the reasoning, if any, then pass everything on."""
        space = yield from self.skip_space()
        if (yield from self.accept(*self._openings)) or self._opened:
            yield from self._reasoning()
        else:
            self.put_back(space)
        while not self._ended:
            self._deltas += self._answer.push(self.take(self.num_unread))
            yield
        self._deltas += self._answer.push(self.take(self.num_unread))
        self._deltas += self._answer.finish(self._cut_at)

    def _reasoning(self) -> Reading[None]:
        yield from self.skip_space()
        while mark := (yield from self.stream_until(self.think, *self._closings, *self._calls)):
            if mark in self._closings:
                yield from self.skip_space()
                return
            gap = self.gap
            if (yield from self._answer_begins(mark)):
                return
            self.think(gap + mark)

    def _answer_begins(self, mark: str) -> Reading[bool]:
        """Read the text after a call's mark, and return whether it is the answer. If not, the text is read again."""
        answer = self._make_answer()
        deltas: list[Delta] = answer.push(mark)
        read: list[str] = []
        verdict, tail, slice_length = "", "", _FIRST_SLICE
        while not verdict:
            while self.num_unread and not verdict:
                read.append(self.take(min(self.num_unread, slice_length)))
                slice_length = min(2 * slice_length, _LAST_SLICE)
                tail = tail[-_LONGEST_TAG:] + read[-1]
                new = answer.push(read[-1])
                deltas += new
                verdict = self._verdict(deltas, new, tail)
            if self._ended and not verdict:
                new = answer.finish(self._cut_at)
                deltas += new
                verdict = self._verdict(deltas, new, tail) or (_CALL if deltas else _DRAFT)
            if not verdict:
                yield
        if verdict == _CALL:
            self._deltas += deltas
            self._answer = answer
            return True
        self._num_drafts += isinstance(deltas[0], ToolCallDelta) if deltas else 0
        if verdict == _CLOSED or self._num_drafts == _MAX_DRAFTS:
            self._calls = ()
        self.put_back("".join(read))
        return False

    def _verdict(self, deltas: list[Delta], new: list[Delta], tail: str) -> str:
        """Classify the text after a call's mark by its deltas and its end. Returns an empty string while undecided."""
        if self._calls_end_it:
            return "" if not deltas else _CALL if isinstance(deltas[0], ToolCallDelta) else _DRAFT
        if any(isinstance(delta, ContentDelta) for delta in new):
            return _DRAFT
        return _CLOSED if any(closing in tail for closing in self._closings) else ""


class WrappedAnswerParser(MarkupParser):
    """Remove the tags around an answer, which Hunyuan (<answer>) and ERNIE 4.5 (<response>) write after reasoning."""

    def __init__(self, answer: TextParser, tags: tuple[str, str]) -> None:
        super().__init__()
        self._answer = answer
        self._tags = tags

    def run(self) -> Reading[None]:
        """Read the text in the tags and after them. Without tags, read everything."""
        space = yield from self.skip_space()
        if (yield from self.accept(self._tags[0])):
            yield from self.skip_space()
            yield from self.stream_until(self._pass, self._tags[1])
            yield from self.skip_space()
        else:
            self.put_back(space)
        while not self._ended:
            self._pass(self.take(self.num_unread))
            yield
        self._pass(self.take(self.num_unread))
        self._deltas += self._answer.finish(self._cut_at)

    def _pass(self, text: str) -> None:
        self._deltas += self._answer.push(text)


def open_tags(prompt: str, tags: TagPairs = THINK) -> tuple[str, str] | None:
    """Return the tags of the reasoning that a prompt leaves open: not closed, and with no turn end or start after it."""
    at, pair = max((prompt.rfind(pair[0]), pair) for pair in tags)
    behind = prompt[at + len(pair[0]) :]
    is_open = at >= 0 and not any(closing in behind for _, closing in tags) and not _TURN.search(behind)
    return pair if is_open else None


def is_opened(prompt: str, tags: TagPairs = THINK) -> bool | None:
    """Return whether a prompt leaves reasoning open. Returns None if it neither does nor ends with a closing tag."""
    if open_tags(prompt, tags) is not None:
        return True
    return False if prompt.rstrip().endswith(tuple(closing for _, closing in tags)) else None
