"""Streams that are written in the step that brings their pieces have the bytes of streams that a task sends.

The oracle is the same application without the connection's extension: then the stream's task is woken for every step.
"""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.types import ASGIApp, Message

from benchmarks.serving.paced_rank import logprobs_of
from scheduler.policy.request import FinishReason, Request, RequestOutput
from server.api.anthropic.messages import messages_routes
from server.api.ollama.routes import ollama_routes
from server.api.openai.chat import chat_routes
from server.api.openai.completions import completion_routes
from server.api.openai.responses.routes import responses_routes
from server.api.parsers.registry import markup_of
from server.api.served import ServedModel
from server.api.sglang.generate import generate_routes
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.app import build_app
from server.http.guards import ApiKeys
from server.http.retries.idempotency import IdempotentAnswers
from server.http.retries.kept_answers import KeptAnswers
from server.http.wire.protocol import DIRECT_BODY
from tests.support.models.tiny_tokenizer import MAX_LEN, write_tokenizer
from tests.support.requests.desk import Desk

TIMEOUT_S = 60.0
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for message in messages %}<|start|>{{ message.content }}<|end|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{% endfor %}"
)
PARTS = (
    *("hello world", " the cat", "é", "€😀", "\n\n", " zebra", "<tool", "\u2028", '"\\', "\ufffd", "<|end|>"),
    *(
        "<think>\nHm, é.\n</think>\n\n",
        '<tool_call>\n{"name": "cat", "arguments": {"a": "Łódź"}}\n</tool_call>',
    ),
)
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
_TOOL = {"name": "cat", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_TOOLS = {"tools": [{"type": "function", "function": _TOOL}]}
_OWN_TOOL = {"name": "cat", "input_schema": _TOOL["parameters"]}
_COUNTED = {"stream_options": {"include_usage": True}}
_ALWAYS_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, **_COUNTED, "n": 3, "stop": ["zebra", "the"]}),
    ("/v1/chat/completions", {**_CHAT, **_TOOLS, **_ALWAYS_COUNTED, "n": 2}),
    ("/v1/chat/completions", {**_CHAT, **_TOOLS, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**_CHAT, "return_token_ids": True, "skip_special_tokens": False}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["hello", "cat"], "n": 2, "echo": True, **_COUNTED}),
    ("/v1/completions", {"prompt": "hello", "logprobs": 2, "stop": ["zebra"], **_ALWAYS_COUNTED}),
    ("/v1/responses", {"input": "hello", "store": False}),
    ("/v1/responses", {"input": "hello", "store": False, "include": ["message.output_text.logprobs"]}),
    ("/v1/messages", {**_CHAT, "max_tokens": 99, "tools": [_OWN_TOOL]}),
    ("/api/chat", {"model": "tiny", **_CHAT, **_TOOLS}),
    ("/api/generate", {"model": "tiny", "prompt": "hello", "raw": True}),
    ("/generate", {"text": "hello", "sampling_params": {"n": 2}}),
    ("/generate", {"text": "hello", "return_logprob": True, "top_logprobs_num": 2}),
)
# Ids, times and durations, which differ between two runs.
_OWN = re.compile(
    rb'[0-9a-f]{24,32}|"(?:created|created_at|completed_at|e2e_latency|\w+_duration)":(?:"[^"]*"|[^,}]*)'
)


class Endpoints(NamedTuple):
    """An application, and the requests that it accepts."""

    app: ASGIApp
    desk: Desk
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Endpoints:
    special = ("<tool_call>", "</tool_call>")
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory, chat_template=TEMPLATE, special_tokens=special)
    return endpoints_of(directory)


