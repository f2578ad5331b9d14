"""/v1/messages through Anthropic's client: whole answers, streams, tools and errors."""

import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import httpx
import pytest

from scheduler.policy.request import FinishReason
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import TIMEOUT_S, FrontProcess

THINKING = "<think>hm, so</think>\n\nhello wörld 😀!"
CALLING = '<think>hm</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ADD: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Anthropic's package. Its import takes seconds, so only the worker that runs these tests imports it."""
    return import_module("anthropic")


@pytest.fixture(scope="module")
def claude(front: FrontProcess, anthropic: Any) -> Iterator[Any]:
    """Anthropic's client, which sends its key as x-api-key."""
    with anthropic.Anthropic(base_url=front.url, api_key="second", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


def create(claude: Any, word: str, **how: Any) -> Any:
    asked: Any = {"model": "claude-alias", "max_tokens": 200, "messages": [{"role": "user", "content": word}]}
    return claude.messages.create(**(asked | how))


def test_a_whole_message_has_blocks_and_usage(front: FrontProcess, claude: Any) -> None:
    script = front.script("m-whole", THINKING, num_cached_tokens=3)
    message = create(claude, "m-whole", system="be brief", extra_body={"temperature": 0.5, "top_k": 3})
    assert message.id.startswith("msg_") and (message.role, message.model) == ("assistant", "claude-alias")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "hm, so"
    assert message.content[1].text.strip() == "hello wörld 😀!"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    request = front.asked("m-whole")
    assert front.decode(request.prompt_ids).startswith("<|start|>system\nbe brief<|end|>")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt_ids)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (3, len(script.token_ids))
    assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.5, 3, 200)


def test_a_stream_s_events_build_the_whole_message(front: FrontProcess, claude: Any) -> None:
    front.script("m-stream", THINKING, num_cached_tokens=2)
    whole = create(claude, "m-stream")
    asked: Any = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "m-stream"}]}
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[1].text == whole.content[1].text
    assert (final.usage.output_tokens, final.usage.cache_read_input_tokens) == (whole.usage.output_tokens, 2)
    events = [event.type for event in create(claude, "m-stream", stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 2


def test_the_wire_is_what_anthropic_documents(front: FrontProcess) -> None:
    front.script("m-wire", "ok")
    body = {
        "model": "tiny",
        "max_tokens": 5,
        "stream": True,
        "messages": [{"role": "user", "content": "m-wire"}],
    }
    response = front.post("/v1/messages?beta=true", json=body, headers={"x-api-key": "sesame"})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == "" and all(event.startswith("event: ") for event in events)
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    assert "[DONE]" not in response.text


def test_a_tool_is_called_and_its_result_read(front: FrontProcess, claude: Any) -> None:
    front.script("m-call", CALLING)
    message = create(claude, "m-call", tools=[ADD], tool_choice={"type": "auto"})
    use = message.content[-1]
    assert (message.stop_reason, use.type, use.name, use.input) == (
        "tool_use",
        "tool_use",
        "add",
        {"a": 1, "b": "ü"},
    )
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "m-sum"}]}
    history = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    front.script("m-sum", "two")
    assert create(claude, "", messages=history, tools=[ADD]).content[0].text == "two"
    prompt = front.decode(front.asked("m-sum").prompt_ids)
    assert "<|start|>tool\nm-sum<|end|>\n<|start|>user\nso?<|end|>" in prompt


def test_a_tool_s_input_is_streamed(front: FrontProcess, claude: Any) -> None:
    front.script("m-input", CALLING)
    asked: Any = {"messages": [{"role": "user", "content": "m-input"}], "tools": [ADD]}
    with claude.messages.stream(model="tiny", max_tokens=200, **asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert "".join(pieces) == '{"a": 1, "b": "ü"}'
    assert message.content[-1].input == {"a": 1, "b": "ü"} and message.stop_reason == "tool_use"


def test_a_named_tool_and_a_format_bind_the_answer(front: FrontProcess, claude: Any) -> None:
    front.script("m-named", '{"a": 1}')
    message = create(claude, "m-named", tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    assert (message.stop_reason, message.content[0].input) == ("tool_use", {"a": 1})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert create(claude, "m-named", output_config=config).content[0].text == '{"a": 1}'
    bound = [
        request.params.structure
        for rank in front.ranks
        for request in rank.requests
        if "m-named" in front.decode(request.prompt_ids)
    ]
    assert len(bound) == 2 and all(each is not None and each.kind == "json_schema" for each in bound)


def test_stop_sequences_and_lengths_are_told(front: FrontProcess, claude: Any) -> None:
    front.script("m-stop", "one<END> two")
    message = create(claude, "m-stop", stop_sequences=["zzz", "<END>"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "<END>")
    assert message.content[0].text == "one"
    assert create(claude, "m-stop", max_tokens=2).stop_reason == "max_tokens"


def test_more_tokens_than_fit_are_those_that_fit(front: FrontProcess, anthropic: Any, claude: Any) -> None:
    front.script("m-large", [97] * MAX_LEN)
    message = create(claude, "m-large", max_tokens=32_000)
    request = front.asked("m-large")
    assert request.params.max_tokens == MAX_LEN - len(request.prompt_ids)
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        create(claude, "x" * 5000)


def test_a_failure_is_a_status_or_an_event(front: FrontProcess, anthropic: Any, claude: Any) -> None:
    front.script("m-fails", "", finish=FinishReason.ERROR, error="out of luck")
    with pytest.raises(anthropic.InternalServerError, match="out of luck"):
        create(claude, "m-fails")
    more = threading.Event()
    front.script("m-breaks", "ab", finish=FinishReason.ERROR, error="out of luck", gates={1: more})
    stream = iter(create(claude, "m-breaks", stream=True))
    next(stream)
    more.set()
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        list(stream)


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    return response.status_code, body["error"]["type"], body["error"]["message"]


def test_keys_are_wanted_in_either_header(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    path = "/v1/messages/count_tokens"
    for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer second"}):
        assert front.post(path, json=body, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "Bearer sesame"}, {"authorization": "sesame"}):
        assert refusal(front.post(path, json=body, headers=headers))[:2] == (401, "authentication_error")


def test_a_stream_s_beginning_and_end_count_the_same_input(front: FrontProcess, claude: Any) -> None:
    front.script("m-counts", "abc", num_cached_tokens=4)
    events = list(create(claude, "m-counts", stream=True))
    [start] = [event.message.usage for event in events if event.type == "message_start"]
    [end] = [event.usage for event in events if event.type == "message_delta"]
    assert start.cache_read_input_tokens == end.cache_read_input_tokens == 4
    num_prompt_tokens = len(front.asked("m-counts").prompt_ids)
    assert start.input_tokens == end.input_tokens == num_prompt_tokens - 4
    assert (start.output_tokens, end.output_tokens) == (0, len(front.encode("abc")))
