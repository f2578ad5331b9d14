"""/v1/responses through the official client: whole, streamed, parsed, with tools, and continued."""

import json
import threading
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from scheduler.policy.request import FinishReason
from tests.support.front_process import FrontProcess

THINKING = "<think>hm, so</think>\n\nhello wörld 😀!"
CALLING = '<think>hm</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "strict": False,
}


def create(client: openai.OpenAI, given: Any, **how: Any) -> Any:
    return client.responses.create(model="tiny", input=given, **how)


def prompt_of(front: FrontProcess, word: str) -> str:
    return front.decode(front.asked(word).prompt_ids)


def paired(events: list[Any]) -> bool:
    """Check that what is added is done before the next is, and that the stream's frame is whole."""
    ends = {"output_item.done": "output_item.added", "content_part.done": "content_part.added"}
    ends |= {
        f"{kind}.done": f"{kind}.delta"
        for kind in ("output_text", "reasoning_text", "function_call_arguments")
    }
    open_: list[str] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind in ends:
            assert open_.pop() == ends[kind], kind
        elif kind in ends.values() and not (kind.endswith("delta") and open_[-1:] == [kind]):
            open_.append(kind)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return not open_


def test_a_whole_response_has_reasoning_text_and_usage(front: FrontProcess, client: openai.OpenAI) -> None:
    script = front.script("r-whole", THINKING, num_cached_tokens=3)
    response = create(client, "r-whole", instructions="be brief", metadata={"k": "v"}, temperature=0.5)
    assert isinstance(response, Response) and response.id.startswith("resp_")
    assert (response.status, response.model, response.metadata) == ("completed", "tiny", {"k": "v"})
    reasoning, message = response.output
    assert reasoning.content[0].text.strip() == "hm, so" and message.role == "assistant"
    assert response.output_text.strip() == "hello wörld 😀!"
    assert prompt_of(front, "r-whole").startswith(
        "<|start|>system\nbe brief<|end|>\n<|start|>user\nr-whole<|end|>"
    )
    request = front.asked("r-whole")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(request.prompt_ids), len(script.token_ids))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert request.params.temperature == response.temperature == 0.5


def test_a_stream_s_events_build_the_whole_response(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-stream", THINKING)
    events = list(create(client, "r-stream", stream=True))
    assert paired(events) and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text and text.strip() == "hello wörld 😀!"
    assert final.usage.output_tokens == len(front.encode(THINKING))
    with client.responses.stream(model="tiny", input="r-stream") as stream:
        assert paired(list(stream))
        assert stream.get_final_response().output_text == text


def test_each_token_is_sent_when_it_comes(front: FrontProcess, client: openai.OpenAI) -> None:
    more = threading.Event()
    front.script("r-gated", "ab", gates={1: more})
    stream = iter(create(client, "r-gated", stream=True))
    deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
    assert next(deltas) == "a"
    more.set()
    assert next(deltas) == "b"
    assert list(stream)[-1].type == "response.completed"


def test_a_call_and_its_output_make_a_conversation(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-call", CALLING)
    history: list[Any] = [{"role": "user", "content": "r-call"}]
    response = create(client, history, tools=[ADD])
    call = response.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1, "b": "ü"}')
    assert call.call_id and call.status == "completed"
    history += response.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "r-sum"})
    front.ranks[0].scripts = {"r-sum": front.script("r-sum", "two")} | front.ranks[0].scripts
    front.ranks[1].scripts = {"r-sum": front.ranks[0].scripts["r-sum"]} | front.ranks[1].scripts
    assert create(client, history, tools=[ADD]).output_text == "two"
    assert "<|start|>tool\nr-sum<|end|>" in prompt_of(front, "r-sum")


def test_a_call_s_arguments_are_streamed(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-args", CALLING)
    events = list(create(client, "r-args", tools=[ADD], stream=True))
    assert paired(events)
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in arguments) == done.arguments == '{"a": 1, "b": "ü"}'
    assert events[-1].response.output[-1].arguments == done.arguments


