"""Parse gpt-oss' answers: messages in channels, in OpenAI's harmony format.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

analysis is reasoning, final is content, a message to an offered function is a call, and commentary without a recipient is
content, because it is meant for the user. The prompt ends inside a message's header, which the answer continues. A header
that breaks off (at <|end|> or at the next message) has no message. If a header has several channels, the last one counts.
"""

import re
from collections.abc import Callable

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.json_span import JsonSpan
from server.api.parsers.reader import MarkupParser, Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(MarkupParser):
    """Read messages in sequence."""

    markers = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

    def __init__(self, *, prompt: str, types: ArgumentTypes | None) -> None:
        """Args: prompt is the text that the answer continues; without types, calls are content."""
        super().__init__(types.offered if types else str)
        self._header = _open_header(prompt)
        self._takes_calls = types is not None
        self._spoken: set[str] = set()

    @staticmethod
    def content_header(prompt: str) -> str:
        """Return the text to add to a prompt so that content follows."""
        header, final = _open_header(prompt), f"{CHANNEL}final{MESSAGE}"
        if MESSAGE not in header:
            return "" if prompt.endswith(MESSAGE) else final
        return f"{END}{START}assistant{final}" if _CHANNEL.findall(header)[-1:] == ["analysis"] else ""

    def run(self) -> Reading[None]:
        header = self._header
        if MESSAGE not in header:
            if not (yield from self._goes_on()):
                return  # text without a header is content
            header = yield from self._rest_of(header)
        while header:
            mark = yield from self._body(header)
            if mark not in (START, CHANNEL):
                mark = yield from self._next_message()
            header = (yield from self._rest_of(mark)) if mark else ""

    def _next_message(self) -> Reading[str]:
        """Read up to the start of a message. Text outside messages is content."""
        yield from self.skip_space()
        return (yield from self.stream_until(self._message("final", self.say), START, CHANNEL))

    def _rest_of(self, header: str) -> Reading[str]:
        """Read to the end of a header. If it breaks off, continue with the next one."""
        while True:
            found = yield from self._header_part()
            header += found
            if not found or found.endswith(MESSAGE):
                return header if found else ""
            if found.endswith(START):
                header = START
            else:
                header = yield from self._next_message()
                if not header:
                    return ""

    def _header_part(self) -> Reading[str]:
        """Read up to the mark that ends a header or breaks it off. Returns an empty string if the text ends first."""
        parts: list[str] = []
        mark = yield from self.stream_until(parts.append, MESSAGE, START, END, CALL, RETURN)
        return "".join(parts) + self.gap + mark if mark else ""

    def _goes_on(self) -> Reading[bool]:
        """Return whether the text continues a header."""
        space = yield from self.skip_space()
        comes = yield from self.coming(CHANNEL, MESSAGE, START, CONSTRAIN, "to=")
        self.put_back(space)
        return bool(comes)

    def _body(self, header: str) -> Reading[str]:
        """Read a message's body and the mark that ends it."""
        channels = _CHANNEL.findall(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None and recipient[1].startswith("functions.") else ""
        function = self._offered(name.removeprefix("functions.")) if name and self._takes_calls else None
        if function:
            return (yield from self._call(function))
        if channels[-1:] == ["analysis"]:
            return (yield from self.stream_until(self._message("analysis", self.think), *_ENDS))
        return (yield from self.stream_until(self._message("final", self.say), *_ENDS))

    def _call(self, name: str) -> Reading[str]:
        """Read a call's arguments. Text after them is content."""
        yield from self.skip_space()
        span, rest = JsonSpan(), self._message("final", self.say)
        if not (yield from self.coming(*_ENDS)) and not (yield from self.object_comes()):
            return (yield from self.stream_until(rest, *_ENDS))
        self.begin_call(name)
        if (yield from self.coming(*_ENDS)):
            self.add_arguments("{}")

        def add(text: str) -> None:
            length, as_json = span.push(text)
            self.add_arguments(as_json)
            if text[length:].strip():
                rest(text[length:])

        return (yield from self.stream_until(add, *_ENDS))

    def _message(self, kind: str, out: Callable[[str], None]) -> Callable[[str], None]:
        """Return `out` with a blank line before the first text if this kind had an earlier message."""
        gap = "\n\n" if kind in self._spoken else ""

        def speak(text: str) -> None:
            nonlocal gap
            if text:
                self._spoken.add(kind)
                out(gap + text)
                gap = ""

        return speak


def _open_header(prompt: str) -> str:
    """Return the message that a prompt leaves open, from its start, or an empty string."""
    message = prompt[prompt.rfind(START) :] if START in prompt else ""
    return "" if message.rstrip().endswith((END, CALL, RETURN)) else message
