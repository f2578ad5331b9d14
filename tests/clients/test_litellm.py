"""LiteLLM (its openai/ provider): answers, streams, and errors mapped to its own classes."""

import json
from typing import Any

import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

litellm = pytest.importorskip("litellm", reason="needs litellm: make test-clients")

pytestmark = pytest.mark.slow


def ask(front: FrontProcess, word: str, model: str = "tiny", **how: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}",
        api_base=f"{front.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": word}],
        num_retries=0,
        timeout=TIMEOUT_S,
        **how,
    )


def test_an_answer_has_text_and_usage(front: FrontProcess) -> None:
    front.script("lite-whole", "hello é😀")
    answer = ask(front, "lite-whole")
    assert answer.choices[0].message.content == "hello é😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(front.encode("hello é😀"))


def test_a_stream_has_text_and_usage_last(front: FrontProcess) -> None:
    front.script("lite-stream", "hello é😀")
    chunks = list(ask(front, "lite-stream", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello é😀"
    assert chunks[-1].usage.completion_tokens == len(front.encode("hello é😀"))


def test_text_completions(front: FrontProcess) -> None:
    front.script("lite-text", "more")
    answer = litellm.text_completion(
        model="text-completion-openai/tiny",
        api_base=f"{front.url}/v1",
        api_key="none",
        prompt="lite-text",
        max_tokens=8,
    )
    assert answer.choices[0].text == "more"


def test_keys_that_it_adds_are_taken(front: FrontProcess) -> None:
    front.script("lite-extra", "fine")
    answer = ask(front, "lite-extra", user="me", metadata={"a": "b"}, extra_body={"made_up": 1})
    assert answer.choices[0].message.content == "fine"


def test_too_long_a_prompt_is_its_context_window_error(front: FrontProcess) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(front, "x" * 9000)


def test_refusals_are_its_errors(front: FrontProcess) -> None:
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        ask(front, "x", model="nobody")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(front, "x", temperature=-1)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CALLS = "".join(
    f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{at}"}}}}\n</tool_call>' for at in ("sky", "sea")
)


def test_parallel_tool_calls_are_a_list(front: FrontProcess) -> None:
    front.script("lite-tools", CALLS)
    answer = ask(front, "lite-tools", tools=[LOOK])
    calls = answer.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("look", {"at": "sky"}),
        ("look", {"at": "sea"}),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_tool_calls_add_up(front: FrontProcess) -> None:
    front.script("lite-deltas", CALLS)
    whole = litellm.stream_chunk_builder(list(ask(front, "lite-deltas", tools=[LOOK], stream=True)))
    calls = whole.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["at"] for call in calls] == ["sky", "sea"]
    assert len({call.id for call in calls}) == 2
