"""Prefixes that all fronts know. The oracle is the memory of a single front."""

import random
from pathlib import Path

import pytest

from server.front.routing.prefixes import PREFIX_CHUNK_TOKENS, PrefixMemory
from server.front.several.shared_prefixes import SharedPrefixes


@pytest.mark.parametrize("num_ranks", [3, 130])
def test_each_front_knows_what_one_front_would(tmp_path: Path, num_ranks: int) -> None:
    drawn = random.Random(7)
    fronts = [SharedPrefixes(tmp_path / "prefixes", num_ranks) for _ in range(3)]
    alone = PrefixMemory()
    prompts = [
        [prefix] * PREFIX_CHUNK_TOKENS * length + [tail] * 70
        for prefix in range(4)
        for length in (0, 1, 3)
        for tail in (8, 9)
    ]
    for turn in range(400):
        prompt, rank = drawn.choice(prompts), drawn.randrange(num_ranks)
        front = drawn.choice(fronts)
        assert front.held_tokens(prompt) == alone.held_tokens(prompt)
        assert front.remember(prompt, rank) == alone.remember(prompt, rank)
        if turn % 50 == 49:
            front.leave(rank)
            alone.leave(rank)
    fronts[0].clear()
    assert not any(fronts[1].held_tokens(prompt) for prompt in prompts)


def test_a_request_that_left_its_rank_is_forgotten(tmp_path: Path) -> None:
    prefixes = SharedPrefixes(tmp_path / "prefixes", 2)
    prompt = list(range(200))
    assert prefixes.remember(prompt, 1) == 0
    assert prefixes.held_tokens([*prompt[:130], 5]) == {1: 128}
    prefixes.forget(prompt, 1)
    assert prefixes.held_tokens(prompt) == {}


def test_ranks_without_a_bit_have_no_prefixes(tmp_path: Path) -> None:
    """A resize from 63 to 64 ranks would need another word. Fronts that begin with 64 ranks have it, in another file."""
    prompt = list(range(200))
    prefixes = SharedPrefixes(tmp_path / "prefixes", 63)
    for rank in (62, 63):
        assert prefixes.remember(prompt, rank) == 0
    assert prefixes.held_tokens(prompt) == {62: 192}
    prefixes.forget(prompt, 63)
    prefixes.leave(63)
    assert prefixes.remember(prompt, 63) == 0 and prefixes.remember(prompt, 62) == 192
    later = SharedPrefixes(tmp_path / "prefixes", 64)
    assert later.held_tokens(prompt) == {}
    assert later.remember(prompt, 63) == 0 and later.held_tokens(prompt) == {63: 192}
    assert prefixes.held_tokens(prompt) == {62: 192}
