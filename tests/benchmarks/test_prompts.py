import pytest

from benchmarks.prompts import Prompts


def test_prompts_have_the_exact_length_and_distinct_beginnings() -> None:
    prompts = Prompts(str.split, 128)  # words stand for tokens
    taken = prompts.take(1000)
    assert {len(prompt) for prompt in taken} == {128}
    assert len({tuple(prompt[:16]) for prompt in taken}) > 990  # the text repeats itself now and then


def test_more_prompts_than_the_text_has_are_an_error() -> None:
    prompts = Prompts(lambda text: list(range(1000)), 128)
    with pytest.raises(ValueError, match="no 99 more prompts of 128 tokens"):
        prompts.take(99)
