"""With `repeats_decodes`, generated tokens that are computed again run as decodes, and only blocks of prompts are shared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Request
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.sequence import Row
from tests.scheduler.policy.test_hand_over import go_on, prompt_of, rank_of_host
from tests.scheduler.policy.test_tier_tables import ask
from tests.support.engines.guesses import Guesses
from tests.support.engines.policy_cases import BLOCK_TOKENS, request_of, step
from tests.support.models.fake_model import PlannedRank, serve_alone

LENGTH = 96


def rank_of(
    *,
    seqs: int = 8,
    batched: int = 32,
    num_blocks: int = 64,
    states: int = 0,
    repeats: bool = True,
    **options: Any,
) -> PlannedRank:
    pool, slots = BlockPool(num_blocks, BLOCK_TOKENS), StatePool(states) if states else None
    scheduler = Scheduler(
        pool, max_num_seqs=seqs, max_num_batched_tokens=batched, max_model_len=min(LENGTH, num_blocks * BLOCK_TOKENS),
        states=slots, repeats_decodes=repeats, **options,
    )  # fmt: skip
    return PlannedRank(pool, scheduler, batched, slots)


def resumed(name: str, prompt: int, num_generated: int, max_tokens: int = 40) -> Request:
    """Return a request of which a lost rank had generated some tokens."""
    request = request_of(name, prompt, max_tokens)
    return replace(request, replayed_ids=tuple(serve_alone(request, LENGTH)[0][:num_generated]))


def check_answer(rank: PlannedRank, request: Request) -> None:
    rank.drain()
    assert rank.tokens_of(request.request_id) == serve_alone(request, LENGTH)[0]


@pytest.mark.parametrize(
    ("device", "batch_invariant", "repeats"),
    [("cpu", True, False), ("cuda", False, False), ("cuda:1", True, True), ("interpreter", True, True)],
)
def test_only_gpus_with_batch_invariant_repeat_decodes(
    device: str, batch_invariant: bool, repeats: bool
) -> None:
    config = EngineConfig(directory=Path(), kv_cache_bytes=1, device=device, batch_invariant=batch_invariant)
    assert config.repeats_decodes is repeats


def test_a_resumed_request_runs_its_prompt_then_its_tokens_as_decodes_then_samples() -> None:
    rank, request = rank_of(), resumed("a", 5, 7)
    rank.scheduler.add(request)
    batch = rank.plan()
    assert [(item.start, item.num_tokens, item.samples) for item in batch.items] == [(0, 5, False)]
    assert batch.num_prefill_tokens == 5
    rank.finish()
    assert rank.scheduler.next_step.num_decodes == 7 and not rank.scheduler.next_step.has_prefill
    batch = rank.plan()
    assert [(item.start, item.num_tokens, item.samples) for item in batch.items] == [(5, 7, True)]
    assert (batch.num_prefill_tokens, batch.num_decode_tokens) == (0, 7)
    rank.finish()
    assert step(rank) == [("a", 12, 1, True)]
    check_answer(rank, request)


def test_without_the_rule_it_runs_all_its_tokens_as_a_prompt() -> None:
    rank, request = rank_of(repeats=False), resumed("a", 5, 7)
    rank.scheduler.add(request)
    assert rank.plan().num_prefill_tokens == 12
    rank.finish()
    check_answer(rank, request)


def test_tokens_run_again_in_as_many_steps_as_rows_of_decodes_require() -> None:
    rank, request = rank_of(seqs=4), resumed("a", 5, 10)
    rank.scheduler.add(request)
    assert [step(rank) for _ in range(4)] == [
        [("a", 0, 5, False)], [("a", 5, 4, False)], [("a", 9, 4, False)], [("a", 13, 2, True)]
    ]  # fmt: skip
    check_answer(rank, request)


def test_every_running_request_keeps_its_row_and_prompts_wait_for_rows() -> None:
    rank, request = rank_of(seqs=4), resumed("b", 5, 9)
    rank.scheduler.add(request_of("a", 3, 40))
    step(rank)
    rank.scheduler.add(request)
    rank.scheduler.add(request_of("c", 3))
    assert step(rank) == [("a", 3, 1, True), ("b", 0, 5, False), ("c", 0, 3, True)]
    rank.scheduler.add(request_of("d", 3))
    # One row each for a and c, the others for b. Each row is a sequence of a GPU's step, so d waits for one.
    assert step(rank) == [("a", 4, 1, True), ("b", 5, 2, False), ("c", 3, 1, True)]
    assert step(rank)[1] == ("b", 7, 2, False)
    for _ in range(3):
        last = step(rank)
    assert last == [("a", 8, 1, True), ("b", 13, 1, True), ("c", 7, 1, True), ("d", 0, 3, True)]
    check_answer(rank, request)


def test_a_step_that_ranks_agreed_on_is_kept() -> None:
    rank = rank_of()
    rank.scheduler.add(resumed("a", 5, 7))
    step(rank)
    batch = rank.scheduler.schedule(most_tokens=3)
    assert batch.num_tokens == 3 and not batch.items[0].samples
    rank.scheduler.commit(batch, [], [])
    rank.scheduler.clear()


def test_steps_in_flight_go_on_with_tokens_that_are_known_and_then_with_pending_ones() -> None:
    rank, request = rank_of(seqs=4), resumed("a", 5, 6)
    rank.scheduler.add(request)
    planned = [rank.plan().items for _ in range(4)]
    shapes = [[(item.start, item.num_tokens, item.samples) for item in items] for items in planned]
    assert shapes == [[(0, 5, False)], [(5, 4, False)], [(9, 2, True)], [(11, 1, True)]]
    check_answer(rank, request)


def test_a_preempted_request_keeps_its_answer_and_runs_its_tokens_as_decodes() -> None:
    rank = rank_of(num_blocks=14)
    requests = [request_of(name, 6, 30) for name in "ab"]
    for request in requests:
        rank.scheduler.add(request)
    again: list[int] = []
    while rank.scheduler.has_work:
        batch = rank.plan()
        again += [item.num_tokens for item in batch.items if item.start >= 6 and item.num_tokens > 1]
        rank.finish()
    assert rank.scheduler.stats.num_preemptions > 0 and again
    for request in requests:
        check_answer(rank, request)


def test_drafts_come_only_after_the_newest_token() -> None:
    guesses = Guesses(3, seed=1)
    rank, request = rank_of(seqs=2, drafter=guesses), resumed("a", 5, 12)
    rank.scheduler.add(request)
    step(rank)
    batch = rank.plan()
    assert batch.num_decode_tokens == 8 and not batch.items[0].drafts, (
        "two sequences of a token and three drafts"
    )
    rank.finish()
    batch = rank.plan()
    assert batch.num_decode_tokens == 4 and not batch.items[0].drafts and batch.items[0].samples
    rank.finish()
    check_answer(rank, request)
    assert guesses.num_tried > 0


class CountingMatcher:
    """A structure that forbids nothing and counts its steps."""

    has_ended, is_ready, is_late = False, True, False
    failure: str | None = None

    def __init__(self) -> None:
        self.num_steps = 0
        self.followed: list[int] = []

    def begin_step(self) -> None:
        self.num_steps += 1

    def mask(self, logits_V: Row, after: Sequence[int] = ()) -> None:
        """Forbid nothing."""

    def look_ahead(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def advance(self, token_id: int) -> None:
        self.followed.append(token_id)


def test_a_structure_sees_only_new_tokens_and_the_steps_that_sample() -> None:
    rank, request, matcher = rank_of(seqs=4), resumed("a", 5, 10, max_tokens=13), CountingMatcher()
    rank.scheduler.add(request, matcher)
    check_answer(rank, request)
    assert matcher.num_steps == 3 and matcher.followed == rank.tokens_of("a")


@pytest.mark.parametrize("states", [0, 12])
def test_a_second_turn_finds_only_what_ran_as_a_prompt_and_a_third_finds_the_second(states: int) -> None:
    rank = rank_of(states=states)
    first = ask("first", prompt_of(10), max_tokens=12)
    rank.scheduler.add(first)
    rank.drain()
    turn = [*first.prompt_ids, *rank.tokens_of("first"), 3, 1]
    for name, num_cached in (("second", 8), ("third", 20)):
        rank.scheduler.add(ask(name, turn, max_tokens=3))
        rank.drain()
        assert rank.outputs[name][0].num_cached_tokens == num_cached
        assert rank.tokens_of(name) == serve_alone(ask("same", turn, max_tokens=3), LENGTH)[0]


def test_a_resumed_request_does_not_find_its_tokens_in_the_prompt_of_another() -> None:
    rank, request = rank_of(), resumed("a", 6, 9)
    rank.scheduler.add(request_of("b", (*request.prompt_ids, *request.replayed_ids), 2))
    rank.drain()
    rank.scheduler.add(request)
    assert step(rank) == [("a", 4, 2, False)]
    assert step(rank)[0][:2] == ("a", 6)
    check_answer(rank, request)


def test_a_resumed_request_with_a_cached_prompt_begins_with_decodes() -> None:
    rank, request = rank_of(), resumed("a", 8, 3)
    rank.scheduler.add(request_of("b", (*request.prompt_ids, 1), 1))
    rank.drain()
    rank.scheduler.add(request)
    assert step(rank) == [] and step(rank) == [("a", 8, 3, True)]
    check_answer(rank, request)


@pytest.mark.parametrize("states", [0, 12])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_tiers_and_hand_overs_get_only_blocks_of_prompts(length: int, states: int) -> None:
    first = rank_of_host(states=states, repeats_decodes=True)
    second = rank_of_host(states=states, other=first, repeats_decodes=True)
    request = ask("r", prompt_of(length), max_tokens=20)
    replayed_ids = tuple(serve_alone(request, LENGTH)[0][:9])
    first.scheduler.add(replace(request, hands_over=True, replayed_ids=replayed_ids))
    first.drain()
    output = first.outputs["r"][-1]
    assert output.is_returned and output.num_saved_tokens <= length
    output.token_ids[:0] = replayed_ids
    go_on(second, request, output)
    assert len(first.tiers._blocks) == length // BLOCK_TOKENS, "the blocks of the prompt"
