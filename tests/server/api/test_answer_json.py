"""Shared parts of answers: events made from a template, log-probabilities in both formats, times in milliseconds."""

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Logprobs
from server.api.answer_json import (
    CompletionLogprobs,
    TextEvent,
    chat_logprobs,
    event,
    metrics_of,
    prompt_logprobs_list,
)
from server.api.openai.completions import CompletionChunks
from server.api.schemas import CompletionRequest
from server.api.served import ServedModel
from server.front.generations import Answer, Piece
from server.front.tokenizer import Tokenizer
from tests.support.requests.answers import ByteDecoder, ask_of

WORDS = [b"a", b"bc", b"\xe2\x82", b"\xac", b" d", b"\xff", b"", b""]


class Words:
    """The part of a tokenizer that is needed. Two tokens are halves of a character, and one has no text."""

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id]


TOKENIZER = cast(Tokenizer, Words())


def entry(token_id: int, *top_ids: int, rank: int = 1) -> Logprobs:
    return Logprobs(token_id, -1.0, list(top_ids), [-0.5 - place for place in range(len(top_ids))], rank)


def objects(*pieces: list[Logprobs], first: int | None = None, **how: Any) -> list[dict[str, Any]]:
    words = CompletionLogprobs(TOKENIZER, how.pop("num_top", 1), **how)
    if first is not None:
        words.push_first(first)
    taken = []
    for piece in pieces:
        words.push(piece)
        taken.append(words.take())
    return taken


def test_an_event_is_one_line_for_clients_that_know_all_of_unicode_s_line_ends() -> None:
    text = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e\r\nё"
    made = TextEvent(lambda text: {"choices": [{"text": text}]}).of(text)
    assert made == event({"choices": [{"text": text}]})
    line, rest = made.decode().split("\n", 1)
    assert line.splitlines() == [line] and rest == "\n"
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == text


def test_a_prompt_s_first_token_has_no_probability() -> None:
    [content] = objects([entry(1, 4)], first=0)
    assert content == {
        "tokens": ["a", "bc"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {" d": -0.5, "bc": -1.0}],
        "text_offset": [0, 1],
    }


def test_offsets_count_characters_of_the_text_also_where_tokens_are_parts_of_one() -> None:
    [content] = objects([entry(0), entry(2), entry(3), entry(4)])
    assert content["tokens"] == ["a", "bytes:\\xe2\\x82", "bytes:\\xac", " d"]
    text = "a\u20ac d"
    assert content["text_offset"] == [0, 1, 1, 2]
    assert text[2:] == " d"


def test_offsets_run_on_from_piece_to_piece_however_they_are_cut() -> None:
    entries = [entry(0), entry(2), entry(3), entry(1), entry(4)]
    [whole] = objects(entries)
    cut = objects(entries[:2], [], entries[2:3], entries[3:])
    for name, values in whole.items():
        assert [value for content in cut for value in content[name]] == values


def test_tokens_that_are_no_text_stay_apart_as_keys() -> None:
    [content] = objects([entry(5, 2, 3)], num_top=2)
    assert set(content["top_logprobs"][0]) == {"bytes:\\xff", "bytes:\\xe2\\x82", "bytes:\\xac"}
    [content] = objects([entry(6, 7)])
    assert content["top_logprobs"] == [{"token_id:7": -0.5, "token_id:6": -1.0}], "ids without text"


def test_tokens_may_be_told_as_ids() -> None:
    [content] = objects([entry(2, 3)], as_ids=True)
    assert content["tokens"] == ["token_id:2"]
    assert content["top_logprobs"] == [{"token_id:3": -0.5, "token_id:2": -1.0}]
    chat = chat_logprobs([entry(2, 3)], TOKENIZER, 1, as_ids=True)["content"][0]
    assert (chat["token"], chat["top_logprobs"][0]["token"]) == ("token_id:2", "token_id:3")
    assert chat["bytes"] == [0xE2, 0x82]


