"""/v1/responses through the official client: whole, streamed, parsed, with tools, and continued."""

import json
import threading
from collections.abc import Iterable
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from scheduler.policy.request import FinishReason
from tests.support.service.front_process import FrontProcess

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
    """Check that each added item is done before the next is added, and that the stream begins and ends correctly."""
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
    output: Any = response.output
    reasoning, message = output
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
    assert [response.status, response.output[0].status] == ["incomplete"] * 2
    assert response.output_text == "ab"
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(create(client, "r-length", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    response = create(client, "r-length", max_output_tokens=1_000_000)
    assert response.status == "completed", "too large a limit is reduced, as in vLLM"


def test_log_probabilities_come_with_the_text(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-logprobs", "hé")
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = create(client, "r-logprobs", **asked)
    entries = response.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [-0.5] * 3 and len(entries[0].top_logprobs) == 2
    events = list(create(client, "r-logprobs", stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]


def test_many_log_probabilities_are_the_same_in_every_form(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("r-many", "abcdefgh" * 30)
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    whole = create(client, "r-many", **asked)
    found = client.responses.retrieve(whole.id)
    assert found == whole
    streamed, followed = (
        list(create(client, "r-many", stream=True, background=on, **asked)) for on in (False, True)
    )
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == 240 and len(entries[0].top_logprobs) == 20
    for events in (streamed, followed):
        text, part, item, ended = events[-4:]
        assert text.text == whole.output_text
        for same in (text.logprobs, part.part.logprobs, item.item.content[0].logprobs):
            assert [each.to_dict() for each in same] == [each.to_dict() for each in entries]
        assert ended.response.output == [item.item]


@pytest.mark.parametrize("gap", [1, 3, 64])
def test_log_probabilities_spell_the_text_and_nothing_else(
    front: FrontProcess, client: openai.OpenAI, gap: int
) -> None:
    word = f"r-spelled{gap}"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    front.script(word, f"<think>hm, é.</think>\n\nLook é 😀.\n{call}", tokens_per_step=gap)
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": [ADD]}
    response = create(client, word, **asked)
    [text] = [item.content[0] for item in response.output if item.type == "message"]
    assert "Look é 😀." in text.text and spelled(text.logprobs) == text.text
    events = list(create(client, word, stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text.text
    assert spelled(entry for event in deltas for entry in event.logprobs) == text.text
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert spelled(done.logprobs) == text.text


def spelled(entries: Iterable[Any]) -> str:
    """Return the text of entries, decoded from their bytes."""
    given = list(entries)
    if any(getattr(entry, "bytes", None) is None for entry in given):
        raise AssertionError("an entry has no bytes")
    return b"".join(bytes(entry.bytes) for entry in given).decode()


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
    assert last.response.error.code == "server_error"


class City(pydantic.BaseModel):
    """The form that the requests ask for."""

    name: str
    people: int


def test_an_answer_is_parsed_into_the_client_s_type(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("r-parse", '{"name": "Ulm", "people": 126000}')
    response = client.responses.parse(model="tiny", input="r-parse", text_format=City)
    assert response.output_parsed == City(name="Ulm", people=126000)
    structure = front.asked("r-parse").params.structure
    assert structure is not None and structure.kind == "json_schema" and "people" in structure.text


# The tests below follow vLLM's published tests (tests/entrypoints/openai/responses).
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get current weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
NAMED = {"type": "function", "name": "get_weather"}
CALL = (
    '<think>hm</think>\n<tool_call>\n{"name": "get_weather", "arguments": {"location": "Rome"}}\n</tool_call>'
)


def test_no_model_is_the_served_one(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("q-none", "<think>hm</think>\n\nok")
    response = client.responses.create(input="q-none")
    assert (response.status, response.model, response.incomplete_details) == ("completed", "tiny", None)
    assert [item.type for item in response.output] == ["reasoning", "message"]


def said(role: str, text: str) -> str:
    return f"<|start|>{role}\n{text}<|end|>\n"


HISTORIES: list[tuple[list[Any], str]] = [
    ([{"role": "user", "content": [{"type": "input_text", "text": "WORD"}]}], said("user", "WORD")),
    (
        [
            {"role": "system", "content": "Finish with QED."},
            {"role": "user", "content": "What is 5 * 3?"},
            {"role": "assistant", "content": "15. QED."},
            {"role": "user", "content": "WORD"},
        ],
        said("system", "Finish with QED.")
        + said("user", "What is 5 * 3?")
        + said("assistant", "15. QED.")
        + said("user", "WORD"),
    ),
    (
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Be concise."}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Acknowledged."}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "encrypted_content": None,
                "status": "completed",
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "WORD"}]},
        ],
        said("user", "Be concise.") + said("assistant", "Acknowledged.") + said("user", "WORD"),
    ),
    (
        [
            {"type": "message", "role": "user", "content": "WORD"},
            {
                "type": "reasoning",
                "id": "lol",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "A greeting."}],
            },
        ],
        said("user", "WORD") + said("assistant", "<think>A greeting.</think>"),
    ),
    (
        [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be concise."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "WORD"}]},
        ],
        said("system", "Be concise.") + said("user", "WORD"),
    ),
]


@pytest.mark.parametrize("number", range(len(HISTORIES)))
def test_histories_of_every_shape_reach_the_prompt(
    front: FrontProcess, client: openai.OpenAI, number: int
) -> None:
    word = f"q-history{number}"
    given, prompt = HISTORIES[number]
    create(client, json.loads(json.dumps(given).replace("WORD", word)), max_output_tokens=5)
    assert prompt_of(front, word) == prompt.replace("WORD", word) + "<|start|>assistant\n"


def test_sampling_extras_are_taken(client: openai.OpenAI) -> None:
    extras = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "stop": ["END"], "ignore_eos": True}
    response = create(client, "Hi", max_output_tokens=5, temperature=0.7, top_p=0.9, extra_body=extras)
    assert response.status == "incomplete" and response.output[0].content[0].text
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("choice", ["auto", NAMED])
def test_a_call_goes_back_as_an_item(front: FrontProcess, client: openai.OpenAI, choice: Any) -> None:
    word = f"q-back{choice == 'auto'}"
    front.script(word, CALL if choice == "auto" else '{"location": "Rome"}')
    history: list[Any] = [{"role": "user", "content": word}]
    response = create(client, history, tools=[WEATHER], tool_choice=choice)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.arguments.replace(" ", "")) == ("get_weather", '{"location":"Rome"}')
    assert call.call_id and call.status == "completed"
    history += [
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": f"20 degrees{word}"},
    ]
    assert create(client, history, max_output_tokens=5).status == "incomplete"
    assert f"<|start|>tool\n20 degrees{word}<|end|>" in prompt_of(front, f"20 degrees{word}")


