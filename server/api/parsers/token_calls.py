"""Parse calls written between special tokens: DeepSeek's and Kimi's.

Documented in the chat templates of DeepSeek-V3 and V3.1 and in Kimi-K2's tool calling guide:

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME\\n```json\\n{...}\\n```<|tool_call_end|>...      (V3, R1)
    <|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>{...}<|tool_call_end|>...                           (V3.1)
    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...

(DeepSeek writes its bars and underscores as U+FF5C and U+2581. Kimi-K2 also writes its section tokens in the singular,
<|tool_call_section_begin|>: llama.cpp#17376.)
"""

from abc import abstractmethod
from dataclasses import dataclass

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.reader import MarkupParser, NoCall, Reading

_FENCES = ("```json", "```")


@dataclass(frozen=True, kw_only=True)
class CallTokens:
    """A family's special tokens."""

    sections: tuple[tuple[str, str], ...]
    call: tuple[str, str]
    separator: str

    @property
    def section(self) -> tuple[str, str]:
        """The section's tokens as in the template."""
        return self.sections[0]

    @property
    def all(self) -> tuple[str, ...]:
        """All tokens."""
        return (*(token for section in self.sections for token in section), *self.call, self.separator)


def _deepseek(token: str) -> str:
    """Spell a token with DeepSeek's characters."""
    return token.replace("|", "\uff5c").replace("_", "\u2581")


DEEPSEEK = CallTokens(
    sections=((_deepseek("<|tool_calls_begin|>"), _deepseek("<|tool_calls_end|>")),),
    call=(_deepseek("<|tool_call_begin|>"), _deepseek("<|tool_call_end|>")),
    separator=_deepseek("<|tool_sep|>"),
)
KIMI = CallTokens(
    sections=(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
)


class TokenCallParser(MarkupParser):
    """Read sections of calls. Subclasses read the text before a call's arguments."""

    tokens: CallTokens

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(types.offered)
        self._types = types
        self.openings = (*(opening for opening, _ in self.tokens.sections), self.tokens.call[0])
        self._closings = tuple(closing for _, closing in self.tokens.sections)
        self.markers = self.tokens.all

    def run(self) -> Reading[None]:
        """Read content and sections in turn. A call outside a section counts, too."""
        yield from self.find_calls(*self.openings, read=self._section)

    def _section(self, mark: str) -> Reading[None]:
        return self.section(mark, self.tokens.call[0], self._closings, self._call)

    def _call(self) -> Reading[None]:
        found = yield from self.head(self.tokens.separator, self.tokens.call[1])
        if found.mark != self.tokens.separator:
            raise NoCall
        name, call_id = yield from self.name(found.text.strip())
        self.function(name)
        yield from self.skip_space()
        fence = yield from self.accept(*_FENCES)
        yield from self.skip_space()
        if (yield from self.object_comes()):
            self.begin_call(name, call_id)
            yield from self.json_text(self.add_arguments)
        elif (yield from self.coming(self.tokens.call[1], "```")):
            self.begin_call(name, call_id)
            self.add_arguments("{}")
        else:
            raise NoCall
        if fence:
            yield from self.end_tag(_FENCES[1])
        yield from self.end_tag(self.tokens.call[1])

    @abstractmethod
    def name(self, text: str) -> Reading[tuple[str, str | None]]:
        """Return a call's function, and its id if it has one; `text` precedes the separator."""


class DeepseekParser(TokenCallParser):
    """V3.1 writes the name before the separator. V3 and R1 write a type, then the name, and the arguments in a fence."""

    tokens = DEEPSEEK

    def name(self, text: str) -> Reading[tuple[str, str | None]]:
        """Return the name. The next character distinguishes the two forms."""
        yield from self.skip_space()
        if text != "function" or (yield from self.peek()) in ("{", "<", "`"):
            return text, None
        return (yield from self.head("\n")).text.strip(), None


class KimiParser(TokenCallParser):
    """functions.NAME:NUMBER precedes the separator. It is the call's id, and the template expects it back."""

    tokens = KIMI

    def name(self, text: str) -> Reading[tuple[str, str | None]]:
        yield from ()
        return self._types.of_call_id(text) or "", text
