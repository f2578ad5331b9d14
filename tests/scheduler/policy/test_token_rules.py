"""Rules for single tokens against a slow oracle that follows their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.request import SamplingParams, TokenBias
from scheduler.policy.token_rules import TokenRules

VOCABULARY = 12
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, max_size=4, unique=True).map(tuple)


def applied(
    params: SamplingParams, output_ids: tuple[int, ...] = (), prompt_ids: tuple[int, ...] = (0,)
) -> list[float]:
    """Return a flat row after the rules."""
    rules = TokenRules.of(params)
    logits_V = np.arange(VOCABULARY, dtype=np.float32)
    if rules is not None:
        rules.apply(logits_V, [*prompt_ids, *output_ids], len(output_ids))
    values: list[float] = logits_V.tolist()
    return values


def left(
    params: SamplingParams, output_ids: tuple[int, ...] = (), prompt_ids: tuple[int, ...] = (0,)
) -> set[int]:
    """Return the tokens that may be sampled."""
    values = applied(params, output_ids, prompt_ids)
    return {token for token, value in enumerate(values) if value > -math.inf}


def oracle(params: SamplingParams, output_ids: tuple[int, ...]) -> set[int]:
    """Return the tokens that may be sampled, rule by rule. A rule that would leave no token does not apply."""
    may = set(range(VOCABULARY))
    bad = {
        word[-1]
        for word in params.bad_words
        if len(word) - 1 <= len(output_ids) and (*output_ids, word[-1])[-len(word) :] == word
    }
    early = set(params.stop_token_ids) if len(output_ids) < params.min_tokens else set()
    for kept in (
        set(params.allowed_token_ids) or may,
        set(range(VOCABULARY)) - bad,
        set(range(VOCABULARY)) - early,
    ):
        may = may & kept or may
    return may


@given(
    TOKENS,
    st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    TOKENS,
    st.integers(0, 3),
    st.lists(TOKEN, max_size=4).map(tuple),
)
def test_what_may_be_sampled_is_what_the_definitions_say(
    allowed: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    stops: tuple[int, ...],
    min_tokens: int,
    output_ids: tuple[int, ...],
) -> None:
    params = SamplingParams(
        max_tokens=9,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        stop_token_ids=stops,
        min_tokens=min_tokens,
    )
    assert left(params, output_ids) == oracle(params, output_ids)


def test_a_bad_word_that_the_prompt_begins_is_not_one() -> None:
    params = SamplingParams(max_tokens=9, bad_words=((3, 4),))
    assert 4 in left(params, (), prompt_ids=(1, 3)), "as in vLLM, bad words match generated tokens only"
    assert 4 not in left(params, (3,), prompt_ids=(1,))


def test_biases_are_added_and_bring_nothing_back() -> None:
    params = SamplingParams(
        max_tokens=9, bad_words=((2,),), logit_bias=(TokenBias(2, 100.0), TokenBias(3, -0.5))
    )
    values = applied(params)
    assert values[2] == -math.inf and values[3] == 2.5 and values[4] == 4.0


def test_ids_past_the_logits_do_no_harm() -> None:
    """A tokenizer may have more tokens than the model has logits."""
    params = SamplingParams(
        max_tokens=9,
        min_tokens=1,
        stop_token_ids=(99,),
        allowed_token_ids=(3, 98),
        bad_words=((97,),),
        logit_bias=(TokenBias(96, 5.0),),
    )
    assert left(params) == {3}
    assert left(SamplingParams(max_tokens=9, allowed_token_ids=(98,))) == set(range(VOCABULARY))


@pytest.mark.parametrize("params", [{}, {"min_tokens": 5}, {"stop_token_ids": (3,)}])
def test_a_request_without_rules_has_none(params: dict[str, object]) -> None:
    assert TokenRules.of(SamplingParams(max_tokens=9, **params)) is None  # type: ignore[arg-type]


def test_rules_that_are_over_leave_the_fast_path_free() -> None:
    rules = TokenRules.of(SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(3,)))
    assert rules is not None and rules.apply_at(1) and not rules.apply_at(2)
