"""DeepSeek-V3.2's chats are encoded as in its published code, and its calls are read back.

The example is the published one (encoding/test_input.json of deepseek-ai/DeepSeek-V3.2) with shorter results and answers.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from server.api.parsers.registry import markup_of
from server.front.tokenizer import ChatTemplateError, Tokenizer
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

EXAMPLE = Path(__file__).with_name("deepseek_v32_example.txt").read_text(encoding="utf-8")
DSML = "\uff5cDSML\uff5c"
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    fields = {name: {"type": "string", "description": said} for name, said in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("get_datetime", "Get the current date and time", timezone="The timezone, e.g. America/New_York, UTC"),
    _tool(
        "get_weather", "Get the weather for a specific date and location",
        location="The city name, e.g. New York, San Francisco", date="The date in YYYY-MM-DD format",
    ),
]  # fmt: skip


def _calls(
    *calls: tuple[str, dict[str, Any]], reasoning: str = "", content: str | None = None
) -> dict[str, Any]:
    made = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in calls
    ]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}


def _result(**values: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": json.dumps(values)}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful Assistant."},
    {"role": "user", "content": "What's the weather tomorrow in San Francisco and New York?"},
    _calls(
        ("get_datetime", {"timezone": "America/New_York"}),
        reasoning="User is asking about tomorrow's weather.",
    ),
    _result(current_date="2024-01-15", current_time="14:30:00", timezone="America/New_York"),
    _calls(
        ("get_weather", {"location": "San Francisco", "date": "2024-01-16"}),
        ("get_weather", {"location": "New York", "date": "2024-01-16"}),
        reasoning="Now I know today is 2024-01-15.",
    ),
    _result(location="San Francisco", temperature_high="65"),
    _result(location="New York", temperature_high="28"),
    {"role": "assistant", "reasoning_content": "Retrieved.", "content": "Based on the forecast: 65 and 28."},
    {"role": "user", "content": "Thanks! What about the day after tomorrow?"},
    _calls(
        ("get_weather", {"location": "San Francisco", "date": "2024-01-17"}),
        reasoning="User is now asking about the day after tomorrow, which is 2024-01-17.",
    ),
    _result(location="San Francisco", temperature_high="68"),
    {"role": "assistant", "reasoning_content": "Got the weather data.", "content": "Here's the forecast."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"), chat_template=None)
    (directory / "config.json").write_text('{"model_type": "deepseek_v32", "vocab_size": 320}')
    return Tokenizer(str(directory))


def _render(tokenizer: Tokenizer, *messages: dict[str, Any], tools: Any = (), **variables: Any) -> str:
    return tokenizer.render_chat(messages, tools=tools, template_kwargs=variables)


def test_the_published_example_is_encoded_as_published(tokenizer: Tokenizer) -> None:
    assert _render(tokenizer, *CONVERSATION, tools=TOOLS, thinking=True) == EXAMPLE


@pytest.mark.parametrize(
    ("variables", "opens"), [({}, False), ({"thinking": True}, True), ({"enable_thinking": True}, True)]
)
def test_thinking_is_a_variable_of_the_request(
    variables: dict[str, Any], opens: bool, tokenizer: Tokenizer
) -> None:
    text = _render(tokenizer, {"role": "user", "content": "hi"}, **variables)
    assert text == f"{BEGIN}{USER}hi{ASSISTANT}{'<think>' if opens else '</think>'}"


def test_tools_without_a_system_message_come_first(tokenizer: Tokenizer) -> None:
    text = _render(tokenizer, {"role": "user", "content": "hi"}, tools=TOOLS[:1])
    assert text.startswith(f"{BEGIN}\n\n## Tools\n\n") and text.endswith(
        f"</functions>\n{USER}hi{ASSISTANT}</think>"
    )


def test_values_are_text_or_json(tokenizer: Tokenizer) -> None:
    call = _calls(("f", {"a": 'x<y>\n"é"', "b": [1, {"é": None}], "c": True, "d": 1.5}), content="so:")
    text = _render(tokenizer, {"role": "user", "content": "u"}, call)
    assert text.endswith(
        f'</think>so:\n\n<{DSML}function_calls>\n<{DSML}invoke name="f">\n'
        f'<{DSML}parameter name="a" string="true">x<y>\n"é"</{DSML}parameter>\n'
        f'<{DSML}parameter name="b" string="false">[1, {{"é": null}}]</{DSML}parameter>\n'
        f'<{DSML}parameter name="c" string="false">true</{DSML}parameter>\n'
        f'<{DSML}parameter name="d" string="false">1.5</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>{END}"
    )


def test_a_developer_s_last_message_has_the_published_form(tokenizer: Tokenizer) -> None:
    text = _render(tokenizer, {"role": "developer", "content": "find it"}, tools=TOOLS[:1], thinking=True)
    before, _, after = text.partition("\n\n## Tools")
    assert before == f"{BEGIN}{USER}"
    assert after.endswith(f"</functions>\n\n\n# The user's message is: find it{ASSISTANT}<think>")


@pytest.mark.parametrize("thinking", [False, True])
def test_a_developer_s_instructions_before_a_user_s_message_are_kept(
    thinking: bool, tokenizer: Tokenizer
) -> None:
    chat = [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "hi"}]
    text = _render(tokenizer, *chat, thinking=thinking)
    assert text == f"{BEGIN}Be terse.{USER}hi{ASSISTANT}{'<think>' if thinking else '</think>'}"


def test_a_continued_answer_ends_with_its_text(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    text = tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == f"{BEGIN}{USER}hi{ASSISTANT}</think>Well,"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [{"role": "user", "content": "u"}, {"role": "tool", "content": "r"}],
            "a tool message that answers no call",
        ),
        ([{"role": "developer", "content": ""}], "a developer message without content"),
        ([{"role": "pirate", "content": "x"}], "unknown role pirate"),
        ([_calls(("f", "not JSON"))], "the arguments of a call of f are not a JSON object"),  # type: ignore[arg-type]
    ],
)
def test_messages_without_a_place_are_refused(
    messages: list[dict[str, Any]], why: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ChatTemplateError, match=why):
        _render(tokenizer, *messages)


def test_its_parsers_are_chosen_and_a_template_of_the_user_s_comes_first(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    markup = markup_of(tokenizer.template.text)
    assert (markup.tools, markup.reasoning) == ("deepseek_v32", "qwen3")
    assert (
        tokenizer.template.knows_tools
        and tokenizer.template.knows_calls
        and not tokenizer.template.wants_parts
    )
    directory = write_tokenizer(tmp_path / "model")
    (tmp_path / "own.jinja").write_text("own")
    hello = {"role": "user", "content": "hi"}
    assert _render(Tokenizer(str(directory), mode="deepseek_v32"), hello).startswith(f"{BEGIN}{USER}"), (
        "the same mode as vLLM's flag"
    )
    assert _render(Tokenizer(str(directory), str(tmp_path / "own.jinja"), "deepseek_v32"), hello) == "own"
    (directory / "config.json").write_text('{"model_type": "deepseek_v32", "vocab_size": 320}')
    assert Tokenizer(str(directory)).template.text == CHAT_TEMPLATE, "a checkpoint's template has precedence"
