"""gpt-oss' answers: messages in channels, as OpenAI's harmony format documents them.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

analysis is reasoning, final is content, a message to a function is a call, and commentary to nobody is content: it is
meant for the user. The prompt ends inside a message's header, which the answer goes on with.
"""

import re
from collections.abc import Callable

from server.api.parsers.reader import JsonSpan, MarkupParser, Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(MarkupParser):
    """Reads messages, one after the other."""

    markers = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

    def __init__(self, *, prompt: str, takes_calls: bool) -> None:
        """Args: prompt is what the answer goes on from; without takes_calls a call is content."""
        super().__init__()
        self._header = _open_header(prompt)
        self._takes_calls = takes_calls
        self._spoken: set[str] = set()

    def run(self) -> Reading[None]:
        """Read messages to the end."""
        header = self._header
        if MESSAGE not in header:
            if not (yield from self._goes_on()):
                return  # text without a header: all content
            header = yield from self._rest_of(header)
        while header:
            mark = yield from self._body(header)
            if mark not in (START, CHANNEL):
                mark = (yield from self.until(START, CHANNEL)).mark
            header = yield from self._rest_of(mark)

    def _rest_of(self, header: str) -> Reading[str]:
        """Read a header to its end; one that is cut off is none."""
        found = yield from self.until(MESSAGE)
        return header + found.text + found.mark if found.mark else ""

    def _goes_on(self) -> Reading[bool]:
        """Tell whether the text goes on with a header."""
        space = yield from self.skip_space()
        for mark in (CHANNEL, MESSAGE, START, CONSTRAIN, "to="):
            if (yield from self.accept(mark)):
                self.unread = space + mark + self.unread
                return True
        self.unread = space + self.unread
        return False

    def _body(self, header: str) -> Reading[str]:
        """Read a message's body and the mark that ends it."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions.") and self._takes_calls:
            return (yield from self._call(recipient[1].removeprefix("functions.")))
        if channel is not None and channel[1] == "analysis":
            return (yield from self.stream_until(self._message("analysis", self.think), *_ENDS))
        return (yield from self.stream_until(self._message("final", self.say), *_ENDS))

    def _call(self, name: str) -> Reading[str]:
        yield from self.skip_space()
        self.begin_call(name)
        if (yield from self.peek()) == "<":
            self.add_arguments("{}")
            return (yield from self.until(*_ENDS)).mark
        span = JsonSpan()

        def add(text: str) -> None:
            length, as_json = span.push(text)
            self.add_arguments(as_json + text[length:])

        return (yield from self.stream_until(add, *_ENDS, keeps_rest=False))

    def _message(self, kind: str, out: Callable[[str], None]) -> Callable[[str], None]:
        """Return `out` with a blank line before the first text, if another message of this kind came before."""
        gap = "\n\n" if kind in self._spoken else ""

        def speak(text: str) -> None:
            nonlocal gap
            if text:
                self._spoken.add(kind)
                out(gap + text)
                gap = ""

        return speak


def _open_header(prompt: str) -> str:
    """Return the message that a prompt's end leaves open, from its start; empty if there is none."""
    message = prompt[prompt.rfind(START) :] if START in prompt else ""
    return "" if message.rstrip().endswith((END, CALL, RETURN)) else message
