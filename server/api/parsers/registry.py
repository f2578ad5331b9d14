"""The parsers by name, and which of them a model wants when nobody says.

Names are vLLM's, so that start commands keep working. The choice is made from the chat template: it shows the model
how its own calls and thoughts are written, and fine-tunes under another model_type keep it. Knows no request.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from server.api.parsers.deltas import PlainParser, TextParser
from server.api.parsers.harmony import CHANNEL, MESSAGE, HarmonyParser
from server.api.parsers.json_calls import MistralParser, TaggedJsonParser, WholeJsonParser
from server.api.parsers.reader import MarkupParser
from server.api.parsers.tag_calls import (
    MINIMAX_M2,
    QWEN3_CODER,
    ArgumentTypes,
    DsmlParser,
    GlmParser,
    NamedTagParser,
)
from server.api.parsers.tag_calls import TOKEN as DSML
from server.api.parsers.thinking import CLOSING, OPENING, ThinkParser, WrappedAnswerParser, is_opened
from server.api.parsers.token_calls import DEEPSEEK, KIMI, DeepseekParser, KimiParser

NONE = "none"  # turns parsing off
GPT_OSS = "openai"
_GENERIC = "hermes"  # also what models are told to write whose template knows no tools


@dataclass(frozen=True, kw_only=True)
class ThinkingStyle:
    """How a family thinks."""

    assumes_opened: bool = False  # where the prompt's end does not tell
    ends_before: tuple[str, ...] = ()
    answer_tags: tuple[str, str] | None = None  # around what follows


_Factory = Callable[[ArgumentTypes], MarkupParser]
_TOOLS: dict[str, _Factory] = {
    _GENERIC: lambda _: TaggedJsonParser("<tool_call>", "</tool_call>"),
    "qwen3_coder": lambda types: NamedTagParser(QWEN3_CODER, types),
    "deepseek_v3": lambda _: DeepseekParser(),
    "deepseek_v32": lambda types: DsmlParser("function_calls", types),
    "deepseek_v4": lambda types: DsmlParser("tool_calls", types),
    "glm45": GlmParser,
    "kimi_k2": lambda _: KimiParser(),
    "minimax_m2": lambda types: NamedTagParser(MINIMAX_M2, types),
    "mistral": lambda _: MistralParser(),
    "llama3_json": lambda _: WholeJsonParser(),
    "granite": lambda _: TaggedJsonParser("<|tool_call|>"),
    "hunyuan_a13b": lambda _: TaggedJsonParser("<tool_calls>", "</tool_calls>"),
}
_TOOLS |= {  # other names that users know
    "qwen3": _TOOLS[_GENERIC],
    "qwen3_xml": _TOOLS["qwen3_coder"],
    "mimo": _TOOLS["qwen3_coder"],
    "deepseek_v31": _TOOLS["deepseek_v3"],
    "glm47": _TOOLS["glm45"],
    "llama4_json": _TOOLS["llama3_json"],
}
_REASONING: dict[str, ThinkingStyle] = {
    "qwen3": ThinkingStyle(),
    "deepseek_r1": ThinkingStyle(assumes_opened=True),
    "deepseek_v3": ThinkingStyle(),
    "glm45": ThinkingStyle(ends_before=("<tool_call>",)),
    "kimi_k2": ThinkingStyle(ends_before=(KIMI.section[0],)),
    "minimax_m2": ThinkingStyle(assumes_opened=True),
    "hunyuan_a13b": ThinkingStyle(answer_tags=("<answer>", "</answer>")),
    "ernie45": ThinkingStyle(answer_tags=("<response>", "</response>")),
}
_GPT_OSS_NAMES = (GPT_OSS, "openai_gptoss", "gpt-oss", "gpt_oss")
TOOL_PARSERS = tuple(sorted([*_TOOLS, *_GPT_OSS_NAMES, NONE]))
REASONING_PARSERS = tuple(sorted([*_REASONING, *_GPT_OSS_NAMES, NONE]))

# Text of a template -> the parser of what it shows; the first that is there counts.
_TOOLS_BY_TEMPLATE = (
    (CHANNEL, GPT_OSS),
    ("<minimax:tool_call>", "minimax_m2"),
    (KIMI.section[0], "kimi_k2"),
    (f"{DSML}function_calls", "deepseek_v32"),
    (f"{DSML}tool_calls", "deepseek_v4"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    (DEEPSEEK.separator, "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "hunyuan_a13b"),
    ("<tool_call>", _GENERIC),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),  # Llama 3.1's own words
)
_FENCE = "```json"  # DeepSeek-V3 has one around arguments, V3.1 none
_REASONING_BY_TOOLS = {name: name for name in ("minimax_m2", "kimi_k2", "glm45", "hunyuan_a13b")}


class Bound(NamedTuple):
    """Where the form of a bound answer begins: what to add to the prompt, and the text that comes before the form."""

    prompt: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Markup:
    """How one model writes calls and reasoning: names of parsers."""

    tools: str = _GENERIC
    reasoning: str = NONE
    continues: bool = False  # prompts end within the assistant's own message

    def parser(self, prompt: str, tools: ArgumentTypes | None) -> TextParser:
        """Return a parser for an answer to `prompt`; without tools, calls are content."""
        if self._is_harmony:
            return HarmonyParser(prompt=prompt, takes_calls=tools is not None and self.tools != NONE)
        answer = PlainParser() if tools is None else self._call_parser(tools)
        return self.thinking(prompt, answer)

    def thinking(self, prompt: str, answer: TextParser) -> TextParser:
        """Return a parser that splits off reasoning and leaves the rest to `answer`."""
        style = _REASONING.get(self.reasoning)
        if style is None:
            return answer
        ends_before = style.ends_before if isinstance(answer, MarkupParser) else ()
        if style.answer_tags is not None:
            answer = WrappedAnswerParser(answer, style.answer_tags)
        return ThinkParser(answer, opened=self._starts_thinking(prompt), ends_before=ends_before)

    def without_reasoning(self) -> "Markup":
        """Return the markup of a model whose reasoning is left in its text; harmony's channels are always read."""
        return self if self._is_harmony else replace(self, reasoning=NONE)

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the marks that must reach the parser even where they are special tokens."""
        if self._is_harmony:
            return HarmonyParser.markers
        style = _REASONING.get(self.reasoning)
        thinks = () if style is None else (OPENING, CLOSING, *(style.answer_tags or ()))
        calls = self._call_parser(ArgumentTypes({})) if with_tools else None
        return (*thinks, *(calls.markers if isinstance(calls, MarkupParser) else ()))

    @property
    def taught_form(self) -> str | None:
        """Which of `server.api.prompts`'s forms the parser reads."""
        if _TOOLS.get(self.tools) is _TOOLS[_GENERIC]:
            return _GENERIC
        return self.tools if self.tools in ("deepseek_v3", "deepseek_v31") else None

    def bound(self, prompt: str) -> Bound:
        """Return where an answer's form begins. Harmony has a header first, which the prompt then brings along."""
        if self._is_harmony:
            return Bound("" if prompt.endswith(MESSAGE) else f"{CHANNEL}final{MESSAGE}", "")
        return Bound("", CLOSING if self._starts_thinking(prompt) else "")

    def bound_parser(self, prompt: str, answer: TextParser) -> TextParser:
        """Return a parser for a bound answer, which `answer` reads once reasoning is over."""
        return answer if self._is_harmony else self.thinking(prompt, answer)

    def _starts_thinking(self, prompt: str) -> bool:
        """Tell whether the answer's first text is reasoning for certain."""
        style = _REASONING.get(self.reasoning)
        opened = is_opened(prompt)
        if style is None:
            return False
        return style.assumes_opened and not self.continues if opened is None else opened

    @property
    def _is_harmony(self) -> bool:
        return self.reasoning in _GPT_OSS_NAMES

    def _call_parser(self, types: ArgumentTypes) -> TextParser:
        factory = _TOOLS.get(self.tools)
        return PlainParser() if factory is None else factory(types)


def markup_of(template: str, *, tools: str | None = None, reasoning: str | None = None) -> Markup:
    """Choose by a chat template's text, unless the user chose: names of TOOL_PARSERS and REASONING_PARSERS."""
    found = next((name for mark, name in _TOOLS_BY_TEMPLATE if mark in template), _GENERIC)
    if found == "deepseek_v3" and _FENCE not in template:
        found = "deepseek_v31"
    tools = tools or (reasoning if reasoning in _GPT_OSS_NAMES else found)
    if reasoning is None:
        reasoning = _REASONING_BY_TOOLS.get(found, "qwen3") if OPENING in template else NONE
        if reasoning == "qwen3" and found == _GENERIC and "<response>" in template:
            reasoning = "ernie45"
    if tools in _GPT_OSS_NAMES:
        reasoning = reasoning if reasoning in _GPT_OSS_NAMES else GPT_OSS
    return Markup(tools=tools, reasoning=reasoning)
