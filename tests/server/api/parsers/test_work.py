"""A parser runs for each token of each stream: its work grows linearly with the answer, not quadratically.

The tests count work instead of time: for each piece, a parser may copy only the characters that it still holds.
"""

import time
from collections.abc import Iterator

import pytest

from server.api.parsers.reader import AHEAD, MarkupParser
from server.api.parsers.registry import Markup
from tests.server.api.parsers.formats import DSML, OFFERED

TEXT_ARGUMENT = "<tool_call>\n<function=save>\n<parameter=body>\n"
LIST_ARGUMENT = "<tool_call>\n<function=save>\n<parameter=tags>\n"
ANSWERS = [
    ("none", "hermes", "none", "", "word "),
    ("hermes", "hermes", "none", "", "a <tool_call> b "),
    ("hermes", "hermes", "none", '<tool_call>{"name": "save", "arguments": {"body": "', "é\\n"),
    ("hermes", "hermes", "none", '<tool_call>{"arguments": {"body": "', "é\\n"),
    ("quoted tags", "qwen3_coder", "none", TEXT_ARGUMENT, "a </parameter> b\n"),
    ("closing tags only", "qwen3_coder", "none", TEXT_ARGUMENT, "</parameter>"),
    ("value of another type", "qwen3_coder", "none", LIST_ARGUMENT, '"x", '),
    ("blanks", "hermes", "none", "", " "),
    ("blanks in a value", "glm45", "none", "<tool_call>save<arg_key>body</arg_key><arg_value>x", " "),
    ("blanks behind a tag", "qwen3_coder", "none", TEXT_ARGUMENT + "</parameter>", " "),
    ("a call in open reasoning", "qwen3_coder", "qwen3", "<think>Hm." + TEXT_ARGUMENT, "word "),
    ("reasoning", "qwen3_coder", "qwen3", "<think>", "a <tool_call> b "),
    (
        "dsml",
        "deepseek_v32",
        "none",
        f'<{DSML}invoke name="save"><{DSML}parameter name="body" string="true">',
        "x<",
    ),
    ("python", "lfm2", "none", "<|tool_call_start|>[save(body='", "it\\'s "),
    ("gemma", "gemma4", "none", '<|tool_call>call:save{body:<|"|>', '<|"|> a'),
    ("harmony", "openai", "openai", '<|channel|>commentary to=functions.save<|message|>{"body": "', "x"),
    (
        "muse",
        "muse",
        "muse",
        ' to=save<|message|><atem:invoke name="save"><atem:parameter name="body">',
        "x\n",
    ),
]
_CASES = pytest.mark.parametrize(("tools", "reasoning", "head", "unit"), [each[1:] for each in ANSWERS], ids=[each[0] for each in ANSWERS])  # fmt: skip


def parser_of(tools: str, reasoning: str) -> MarkupParser:
    parser = Markup(tools=tools, reasoning=reasoning).parser("", OFFERED)
    assert isinstance(parser, MarkupParser)
    return parser


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the characters that each piece was joined with, in every parser."""
    counted: list[int] = []
    push = MarkupParser.push

    def counting(self: MarkupParser, text: str) -> object:
        counted.append(self.num_unread + len(text))
        return push(self, text)

    monkeypatch.setattr(MarkupParser, "push", counting)
    yield counted


def check_work(copied: list[int], parser: MarkupParser, text: str) -> None:
    """Parse a text character by character. A parser and its inner one may each copy at most the look-ahead per character."""
    for char in text:
        parser.push(char)
    parser.finish()
    assert max(copied) <= AHEAD + 64
    assert sum(copied) <= 2 * (AHEAD + 64) * len(text)


@_CASES
def test_a_parser_never_holds_much_of_an_answer(
    copied: list[int], tools: str, reasoning: str, head: str, unit: str
) -> None:
    check_work(copied, parser_of(tools, reasoning), head + unit * (1500 // len(unit)))


@pytest.mark.slow
@_CASES
def test_nor_of_one_of_100_kb(copied: list[int], tools: str, reasoning: str, head: str, unit: str) -> None:
    check_work(copied, parser_of(tools, reasoning), head + unit * (100_000 // len(unit)))


HOSTILE = [
    ("hermes", "none", '<tool_call>{"a":"'),
    ("hermes", "none", '<tool_call>{"name": "save", "arguments": {"x": "'),
    ("qwen3_coder", "none", TEXT_ARGUMENT),
    ("qwen3_coder", "none", TEXT_ARGUMENT + "</parameter>"),
    ("qwen3_coder", "qwen3", "<think>" + TEXT_ARGUMENT),
    ("llama4_pythonic", "none", "[save(body=["),
    ("gemma4", "none", "<|tool_call>call:save{tags:["),
    ("kimi_k2", "kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    ("cohere_command4", "cohere_command4", "<|START_ACTION|>"),
    ("openai", "openai", "<|channel|>commentary to=functions.save<|message|>"),
]


@pytest.mark.parametrize(("tools", "reasoning", "unit"), HOSTILE)
def test_an_answer_of_nothing_but_marks_takes_no_long_time(tools: str, reasoning: str, unit: str) -> None:
    parser, begin = parser_of(tools, reasoning), time.process_time()
    parser.push(unit * (100_000 // len(unit)))
    parser.push("</think>")
    parser.finish()
    assert time.process_time() - begin < 5, "usually 0.1 to 0.3 s; quadratic work would take a minute"
