"""Answers in each family's documented format, with their parsed content.

The modules of server.api.parsers name the formats' sources.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.deltas import TextParser
from server.api.parsers.harmony import HarmonyParser
from server.api.parsers.registry import Markup

TYPES = ArgumentTypes(
    {
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "exact": {"type": "boolean"},
            },
        },
        "get_time": {},
        "now": {},
        "f": {},
    }
)
WEATHER = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", '{"zone": "CET", "at": [1, {"x": "}</tool_call>"}]}')
FULL = ("get_weather", '{"city": "<Łódź> & \\"co\\"", "days": 3, "tags": ["a", 1], "exact": true}')


@dataclass(frozen=True)
class Text:
    """One answer and its parsed content."""

    family: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def parser_of(family: str) -> Callable[[], TextParser]:
    """Return a factory of the family's call parser, without reasoning."""
    if family == "openai":
        return lambda: HarmonyParser(prompt="<|start|>assistant", types=TYPES)
    return lambda: Markup(tools=family).parser("", TYPES)


def _call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def _deepseek(text: str) -> str:
    """Spell special tokens as DeepSeek does."""
    for word in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        inside = f"tool_{word}"
        text = text.replace(f"<|{inside}|>", f"<\uff5c{inside}\uff5c>".replace("_", "\u2581"))
    return text


def _dsml(text: str) -> str:
    """Spell DSML's bars as DeepSeek does."""
    return text.replace("|DSML|", "\uff5cDSML\uff5c")


