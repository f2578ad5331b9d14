"""Every family's format, in reverse: calls, reasoning and content rendered as its chat template does.

The templates' texts are not copied here. Each renderer writes the format that the parser's module documents.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.registry import Markup

OFFERED = ArgumentTypes(
    {
        "save": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "body": {"type": "string"},
                "n": {"type": "number"},
                "flag": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"$ref": "#/$defs/A%20B"},
            },
            "$defs": {"A B": {"type": "object"}},
        },
        "list_all": {"type": "object", "properties": {}},
    }
)
Call = tuple[str, dict[str, Any]]
DSML = "\uff5cDSML\uff5c"
_NO_TEXT = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a family."""

    tools: str
    render: Callable[[Sequence[Call]], str]
    marks: tuple[str, ...]  # may be quoted by values, and form prose about the format
    reasoning: str = "none"
    think: Callable[[str], str] | None = None
    say: Callable[[str], str] = str
    prompt: str = ""
    max_calls: int = 3
    ends_value: re.Pattern[str] = _NO_TEXT  # ends a value at any position: no value can hold it
    closes: str = ""  # closes every section that may be open

    @property
    def name(self) -> str:
        """Return the format's name in test ids."""
        return f"{self.tools}-{self.reasoning}" if self.reasoning != "none" else self.tools

    def parser(self) -> Any:
        """Return a parser of an answer to a request that offers the functions."""
        return Markup(tools=self.tools, reasoning=self.reasoning).parser(self.prompt, OFFERED)


def json_text(value: Any) -> str:
    """Write JSON as the templates' tojson does."""
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _object(call: Call, name: str = "name", arguments: str = "arguments") -> str:
    return f'{{"{name}": "{call[0]}", "{arguments}": {json_text(call[1])}}}'


def _think_tags(opening: str, closing: str) -> Callable[[str], str]:
    return lambda text: f"{opening}\n{text}\n{closing}\n\n"


def _hermes(calls: Sequence[Call]) -> str:
    return "".join(f"\n<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _named(section: tuple[str, str], call: str, end: str, argument: str, plain: Callable[[Any], str]) -> Any:
    """Return a renderer of tags with names. It replaces KEY and VALUE in `argument`."""

    def render(calls: Sequence[Call]) -> str:
        written = "".join(
            call.replace("NAME", name)
            + "".join(
                argument.replace("KEY", key)
                .replace("IS_TEXT", str(isinstance(value, str)).lower())
                .replace("VALUE", plain(value))
                for key, value in arguments.items()
            )
            + end
            for name, arguments in calls
        )
        return f"\n{section[0]}\n{written}{section[1]}" if calls else ""

    return render


def _each(render: Callable[[Sequence[Call]], str]) -> Callable[[Sequence[Call]], str]:
    """Render each call in a separate section."""
    return lambda calls: "".join(render([call]) for call in calls)


def _ends(
    close: str, opening: str, call: tuple[str, str], sections: Sequence[tuple[str, str]]
) -> re.Pattern[str]:
    """Return a pattern of the texts that end a value of named tags."""
    openings = [call[0], *(each[0] for each in sections)]
    closings = [each[1] for each in sections]

    def any_of(tags: Sequence[str]) -> str:
        return "|".join(map(re.escape, tags))

    return re.compile(
        rf"{re.escape(close)}\s*(?:{any_of([opening, call[1], *closings, *openings])})"
        rf"|{re.escape(call[1])}\s*(?:{any_of([*closings, *openings])})|(?:{any_of(closings)})\s*(?:{any_of(openings)})"
        rf"|(?:^|\n){re.escape(opening)}"
    )


def _keyed(calls: Sequence[Call], *, suffix: str = "", separator: str = "") -> str:
    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    written = ""
    for name, arguments in calls:
        written += f"\n{tag('tool_call')}{name}{tag(separator) if separator else ''}\n"
        for key, value in arguments.items():
            written += f"{tag('arg_key')}{key}{tag('/arg_key')}\n{tag('arg_value')}{_plain(value)}{tag('/arg_value')}\n"
        written += tag("/tool_call")
    return f"\n{tag('tool_calls')}{written}\n{tag('/tool_calls')}" if separator and calls else written


def _deepseek(text: str) -> str:
    return re.sub(r"<\|(tool_\w+)\|>", lambda m: f"<\uff5c{m[1]}\uff5c>".replace("_", "\u2581"), text)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call_begin|>function<|tool_sep|>{name}\n```json\n{json_text(arguments)}\n```<|tool_call_end|>\n"
        for name, arguments in calls
    )
    return _deepseek(f"<|tool_calls_begin|>{each.strip()}<|tool_calls_end|>") if calls else ""