def test_prompt_logprobs_are_vllm_s_list_with_the_own_token_first_and_none_for_the_first() -> None:
    assert list(prompt_logprobs_list([entry(1, 4, 0, rank=9), entry(4, 4, 0)], TOKENIZER, 2)) == [
        None,
        {
            "1": {"logprob": -1.0, "rank": 9, "decoded_token": "bc"},
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": " d"},
            "0": {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
        },
        {
            "4": {"logprob": -1.0, "rank": 1, "decoded_token": " d"},
            "0": {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
        },
    ]
    assert list(prompt_logprobs_list([entry(1, 4)], TOKENIZER, 0))[1] == {
        "1": {"logprob": -1.0, "rank": 1, "decoded_token": "bc"}
    }


def test_what_json_has_no_number_for_is_clamped() -> None:
    minus_infinity = Logprobs(0, float("-inf"), [], [])
    [content] = objects([minus_infinity])
    assert content["token_logprobs"] == [-9999.0]


TEXTS = ["", "plain", 'quotes " and \\ and \n', "ünïcode 漢字 🦊", "\ue000", "\u2028\x7f\x00"]


def word(text: str) -> dict[str, Any]:
    """An object like a chunk's."""
    return {"id": "a", "choices": [{"text": text, "logprobs": None}], "usage": None}


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_every_text_makes_the_bytes_of_a_whole_event(text: str) -> None:
    assert TextEvent(word).of(text) == event(word(text))


@pytest.mark.parametrize("text", TEXTS)
def test_awkward_texts_make_the_bytes_of_a_whole_event(text: str) -> None:
    assert TextEvent(word).of(text) == event(word(text))


def test_half_a_surrogate_pair_is_refused_as_by_a_whole_event() -> None:
    for make in (TextEvent(word).of, lambda text: event(word(text))):
        with pytest.raises(UnicodeEncodeError):
            make("\ud800")


def streamed(pieces: list[tuple[int, Piece]], **fields: Any) -> list[bytes]:
    """Format the pieces of a completion of one prompt, with `n` choices."""

    async def scenario() -> list[bytes]:
        answer = Answer("cmpl-1", lambda _answer: None)
        for _ in range(fields.get("n", 1)):
            answer.add(ask_of("x", (1, 2)), 0, ByteDecoder())
        model = cast(ServedModel, type("Model", (), {"tokenizer": None, "has_metrics": False}))
        chunks = CompletionChunks(answer, CompletionRequest(prompt="x", stream=True, **fields), "m", model)
        return [chunks.piece(index, piece) for index, piece in pieces]

    return asyncio.run(scenario())


def test_pieces_in_the_middle_are_chunks_as_those_at_the_ends() -> None:
    last = Piece("c", finish_reason=FinishReason.STOP, stop_reason="x")
    said = streamed([(1, Piece("a")), (1, Piece("a")), (0, Piece("a")), (0, Piece("b")), (1, last)], n=2)
    first = said[0]
    assert said[1] == first, "a second piece, made from the template, has the first one's bytes"
    assert said[3] == first.replace(b'"index":1', b'"index":0').replace(b'"text":"a"', b'"text":"b"')
    assert said[4] == first.replace(b'"text":"a"', b'"text":"c"').replace(
        b'"finish_reason":null,"stop_reason":null',
        b'"finish_reason":"stop","stop_reason":"x","matched_stop":null',
    )


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"return_token_ids": True}, b'"token_ids":[7]'),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, b'"total_tokens":2'),
        ({"stream_options": {"include_usage": True}}, b'"usage":null'),
    ],
)
def test_what_else_a_client_wants_is_in_every_piece(fields: dict[str, Any], shown: bytes) -> None:
    pieces = [(0, Piece("a", token_ids=[7])) for _ in range(3)]
    assert all(shown in said for said in streamed(pieces, **fields))


def test_a_piece_without_text_says_nothing() -> None:
    assert streamed([(0, Piece("a")), (0, Piece())])[1] == b""


def test_a_request_s_times_are_told_in_milliseconds_as_vllm_divides_them() -> None:
    async def scenario() -> tuple[object, object, object]:
        answer = Answer("a", lambda _answer: None)
        choice = answer.add(ask_of(), 0, ByteDecoder())
        nothing = metrics_of(answer)
        choice.queued_s, choice.first_token_s, choice.last_token_s, choice.num_tokens = 0.5, 100.75, 101.25, 5
        one = metrics_of(answer)
        answer.add(ask_of(), 0, ByteDecoder())
        return nothing, one, metrics_of(answer)

    nothing, one, two = asyncio.run(scenario())
    assert nothing == {
        "time_to_first_token_ms": 0.0,
        "generation_time_ms": 0.0,
        "queue_time_ms": 0.0,
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    assert one == {
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 500.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 125.0,
        "tokens_per_second": 10.0,
    }
    assert two is None, "several choices share the time"