def test_a_call_that_must_be_is_bound_to_its_form(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-must", '[{"name": "add", "arguments": {"a": 1}}]')
    [call] = create(client, "r-must", tools=[ADD], tool_choice="required").output
    assert (call.name, call.arguments.replace(" ", "")) == ("add", '{"a":1}')
    structure = front.asked("r-must").params.structure
    assert structure is not None and structure.kind == "json_schema"


def test_a_length_is_an_incomplete_response(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-length", "abcdef")
    response = create(client, "r-length", max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "ab")
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(create(client, "r-length", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    response = create(client, "r-length", max_output_tokens=1_000_000)
    assert response.status == "completed", "more than fits is what fits, as vLLM does"


def test_log_probabilities_come_with_the_text(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-logprobs", "hé")
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = create(client, "r-logprobs", **asked)
    entries = response.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [-0.5] * 3 and len(entries[0].top_logprobs) == 2
    events = list(create(client, "r-logprobs", stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]


def test_a_response_is_kept_and_continued(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-first", "I am Ann")
    first = create(client, "r-first", instructions="only now")
    assert client.responses.retrieve(first.id) == first
    front.script("r-second", "Ann")
    streamed = list(create(client, "r-second?", previous_response_id=first.id, stream=True))[-1].response
    prompt = prompt_of(front, "r-second")
    assert (
        "<|start|>user\nr-first<|end|>\n<|start|>assistant\nI am Ann<|end|>\n<|start|>user\nr-second?"
        in prompt
    )
    assert "only now" not in prompt, "instructions do not carry over"
    assert streamed.previous_response_id == first.id
    create(client, "r-second, third", previous_response_id=streamed.id)
    assert "r-first" in prompt_of(front, "r-second, third")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(first.id)


def test_store_false_keeps_nothing(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-forget", "ok")
    response = create(client, "r-forget", store=False)
    with pytest.raises(openai.NotFoundError, match="not found"):
        create(client, "more", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(response.id)
    kept = create(client, "r-forget")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(kept.id)


def test_tokens_can_be_counted_beforehand(front: FrontProcess, client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="r-count", instructions="be brief")
    create(client, "r-count", instructions="be brief", max_output_tokens=1)
    assert counted.input_tokens == len(front.asked("r-count").prompt_ids)


def test_a_failure_is_a_status_or_an_event(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-fails", "", finish=FinishReason.ERROR, error="out of luck")
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        create(client, "r-fails", stream=True)
    more = threading.Event()
    front.script("r-breaks", "ab", finish=FinishReason.ERROR, error="out of luck", gates={1: more})
    stream = iter(create(client, "r-breaks", stream=True))
    next(stream)
    more.set()
    last = list(stream)[-1]
    assert last.type == "response.failed" and "out of luck" in last.response.error.message


def test_a_client_that_hangs_up_frees_its_place(front: FrontProcess, client: openai.OpenAI) -> None:
    never = threading.Event()
    front.script("r-hangup", "abc", gates={1: never})
    with create(client, "r-hangup", stream=True) as stream:
        next(iter(stream))
    rank = front.served("r-hangup")
    rank.wait_for(lambda told: rank.requests[-1].request_id in told.aborted)
    never.set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "video"}]}, "input.0.type"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"instructions": "\ud800"}, "input"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(
    front: FrontProcess, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": "tiny", "input": "x"} | fields)  # escapes half a surrogate pair
    headers = {"Authorization": "Bearer sesame", "content-type": "application/json"}
    response = front.post("/v1/responses", content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


class City(pydantic.BaseModel):
    """What is asked for."""

    name: str
    people: int


def test_an_answer_is_parsed_into_the_client_s_type(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-parse", '{"name": "Ulm", "people": 126000}')
    response = client.responses.parse(model="tiny", input="r-parse", text_format=City)
    assert response.output_parsed == City(name="Ulm", people=126000)
    structure = front.asked("r-parse").params.structure
    assert structure is not None and structure.kind == "json_schema" and "people" in structure.text
