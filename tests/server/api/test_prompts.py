"""Prompts that do not delay other requests: too long ones are refused before encoding, and long work leaves the event loop."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pydantic
import pytest

from server.api.anthropic.request import MessagesRequest
from server.api.anthropic.request import chat_request as anthropic_chat
from server.api.openai.completions import encode_prompts
from server.api.openai.responses.request import messages_of
from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.deltas import ToolCallDelta
from server.api.parsers.registry import Markup
from server.api.parsers.token_calls import DEEPSEEK
from server.api.prompts import (
    LONG_TEXT,
    SLACK_TOKENS,
    SLICE_CHARS,
    encode,
    render_chat,
)
from server.api.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest, Message
from server.api.served import MAX_LONG_WORK, ServedModel
from server.api.template_messages import (
    as_text,
    beginning_with,
    mentions_tools,
    template_messages,
    tool_text,
    with_content,
    with_text_arguments,
)
from server.front.errors import ApiError
from server.front.structure.structure_checks import StructureChecks
from server.front.template_probe import ContentForm
from server.front.tokenizer import TemplateFacts
from tests.server.api.parsers.reading import read
from tests.server.api.parsers.texts import TYPES
from tests.support.requests.desk import in_loop

LONGEST = 4  # characters of the longest token


class Worker:
    """A fake tokenizer with tokens of LONGEST characters. It records its texts and the threads of its calls."""

    longest_token_chars = LONGEST
    vocab_size = 320
    chars_of_token = LONGEST
    template = TemplateFacts(text="x", knows_tools=True, knows_calls=True)

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: list[threading.Thread] = []
        self.gate: threading.Event | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._note(text)
        return [5] * -(-len(text) // self.chars_of_token)

    def render_chat(self, messages: list[dict[str, Any]], **how: Any) -> str:
        self._note("")
        return "".join(message["content"] for message in messages)

    def _note(self, text: str) -> None:
        self.texts.append(text)
        self.threads.append(threading.current_thread())
        if self.gate is not None:
            assert self.gate.wait(20)

    @property
    def left_the_loop(self) -> bool:
        """Return whether all calls ran in threads. They must not be mixed."""
        outside = {thread is not threading.main_thread() for thread in self.threads}
        assert len(outside) == 1, self.threads
        return outside.pop()


def model_of(max_len: int, made: type[Worker] = Worker) -> tuple[ServedModel, Worker]:
    worker = made()
    tokenizer: Any = worker
    model = ServedModel(
        names=("m",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: max_len,
        created=0,
        structures=StructureChecks(lambda: None),  # type: ignore[arg-type, return-value]
    )
    return model, worker


class NewerWorker(Worker):
    """A tokenizer with one token more than the model."""

    vocab_size = 5

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]


def chat(*contents: Any, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatRequest.model_validate({"messages": messages, **fields})


def prompts(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt=prompt, **fields)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d" * LONG_TEXT}}]


@pytest.mark.parametrize(
    ("work", "leaves"),
    [
        (lambda model: render_chat(chat("hello"), model), False),
        (lambda model: render_chat(chat("x" * LONG_TEXT), model), True),
        (lambda model: render_chat(chat(*["x"] * 2000), model), True),
        (lambda model: render_chat(chat([{"type": "text", "text": "x"}] * 2000), model), True),
        (lambda model: render_chat(chat("x", tools=TOOLS), model), True),
        (lambda model: render_chat(chat("x", chat_template_kwargs={"a": ["x"] * 2000}), model), True),
        (lambda model: encode("hello", model, add_special_tokens=True, param="prompt"), False),
        (lambda model: encode("x" * LONG_TEXT, model, add_special_tokens=True, param="prompt"), True),
        (lambda model: encode_prompts(prompts(["x" * 99] * 128), model), False),
        (lambda model: encode_prompts(prompts(["x" * 19_999] * 128), model), True),
    ],
)
def test_long_work_leaves_the_event_loop_and_short_work_does_not(
    work: Callable[[ServedModel], Coroutine[Any, Any, Any]], leaves: bool
) -> None:
    model, worker = model_of(1 << 20)
    asyncio.run(work(model))
    assert worker.left_the_loop is leaves


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda model: render_chat(chat(*["x"] * 101), model), "at least 101 prompt tokens"),
        (lambda model: render_chat(chat("x" * 401), model), "at least 101 prompt tokens"),
        (lambda model: render_chat(chat([{"type": "text", "text": "x" * 401}]), model), "at least 101"),
        (lambda model: encode_prompts(prompts(["x", "x" * 401]), model), "at least 101 prompt tokens"),
        (lambda model: encode_prompts(prompts([5] * 101), model), "101 prompt tokens"),
        (lambda model: encode_prompts(prompts([[5], [5] * 101]), model), "101 prompt tokens"),
    ],
)
def test_what_cannot_fit_is_refused_before_any_work(
    work: Callable[[ServedModel], Coroutine[Any, Any, Any]], words: str
) -> None:
    model, worker = model_of(100)
    with pytest.raises(ApiError, match=words) as caught:
        asyncio.run(work(model))
    assert caught.value.status == 400 and caught.value.param in ("messages", "prompt")
    assert worker.texts == []


def test_token_ids_that_are_to_be_cut_may_be_more_than_fit() -> None:
    model, _ = model_of(100)
    [ids] = asyncio.run(encode_prompts(prompts([5] * 101, truncate_prompt_tokens=50), model))
    assert len(ids) == 101


def test_of_a_text_of_megabytes_only_as_much_is_tokenized_as_shows_that_it_does_not_fit() -> None:
    model, worker = model_of(SLICE_CHARS // 2)
    worker.chars_of_token = 1
    with pytest.raises(ApiError, match=f"at least {SLICE_CHARS - SLACK_TOKENS} prompt tokens"):
        asyncio.run(encode("x" * (SLICE_CHARS * 2), model, add_special_tokens=True, param="prompt"))
    assert [len(text) for text in worker.texts] == [SLICE_CHARS]


@in_loop
async def test_a_few_long_texts_at_once_and_the_loop_goes_on() -> None:
    model, worker = model_of(1 << 20)
    worker.gate = threading.Event()
    waiting = [
        asyncio.create_task(encode("x" * LONG_TEXT, model, add_special_tokens=True, param="prompt"))
        for _ in range(3 * MAX_LONG_WORK)
    ]
    while len(worker.texts) < MAX_LONG_WORK:
        await asyncio.sleep(0.001)
    for _ in range(100):  # the loop turns, and no other work begins
        await asyncio.sleep(0)
    assert len(worker.texts) == MAX_LONG_WORK
    worker.gate.set()
    assert len(await asyncio.gather(*waiting)) == len(waiting) == len(worker.texts)


def many_parts() -> Iterator[tuple[str, Callable[[], object]]]:
    part = {"type": "text", "text": ""}
    blocks = [part] * MAX_MESSAGES
    result = [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]
    yield "messages", lambda: asyncio.run(render_chat(chat(blocks), model_of(1 << 20)[0]))
    yield "input", lambda: messages_of([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1))
    yield "input", lambda: messages_of([{"role": "user", "content": blocks}])
    for content in (blocks, result):
        yield (
            "messages",
            lambda content=content: anthropic_chat(  # type: ignore[misc]
                MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": content}])  # type: ignore[call-arg,list-item]
            ),
        )


@pytest.mark.parametrize(("param", "work"), list(many_parts()))
def test_a_conversation_has_a_bounded_number_of_parts(param: str, work: Callable[[], object]) -> None:
    with pytest.raises(ApiError, match=f"more than {MAX_MESSAGES} messages and parts") as caught:
        work()
    assert caught.value.param == param


@pytest.mark.parametrize("kind", [ChatRequest, MessagesRequest])
def test_of_200_000_messages_no_more_are_read_than_are_taken(kind: type[pydantic.BaseModel]) -> None:
    fields: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 200_000}
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(fields)
    [error] = caught.value.errors()
    assert (error["type"], error["loc"]) == ("too_long", ("messages",))


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def messages(*sent: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([Message.model_validate(each) for each in sent])


def test_a_whole_history_reaches_the_template() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assistant = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "bot"}
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    asked, called, answered = messages(user, assistant, tool)
    assert asked == {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert called == {
        "role": "assistant",
        "name": "bot",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert answered == tool


def test_reasoning_beside_calls_has_gpt_oss_name_too() -> None:
    [message] = messages({"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"})
    assert message["thinking"] == "hm"


def test_reasoning_has_both_names() -> None:
    for field in ("reasoning", "reasoning_content"):
        [message] = messages({"role": "assistant", "content": "x", field: "hm"})
        assert message["reasoning"] == message["reasoning_content"] == "hm"


@pytest.mark.parametrize("sent", [[], None])
def test_no_calls_are_no_calls(sent: Any) -> None:
    assert messages({"role": "assistant", "content": "x", "tool_calls": sent}) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(None, {}), ("", {}), ({"a": 1}, {"a": 1}), ('{"a"', '{"a"'), ("[1]", "[1]"), ("[" * 5000, "[" * 5000)],
)
def test_arguments_are_objects_where_they_can_be(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = messages({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": [{"type": "refusal"}]}, "messages.0.content.0.refusal"),
        ({"tool_calls": {}}, "messages.0.tool_calls"),
        ({"tool_calls": ["f"]}, "messages.0.tool_calls.0.function"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "messages.0.tool_calls.0.function"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_a_wrong_message_says_where(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages({"role": "assistant", **message})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_parts_and_text_arguments_are_other_spellings() -> None:
    history = messages({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]})
    listed = with_content(history, lambda role: ContentForm.PARTS)
    assert [each["content"] for each in listed] == [[{"type": "text", "text": "a"}], []]
    assert with_text_arguments(history)[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_lfm2_s_history_has_its_own_calls() -> None:
    arguments = {"city": "Köln", "days": 2, "now": True, "tags": ["a"]}
    calls = [
        {"function": {"name": "get_weather", "arguments": arguments}},
        {"function": {"name": "stop", "arguments": {}}},
    ]
    history = [
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "sunny"},
    ]
    assistant, tool = as_text(history, "lfm2")
    text = assistant["content"]
    assert (
        text.startswith("Hm.\n<|tool_call_start|>[get_weather(city='Köln', days=2, ")
        and "tool_calls" not in assistant
    )
    assert tool == {"role": "tool", "content": "<|tool_response_start|>sunny<|tool_response_end|>"}
    schema: dict[str, Any] = {name: {} for name in arguments}
    types = ArgumentTypes({"get_weather": {"properties": schema}, "stop": {}})
    parser = Markup(tools="lfm2", reasoning="none").parser("", types)
    deltas = [each for each in parser.push(text) + parser.finish() if isinstance(each, ToolCallDelta)]
    assert [each.name for each in deltas if each.name] == ["get_weather", "stop"], "the parser reads it back"
    spelled = "".join(each.arguments for each in deltas if each.index == 0)
    assert json.loads(spelled) == arguments


def test_a_template_that_knows_no_calls_gets_them_as_text() -> None:
    history = messages(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
    )
    user, assistant, tool = as_text(history)
    assert user == {"role": "user", "content": "a"}
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": text}
    assert tool == {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}
    assert mentions_tools(history) and not mentions_tools(history[:1])


def test_the_model_is_told_at_the_beginning() -> None:
    user, system = messages({"role": "user", "content": "a"}, {"role": "system", "content": "b"})
    assert beginning_with([user], "T") == [{"role": "system", "content": "T"}, user]
    assert beginning_with([system, user], "T") == [{"role": "system", "content": "b\n\nT"}, user]
    assert beginning_with([user], "T", role="user") == [{"role": "user", "content": "T\n\na"}]


def test_a_model_is_told_of_tools_in_the_form_that_is_read() -> None:
    for form in ("hermes", "deepseek_v3", "deepseek_v31"):
        shown = tool_text([TOOL], form)
        assert '"object"' in shown
        call = shown[shown.index("<tool_call>" if form == "hermes" else DEEPSEEK.section[0]) :]
        call = call.replace("NAME", "f").replace("ARGUMENTS", "{}").replace("{...}", "{}")
        assert read(lambda form=form: Markup(tools=form).parser("", TYPES), call).calls == [("f", "{}")]  # type: ignore[misc]


@in_loop
async def test_a_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    model, _ = model_of(100, NewerWorker)
    words = r"has the token '<5>'; its id 5 is outside the model's vocabulary \(0 to 4\)"
    with pytest.raises(ApiError, match=words):
        await encode("x", model, add_special_tokens=True, param="prompt")
