"""Reasoning that stands before an answer, between tags such as <think> and </think>; what follows goes to another parser.

Documented in the chat templates of DeepSeek-R1, Qwen3, GLM-4.5, Kimi-K2-Thinking, MiniMax-M2, Hy3, Gemma 4 and Command A
Reasoning. Whether the text begins inside is seen in the prompt, whose template may have written the opening tag, or both
tags where thinking is off, and whose last message may be an answer to go on with. White space around the tags belongs to
neither part.

Models also call without closing their reasoning (Qwen3.5, MiniMax-M2, DeepSeek-V3.2; Kimi and GLM do it by design). Drafts of
calls stand in reasoning too, with more reasoning behind them. So whole calls of offered functions end reasoning if nothing
but calls follows them; in families that do it by design, at once.
"""

import re
from collections.abc import Callable

from server.api.parsers.deltas import ContentDelta, Delta, TextParser, ToolCallDelta
from server.api.parsers.reader import MarkupParser, Reading

OPENING, CLOSING = "<think>", "</think>"
TagPairs = tuple[tuple[str, str], ...]
THINK: TagPairs = ((OPENING, CLOSING),)
_FIRST_SLICE, _LAST_SLICE = 64, 4096  # of what may be a call; most of what is none shows in a few characters
_LONGEST_TAG = 32
_CALL, _DRAFT, _CLOSED = "call", "draft", "reasoning goes on to its closing tag"
_MAX_DRAFTS = 32  # whole calls in reasoning that were none; behind them nobody looks for one
# Special tokens in the forms that chat templates give them: a turn ends or begins, so what was open is history.
_TURN = re.compile(
    r"<[|\uff5c][^<>]{1,40}>|<[^<>]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|\[e~\[|\]~b\]|</s>"
)


class ThinkParser(MarkupParser):
    """Splits off the reasoning."""

    def __init__(
        self,
        make_answer: Callable[[], TextParser],
        *,
        opened: bool,
        tags: TagPairs = THINK,
        calls: tuple[str, ...] = (),
        calls_end_it: bool = False,
    ) -> None:
        """Set up.

        Args:
            make_answer: makes the parser of what follows.
            opened: the prompt has opened reasoning.
            tags: pairs, one of which is used.
            calls: marks that begin calls, which may stand in reasoning that is never closed.
            calls_end_it: whatever follows them.
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
        """Read the reasoning, if there is any, then hand everything on."""
        space = yield from self.skip_space()
        if (yield from self.accept(*self._openings)) or self._opened:
            yield from self._reasoning()
        else:
            self.put_back(space)
        while not self._ended:
            self._deltas += self._answer.push(self.take(self.num_unread))
            yield
        self._deltas += self._answer.push(self.take(self.num_unread))
        self._deltas += self._answer.finish()

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
        """Read what a mark of a call begins; tell whether it is the answer. If not, it comes again."""
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
                new = answer.finish()
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
        """Judge what stands behind a call's mark by its deltas and its end; empty as long as it is open."""
        if self._calls_end_it:
            return "" if not deltas else _CALL if isinstance(deltas[0], ToolCallDelta) else _DRAFT
        if any(isinstance(delta, ContentDelta) for delta in new):
            return _DRAFT
        return _CLOSED if any(closing in tail for closing in self._closings) else ""


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
            self.put_back(space)
        while not self._ended:
            self._pass(self.take(self.num_unread))
            yield
        self._pass(self.take(self.num_unread))
        self._deltas += self._answer.finish()

    def _pass(self, text: str) -> None:
        self._deltas += self._answer.push(text)


def open_tags(prompt: str, tags: TagPairs = THINK) -> tuple[str, str] | None:
    """Return the tags whose reasoning a prompt leaves open: opened, not closed, and no turn ends or begins behind it."""
    at, pair = max((prompt.rfind(pair[0]), pair) for pair in tags)
    behind = prompt[at + len(pair[0]) :]
    is_open = at >= 0 and not any(closing in behind for _, closing in tags) and not _TURN.search(behind)
    return pair if is_open else None


def is_opened(prompt: str, tags: TagPairs = THINK) -> bool | None:
    """Tell whether a prompt leaves reasoning open; None if it does not, but does not end with its closing tag either."""
    if open_tags(prompt, tags) is not None:
        return True
    return False if prompt.rstrip().endswith(tuple(closing for _, closing in tags)) else None
