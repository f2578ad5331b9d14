"""The log-probabilities of a text spell that text, for every way of writing and tokenising it."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Logprobs, RequestOutput
from server.api.blocks import DraftChunks
from server.api.chat_turn import MessageParser, ReasoningCount
from server.api.openai.responses.answer import ResponseDraft
from server.api.openai.responses.request import ResponsesRequest
from server.api.openai.responses.text_logprobs import TextLogprobs
from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.registry import Markup
from server.front.generations import Answer, Piece
from server.http.json_writer import json_bytes
from tests.support.requests.answers import ask_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"th": "Look é."}}\n</tool_call>'
PARTS = [
    "Look é.",
    "th",
    " \n",
    "a<b",
    "\n\n",
    "<tool",
    "😀",
    CALL,
    CALL.replace("add", "sub"),
    "<tool_call>no</tool_call>",
]
NOISE = "<|noise|>"  # a special token, which is not shown


class Chunks:
    """A tokenizer with these chunks of bytes as its tokens, by id."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = list(chunks)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        shown = [self.chunks[token_id] for token_id in token_ids if self.chunks[token_id] != NOISE.encode()]
        return b"".join(shown).decode(errors="replace")

    def lone_texts(self, *, skip_special_tokens: bool) -> None:
        return None

    def spell(self, entries: Sequence[Logprobs]) -> list[dict[str, Any]]:
        of_tokens = [self.chunks[each.token_id] for each in entries]
        return [{"token": raw.decode(errors="replace"), "bytes": list(raw)} for raw in of_tokens]


def cut(text: str, sizes: Sequence[int]) -> list[bytes]:
    """Cut a text's bytes into chunks. The special token is a chunk."""
    chunks: list[bytes] = []
    for place, part in enumerate(text.split(NOISE)):
        chunks += [NOISE.encode()] if place else []
        data, turn = part.encode(), 0
        while data:
            size = sizes[turn % len(sizes)]
            chunks.append(data[:size])
            data, turn = data[size:], turn + 1
    return chunks


def answered(
    chunks: Sequence[bytes], steps: Sequence[int], stops: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return the events of an answer of these tokens, with the given number of tokens per step."""
    tokens = Chunks([*chunks, b"."])
    ask = ask_of(prompt_ids=(len(chunks),), stops=stops, max_tokens=9999, num_logprobs=1)
    answer = Answer("resp_1", lambda _: None)
    choice = answer.add(ask, 0, tokens)
    markup = Markup(tools="hermes", reasoning="qwen3")
    parser = MessageParser(markup.parser("", ArgumentTypes({"add": {}, "sub": {}})), ReasoningCount(len))
    special = [token_id for token_id, raw in enumerate(chunks) if raw == NOISE.encode()]
    draft = ResponseDraft(
        "resp_1",
        ResponsesRequest.model_validate({"input": "x", "top_logprobs": 0}),
        "tiny",
        temperature=1.0,
        top_p=1.0,
        logprobs=TextLogprobs(tokens.spell, special),
        usage=dict,
    )
    feeding = DraftChunks(parser, draft)
    events, left, turn = feeding.begin(), list(range(len(chunks))), 0
    reason = None
    while left and reason is None:
        size = steps[turn % len(steps)]
        taken, left, turn = left[:size], left[size:], turn + 1
        logprobs = [Logprobs(token_id, -0.5, [], []) for token_id in taken]
        reason = choice.push(
            RequestOutput(
                request_id="r",
                token_ids=taken,
                logprobs=logprobs,
                finish_reason=None if left else FinishReason.STOP,
            )
        )
        if reason is not None:
            choice.end(reason)
        if turn % 2 or reason is not None:  # otherwise the reader is slow, and pieces merge
            events += feeding.feed(choice.take())
    return [json.loads(json_bytes(event)) for event in events]


def spelled(entries: Sequence[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([*PARTS, NOISE]), min_size=1, max_size=6).map("".join),
    st.sampled_from(["", "<think>Hm th é.</think>\n\n", "<think>\nLook é.\n</think>"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([(), ("b",), ("é.",)]),
)
def test_the_tokens_of_a_text_spell_it(
    text: str, thoughts: str, sizes: list[int], steps: list[int], stops: tuple[str, ...]
) -> None:
    events = answered(cut(thoughts + text, sizes), steps, stops)
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert spelled(event["logprobs"]) == event["delta"]
        if event["type"] == "response.output_text.done":
            assert spelled(event["logprobs"]) == event["text"]
    for item in events[-1]["response"]["output"]:
        if item["type"] == "message":
            assert spelled(item["content"][0]["logprobs"]) == item["content"][0]["text"]


def test_the_tokens_are_those_that_the_text_came_from() -> None:
    chunks = [
        b"<think>",
        b"th",
        b"</th",
        b"ink>",
        b"\n\nth",
        b"e ",
        b"th\n<to",
        b"ol_call>",
        CALL[11:].encode(),
    ]
    events = answered(chunks, [1])
    [text] = [item["content"][0] for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert text["text"].strip() == "the th"
    assert [bytes(entry["bytes"]).strip() for entry in text["logprobs"]] == [b"th", b"e", b"th"]
    assert json.dumps(text)


def test_a_text_that_is_held_back_twice_keeps_both_its_tokens() -> None:
    events = answered([b"<tool", b"<tool"], [1])
    [message] = events[-1]["response"]["output"]
    [text] = message["content"]
    assert text["text"] == spelled(text["logprobs"]) == "<tool<tool"
    assert len(text["logprobs"]) == 2


def test_bytes_that_are_no_text_are_told_as_they_are() -> None:
    events = answered([b"a", b"\xff", b"\xfe", b"b"], [4])
    [message] = events[-1]["response"]["output"]
    entries = message["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"a\xff\xfeb"


def test_a_piece_without_log_probabilities_is_fed_whole() -> None:
    assert Piece("ab", [1, 2]).ends == []
