"""What one rank prepares for new weights, with which blocks, and when it lets the switch come. Without a model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Request
from scheduler.policy.scheduler import Scheduler
from scheduler.weights.preparation import (
    CHUNK_S,
    LEAST_CHUNK,
    MOST_CHUNK,
    TOKENS_PER_REQUEST,
    Preparation,
    most_steps,
)
from scheduler.weights.updates import Loaded, PostedVersion
from scheduler.weights.versions import WeightDigests, WeightVersion
from tests.support.engines.serving import request

BLOCK = 16
LENGTH = 1024


class NewModel:
    """The model of another version."""

    def __init__(self) -> None:
        self.joined: list[object] = []

    def join(self, other: object) -> None:
        self.joined.append(other)


def posted(number: int = 1) -> PostedVersion:
    digests = WeightDigests("p", np.zeros((1, 1), np.uint64))
    version = WeightVersion(number, digest=f"digest {number}")
    return PostedVersion(Loaded(NewModel(), [[0]], digests, 1), version)


class Rank:
    """A scheduler that decodes token 7 for all requests, and its preparation. `token_s` is how long a token of a chunk takes."""

    def __init__(self, num_blocks: int = 256, *, states: int = 0, seqs: int = 8) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.states = StatePool(states) if states else None
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=seqs,
            max_num_batched_tokens=LENGTH,
            max_model_len=LENGTH,
            states=self.states,
        )
        self.chunks: list[StepBatch] = []
        self.token_s, self.now_s = 0.0, 0.0
        self.fails = False
        self.model: Any = object()
        runner: Any = self
        self.preparation = Preparation(
            self.scheduler, runner, self.model, agreed_tokens=64, clock=lambda: self.now_s
        )

    def fill_cache(self, model: Any, batch: StepBatch, agreed_tokens: int) -> None:
        """Stand in for the runner."""
        assert model.joined == [self.model] and agreed_tokens == 64
        if self.fails:
            raise ConnectionError
        self.chunks.append(batch)
        self.now_s += batch.num_tokens * self.token_s

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
        self.step()

    def step(self) -> list[str]:
        """Run a step of the serving weights. Return the requests that it ended."""
        batch = self.scheduler.schedule()
        count = sum(item.num_samples for item in batch.items)
        outputs = self.scheduler.commit(batch, [7] * count, [None] * count)
        return [each.request_id for each in outputs if each.finish_reason]

    def prepare(self, version: PostedVersion) -> int:
        """Prepare between steps until the rank is prepared. Return the number of chunks."""
        before = len(self.chunks)
        while not self.preparation.is_complete:
            self.preparation.step(version)
            self.step()
        return len(self.chunks) - before

    def switch(self, version: PostedVersion) -> int:
        """Switch, and compute what the cache lacks. Return the number of tokens of prompts that were computed."""
        self.preparation.end()
        self.scheduler.use_weights(version.version.digest, version.version.number)
        batch = self.scheduler.schedule()
        count = sum(item.num_samples for item in batch.items)
        self.scheduler.commit(batch, [7] * count, [None] * count)
        return batch.num_prefill_tokens

    @property
    def num_held(self) -> int:
        return self.pool.num_blocks - self.pool.num_free


def prompt(seed: int, length: int) -> list[int]:
    return [(seed + 3 * place) % 97 for place in range(length)]


def wanted(*lengths: int, **how: Any) -> list[Request]:
    values = {"max_tokens": 500, **how}
    return [request(f"r{seed}", prompt(seed, length), **values) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("states", [0, 40])
def test_after_the_switch_only_the_last_tokens_are_computed(states: int) -> None:
    def run(*, prepares: bool) -> int:
        rank, new = Rank(states=states), posted()
        rank.add(*wanted(200, 90, 33))
        if prepares:
            assert rank.prepare(new) >= 323 // MOST_CHUNK
        return rank.switch(new)

    assert run(prepares=False) == 323 + 3
    assert run(prepares=True) < 3 * 2 * BLOCK


def test_a_chunk_takes_the_time_of_its_target() -> None:
    rank, new = Rank(), posted()
    rank.add(*wanted(900))
    rank.preparation.step(new)
    assert rank.chunks[-1].num_tokens == LEAST_CHUNK
    for fitting, num_tokens in ((64, 64), (400, MOST_CHUNK), (3, LEAST_CHUNK)):
        rank.token_s = CHUNK_S / fitting
        rank.preparation.step(new)
        rank.preparation.step(new)
        assert rank.chunks[-1].num_tokens == num_tokens


def test_many_streams_make_chunks_larger_than_what_they_generate() -> None:
    rank, new = Rank(), posted()
    rank.add(*wanted(*[100] * 8))
    rank.token_s = 9.0
    rank.preparation.step(new)
    rank.preparation.step(new)
    assert rank.chunks[-1].num_tokens == 8 * TOKENS_PER_REQUEST
    assert rank.prepare(new) < 40


def test_without_open_requests_a_rank_is_prepared_and_runs_empty_chunks() -> None:
    rank, new = Rank(), posted()
    assert rank.preparation.is_complete
    rank.preparation.step(new)
    assert [each.items for each in rank.chunks] == [[]]
    rank.add(*wanted(2 * BLOCK - 2))
    assert rank.preparation.is_complete, "it lacks less than two blocks"


@pytest.mark.parametrize("cause", ["end", "another version", "broken"])
@pytest.mark.parametrize("states", [0, 40])
def test_copies_hold_nothing_when_a_preparation_ends(cause: str, states: int) -> None:
    rank, new = Rank(states=states), posted()
    rank.add(*wanted(200, 90))
    before = rank.num_held
    rank.preparation.step(new)
    rank.preparation.step(new)
    assert rank.num_held > before
    if cause == "broken":
        rank.fails = True
        with pytest.raises(ConnectionError):
            rank.preparation.step(new)
    if cause == "another version":
        newer = posted(2)
        rank.preparation.step(newer)
        assert rank.chunks[-1].items[0].start == 0, "other weights share no prefix"
        assert rank.chunks[-1].items[0].sequence.weights == "digest 2"
    rank.preparation.end()
    assert rank.num_held == before
    if rank.states is not None:
        rank.scheduler.clear()
        assert rank.states.num_left_over == rank.states.num_slots and rank.num_held == 0


def test_a_request_that_ends_releases_its_copy() -> None:
    rank, new = Rank(), posted()
    rank.add(*wanted(200))
    rank.preparation.step(new)
    rank.scheduler.abort("r0")
    assert rank.num_held > 0
    rank.preparation.step(new)
    assert rank.num_held == 0 and rank.preparation.is_complete


def test_the_statistics_of_requests_stay_as_they_are() -> None:
    rank, new = Rank(), posted()
    rank.add(*wanted(200, 90))
    before = rank.scheduler.stats
    batch_before = rank.scheduler.next_step
    while not rank.preparation.is_complete:
        rank.preparation.step(new)
    rank.preparation.end()
    assert rank.scheduler.stats == before and rank.scheduler.next_step == batch_before
    assert rank.preparation.num_tokens >= 290


def test_blocks_that_are_short_prepare_less_and_preempt_nothing() -> None:
    for num_blocks in range(64, 92):
        rank, new = Rank(num_blocks), posted()
        rank.add(*wanted(200, 200, 200, max_tokens=40))
        ended: list[str] = []
        while len(ended) < 3:
            if not rank.preparation.is_complete:
                rank.preparation.step(new)
            ended += rank.step()
        assert rank.scheduler.stats.num_preemptions == 0
        rank.preparation.end()
        assert rank.num_held == 0


def test_a_waiting_request_gets_the_blocks_of_copies() -> None:
    rank, new = Rank(64), posted()
    rank.add(*wanted(400))
    for _ in range(2):
        rank.preparation.step(new)
    held = rank.num_held
    assert held > 26
    rank.scheduler.add(request("late", prompt(50, 480), max_tokens=1))
    ended = [*rank.step(), *rank.step()]
    assert ended == ["late"] and rank.num_held == 26
    assert rank.preparation.is_complete, "it does not take the blocks again"


def test_a_decode_gets_the_blocks_of_copies() -> None:
    rank, new = Rank(64), posted()
    rank.add(*wanted(3 * BLOCK - 1, 600))
    rank.preparation.step(new)
    taken = rank.pool.acquire(rank.pool.num_free)
    for _ in range(3):
        rank.step()
    assert rank.scheduler.stats.num_preemptions == 0 and rank.preparation.is_complete
    rank.pool.release(taken)


def test_short_state_slots_prepare_nothing() -> None:
    rank, new = Rank(states=4, seqs=1), posted()
    rank.add(*wanted(200))
    assert rank.states is not None
    taken = [rank.states.take_left_over() for _ in range(2)]
    rank.preparation.step(new)
    assert rank.preparation.is_complete and not rank.chunks[-1].items
    for slot in taken:
        assert slot is not None
        rank.states.give(slot)


def test_requests_that_come_later_do_not_delay_the_switch_without_end() -> None:
    rank, new = Rank(4096, seqs=8), posted()
    rank.add(*wanted(200))
    chunks = 0
    while not rank.preparation.is_complete:
        rank.preparation.step(new)
        chunks += 1
        assert chunks <= most_steps(201)
        rank.scheduler.add(request(f"late {chunks}", prompt(chunks, 900), max_tokens=8))
        rank.step()


def test_a_prepared_rank_continues_while_others_prepare() -> None:
    rank, new = Rank(), posted()
    rank.add(*wanted(100))
    rank.prepare(new)
    for _ in range(100):
        rank.preparation.step(new)
        rank.step()
    assert rank.switch(new) < 2 * BLOCK


@pytest.mark.parametrize(
    "change",
    [
        lambda each: Request(**{**vars(each), "hands_over": True}),
        lambda each: Request(**{**vars(each), "adapter": "digest", "adapter_place": 0}),
    ],
)
def test_a_request_that_would_not_use_its_prefix_is_left_out(change: Callable[[Request], Request]) -> None:
    rank = Rank()
    [only] = wanted(200)
    rank.scheduler.add(change(only))
    rank.scheduler.schedule()
    assert rank.scheduler.begun and rank.preparation.is_complete


def test_a_salt_separates_prepared_prefixes() -> None:
    rank, new = Rank(), posted()
    [plain] = wanted(200)
    salted = Request(**{**vars(plain), "request_id": "salted", "cache_salt": "s"})
    rank.add(plain, salted)
    rank.prepare(new)
    assert rank.preparation.num_tokens >= 2 * 200
    assert rank.switch(new) < 2 * 2 * BLOCK
