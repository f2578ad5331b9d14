"""The parsers by name, and the default parser for each model.

Names are those of vLLM and SGLang, so that start commands keep working. The default follows from the chat template, which
shows the model how to write calls and reasoning: fine-tunes keep it, even under another model_type. It depends on no request.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.channels import MuseParser, SolarParser
from server.api.parsers.deltas import PlainParser, TextParser
from server.api.parsers.harmony import CHANNEL, HarmonyParser
from server.api.parsers.json_calls import MistralParser, TaggedJsonParser, WholeJsonParser
from server.api.parsers.literal_calls import GemmaParser, PythonCallParser
from server.api.parsers.reader import MarkupParser
from server.api.parsers.tag_calls import (
    GLM,
    HY3,
    MINIMAX_M2,
    QWEN3_CODER,
    DsmlParser,
    KeyTagParser,
    NamedTagParser,
)
from server.api.parsers.tag_calls import TOKEN as DSML
from server.api.parsers.thinking import (
    OPENING,
    THINK,
    TagPairs,
    ThinkParser,
    WrappedAnswerParser,
    is_opened,
    open_tags,
)
from server.api.parsers.token_calls import DEEPSEEK, KIMI, DeepseekParser, KimiParser
from server.options.parser_names import REASONING_PARSERS, TOOL_PARSERS

NONE = "none"  # disables parsing
_GENERIC = "hermes"  # also taught to models without tools in their template


@dataclass(frozen=True, kw_only=True)
class ThinkingStyle:
    """How a family writes its reasoning."""

    tags: TagPairs = THINK
    assumes_opened: bool = False  # assume open reasoning if the end of the prompt does not show it
    calls_end_it: bool = False  # a call ends reasoning, regardless of the text after it
    answer_tags: tuple[str, str] | None = None  # around the answer


_Factory = Callable[[ArgumentTypes], MarkupParser]
_ROLE_SEP = "<|role_sep|>"
_GIGACHAT = (f"<|message_sep|>\n\nfunction call{_ROLE_SEP}", f"function call{_ROLE_SEP}", "<|function_call|>")
_TOOLS: dict[str, _Factory] = {
    _GENERIC: lambda types: TaggedJsonParser(types.offered, ("<tool_call>",), "</tool_call>"),
    "qwen3_coder": lambda types: NamedTagParser(QWEN3_CODER, types),
    "deepseek_v3": DeepseekParser,
    "deepseek_v32": DsmlParser,
    "glm45": lambda types: KeyTagParser((GLM,), types),
    "hy_v3": lambda types: KeyTagParser(HY3, types),
    "kimi_k2": KimiParser,
    "minimax_m2": lambda types: NamedTagParser(MINIMAX_M2, types),
    "mistral": lambda types: MistralParser(types.offered),
    "llama3_json": lambda types: WholeJsonParser(types.offered),
    "llama4_pythonic": lambda types: PythonCallParser(
        types, ("<|python_start|>", "<|python_end|>"), whole_answer=True
    ),
    "lfm2": lambda types: PythonCallParser(types, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "gemma4": GemmaParser,
    "granite": lambda types: TaggedJsonParser(types.offered, ("<|tool_call|>",)),
    "hunyuan_a13b": lambda types: TaggedJsonParser(types.offered, ("<tool_calls>",), "</tool_calls>"),
    "gigachat3": lambda types: TaggedJsonParser(types.offered, _GIGACHAT, "<|message_sep|>"),
    "cohere_command4": lambda types: TaggedJsonParser(types.offered, ("<|START_ACTION|>",), "<|END_ACTION|>"),
}
_COHERE_TAGS = (("<|START_THINKING|>", "<|END_THINKING|>"),)
_REASONING: dict[str, ThinkingStyle] = {
    "qwen3": ThinkingStyle(),
    "deepseek_r1": ThinkingStyle(assumes_opened=True),
    "deepseek_v3": ThinkingStyle(),
    "glm45": ThinkingStyle(calls_end_it=True),
    "kimi_k2": ThinkingStyle(calls_end_it=True),
    "minimax_m2": ThinkingStyle(assumes_opened=True),
    "hunyuan_a13b": ThinkingStyle(answer_tags=("<answer>", "</answer>")),
    "ernie45": ThinkingStyle(answer_tags=("<response>", "</response>")),
    "hy_v3": ThinkingStyle(tags=(*THINK, ("<think:opensource>", "</think:opensource>"))),
    "gemma4": ThinkingStyle(tags=(("<|channel>thought", "<channel|>"),)),
    "cohere_command3": ThinkingStyle(
        tags=_COHERE_TAGS, answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": ThinkingStyle(tags=_COHERE_TAGS, answer_tags=("<|START_TEXT|>", "<|END_TEXT|>")),
}
# Families with messages in channels: one parser reads reasoning and calls.
_Channels = type[HarmonyParser] | type[SolarParser] | type[MuseParser]
_CHANNELS: dict[str, _Channels] = {
    "openai": HarmonyParser,
    "solar_open": SolarParser,
    "muse_glimmer": MuseParser,
}
GPT_OSS = "openai"
_CHANNELS |= dict.fromkeys(("openai_gptoss", "gpt-oss", "gpt_oss"), HarmonyParser)
_CHANNELS |= {"muse": MuseParser}

# Other known names, most of them SGLang's.
_TOOL_ALIASES = {
    **dict.fromkeys(("qwen3", "qwen", "qwen25"), _GENERIC),
    **dict.fromkeys(("qwen3_xml", "mimo"), "qwen3_coder"),
    **dict.fromkeys(("deepseek_v31", "deepseekv3", "deepseekv31"), "deepseek_v3"),
    **dict.fromkeys(("deepseek_v4", "deepseekv32", "deepseekv4"), "deepseek_v32"),
    **dict.fromkeys(("glm47", "glm"), "glm45"),
    **dict.fromkeys(("llama4_json", "llama3"), "llama3_json"),
    "pythonic": "llama4_pythonic",
    "minimax-m2": "minimax_m2",
    "minimax": "hunyuan_a13b",
    "hunyuan": "hy_v3",
    "cohere_command3": "cohere_command4",
}
_REASONING_ALIASES = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "glm47": "glm45",
    "hunyuan": "hy_v3",
    "mimo": "qwen3",
    "minimax": "minimax_m2",
    "qwen3-thinking": "deepseek_r1",
}
_TOOLS |= {alias: _TOOLS[name] for alias, name in _TOOL_ALIASES.items()}
_REASONING |= {alias: _REASONING[name] for alias, name in _REASONING_ALIASES.items()}
assert set(TOOL_PARSERS) == {*_TOOLS, *_CHANNELS, NONE}, "TOOL_PARSERS must list these parsers"
assert set(REASONING_PARSERS) == {*_REASONING, *_CHANNELS, NONE}, "REASONING_PARSERS must list these"

# Texts of a template -> the parser for it. The first entry with all its texts in the template applies.
_TOOLS_BY_TEMPLATE = (
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|tool_call:begin|>",), "solar_open"),
    ((CHANNEL,), GPT_OSS),
    (("<minimax:tool_call>",), "minimax_m2"),
    ((KIMI.section[0],), "kimi_k2"),
    ((DSML, "function_calls"), "deepseek_v32"),
    ((DSML, "tool_calls"), "deepseek_v4"),
    (("<function=",), "qwen3_coder"),
    (("<tool_sep",), "hy_v3"),
    (("<arg_key>",), "glm45"),
    ((DEEPSEEK.separator,), "deepseek_v3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<|tool_call>",), "gemma4"),
    (("<|tool_call_start|>",), "lfm2"),
    (("List of tools: ", "<|im_start|>"), "lfm2"),  # LFM2's other templates, which show no calls
    (("<|START_ACTION|>",), "cohere_command4"),
    ((_ROLE_SEP,), "gigachat3"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<tool_call>",), _GENERIC),
    (("[func_name1(",), "llama4_pythonic"),  # text of Llama 3.2's and 4's templates
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),  # text of Llama 3.1's
)
_FENCE = "```json"  # DeepSeek-V3 puts one around arguments, V3.1 does not
_REASONING_BY_TOOLS = {name: name for name in ("minimax_m2", "kimi_k2", "glm45", "hunyuan_a13b", "hy_v3")}


class Bound(NamedTuple):
    """The beginning of a structure in an answer: text to add to the prompt, and text that precedes the structure."""

    prompt: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Markup:
    """Names of the parsers for one model's calls and reasoning."""

    tools: str = _GENERIC
    reasoning: str = NONE
    continues: bool = False  # prompts end within the assistant's message

    def parser(self, prompt: str, tools: ArgumentTypes | None) -> TextParser:
        """Return a parser for an answer to `prompt`. Without tools, calls are content."""
        if self._channels is not None:
            return self._channels(prompt=prompt, types=None if self.tools == NONE else tools)
        if tools is None:
            return self.thinking(prompt, PlainParser)
        return self.thinking(prompt, lambda: self._call_parser(tools))

    def thinking(self, prompt: str, make_answer: Callable[[], TextParser]) -> TextParser:
        """Return a parser that separates reasoning and passes the rest to a parser from `make_answer`."""
        style, answer = self._style, make_answer()
        if style is None:
            return answer

        def wrapped() -> TextParser:
            answer = make_answer()
            return answer if style.answer_tags is None else WrappedAnswerParser(answer, style.answer_tags)

        return ThinkParser(
            wrapped,
            opened=self._starts_thinking(prompt),
            tags=style.tags,
            calls=answer.openings if isinstance(answer, MarkupParser) else (),
            calls_end_it=style.calls_end_it,
        )

    def without_reasoning(self) -> "Markup":
        """Return a markup that leaves reasoning in the text. Channels are always parsed."""
        return self if self._channels is not None else replace(self, reasoning=NONE)

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the marks that must reach the parser even if they are special tokens."""
        if self._channels is not None:
            return self._channels.markers
        style = self._style
        tags = (
            ()
            if style is None
            else (*(tag for pair in style.tags for tag in pair), *(style.answer_tags or ()))
        )
        calls = self._call_parser(ArgumentTypes({})) if with_tools else None
        return (*tags, *(calls.markers if isinstance(calls, MarkupParser) else ()))

    @property
    def taught_form(self) -> str | None:
        """The form for describing tools (`template_messages.tool_text`) that the parser reads, if any."""
        if _TOOLS.get(self.tools) is _TOOLS[_GENERIC]:
            return _GENERIC
        return self.tools if self.tools in ("deepseek_v3", "deepseek_v31") else None

    def bound(self, prompt: str) -> Bound:
        """Return the beginning of a structured answer. With channels, its prompt part is the header that precedes content."""
        if self._channels is not None:
            return Bound(self._channels.content_header(prompt), "")
        if not self._starts_thinking(prompt):
            return Bound("", "")
        assert self._style is not None, "only a model with a style thinks"
        return Bound("", (open_tags(prompt, self._style.tags) or self._style.tags[0])[1])

    def bound_parser(self, prompt: str, answer: TextParser) -> TextParser:
        """Return a parser for a bound answer: `answer` reads the text after reasoning."""
        return answer if self._channels is not None else self.thinking(prompt, lambda: answer)

    def _starts_thinking(self, prompt: str) -> bool:
        """Return whether the answer certainly begins with reasoning."""
        style = self._style
        if style is None:
            return False
        opened = is_opened(prompt, style.tags)
        return style.assumes_opened and not self.continues if opened is None else opened

    @property
    def _style(self) -> ThinkingStyle | None:
        return _REASONING.get(self.reasoning)

    @property
    def _channels(self) -> _Channels | None:
        return _CHANNELS.get(self.reasoning)

    def _call_parser(self, types: ArgumentTypes) -> TextParser:
        factory = _TOOLS.get(self.tools)
        return PlainParser() if factory is None else factory(types)


def markup_of(template: str, *, tools: str | None = None, reasoning: str | None = None) -> Markup:
    """Choose parsers by a chat template's text. `tools` and `reasoning` are the user's choices, which take precedence."""
    found = _shown_by(template) or _GENERIC
    if found == "deepseek_v3" and _FENCE not in template:
        found = "deepseek_v31"
    tools = tools or (reasoning if reasoning in _CHANNELS else found)
    if found in _CHANNELS and tools not in (*_CHANNELS, NONE):
        found = _GENERIC  # the user's choice takes precedence
    reasoning = reasoning or _reasoning_of(template, found)
    if tools in _CHANNELS:
        reasoning = reasoning if reasoning in _CHANNELS else tools
    return Markup(tools=tools, reasoning=reasoning)


def shows_known_calls(template: str) -> bool:
    """Return whether a chat template shows calls in a form that a parser reads."""
    return _shown_by(template) is not None


def _shown_by(template: str) -> str | None:
    return next((name for marks, name in _TOOLS_BY_TEMPLATE if all(mark in template for mark in marks)), None)


def _reasoning_of(template: str, tools: str) -> str:
    if tools in _CHANNELS:
        return tools
    if tools == "gemma4":
        return "gemma4" if "<|channel>" in template else NONE
    if _COHERE_TAGS[0][0] in template:
        return "cohere_command3" if "<|START_RESPONSE|>" in template else "cohere_command4"
    if tools == "hy_v3":
        return "hy_v3" if "<think" in template else NONE
    if OPENING not in template:
        return NONE
    if tools == _GENERIC and "<response>" in template:
        return "ernie45"
    return _REASONING_BY_TOOLS.get(tools, "qwen3")
