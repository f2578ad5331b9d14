"""Parse answers that are messages in channels: Solar-Open's and Muse's. (`harmony` parses gpt-oss'.)

Solar-Open (chat template of upstage/Solar-Open-100B):

    <|think|>...<|end|><|begin|>assistant<|content|>...<|end|>
    <|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|><|calls|>

Muse (the parsers of vLLM and SGLang, muse_glimmer):

    to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>
    <|start|>assistant to=NAME<|message|><atem:function_calls>...</atem:function_calls><|eom|>

The prompt ends within a message or its header, which the answer continues.
"""

import re

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.reader import MarkupParser, NoCall, Reading
from server.api.parsers.tag_calls import MUSE, NamedTagParser

_THINK, _CONTENT, _BEGIN, _END = "<|think|>", "<|content|>", "<|begin|>assistant", "<|end|>"
_CALLS, _CALLS_END, _FLUSH = "<|tool_calls|>", "<|calls|>", "<|flush|>"
_CALL, _CALL_NAME, _CALL_ARGUMENTS, _CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)


class SolarParser(MarkupParser):
    """Read Solar-Open's messages."""

    markers = (
        *(_THINK, _CONTENT, "<|begin|>", _END, _CALLS, _CALLS_END, _FLUSH),
        *(_CALL, _CALL_NAME, _CALL_ARGUMENTS, _CALL_END),
    )

    def __init__(self, *, prompt: str, types: ArgumentTypes | None) -> None:
        """Args: prompt is the text that the answer continues; without types, calls are content."""
        super().__init__(types.offered if types else str)
        self._thinks = _open_in(prompt) == _THINK
        self._takes_calls = types is not None

    @staticmethod
    def content_header(prompt: str) -> str:
        """Return the text to add to a prompt so that content follows."""
        return {_THINK: f"{_END}{_BEGIN}{_CONTENT}", _CONTENT: ""}.get(_open_in(prompt), _CONTENT)

    def run(self) -> Reading[None]:
        marks = (_THINK, _CONTENT, _BEGIN, _END, _CALLS_END, _FLUSH)
        calls = (_CALLS, _CALL) if self._takes_calls else ()
        out = self.think if self._thinks else self.say
        while mark := (yield from self.stream_until(out, *marks, *calls)):
            if mark in calls:
                yield from self.attempt(mark, self._calls(mark), gap=self.gap)
            out = self.think if mark == _THINK else self.say

    def _calls(self, mark: str) -> Reading[None]:
        if mark == _CALLS:
            yield from self.skip_space()
            if not (yield from self.accept(_CALL)):
                raise NoCall
        call_id = (yield from self.head(_CALL_NAME)).text.strip()
        name = self.function((yield from self.head(_CALL_ARGUMENTS)).text.strip())
        yield from self.skip_space()
        if (yield from self.object_comes()):
            self.begin_call(name, call_id)
            yield from self.json_text(self.add_arguments)
        elif (yield from self.coming(_CALL_END)):
            self.begin_call(name, call_id)
            self.add_arguments("{}")
        else:
            raise NoCall
        yield from self.end_tag(_CALL_END)


def _open_in(prompt: str) -> str:
    """Return the mark of the message that a prompt leaves open, or the mark that ended the last one."""
    return max((prompt.rfind(mark), mark) for mark in (_THINK, _CONTENT, _BEGIN, _END))[1]


_START, _MESSAGE, _EOM, _EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_MUSE_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?[ \t]*(?:to=(?P<to>[^\s<]{1,128}))?\s*<\|message\|>"
)

_CUT_HEADER = re.compile(r"<\|start\|>\s*\w*[ \t]*(?:to=[^\s<]*)?\s*(?:<[|a-z]*)?")


class MuseParser(MarkupParser):
    """Read Muse's messages. Calls count only in a message to a function."""

    markers = (_START, _MESSAGE, _EOM, _EOT)

    def __init__(self, *, prompt: str, types: ArgumentTypes | None) -> None:
        """Args: prompt is the text that the answer continues; without types, calls are content."""
        super().__init__()
        self._types = types
        self._open_header = _open_message(prompt)

    @staticmethod
    def content_header(prompt: str) -> str:
        """Return the text to add to a prompt so that content follows."""
        header = _open_message(prompt)
        if header is None:
            return " to=user<|message|>"
        return "" if header["to"] in (None, "user") else f"{_EOM}{_START}assistant to=user{_MESSAGE}"

    def run(self) -> Reading[None]:
        """Read messages to the end. Text without a header is content."""
        if self._open_header is not None:
            yield from self._body(self._open_header["to"] or "")
        while self.num_unread or not self._ended:
            space = yield from self.skip_space()
            if (yield from self.pass_cut_tag(_START)):
                return
            comes = yield from self.coming(_START, _MESSAGE, "assistant", "to=")
            header = (yield from self.take_match(_MUSE_HEADER)) if comes else None
            if header is None and comes == _START:
                self.pass_cut(_CUT_HEADER)
                yield from self.accept(_START)
            elif header is None:
                self.put_back(space)
            yield from self._body((header["to"] or "") if header else "")

    def _body(self, to: str) -> Reading[None]:
        """Read a message up to its end or the start of the next one."""
        ends = (_EOM, _EOT, _START)
        if to == "self":
            mark = yield from self.stream_until(self.think, *ends)
        elif to in ("", "user") or self._types is None:
            mark = yield from self.stream_until(self.say, *ends)
        else:
            mark = yield from self._calls(self._types, ends)
        if mark == _START:
            self.put_back(mark)

    def _calls(self, types: ArgumentTypes, ends: tuple[str, ...]) -> Reading[str]:
        calls = NamedTagParser(MUSE, types)
        calls.num_calls = self.num_calls

        def push(text: str) -> None:
            self._deltas += calls.push(text)

        mark = yield from self.stream_until(push, *ends)
        self._deltas += calls.finish(None if mark else self._cut_at)
        self.num_calls = calls.num_calls
        return mark


def _open_message(prompt: str) -> re.Match[str] | None:
    """Return the header of the message that a prompt leaves open."""
    header = _MUSE_HEADER.match(prompt, max(prompt.rfind(_START), 0))
    return None if prompt.rstrip().endswith((_EOM, _EOT)) else header
