"""Parse calls written like program code: f(city="Paris", days=3), and Gemma 4's call:f{city:<|"|>Paris<|"|>,days:3}.

Documented in Llama 3.2's and 4's prompt formats (a list of calls, the whole answer; vLLM's llama4_pythonic template),
the model cards and chat templates of LFM2 (the list is between <|tool_call_start|> and <|tool_call_end|>) and Gemma 4's
chat template (format_argument: strings between <|"|>, bare keys).

Templates show a text in quotes without escaping quotes inside it, so a quote ends a text only if a comma or a closing bracket
follows. A call is output as soon as its first argument has a name, and each argument when it is complete.
"""

import re
from dataclasses import dataclass
from typing import Any

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.literals import MAX_DEPTH, as_json, unescape, word_value
from server.api.parsers.reader import NOTHING, MarkupParser, NoCall, Reading, decode_json

_CUT_NAME = re.compile(r"""[\w.:/"<|>-]{0,128}\s{0,16}""")
_PAIRS = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The syntax of calls and values."""

    arguments: tuple[str, str]  # brackets around a call's arguments
    name: re.Pattern[str]  # an argument's name and the sign after it
    quotes: tuple[str, ...]
    has_escapes: bool  # in quoted text
    word: re.Pattern[str]  # a value without quotes
    behind: re.Pattern[str]  # what follows a quoted text


PYTHON = CallForm(
    arguments=("(", ")"),
    name=re.compile(r"([\w.:/-]{1,128})\s{0,16}="),
    quotes=('"', "'"),
    has_escapes=True,
    word=re.compile(r"[^\s,()\[\]{}<]+"),
    behind=re.compile(r"\s{0,64}[,)\]}:]"),
)
GEMMA = CallForm(
    arguments=("{", "}"),
    name=re.compile(r"""(?:<\|"\|>|")?([^\s"<>:,{}]{1,128})(?:<\|"\|>|")?\s{0,16}:"""),
    quotes=('<|"|>', '"'),
    has_escapes=False,
    word=re.compile(r"[^,\[\]{}<]+"),
    behind=re.compile(r"\s{0,64}[,\]}:]"),
)


