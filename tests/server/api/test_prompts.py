"""How a prompt is made without holding up others: what cannot fit is refused unseen, long work leaves the event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pydantic
import pytest

from server.api.anthropic.request import MessagesRequest
from server.api.anthropic.request import chat_request as anthropic_chat
from server.api.completions import encode_prompts
from server.api.prompts import LONG_TEXT, SLACK_TOKENS, SLICE_CHARS, encode, render_chat
from server.api.responses.request import messages_of
from server.api.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest
from server.api.served import MAX_LONG_WORK, ServedModel
from server.errors import ApiError
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import TemplateFacts
from tests.support.desk import in_loop

LONGEST = 4  # characters of the longest token


class Worker:
    """Stands in for a tokenizer: a token is LONGEST characters; remembers what it was given, and where it ran."""

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
        """Whether all of it ran beside the event loop, or none."""
        outside = {thread is not threading.main_thread() for thread in self.threads}
        assert len(outside) == 1, self.threads
        return outside.pop()


def model_of(max_len: int) -> tuple[ServedModel, Worker]:
    worker = Worker()
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
    for _ in range(100):  # the loop turns, and nobody else has begun
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
                MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": content}])  # type: ignore[list-item]
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
