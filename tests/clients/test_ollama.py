"""ollama's Python client: chats, prompts, lists, whole and streamed, and errors for unsupported features."""

import asyncio
from typing import Any

import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

ollama = pytest.importorskip("ollama", reason="needs ollama: make test-clients")

pytestmark = pytest.mark.slow


@pytest.fixture
def client(front: FrontProcess) -> Any:
    return ollama.Client(host=front.url, timeout=TIMEOUT_S)


def said(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}]


def test_a_chat_is_whole_or_streamed(front: FrontProcess, client: Any) -> None:
    front.script("oll-chat", "hello é😀")
    answer = client.chat(model="tiny", messages=said("oll-chat"), options={"temperature": 0})
    assert (answer.message.content, answer.done_reason) == ("hello é😀", "stop")
    assert answer.eval_count == len(front.encode("hello é😀")) and answer.total_duration > 0
    *pieces, last = client.chat(model="tiny:latest", messages=said("oll-chat"), stream=True)
    assert "".join(each.message.content for each in pieces) == "hello é😀"
    assert last.done and last.prompt_eval_count == answer.prompt_eval_count


def test_a_prompt_is_whole_or_streamed(front: FrontProcess, client: Any) -> None:
    front.script("oll-prompt", "the cat")
    answer = client.generate(model="tiny", prompt="oll-prompt", options={"num_predict": 20})
    assert (answer.response, answer.done) == ("the cat", True)
    pieces = client.generate(model="tiny", prompt="oll-prompt", raw=True, stream=True)
    assert "".join(each.response for each in pieces) == "the cat"


def test_a_function_is_called(front: FrontProcess, client: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    front.script("oll-tool", "no call")
    answer = client.chat(model="tiny", messages=said("oll-tool"), tools=[add])
    assert answer.message.content == "no call" and not answer.message.tool_calls


def test_the_model_is_listed_shown_and_in_memory(client: Any) -> None:
    [listed] = client.list().models
    assert listed.model == "tiny"
    [running] = client.ps().models
    assert running.model == "tiny" and running.expires_at.year == 9999 and running.size_vram == 0
    shown = client.show("tiny")
    assert "completion" in shown.capabilities and shown.details.format == "safetensors"


def test_a_conversation_may_be_asked_for_asynchronously(front: FrontProcess) -> None:
    front.script("oll-async", "the mat")

    async def ask() -> str:
        client = ollama.AsyncClient(host=front.url, timeout=TIMEOUT_S)
        stream = await client.chat(model="tiny", messages=said("oll-async"), stream=True)
        return "".join([each.message.content async for each in stream])

    assert asyncio.run(ask()) == "the mat"


def test_what_is_wrong_or_not_served_is_its_own_error_with_our_sentence(client: Any) -> None:
    asks = {
        "does not exist": lambda: client.chat(model="other", messages=said("x")),
        "options.mirostat is 2": lambda: client.chat(
            model="tiny", messages=said("x"), options={"mirostat": 2}
        ),
        "does not support embeddings": lambda: client.embed(model="tiny", input="x"),
        "its model generates text": lambda: client.embeddings(model="tiny", prompt="x"),
        "not pulled here": lambda: client.pull("tiny"),
        "are not pulled": lambda: list(client.pull("tiny", stream=True)),
        "not pushed here": lambda: client.push("tiny"),
        "not created here": lambda: client.create(model="a", from_="tiny"),
        "not copied here": lambda: client.copy("tiny", "a"),
        "not deleted here": lambda: client.delete("tiny"),
    }
    for words, ask in asks.items():
        with pytest.raises(ollama.ResponseError, match=words) as refused:
            ask()
        assert refused.value.status_code in (400, 404) and "{" not in refused.value.error
