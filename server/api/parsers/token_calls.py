"""Calls that are written between special tokens: DeepSeek's and Kimi's.

Documented in the chat templates of DeepSeek-V3 and V3.1 and in Kimi-K2's tool calling guide:

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME\\n```json\\n{...}\\n```<|tool_call_end|>...      (V3, R1)
    <|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>{...}<|tool_call_end|>...                           (V3.1)
    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...

(DeepSeek writes its bars and underscores as U+FF5C and U+2581.)
"""

from abc import abstractmethod
from dataclasses import dataclass

from server.api.parsers.reader import MarkupParser, Reading


@dataclass(frozen=True, kw_only=True)
class CallTokens:
    """A family's special tokens."""

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str


def _deepseek(token: str) -> str:
    """Spell a token as DeepSeek does."""
    return token.replace("|", "\uff5c").replace("_", "\u2581")


DEEPSEEK = CallTokens(
    section=(_deepseek("<|tool_calls_begin|>"), _deepseek("<|tool_calls_end|>")),
    call=(_deepseek("<|tool_call_begin|>"), _deepseek("<|tool_call_end|>")),
    separator=_deepseek("<|tool_sep|>"),
)
KIMI = CallTokens(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
)


class TokenCallParser(MarkupParser):
    """Reads sections of calls; subclasses read what is before a call's arguments."""

    tokens: CallTokens

    def run(self) -> Reading[None]:
        """Read content and sections in turn. A call outside a section is one too."""
        opening = self.tokens.section[0]
        while mark := (yield from self.content_until(opening, self.tokens.call[0])):
            self.keep(mark)
            if mark != opening:
                self.put_back(mark)
            yield from self._section()
            self.say_kept()

    def _section(self) -> Reading[None]:
        while (yield from self.until(self.tokens.call[0], self.tokens.section[1])).mark == self.tokens.call[
            0
        ]:
            yield from self._call()

    def _call(self) -> Reading[None]:
        ends = (self.tokens.call[1], self.tokens.section[1])
        found = yield from self.until(self.tokens.separator, *ends)
        if found.mark == self.tokens.separator:
            name, call_id = yield from self.head(found.text.strip())
            yield from self.skip_space()
            yield from self._arguments(name, call_id)
            found = yield from self.until(*ends)
        if found.mark == self.tokens.section[1]:
            self.put_back(found.mark)

    @abstractmethod
    def head(self, text: str) -> Reading[tuple[str, str | None]]:
        """Return a call's name, and its id if it has one; `text` is what came before the separator."""

    def _arguments(self, name: str, call_id: str | None) -> Reading[None]:
        first = yield from self.peek()
        if name and first == "{":
            self.begin_call(name, call_id)
            yield from self.json_text(self.add_arguments)
        elif name and first in ("<", "`"):  # the end, at once
            self.begin_call(name, call_id)
            self.add_arguments("{}")


class DeepseekParser(TokenCallParser):
    """V3.1 has the name before the separator; V3 and R1 a kind, then the name, and the arguments in a fence."""

    tokens = DEEPSEEK
    markers = (*DEEPSEEK.section, *DEEPSEEK.call, DEEPSEEK.separator)

    def head(self, text: str) -> Reading[tuple[str, str | None]]:
        """Return the name; what comes next tells the two forms apart."""
        yield from self.skip_space()
        if text != "function" or (yield from self.peek()) in ("{", "<"):
            return text, None
        found = yield from self.until("\n", self.tokens.call[1])
        if found.mark != "\n":
            self.put_back(found.mark)
        yield from self.skip_space()
        if (yield from self.accept("```")):
            yield from self.accept("json")
        return found.text.strip(), None


class KimiParser(TokenCallParser):
    """functions.NAME:NUMBER stands before the separator; it is the call's id, which the template wants back."""

    tokens = KIMI
    markers = (*KIMI.section, *KIMI.call, KIMI.separator)

    def head(self, text: str) -> Reading[tuple[str, str | None]]:
        """Return the name and the id."""
        yield from ()
        return text.split(":")[0].removeprefix("functions."), text
