"""Prompts with images that must stay whole: no chunk ends within one, and each image gets its turn."""

import random
from dataclasses import replace

import pytest

from kvcache.blocks import BlockPool
from kvcache.images import Image
from scheduler.policy.request import FinishReason, Request
from scheduler.policy.scheduler import Scheduler
from tests.support.engines.policy_cases import BLOCK_TOKENS, request_of, step
from tests.support.models.fake_model import PlannedRank


def rank_of(*, batched: int = 16, seqs: int = 8, num_blocks: int = 64, length: int = 64) -> PlannedRank:
    pool = BlockPool(num_blocks, BLOCK_TOKENS)
    scheduler = Scheduler(
        pool,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=length,
        keeps_images_whole=True,
    )
    return PlannedRank(pool, scheduler, batched)


def seeing(request_id: str, prompt: int, *ranges: tuple[int, int], max_tokens: int = 8) -> Request:
    """Return a request with images at these starts, with these lengths."""
    images = tuple(Image(f"{request_id}{start}".ljust(64, "0"), start, length) for start, length in ranges)
    return replace(request_of(request_id, prompt, max_tokens=max_tokens), images=images)


def test_a_chunk_ends_before_an_image_that_it_cannot_hold() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(seeing("a", 20, (5, 6), max_tokens=1))
    assert [step(rank) for _ in range(3)] == [
        [("a", 0, 5, False)],
        [("a", 5, 8, False)],
        [("a", 13, 7, True)],
    ]


def test_an_image_exceeds_the_prefill_budget_but_not_the_step() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(seeing("a", 12, (2, 7), max_tokens=1))
    assert step(rank, prefill_budget=4) == [("a", 0, 2, False)]
    assert step(rank, prefill_budget=0) == []
    assert step(rank, prefill_budget=4) == [("a", 2, 7, False)]


def test_no_prompt_begins_in_the_room_before_an_image() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(seeing("a", 12, (2, 8), max_tokens=1))
    rank.scheduler.add(request_of("b", 3, max_tokens=1))
    assert step(rank) == [("a", 0, 2, False)]
    assert step(rank) == [("a", 2, 8, False)]
    assert step(rank) == [("a", 10, 2, True), ("b", 0, 3, True)]


def test_decodes_wait_a_step_for_an_image_that_leaves_them_no_room() -> None:
    rank = rank_of(batched=8)
    for name in "abc":
        rank.scheduler.add(request_of(name, 2, max_tokens=9))
    assert len(step(rank)) == 3
    rank.scheduler.add(seeing("d", 12, (1, 7), max_tokens=1))
    assert step(rank) == [("a", 2, 1, True), ("b", 2, 1, True), ("c", 2, 1, True), ("d", 0, 1, False)]
    assert step(rank) == [("a", 3, 1, True), ("d", 1, 7, False)]
    assert step(rank) == [("a", 4, 1, True), ("b", 3, 1, True), ("c", 3, 1, True), ("d", 8, 4, True)]


def test_a_prompt_that_begins_with_an_image_takes_a_seat_and_waits_for_room() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(request_of("a", 2, max_tokens=9))
    step(rank)
    rank.scheduler.add(seeing("d", 12, (0, 8), max_tokens=1))
    assert step(rank) == [("a", 2, 1, True)]
    assert step(rank) == [("d", 0, 8, False)]
    assert step(rank) == [("a", 3, 1, True), ("d", 8, 4, True)]


def test_a_prefix_hit_may_end_within_an_image_and_the_rest_runs_in_one_chunk() -> None:
    rank = rank_of(batched=16)
    first = seeing("a", 20, (3, 12), max_tokens=1)
    rank.scheduler.add(first)
    while rank.scheduler.has_work:
        step(rank)
    rank.scheduler.add(replace(first, request_id="b", prompt_ids=(*first.prompt_ids[:15], 1, 2, 3)))
    assert step(rank, prefill_budget=1) == [("b", 12, 3, False)]


def test_an_image_larger_than_a_step_is_refused() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(seeing("a", 20, (2, 9)))
    [refused] = rank.scheduler.expire(0.0)
    assert refused.finish_reason is FinishReason.ERROR
    assert "an image has 9 tokens" in refused.error and "--max-num-batched-tokens" in refused.error


@pytest.mark.parametrize("seed", range(8))
def test_every_history_runs_whole_images_and_all_requests(seed: int) -> None:
    draw = random.Random(seed)
    rank = rank_of(batched=12, seqs=6, num_blocks=24, length=48)
    requests = {}
    for name in "abcdefghijkl":
        length = draw.randint(4, 30)
        start = draw.randrange(length - 2)
        requests[name] = seeing(
            name,
            length,
            (start, draw.randint(1, min(12, length - 1 - start))),
            max_tokens=draw.randint(1, 12),
        )
        rank.scheduler.add(requests[name])
    for _ in range(600):
        items = step(rank, draw.choice([None, None, 0, 1, 5]))
        assert sum(num_tokens for _, _, num_tokens, _ in items) <= 12
        for name, begin, num_tokens, _ in items:
            [image] = requests[name].images
            assert not image.start < begin + num_tokens < image.end, "a chunk ends within an image"
        if not rank.scheduler.has_work:
            break
    assert not rank.scheduler.has_work
    assert all(rank.end_of(name) is FinishReason.LENGTH for name in requests)
