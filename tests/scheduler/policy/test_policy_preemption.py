"""The local scheduler when blocks are short: who is preempted, who comes back, and that nobody starves."""

import random
from dataclasses import replace
from itertools import count, islice

import pytest

from kvcache.blocks import BlockPool
from kvcache.prefix import PrefixIndex
from scheduler.policy.sequence import Sequence
from tests.support.fake_model import VOCABULARY, serve_alone
from tests.support.policy_cases import rank_of, request_of, step


def test_a_preempted_request_says_how_long_it_waited_the_first_time() -> None:
    rank = rank_of(num_blocks=6, seqs=2, length=16, caching=False)
    for name in ("a", "b"):
        rank.scheduler.add(replace(request_of(name, 8, max_tokens=8), arrival_s=1.0))
    rank.plan(now_s=2.0)
    rank.finish()
    rank.drain()
    assert rank.scheduler.stats.num_preemptions > 0
    assert rank.outputs["b"][0].queued_s == 1.0
    assert not any(output.queued_s for output in rank.outputs["b"][1:])


def test_out_of_blocks_preempts_the_latest_arrival_and_delivers_nothing_twice() -> None:
    rank = rank_of(6, length=20, batched=16)
    requests = [request_of(request_id, 6, max_tokens=12) for request_id in "ab"]
    for request in requests:
        rank.scheduler.add(request)
    while not rank.scheduler.stats.num_preemptions:
        step(rank)
    assert [item[0] for item in step(rank)] == ["a"]
    assert rank.scheduler.stats.num_waiting == 1
    rank.drain()
    for request in requests:
        assert (rank.tokens_of(request.request_id), rank.end_of(request.request_id)) == serve_alone(
            request, 20
        )


def test_a_preempted_sequence_goes_before_those_that_never_ran_and_reuses_its_cached_blocks() -> None:
    rank = rank_of(6, length=20)
    for request_id in "abc":
        rank.scheduler.add(request_of(request_id, 6, max_tokens=12))
    admitted: list[str] = []
    starts: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while rank.scheduler.has_work:
        running_before = set(admitted)
        for request_id, start, num_tokens, _ in step(rank):
            admitted += [request_id] if request_id not in running_before else []
            starts[request_id] += [start] if num_tokens > 1 else []
    assert rank.scheduler.stats.num_preemptions > 0
    assert admitted == ["a", "b", "c"]
    assert starts["b"][1] > 0, "its prefix was still cached when it came back"


def test_admission_leaves_a_block_free_for_every_running_sequence() -> None:
    rank = rank_of(6, length=24)
    rank.scheduler.add(request_of("a", 11))  # three blocks, one row to spare
    rank.scheduler.add(request_of("b", 11))  # three blocks are left, but one is a's
    rank.scheduler.add(request_of("c", 4))  # would fit, but came later
    assert step(rank) == [("a", 0, 11, True)]
    rank.scheduler.abort("b")
    assert step(rank) == [("a", 11, 1, True), ("c", 0, 4, True)]


def test_a_sequence_of_max_model_len_runs_alone_in_the_smallest_pool() -> None:
    rank = rank_of(5, length=20, seqs=4)
    requests = [request_of(request_id, 10, max_tokens=99) for request_id in "abc"]
    for request in requests:
        rank.scheduler.add(request)
    rank.drain()
    for request in requests:
        assert (rank.tokens_of(request.request_id), rank.end_of(request.request_id)) == serve_alone(
            request, 20
        )
        assert len(rank.tokens_of(request.request_id)) == 10


def test_a_newcomer_is_not_starved_by_a_steady_stream_of_others() -> None:
    rank = rank_of(12, seqs=4, length=40)
    names = (f"{letter}{number}" for number in count() for letter in "abcdef")
    for name in islice(names, 12):
        rank.scheduler.add(request_of(name, 5, max_tokens=20))
    rank.scheduler.add(request_of("late", 30, max_tokens=5))
    for name in islice(names, 200):
        rank.scheduler.add(request_of(name, 5, max_tokens=20))
        step(rank)
        if rank.outputs.get("late"):
            return
    raise AssertionError("a long prompt waited for ever behind short ones that arrived later")


def test_a_head_of_the_queue_that_does_not_fit_is_not_looked_up_anew_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cost must not depend on the prompt's length: all ranks pay it in lock-step."""
    num_hashes = 0
    key = PrefixIndex._key

    def counted(self: PrefixIndex, parent_key: bytes, packed_ids: bytes) -> bytes:
        nonlocal num_hashes
        num_hashes += 1
        return key(self, parent_key, packed_ids)

    rank = rank_of(34, length=136, seqs=4, batched=100)
    shared = tuple(index % VOCABULARY for index in range(60))
    rank.scheduler.add(request_of("a", shared, max_tokens=50))
    step(rank)
    rank.scheduler.add(
        request_of("b", (*shared, *range(7)) * 2, max_tokens=2)
    )  # 15 blocks of its 34 are held
    step(rank)
    monkeypatch.setattr(PrefixIndex, "_key", counted)
    waits = []
    while rank.scheduler.stats.num_waiting:
        before = num_hashes
        items = step(rank)
        published = sum((start + length) // 4 - start // 4 for _, start, length, _ in items)
        waits.append(num_hashes - before - published)
    assert len(waits) > 20 and max(waits[:-1]) <= 1, "one look at what could have become held"


def test_who_waits_starts_just_when_a_full_look_would_let_it() -> None:
    """The remembered look and the one it stands for, whatever is published, evicted and ended meanwhile."""
    num_waits = num_starts = 0
    for seed in range(30):
        rng = random.Random(seed)
        rank = rank_of(20, length=60, seqs=6, batched=32)
        for number in range(40):
            shared = (rng.randrange(2),) * rng.choice([0, 8, 24])
            tail = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
            rank.scheduler.add(request_of(str(number), shared + tail, max_tokens=rng.randint(1, 16)))
        while rank.scheduler.has_work:
            waiting = rank.scheduler._roster.waiting
            head = waiting[0] if waiting else None
            if head is not None and not rank.scheduler._in_flight:
                tables, num_running = rank.scheduler._tables, len(rank.scheduler._roster.running)
                fits, had = would_fit(rank.pool, head, num_running), list(head.block_ids)
                assert tables.seat(head, num_running) == fits
                num_waits, num_starts = num_waits + (not fits), num_starts + fits
                if fits:  # undo it
                    rank.pool.release(head.block_ids)
                    head.block_ids, head.num_admissions = had, head.num_admissions - 1
                    head.num_computed = head.num_planned = head.num_prefill_tokens = 0
            step(rank)
    assert num_waits > 100 and num_starts > 100


def would_fit(pool: BlockPool, sequence: Sequence, num_spare_blocks: int) -> bool:
    """Share all that is cached and count, as long prompts cannot afford in every step."""
    matched = pool.match(sequence.token_ids[:-1])
    pool.share(matched)
    fits = pool.blocks_for(len(sequence.token_ids)) - len(matched) + num_spare_blocks <= pool.num_free
    pool.release(matched)
    return fits
