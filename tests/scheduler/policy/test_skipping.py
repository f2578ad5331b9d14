"""Skipped steps leave a scheduler in the state that running them would, apart from block numbers."""

import random
from collections import Counter

import pytest

from kvcache.blocks import BlockPool
from scheduler.policy.request import FinishReason, Request, SamplingParams
from scheduler.policy.skipping import SkippingScheduler

NUM_BLOCKS, BLOCK_TOKENS, MAX_LEN = 24, 4, 64


def _scheduler(caching: bool) -> tuple[BlockPool, SkippingScheduler]:
    pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS, secret=bytes(16))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": MAX_LEN}
    return pool, SkippingScheduler(pool, enable_prefix_caching=caching, **limits)


def _requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    shared = tuple(range(1, 13))
    return [
        Request(
            request_id=str(number),
            prompt_ids=shared[: draw.randrange(13)] + (1000 + number,) * draw.randrange(1, 20),
            params=SamplingParams(max_tokens=draw.randrange(1, 30)),
            arrival_s=0.0,
        )
        for number in range(12)
    ]


class _Run:
    """Requests that arrive at given steps, served with or without skipping."""

    def __init__(self, seed: int, caching: bool, *, skips: bool) -> None:
        self.pool, self.scheduler = _scheduler(caching)
        self.skips, self.num_skipped, self.step = skips, 0, 0
        self.ends: dict[str, tuple[int, FinishReason]] = {}
        draw = random.Random(seed + 1)
        self._coming = sorted(
            ((draw.randrange(60), each) for each in _requests(seed)), key=lambda one: one[0]
        )

    def run(self) -> None:
        while self._coming or self.scheduler.has_work:
            while self._coming and self._coming[0][0] <= self.step:
                self.scheduler.add(self._coming.pop(0)[1])
            until = self._coming[0][0] - self.step if self._coming else MAX_LEN
            most = min(self.scheduler.num_plain_steps, until) if self.skips else 0
            self._skip(most) if most else self._run_one()

    def _skip(self, num_steps: int) -> None:
        self.step += num_steps
        self.num_skipped += num_steps
        for output in self.scheduler.skip(num_steps):
            assert len(output.token_ids) == num_steps
            self._note(output.request_id, output.finish_reason)

    def _run_one(self) -> None:
        self.step += 1
        batch = self.scheduler.schedule()
        tokens = [int(item.sequence.request.request_id) + 1000 for item in batch.items if item.samples]
        for output in self.scheduler.commit(batch, tokens, [None] * len(tokens)):
            self._note(output.request_id, output.finish_reason)

    def _note(self, request_id: str, reason: FinishReason | None) -> None:
        if reason is not None:
            assert request_id not in self.ends
            self.ends[request_id] = self.step, reason


@pytest.mark.parametrize("caching", [False, True])
def test_skipped_steps_end_requests_when_steps_that_run_do(caching: bool) -> None:
    skipped, preempted = 0, 0
    for seed in range(25):
        slow, fast = _Run(seed, caching, skips=False), _Run(seed, caching, skips=True)
        slow.run()
        fast.run()
        assert fast.ends == slow.ends, f"seed {seed}"
        assert fast.scheduler.stats == slow.scheduler.stats, f"seed {seed}"
        assert fast.pool.num_free == NUM_BLOCKS
        assert Counter(reason for _, reason in fast.ends.values()) == {FinishReason.LENGTH: 12}
        skipped += fast.num_skipped
        preempted += fast.scheduler.stats.num_preemptions
    assert skipped > 1000, "no steps were skipped"
    assert preempted > 0, "blocks must run out in some runs"


def test_nothing_is_skipped_while_a_prompt_runs_or_something_could_begin() -> None:
    _, scheduler = _scheduler(caching=True)
    assert scheduler.num_plain_steps == 0
    for request in _requests(0)[:2]:
        scheduler.add(request)
    assert scheduler.num_plain_steps == 0, "a waiting request could start"
    batch = scheduler.schedule(prefill_budget=1)
    assert scheduler.num_plain_steps == 0, "a batch is in flight"
    scheduler.commit(batch, [], [])
    assert scheduler.num_plain_steps == 0, "a prompt is unfinished"