_PLAIN = "It is <b>sunny</b>: 3 < 4, {not json} [or this].\n"
_FAMILIES = (
    "hermes",
    "qwen3_coder",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "llama3_json",
    "granite",
    "hunyuan_a13b",
    "openai",
)
TEXTS = [
    *(Text(family, _PLAIN, _PLAIN) for family in _FAMILIES),
    *(Text(family, "") for family in _FAMILIES),
    Text(
        "hermes",
        f"Let me see.\n\n<tool_call>\n{_call(*WEATHER)}\n</tool_call>\n<tool_call>\n{_call(*TIME)}\n</tool_call>",
        "Let me see.",
        (WEATHER, TIME),
    ),
    Text(
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "id": 7, "name": "get_weather"}</tool_call> Done.',
        "Done.",
        (WEATHER,),
    ),
    Text("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Text(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=(("f", '{"a": 1}'),),
    ),
    Text(
        "qwen3_coder",
        'I\'ll look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n<Łódź> & "co"\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=tags>\n["a", 1]\n</parameter>\n'
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        "I'll look.",
        (FULL, ("now", "{}")),
    ),
    Text(  # the model omits the section's opening tag and an argument's end
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nPa\nris\n<parameter=days>\n3\n</function>\n</tool_call>",
        calls=(("get_weather", '{"city": "Pa\\nris", "days": 3}'),),
    ),
    Text(
        "deepseek_v3",
        _deepseek(
            "Hm.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>get_weather\n```json\n"
            '{"city": "Paris"}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>now\n```json\n{}\n```'
            "<|tool_call_end|><|tool_calls_end|>"
        ),
        "Hm.",
        (WEATHER, ("now", "{}")),
    ),
    Text(
        "deepseek_v3",  # V3.1's format
        _deepseek(
            '<|tool_calls_begin|><|tool_call_begin|>get_weather<|tool_sep|>{"city": "Paris"}<|tool_call_end|>'
            f"<|tool_call_begin|>get_time<|tool_sep|>{TIME[1]}<|tool_call_end|><|tool_calls_end|>"
        ),
        calls=(WEATHER, TIME),
    ),
    Text(
        "deepseek_v32",
        _dsml(
            'Hm.\n\n<|DSML|function_calls>\n<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" '
            'string="true"><Łódź> & "co"</|DSML|parameter>\n<|DSML|parameter name="days" string="false">3'
            '</|DSML|parameter>\n<|DSML|parameter name="tags" string="false">["a", 1]</|DSML|parameter>\n'
            '<|DSML|parameter name="exact" string="false">true</|DSML|parameter>\n</|DSML|invoke>\n'
            '<|DSML|invoke name="now">\n</|DSML|invoke>\n</|DSML|function_calls>'
        ),
        "Hm.",
        (FULL, ("now", "{}")),
    ),
    Text(  # the attribute decides, not the schema; text is raw
        "deepseek_v4",
        _dsml(
            '<|DSML|tool_calls>\n<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" string="false">5'
            '</|DSML|parameter>\n<|DSML|parameter name="days" string="true">3\n</|DSML|parameter>\n'
            '<|DSML|parameter name="exact">no</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|tool_calls>'
        ),
        calls=(("get_weather", '{"city": 5, "days": "3\\n", "exact": "no"}'),),
    ),
    Text(
        "glm45",
        'Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value><Łódź> & "co"</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", 1]</arg_value>\n'
        "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Sure.",
        (FULL, ("now", "{}")),
    ),
    Text(
        "glm45",  # GLM-4.7 writes no newlines
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        calls=(WEATHER,),
    ),
    Text(
        "kimi_k2",
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1 <|tool_call_argument_begin|> '
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        (WEATHER, ("now", "{}")),
    ),
    Text(
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city"><Łódź> & "co"</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="tags">["a", 1]</parameter>\n'
        '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n',
        "Ok.",
        (FULL, ("now", "{}")),
    ),
    Text("mistral", f"[TOOL_CALLS] [{_call(*WEATHER)}, {_call(*TIME)}]", calls=(WEATHER, TIME)),
    Text(
        "mistral",
        f"Hm.\n[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}[TOOL_CALLS]get_time[CALL_ID]abc123def[ARGS]{TIME[1]}",
        "Hm.",
        (WEATHER, TIME),
    ),
    Text(
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {{"city": "Paris"}}}}; {_call(*TIME)}',
        calls=(WEATHER, TIME),
    ),
    Text("llama3_json", '{"answer": 42}', '{"answer": 42}'),
    Text("granite", f"Hm. <|tool_call|>[{_call(*WEATHER)}, {_call(*TIME)}]", "Hm.", (WEATHER, TIME)),
    Text(
        "hunyuan_a13b", f"<tool_calls>[{_call(*WEATHER)}, {_call(*TIME)}]</tool_calls>", calls=(WEATHER, TIME)
    ),
    Text(
        "openai",
        "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I'll look.",
        (WEATHER,),
    ),
    Text(
        "openai",
        f" to=functions.get_time<|channel|>commentary json<|message|>{TIME[1]}<|call|>",
        calls=(TIME,),
    ),
    Text("openai", "<|channel|>final<|message|>It is sunny.<|return|>", "It is sunny."),
]
# Text that is not a valid call is content, including its mark.
BROKEN = [
    Text("hermes", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>"),
    Text("hermes", '<tool_call>{"nome": "f"}</tool_call>', '<tool_call>{"nome": "f"}</tool_call>'),
    Text("hermes", "<tool_call", "<tool_call"),
    Text("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}'),
    Text(  # a broken call does not affect the next one
        "hermes",
        f"<tool_call>{{oops<tool_call>{_call(*WEATHER)}</tool_call>",
        "<tool_call>{oops",
        (WEATHER,),
    ),
    Text(  # a broken call keeps its beginning, without any mark
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Bye.',
        "Bye.",
        (("f", '{"a": 1'),),
    ),
    Text("qwen3_coder", "<tool_call>\nhello\n</tool_call>", "<tool_call>\nhello\n</tool_call>"),
    Text(  # cut off inside an argument: the object stays open
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3",
        calls=(("get_weather", '{"city": "Paris"'),),
    ),
    Text("glm45", "<tool_call>what is this?</tool_call>", "<tool_call>what is this?</tool_call>"),
    Text(
        "kimi_k2",
        "<|tool_calls_section_begin|>hm<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>hm<|tool_calls_section_end|>",
    ),
    Text("minimax_m2", "<minimax:tool_call><invoke name=", "<minimax:tool_call><invoke name="),
    Text(
        "deepseek_v32",
        _dsml("<|DSML|function_calls>\nhello\n</|DSML|function_calls>"),
        _dsml("<|DSML|function_calls>\nhello\n</|DSML|function_calls>"),
    ),
    Text(  # cut off inside an argument: the object stays open
        "deepseek_v32",
        _dsml('<|DSML|function_calls>\n<|DSML|invoke name="f">\n<|DSML|parameter name="a" string="true">Pa'),
        calls=(("f", '{"a": "Pa'),),
    ),
    Text("mistral", "[TOOL_CALLS] what", "[TOOL_CALLS] what"),
    Text("llama3_json", "{} and more", "{} and more"),
    Text("llama3_json", "[1, 2]", "[1, 2]"),
    Text("granite", "<|tool_call|> none", "<|tool_call|> none"),
]
