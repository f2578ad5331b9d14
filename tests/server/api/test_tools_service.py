"""Calls that must hold whatever the model would rather say: a whole service with random weights."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.real_service import RealService, write_tiny_model
from tests.support.tiny_tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.slow
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "blue"]},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("pick", "drop")
]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("service")
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE  # short
    model = write_tiny_model(directory / "tiny", chat_template=template)
    with RealService.serve(model, directory / "log") as service:
        service.wait_ready()
        with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as made:
            yield made


def check(name: str, arguments: str) -> None:
    assert name in ("pick", "drop")
    values = json.loads(arguments)
    assert (
        set(values) == {"count", "kind"} and 0 <= values["count"] <= 99 and values["kind"] in ("red", "blue")
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
def test_a_call_that_must_be_is_made_and_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            temperature=1.5,
        )
        calls = answer.choices[0].message.tool_calls
        assert calls is not None and len(calls) == 1
        check(calls[0].function.name, calls[0].function.arguments)  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
def test_it_streams(client: openai.OpenAI, choice: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=True,
    )
    calls = [call for chunk in stream for c in chunk.choices for call in c.delta.tool_calls or []]
    names = [call.function.name for call in calls if call.function and call.function.name]
    assert len(names) == 1 and len([call for call in calls if call.id]) == 1
    check(names[0], "".join(call.function.arguments or "" for call in calls if call.function))
