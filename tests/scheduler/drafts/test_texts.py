"""Drafts from texts: the continuation of the longest match, or the most frequent continuation."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.drafts.drafter import TextSource
from scheduler.drafts.texts import (
    MOST_CANDIDATES,
    Continuation,
    TextIndex,
    continue_likeliest,
    continue_newest,
)
from scheduler.policy.sequence import Sequence
from scheduler.policy.speculative import parse_speculative_config
from tests.support.engines.policy_cases import request_of


@pytest.mark.parametrize(
    ("first", "second", "drafts"),
    [("", "", [8, 9]), ("", "x", []), ("x", "", []), ("x", "x", [])],
)
def test_a_salted_request_shares_no_answers(first: str, second: str, drafts: list[int]) -> None:
    source = TextSource(parse_speculative_config('{"method": "suffix", "num_speculative_tokens": 2}'))

    def sequence(request_id: str, salt: str, *replayed_ids: int) -> Sequence:
        asked = request_of(request_id, (1, 2, 3), max_tokens=9)
        return Sequence.from_request(replace(asked, cache_salt=salt, replayed_ids=replayed_ids))

    source.forget(sequence("a", first, 4, 5, 6, 7, 8, 9))
    assert [*source.propose(sequence("b", second, 4, 5, 6, 7), 2)] == drafts


def index_of(*texts: list[int], key: int = 2) -> TextIndex:
    index = TextIndex(key)
    for number, text in enumerate(texts):
        for token_id in text:  # sequences grow token by token
            index.extend(number, [token_id])
    return index


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(1, 6))
def test_candidates_are_the_places_behind_equal_tokens(text: list[int], key: int, longest: int) -> None:
    longest = max(key, longest)
    expected = []
    for place in range(len(text) - 1, key - 1, -1):
        length = 0
        while length < min(longest, place) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length >= key:
            expected.append((place, length))
    found = index_of(text, key=key).candidates(text[-longest:], longest)
    assert [(each.place, each.length) for each in found] == expected[:MOST_CANDIDATES]


def test_the_longest_match_goes_before_a_newer_one() -> None:
    text = [9, 1, 2, 3, 7, 7, 7, 4, 2, 3, 8, 8, 8, 1, 2, 3]
    candidates = index_of(text).candidates(text[-4:], 4)
    assert continue_newest(candidates, 3) == [7, 7, 7]
    assert continue_newest(index_of(text).candidates(text[-2:], 2), 2) == [8, 8]


def test_a_place_whose_text_ends_too_soon_is_passed_over() -> None:
    text = [1, 1, 1, 1, 1, 1]
    assert continue_newest(index_of(text).candidates(text[-3:], 3), 3) == [1, 1, 1]
    assert continue_newest([], 3) == []


def test_what_followed_most_often_is_drafted_while_it_is_likely() -> None:
    texts = [[1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [1, 2, 5, 9, 9], [1, 2, 4, 4, 4]]
    candidates = index_of(*texts).candidates([0, 1, 2], 3)
    assert continue_likeliest(candidates, 3, 0.0)[:2] == [5, 6]
    assert continue_likeliest(candidates, 3, 0.6) == [5]
    assert continue_likeliest(candidates, 3, 0.5) == [5, 6]
    assert continue_likeliest(candidates, 3, 0.8) == []
    assert continue_likeliest([], 3, 0.0) == []


def test_forgotten_texts_leave_nothing() -> None:
    rng = random.Random(0)
    index, texts = TextIndex(2), {}
    for number in range(200):
        texts[number] = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        index.extend(number, texts[number])
        if len(index) > 5:
            index.forget_oldest()
            del texts[min(texts)]
        found: list[Continuation] = index.candidates(texts[number], 4)
        assert all(each.token_ids in texts.values() for each in found)
    while len(index):
        index.forget_oldest()
    assert not index._places