def test_a_call_that_is_cut_off_is_no_call(client: openai.OpenAI) -> None:
    response = create(client, "x", tools=[WEATHER], tool_choice="required", max_output_tokens=10)
    assert not [item for item in response.output if item.type == "function_call"]
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("value", [True, False, None])
def test_parallel_tool_calls_null_is_true(client: openai.OpenAI, value: bool | None) -> None:
    response = create(client, "x", max_output_tokens=1, parallel_tool_calls=value)
    assert response.parallel_tool_calls is (value is not False)


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}]
)
def test_a_choice_without_tools_is_none(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert create(client, "x", max_output_tokens=1, **fields).status == "incomplete"


def test_the_prompt_and_the_answer_are_shown_as_they_were(front: FrontProcess, client: openai.OpenAI) -> None:
    script = front.script("q-raw", "<think>hm</think>\n\nok")
    for how in ({}, {"stream": True}):
        answer = create(client, "q-raw", extra_body={"enable_response_messages": True}, **how)
        response = list(answer)[-1].response if how else answer
        prompt_ids = list(front.asked("q-raw").prompt_ids)
        assert response.input_messages == [
            {"type": "raw_message_tokens", "message": front.decode(prompt_ids), "tokens": prompt_ids}
        ]
        [output] = response.output_messages
        assert output["message"] == "<think>hm</think>\n\nok" and output["tokens"] == list(script.token_ids)
    assert not hasattr(create(client, "q-raw"), "input_messages")