def endpoints_of(directory: Path) -> Endpoints:
    tokenizer = Tokenizer(str(directory))
    desk = Desk(num_ranks=1, decoder=tokenizer)
    model = ServedModel(
        names=("tiny",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: MAX_LEN,
        created=0,
        structures=StructureChecks(tokenizer.vocabulary),
        markup=markup_of(tokenizer.template.text),
        draw_seed=lambda: 0,
    )
    makers = (chat_routes, completion_routes, responses_routes, messages_routes, generate_routes)
    routers = [make(model, desk.requests) for make in makers]
    routers.append(ollama_routes(model, desk.requests, version="0"))
    return Endpoints(build_app(routers, version="0", keys=ApiKeys()), desk, tokenizer)


class Connection:
    """A client's connection, which records the parts of the body in the order in which they are written."""

    def __init__(self, body: dict[str, Any], drawn: random.Random | None, *, key: bytes = b"") -> None:
        """Args: drawn decides when a part may be written directly; None leaves the extension out. key is its Idempotency-Key."""
        self.parts: list[bytes] = []
        self._key = key
        self.num_direct = self.status = 0
        self._body, self._drawn = json.dumps(body).encode(), drawn
        self._is_asked = self._has_begun = False

    def scope(self, path: str) -> dict[str, Any]:
        """Return the request's scope."""
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        headers += [(b"idempotency-key", self._key)] if self._key else []
        own = {} if self._drawn is None else {"extensions": {DIRECT_BODY: self}}
        line = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
        }
        return {**line, "headers": headers, **own}

    async def receive(self) -> Message:
        """Return the body; the client stays connected."""
        if self._is_asked:
            await asyncio.Event().wait()
        self._is_asked = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Record a part that the task sends."""
        self.status = message.get("status", self.status)
        self._has_begun = True
        if message.get("body"):
            self.parts.append(message["body"])

    def is_free(self) -> bool:
        """Return whether a part may be written directly now."""
        return self._has_begun and self._drawn is not None and self._drawn.random() < 0.8

    def write(self, part: bytes) -> None:
        """Record a part that is written directly."""
        self.num_direct += 1
        self.parts.append(part)


async def streamed(
    endpoints: Endpoints, path: str, body: dict[str, Any], seed: int, *, is_direct: bool, key: bytes = b""
) -> Connection:
    """Stream answers of random texts, cut into random steps; the same for the same seed."""
    drawn, desk = random.Random(seed), endpoints.desk
    desk.ranks.submitted.clear()
    connection = Connection({**body, "stream": True}, random.Random(seed) if is_direct else None, key=key)
    task: asyncio.Task[None] = asyncio.create_task(
        endpoints.app(connection.scope(path), connection.receive, connection.send)
    )
    async with asyncio.timeout(TIMEOUT_S):
        while not desk.ranks.submitted:
            assert not task.done(), connection.parts
            await asyncio.sleep(0)
        left = {request.request_id: _tokens(endpoints, drawn) for _, request in desk.ranks.submitted}
        asked = {request.request_id: request for _, request in desk.ranks.submitted}
        while left:
            outputs = [_step(asked[name], left, drawn) for name in list(left) if drawn.random() < 0.8]
            desk.requests.deliver(0, [each for each in outputs if each is not None])
            for _ in range(8):  # the task sends what was not written
                await asyncio.sleep(0)
        await task
    assert connection.status == 200
    return connection


def _tokens(endpoints: Endpoints, drawn: random.Random) -> list[int]:
    """Return the tokens of a random text. A character beyond ASCII is several tokens."""
    tokenizer, ids = endpoints.tokenizer, list[int]()
    for part in drawn.choices(PARTS, k=drawn.randrange(1, 9)):
        text = part if drawn.random() < 0.7 else "".join(drawn.sample(part, len(part)))
        ids += tokenizer.encode(text, add_special_tokens=False)
    return ids


def _step(request: Request, left: dict[str, list[int]], drawn: random.Random) -> RequestOutput | None:
    """Return up to three of a choice's tokens, or none."""
    name, num = request.request_id, drawn.choice((0, 1, 1, 1, 2, 3))
    token_ids, left[name] = left[name][:num], left[name][num:]
    if left[name]:
        finish = None
    else:
        finish = drawn.choice((FinishReason.STOP, FinishReason.LENGTH))
        del left[name]
    num_top = request.params.num_logprobs
    return RequestOutput(
        request_id=name,
        token_ids=token_ids,
        logprobs=[] if num_top is None else [logprobs_of(each % 250, num_top) for each in token_ids],
        finish_reason=finish,
        num_draft_tokens=max(0, num - 1),
    )


def _compared(parts: Sequence[bytes]) -> list[bytes]:
    return [_OWN.sub(b"", part) for part in parts]


@pytest.mark.crossed("body", every=3)
@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_stream_has_the_bytes_that_its_task_would_send(
    endpoints: Endpoints, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> int:
        num_direct = 0
        for seed in range(16):
            slow = await streamed(endpoints, path, body, seed, is_direct=False)
            fast = await streamed(endpoints, path, body, seed, is_direct=True)
            assert slow.num_direct == 0
            assert _compared(fast.parts) == _compared(slow.parts), f"seed {seed}"
            num_direct += fast.num_direct
        return num_direct

    assert asyncio.run(scenario()) > 16
    assert endpoints.desk.requests.num_open == 0 and endpoints.desk.requests.num_answers == 0


def test_an_answer_that_is_kept_for_retries_is_not_written_past_its_recording(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    async def scenario() -> None:
        path, body = CASES[0]
        keeping = endpoints._replace(app=IdempotentAnswers(endpoints.app, KeptAnswers(tmp_path), "secret"))
        first = await streamed(keeping, path, body, 1, is_direct=True, key=b"k")
        again = Connection({**body, "stream": True}, random.Random(1), key=b"k")
        await keeping.app(again.scope(path), again.receive, again.send)
        assert first.num_direct == again.num_direct == 0
        assert b"".join(first.parts) == b"".join(again.parts) != b""

    asyncio.run(scenario())
