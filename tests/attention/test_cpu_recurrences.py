"""Recurrences on CPU against `transformers`' own functions, one sequence at a time. Cuts and threads change no bit."""

import pytest
import torch

from attention.recurrences import cpu
from dispatch.compiled.team import Team
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from tests.support.models.recurrences import KINDS, LENGTHS, Rank, check_a_batch, check_cuts, whole

all_kinds = pytest.mark.parametrize("name", KINDS)


def rank_of(name: str, threads: int = 1) -> Rank:
    kind = KINDS[name]("cpu")
    team = Team(threads) if threads > 1 else None
    step = Step(max_tokens=128, max_sequences=8, max_blocks=8, block_tokens=16, team=team)
    cache = PagedCache([LayerShape(state=kind.state)], 1, 16)
    cache.step = step
    return Rank(kind, cpu, step, cache)


@all_kinds
def test_sequences_of_a_batch_give_what_transformers_gives_for_each_alone(name: str) -> None:
    check_a_batch(rank_of(name))


@all_kinds
@pytest.mark.parametrize("threads", [1, 2])
def test_cuts_and_states_between_change_no_bit(name: str, threads: int) -> None:
    check_cuts(rank_of(name, threads))


@all_kinds
def test_threads_change_no_bit_and_padding_is_zero(name: str) -> None:
    alone, together = rank_of(name), rank_of(name, 2)
    inputs = [alone.kind.inputs(10 * index, length) for index, length in enumerate(LENGTHS)]
    found, wanted = (rank.run([whole(length) for length in LENGTHS], inputs) for rank in (together, alone))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not wanted[-1].any()


@all_kinds
def test_an_empty_step_is_zero(name: str) -> None:
    rank = rank_of(name)
    assert not rank.run([], [])[0].any()
