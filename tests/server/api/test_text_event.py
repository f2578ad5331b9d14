"""An event that is worded once says, with every text, what a newly worded one says."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Request, SamplingParams
from server.api.answer_json import TextEvent, event
from server.api.completions import Worded
from server.api.schemas import CompletionRequest
from server.api.served import ServedModel
from server.front.generations import Answer, Ask, Piece

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
    """Word pieces of a completion of one prompt, with as many choices as there are."""

    class Decoder:
        def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
            return ""

    async def scenario() -> list[bytes]:
        answer = Answer("cmpl-1", lambda _answer: None)
        for _ in range(fields.get("n", 1)):
            params = SamplingParams(max_tokens=9)
            request = Request(request_id="x", prompt_ids=(1, 2), params=params, arrival_s=0.0)
            answer.add(Ask(request=request), 0, Decoder())
        model = cast(ServedModel, type("Model", (), {"tokenizer": None}))
        worded = Worded(answer, CompletionRequest(prompt="x", stream=True, **fields), "m", model)
        return [worded.piece(index, piece) for index, piece in pieces]

    return asyncio.run(scenario())


def test_pieces_in_the_middle_are_worded_as_those_at_the_ends() -> None:
    last = Piece("c", finish_reason=FinishReason.STOP, stop_reason="x")
    said = streamed([(1, Piece("a")), (1, Piece("a")), (0, Piece("a")), (0, Piece("b")), (1, last)], n=2)
    first = said[0]
    assert said[1] == first, "the second piece, from the template, is the first one's bytes"
    assert said[3] == first.replace(b'"index":1', b'"index":0').replace(b'"text":"a"', b'"text":"b"')
    assert said[4] == first.replace(b'"text":"a"', b'"text":"c"').replace(
        b'"finish_reason":null,"stop_reason":null', b'"finish_reason":"stop","stop_reason":"x"'
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
