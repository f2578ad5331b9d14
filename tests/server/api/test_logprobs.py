"""The forms in which log-probabilities are told."""

from typing import Any, cast

from scheduler.policy.request import Logprobs
from server.api.answer_json import CompletionLogprobs, chat_logprobs, prompt_logprobs_list
from server.front.tokenizer import Tokenizer

WORDS = [b"a", b"bc", b"\xe2\x82", b"\xac", b" d", b"\xff", b"", b""]


class Words:
    """What is needed of a tokenizer; two tokens are halves of a character, one is no text at all."""

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
    assert content["top_logprobs"] == [{"token_id:7": -0.5, "token_id:6": -1.0}], "ids without any text"


def test_tokens_may_be_told_as_ids() -> None:
    [content] = objects([entry(2, 3)], as_ids=True)
    assert content["tokens"] == ["token_id:2"]
    assert content["top_logprobs"] == [{"token_id:3": -0.5, "token_id:2": -1.0}]
    chat = chat_logprobs([entry(2, 3)], TOKENIZER, 1, as_ids=True)["content"][0]
    assert (chat["token"], chat["top_logprobs"][0]["token"]) == ("token_id:2", "token_id:3")
    assert chat["bytes"] == [0xE2, 0x82]


def test_prompt_logprobs_are_vllm_s_list_with_the_own_token_first_and_none_for_the_first() -> None:
    assert prompt_logprobs_list([entry(1, 4, 0, rank=9), entry(4, 4, 0)], TOKENIZER, 2) == [
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
    assert prompt_logprobs_list([entry(1, 4)], TOKENIZER, 0)[1] == {
        "1": {"logprob": -1.0, "rank": 1, "decoded_token": "bc"}
    }


def test_what_json_has_no_number_for_is_clamped() -> None:
    minus_infinity = Logprobs(0, float("-inf"), [], [])
    [content] = objects([minus_infinity])
    assert content["token_logprobs"] == [-9999.0]