class LiteralCallParser(MarkupParser):
    """Read calls. Subclasses find them in the text."""

    form: CallForm

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(types.offered)
        self._types = types
        self._was_cut = False  # the text ended within an argument

    def one_call(self) -> Reading[None]:
        """Read a call from its name on.

        Raises:
            NoCall: The text is not a call.
        """
        opening, closing = self.form.arguments
        name = self.function((yield from self.head(opening)).text.strip())
        yield from self.skip_space()
        key = None if (yield from self.coming(closing)) else (yield from self._argument_name())
        self.begin_call(name)
        has_any = False
        while key is not None:
            if not (yield from self.attempt(NOTHING, self._argument(name, key[1], has_any))):
                self.put_back(key[0])
                return
            if self._was_cut:
                return
            has_any = True
            yield from self.skip_space()
            if not (yield from self.accept(",")):
                break
            space = yield from self.skip_space()
            if (yield from self.coming(closing)):
                break
            key = yield from self.take_match(self.form.name)
            if key is None:
                self.pass_cut(_CUT_NAME)
                self.put_back(f",{space}" if self.num_unread else "")
                return
        if (yield from self.accept(closing)):
            self.add_arguments("}" if has_any else "{}")

    def _argument_name(self) -> Reading[re.Match[str]]:
        found = yield from self.take_match(self.form.name)
        if found is None:
            raise NoCall
        return found

    def _argument(self, function: str, key: str, has_any: bool) -> Reading[None]:
        """Read and output an argument, unless the text ends within its value."""
        try:
            yield from self.skip_space()
            value = yield from self._value(0, whole=(function, key))
            yield from self.skip_space()
            if not (yield from self.coming(",", self.form.arguments[1])):
                raise NoCall
        except NoCall:
            if self._ended and not self.num_unread:
                self._was_cut = True
                return
            raise
        self.add_arguments(f"{', ' if has_any else '{'}{as_json(key)}: {value}")

    def _value(self, depth: int, whole: tuple[str, str] | None = None) -> Reading[str]:
        """Read a value and return it as JSON. `whole` is the function and the argument if the value is a whole argument."""
        if depth > MAX_DEPTH:
            raise NoCall
        quote = yield from self.accept(*self.form.quotes)
        if quote:
            text = yield from self._text_in(quote)
            # vLLM's template for Llama 4 puts every value in quotes.
            is_other = self.form is PYTHON and whole is not None and self._types.excludes_text(*whole)
            return self._types.json_of(*whole, text) if whole is not None and is_other else as_json(text)
        opening = yield from self.accept(*_PAIRS)
        if opening == "{":
            return (yield from self._object(depth))
        if opening:
            return (yield from self._list(_PAIRS[opening], depth))
        return (yield from self._bare(whole))

    def _text_in(self, quote: str) -> Reading[str]:
        """Read a quoted text after its opening quote."""
        is_json = quote == '"' and not self.form.has_escapes
        escapes = ("\\\\", "\\" + quote) if self.form.has_escapes or is_json else ()

        def is_end(mark: str, _before: str, behind: str, is_all: bool) -> bool | None:
            if mark in escapes:
                return False
            if self.form.behind.match(behind):
                return True
            may_follow = len(behind) <= 64 and not behind.strip()
            return None if may_follow and not is_all else may_follow

        parts: list[str] = []
        if not (yield from self.value_until(parts.append, (*escapes, quote), is_end)):
            raise NoCall
        text = "".join(parts)
        if is_json:
            return _from_json(text)
        return unescape(text) if self.form.has_escapes else text

    def _bare(self, whole: tuple[str, str] | None) -> Reading[str]:
        parts: list[str] = []
        while (yield from self.peek()) and (found := self.form.word.match(self._text, self._at)):
            parts.append(self.take(found.end() - found.start()))
        word = "".join(parts).strip()
        if not word:
            raise NoCall
        if self.form is GEMMA and whole is not None:
            return self._types.json_of(*whole, word)
        try:
            return as_json(word_value(word))
        except ValueError:
            return as_json(word)

    def _list(self, closing: str, depth: int) -> Reading[str]:
        items: list[str] = []
        while True:
            yield from self.skip_space()
            if (yield from self.accept(closing)):
                return f"[{', '.join(items)}]"
            items.append((yield from self._value(depth + 1)))
            yield from self._comma_or(closing)

    def _object(self, depth: int) -> Reading[str]:
        items: list[str] = []
        while True:
            yield from self.skip_space()
            if (yield from self.accept("}")):
                return f"{{{', '.join(items)}}}"
            quote = yield from self.accept(*self.form.quotes)
            if quote:
                key = yield from self._text_in(quote)
                yield from self.skip_space()
                if not (yield from self.accept(":")):
                    raise NoCall
            else:
                key = (yield from self.head(":")).text.strip()
            yield from self.skip_space()
            items.append(f"{as_json(key)}: {(yield from self._value(depth + 1))}")
            yield from self._comma_or("}")

    def _comma_or(self, closing: str) -> Reading[None]:
        yield from self.skip_space()
        if not (yield from self.accept(",")) and not (yield from self.coming(closing)):
            raise NoCall


def _from_json(text: str) -> str:
    try:
        value: Any = decode_json(f'"{text}"')
    except ValueError:
        return text
    return value if isinstance(value, str) else text


class PythonCallParser(LiteralCallParser):
    """Parse [f(a=1), g()], between tags or as the whole answer."""

    form = PYTHON

    def __init__(self, types: ArgumentTypes, tags: tuple[str, str], *, whole_answer: bool = False) -> None:
        """Args: with whole_answer, the tags may be missing, and calls must begin the answer."""
        super().__init__(types)
        self.markers = tags
        self._tags = tags
        self._whole_answer = whole_answer
        self.openings = () if whole_answer else tags[:1]

    def run(self) -> Reading[None]:
        if self._whole_answer:
            yield from self.attempt(NOTHING, self._list_of_calls())
        else:
            yield from self.find_calls(*self.openings, read=lambda _: self._list_of_calls())

    def _list_of_calls(self) -> Reading[None]:
        yield from self.skip_space()
        if self._whole_answer:
            yield from self.accept(self._tags[0])
            yield from self.skip_space()
        in_list = yield from self.accept("[")
        if self._whole_answer and not in_list:
            raise NoCall
        while True:
            yield from self.skip_space()
            if not (yield from self.attempt(NOTHING, self.one_call())):
                return
            space = yield from self.skip_space()
            if not (yield from self.accept(",")):
                self.put_back(space)
                break
        if in_list:
            yield from self.accept("]")
        yield from self.end_tag(self._tags[1])


class GemmaParser(LiteralCallParser):
    """Parse <|tool_call>call:NAME{...}<tool_call|>, once for each call."""

    form = GEMMA
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    openings = ("<|tool_call>",)

    def run(self) -> Reading[None]:
        yield from self.find_calls(*self.openings, read=self._call)

    def _call(self, _: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.accept("call:")
        yield from self.one_call()
        space = yield from self.skip_space()
        if not (yield from self.pass_cut_tag("<tool_call|>")) and not (
            yield from self.accept("<tool_call|>")
        ):
            self.put_back(space)