def _deepseek_v31(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call_begin|>{name}<|tool_sep|>{json_text(arguments)}<|tool_call_end|>"
        for name, arguments in calls
    )
    return _deepseek(f"<|tool_calls_begin|>{each}<|tool_calls_end|>") if calls else ""


def _kimi(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json_text(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>" if calls else ""


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
        case _:
            return json_text(value)


def _gemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


def _python(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]" if calls else ""


def _lines(calls: Sequence[Call], before: str, after: str, between: str = ", ") -> str:
    return f"{before}{between.join(map(_object, calls))}{after}" if calls else ""


def _cohere(calls: Sequence[Call]) -> str:
    objects = ",\n".join(
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {json_text(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{objects}\n]<|END_ACTION|>" if calls else ""


def _harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json_text(arguments)}<|call|>"
        for name, arguments in calls
    )


def _solar(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call:begin|>id{number}<|tool_call:name|>{name}<|tool_call:args|>{json_text(arguments)}<|tool_call:end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|begin|>assistant<|tool_calls|>{each}<|calls|>" if calls else ""


_ATEM = _named(
    ("<atem:function_calls>", "</atem:function_calls>"),
    '<atem:invoke name="NAME">\n',
    "</atem:invoke>\n",
    '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
    _plain,
)


def _muse(calls: Sequence[Call]) -> str:
    return "".join(f"<|start|>assistant to={call[0]}<|message|>{_ATEM([call])}<|eom|>" for call in calls)


def _muse_message(to: str) -> Callable[[str], str]:
    return lambda text: f"<|start|>assistant to={to}<|message|>{text}<|eom|>" if text else ""


_QWEN = ("<tool_call>", "</tool_call>")
_QWEN_ARGUMENT = "<parameter=KEY>\nVALUE\n</parameter>\n"
_QWEN_ENDS = _ends("</parameter>", "<parameter=", ("<function=", "</function>"), [_QWEN])
_QWEN_MARKS = (
    *_QWEN,
    "<function=save>",
    "</function>",
    "<parameter=path>",
    "</parameter>",
    "<function=NAME>",
)
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_KEY_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KEY_ENDS = re.compile(
    r"</arg_value(?::\w+)?>\s*<(?:arg_key|/?tool_calls?)|</tool_call(?::\w+)?>\s*</?tool_call"
    r"|<arg_key(?::\w+)?>[^<>\n]*(?:</arg_key(?::\w+)?>)?\s*<arg_value"
)
_DEEPSEEK_MARKS = tuple(
    map(
        _deepseek, ("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>", "```")
    )
)
_KIMI_MARKS = (
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.save:0",
        "<|tool_call_argument_begin|>",
    ),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
_DSML_SECTIONS = [(f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")]
_DSML_CALL = (f"<{DSML}invoke name=", f"</{DSML}invoke>")
_DSML_ARGUMENT = (f"<{DSML}parameter name=", f"</{DSML}parameter>")


def _dsml(section: int) -> Format:
    return Format(
        tools=("deepseek_v32", "deepseek_v4")[section],
        reasoning="deepseek_v3",
        think=_think_tags("<think>", "</think>"),
        render=_named(
            _DSML_SECTIONS[section],
            f'{_DSML_CALL[0]}"NAME">\n',
            f"{_DSML_CALL[1]}\n",
            f'{_DSML_ARGUMENT[0]}"KEY" string="IS_TEXT">VALUE{_DSML_ARGUMENT[1]}\n',
            _plain,
        ),
        marks=(
            *_DSML_SECTIONS[0],
            f'{_DSML_CALL[0]}"save">',
            _DSML_CALL[1],
            f'{_DSML_ARGUMENT[0]}"path">',
            _DSML_ARGUMENT[1],
        ),
        ends_value=_ends(_DSML_ARGUMENT[1], _DSML_ARGUMENT[0], _DSML_CALL, _DSML_SECTIONS),
        closes=f"\n{_DSML_ARGUMENT[1]}\n{_DSML_CALL[1]}\n{_DSML_SECTIONS[0][1]}",
    )


FORMATS = [
    Format(
        tools="hermes",
        reasoning="qwen3",
        think=_think_tags("<think>", "</think>"),
        render=_hermes,
        marks=("<tool_call>", "</tool_call>", '{"name": "save", "arguments": {', "<think>"),
        closes="</tool_call>",
    ),
    *(
        Format(
            tools="qwen3_coder",
            reasoning=reasoning,
            think=_think_tags("<think>", "</think>") if reasoning != "none" else None,
            render=_each(_named(_QWEN, "<function=NAME>\n", "</function>\n", _QWEN_ARGUMENT, plain)),
            marks=_QWEN_MARKS,
            ends_value=_QWEN_ENDS,
            closes="\n</parameter>\n</function>\n</tool_call>",
        )
        for reasoning, plain in (("qwen3", _plain), ("none", str))  # the older template writes Python's repr
    ),
    *(
        Format(
            tools=name,
            reasoning="deepseek_v3",
            think=_think_tags("<think>", "</think>"),
            render=render,
            marks=_DEEPSEEK_MARKS,
            closes=_deepseek("<|tool_call_end|><|tool_calls_end|>"),
        )
        for name, render in (("deepseek_v3", _deepseek_v3), ("deepseek_v31", _deepseek_v31))
    ),
    _dsml(0),
    _dsml(1),
    Format(
        tools="glm45",
        reasoning="glm45",
        think=_think_tags("<think>", "</think>"),
        render=_keyed,
        marks=_KEY_MARKS,
        ends_value=_KEY_ENDS,
        closes="</arg_value>\n</tool_call>",
    ),
    *(
        Format(
            tools="hy_v3",
            reasoning="hy_v3",
            think=_think_tags(f"<think{suffix}>", f"</think{suffix}>"),
            render=lambda calls, suffix=suffix: _keyed(calls, suffix=suffix, separator="tool_sep"),  # type: ignore[misc]
            marks=(
                *(mark.replace(">", f"{suffix}>") for mark in _KEY_MARKS),
                "<tool_calls>",
                f"<tool_sep{suffix}>",
            ),
            ends_value=_KEY_ENDS,
            closes=f"</arg_value{suffix}>\n</tool_call{suffix}>\n</tool_calls{suffix}>",
        )
        for suffix in ("", ":opensource")
    ),
    Format(
        tools="kimi_k2",
        reasoning="kimi_k2",
        think=_think_tags("<think>", "</think>"),
        render=_kimi,
        marks=_KIMI_MARKS,
        closes="<|tool_call_end|><|tool_calls_section_end|>",
    ),
    Format(
        tools="minimax_m2",
        reasoning="minimax_m2",
        prompt="]~b]ai\n<think>\n",
        think=lambda text: f"{text}\n</think>\n\n",
        render=_named(
            _MINIMAX,
            '<invoke name="NAME">\n',
            "</invoke>\n",
            '<parameter name="KEY">VALUE</parameter>\n',
            _plain,
        ),
        marks=(*_MINIMAX, '<invoke name="save">', "</invoke>", '<parameter name="path">', "</parameter>"),
        # A value that begins with a newline loses it: models also write values on separate lines.
        ends_value=re.compile(
            _ends("</parameter>", "<parameter name=", ("<invoke name=", "</invoke>"), [_MINIMAX]).pattern
            + r"|\A\n"
        ),
        closes="\n</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    Format(
        tools="mistral",
        render=lambda calls: _lines(calls, "[TOOL_CALLS] [", "]"),
        marks=("[TOOL_CALLS]", "[ARGS]", "save"),
    ),
    Format(
        tools="mistral",
        reasoning="ernie45",
        render=lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json_text(each)}" for name, each in calls),
        marks=("[TOOL_CALLS]save[ARGS]", "[ARGS]"),
    ),
    Format(
        tools="llama3_json",
        render=lambda calls: "; ".join(_object(call, arguments="parameters") for call in calls),
        marks=("<|python_tag|>", '{"name": "save"', "; "),
        say=lambda text: "",
    ),
    Format(
        tools="llama4_pythonic",
        render=_python,
        marks=("<|python_start|>", "[save(", "<|python_end|>", "path='", '")]'),
        say=lambda text: "",
        closes="')]",
    ),
    Format(
        tools="lfm2",
        reasoning="qwen3",
        think=_think_tags("<think>", "</think>"),
        render=lambda calls: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>" if calls else "",
        marks=("<|tool_call_start|>", "[save(", "<|tool_call_end|>", "path='", '")]'),
        closes="')]<|tool_call_end|>",
    ),
    Format(
        tools="gemma4",
        reasoning="gemma4",
        think=lambda text: f"<|channel>thought\n{text}<channel|>",
        render=_gemma,
        marks=("<|tool_call>", "call:save{", '<|"|>', "<tool_call|>", 'path:<|"|>'),
        ends_value=re.compile(r'<\|"\|>\s*[,}\]:]'),
        closes='<|"|>}<tool_call|>',
    ),
    Format(
        tools="granite",
        render=lambda calls: _lines(calls, "<|tool_call|>[", "]"),
        marks=("<|tool_call|>", '[{"name": "save"'),
    ),
    Format(
        tools="hunyuan_a13b",
        reasoning="hunyuan_a13b",
        think=_think_tags("<think>", "</think>"),
        say=lambda text: f"<answer>\n{text}\n</answer>" if text else "",
        render=lambda calls: _lines(calls, "<tool_calls>[", "]</tool_calls>"),
        marks=("<tool_calls>", "</tool_calls>", '{"name": "save"'),
        closes="</tool_calls>",
    ),
    Format(  # MiniMax-M1
        tools="minimax",
        render=lambda calls: _lines(calls, "<tool_calls>\n", "\n</tool_calls>", "\n"),
        marks=("<tool_calls>", "</tool_calls>"),
        closes="</tool_calls>",
    ),
    Format(
        tools="gigachat3",
        render=lambda calls: _lines(
            calls, "<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|message_sep|>\n\n"
        ),
        marks=("<|message_sep|>", "function call<|role_sep|>", "<|function_call|>"),
        max_calls=1,
    ),
    Format(
        tools="cohere_command4",
        reasoning="cohere_command4",
        prompt="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
        think=lambda text: f"{text}<|END_THINKING|>",
        say=lambda text: f"<|START_TEXT|>{text}<|END_TEXT|>" if text else "",
        render=_cohere,
        marks=("<|START_ACTION|>", "<|END_ACTION|>", '"tool_name": "save"'),
        closes="<|END_ACTION|>",
    ),
    Format(
        tools="openai",
        reasoning="openai",
        prompt="<|start|>user<|message|>x<|end|>",
        think=lambda text: f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>",
        say=lambda text: f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>" if text else "",
        render=_harmony,
        marks=("to=functions.save",),
    ),
    Format(
        tools="solar_open",
        reasoning="solar_open",
        prompt="<|begin|>assistant",
        think=lambda text: f"<|think|>{text}<|end|><|begin|>assistant",
        say=lambda text: f"<|content|>{text}<|end|>" if text else "",
        render=_solar,
        marks=("<|tool_call:args|>", "<|tool_call:end|>", "<|tool_calls|>"),
        closes="<|tool_call:end|>",
    ),
    Format(
        tools="muse_glimmer",
        reasoning="muse_glimmer",
        prompt="<|start|>user<|message|>x<|eot|>",
        think=_muse_message("self"),
        say=_muse_message("user"),
        render=_muse,
        marks=(
            "<atem:function_calls>",
            "</atem:parameter>",
            '<atem:parameter name="path">',
            "</atem:invoke>",
        ),
        ends_value=re.compile(
            _ends(
                "</atem:parameter>",
                "<atem:parameter name=",
                ("<atem:invoke name=", "</atem:invoke>"),
                [("<atem:function_calls>", "</atem:function_calls>")],
            ).pattern
            + r"|\A\n"
        ),
    ),
]
