"""The local scheduler, rule by rule: order, budgets, seats, rejections, planning ahead, prefixes, preemption."""

import random
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest

from kvcache.blocks import BlockPool
from kvcache.prefix import PrefixIndex
from kvcache.states import StatePool
from scheduler.policy.limits import SchedulerLimitsError
from scheduler.policy.request import FinishReason
from scheduler.policy.scheduler import DuplicateRequestError, Scheduler
from scheduler.policy.sequence import Sequence
from tests.support.engines.policy_cases import rank_of, request_of, step
from tests.support.models.fake_model import VOCABULARY, serve_alone


def test_a_prompt_runs_in_chunks_and_samples_with_its_last_token() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(request_of("a", 19, max_tokens=2))
    steps = [step(rank) for _ in range(4)]
    assert steps == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 3, True)],
        [("a", 19, 1, True)],
    ]
    assert rank.end_of("a") is FinishReason.LENGTH
    assert not rank.scheduler.has_work


def test_decodes_come_first_then_the_half_done_prompt_then_admission_in_order() -> None:
    rank = rank_of(batched=8)
    rank.scheduler.add(request_of("a", 3))
    assert step(rank) == [("a", 0, 3, True)]
    rank.scheduler.add(request_of("b", 10))
    rank.scheduler.add(request_of("c", 2))
    rank.scheduler.add(request_of("d", 9))
    assert step(rank) == [("a", 3, 1, True), ("b", 0, 7, False)]
    assert step(rank) == [("a", 4, 1, True), ("b", 7, 3, True), ("c", 0, 2, True), ("d", 0, 2, False)]
    assert step(rank) == [
        ("a", 5, 1, True),
        ("b", 10, 1, True),
        ("c", 2, 1, True),
        ("d", 2, 5, False),
    ]


def test_the_prefill_budget_caps_prefill_tokens_and_zero_is_decode_only() -> None:
    rank = rank_of(batched=16)
    rank.scheduler.add(request_of("a", 4))
    step(rank)
    rank.scheduler.add(request_of("b", 6))
    assert step(rank, prefill_budget=0) == [("a", 4, 1, True)]
    assert step(rank, prefill_budget=4) == [("a", 5, 1, True), ("b", 0, 4, False)]
    assert step(rank, prefill_budget=0) == [("a", 6, 1, True)]
    assert step(rank, prefill_budget=9) == [("a", 7, 1, True), ("b", 4, 2, True)]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    rank = rank_of(seqs=2)
    for request_id in "abc":
        rank.scheduler.add(request_of(request_id, 2, max_tokens=2))
    assert [item[0] for item in step(rank)] == ["a", "b"]
    assert (rank.scheduler.stats.num_running, rank.scheduler.stats.num_waiting) == (2, 1)
    assert [item[0] for item in step(rank)] == ["a", "b"]
    assert [item[0] for item in step(rank)] == ["c"]


def test_the_first_token_says_how_long_the_request_had_waited_to_be_started() -> None:
    rank = rank_of(seqs=1, batched=4)
    rank.scheduler.add(replace(request_of("a", 6, max_tokens=2), arrival_s=10.0))
    rank.scheduler.add(replace(request_of("b", 4, max_tokens=2), arrival_s=11.0))
    for now_s in (10.5, 11.0, 12.0, 14.0, 15.0):  # two steps of a's prompt, its second token, then b
        rank.plan(now_s=now_s)
        rank.finish()
    assert [output.queued_s for output in rank.outputs["a"]] == [0.5, 0.0]
    assert [output.queued_s for output in rank.outputs["b"]] == [3.0, 0.0]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_blocks": 4, "length": 17}, r"need 5 KV blocks of 4; the pool has 4.*at most 16"),
        ({"seqs": 17, "batched": 16}, r"max_num_batched_tokens is 16.*at least max_num_seqs \(17\)"),
        ({"seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"length": 1}, "max_model_len is 1; it must be at least 2"),
    ],
)
def test_impossible_limits_are_refused_by_name(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(SchedulerLimitsError, match=message):
        rank_of(**limits)


def test_fewer_state_slots_than_a_request_needs_beside_the_snapshot_that_it_begins_with_are_refused() -> None:
    with pytest.raises(SchedulerLimitsError, match="there are 2 state slots; one request needs 3"):
        Scheduler(
            BlockPool(4, 4),
            max_num_seqs=1,
            max_num_batched_tokens=4,
            max_model_len=8,
            states=StatePool(2),
        )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(65, "the prompt has 65 tokens; max_model_len is 64"), (0, "the prompt has no tokens")],
)
def test_an_unservable_prompt_ends_with_an_error_and_costs_nobody_else(prompt: int, message: str) -> None:
    rank = rank_of(length=64)
    rank.scheduler.add(request_of("bad", prompt))
    rank.scheduler.add(request_of("good", 64, max_tokens=5))
    assert rank.scheduler.has_work
    rank.drain()
    (output,) = rank.outputs["bad"]
    assert output.finish_reason is FinishReason.ERROR and output.error.startswith(message)
    assert rank.end_of("good") is FinishReason.LENGTH and len(rank.tokens_of("good")) == 1


def test_an_unservable_prompt_alone_is_handed_out_by_expire() -> None:
    rank = rank_of(length=8)
    rank.scheduler.add(request_of("bad", 9))
    assert [output.finish_reason for output in rank.scheduler.expire(0.0)] == [FinishReason.ERROR]
    assert not rank.scheduler.has_work
    assert rank.scheduler.abort("bad") is None


def test_an_id_being_served_is_refused_and_may_come_again_afterwards() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 3))
    with pytest.raises(DuplicateRequestError, match="'a' is already being served"):
        rank.scheduler.add(request_of("a", 4))
    rank.scheduler.abort("a")
    rank.scheduler.add(request_of("a", 4, max_tokens=1))
    rank.drain()


def test_an_idle_scheduler_plans_an_empty_batch_that_may_be_committed_or_dropped() -> None:
    rank = rank_of()
    batch = rank.scheduler.schedule()
    assert (batch.items, batch.num_tokens, batch.num_prefill_tokens) == ([], 0, 0)
    assert rank.scheduler.commit(batch, [], []) == []


def test_commit_refuses_a_wrong_number_of_tokens_and_a_wrong_order() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 3))
    first = rank.scheduler.schedule()
    with pytest.raises(AssertionError, match="0 tokens and 0 logprobs for 1 sampling"):
        rank.scheduler.commit(first, [], [])
    second = rank.scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order planned"):
        rank.scheduler.commit(second, [1], [None])


def test_the_next_step_knows_how_many_tokens_of_prompts_wait() -> None:
    """At most the tokens of one step: first the rest of a running prompt, then waiting ones."""
    rank = rank_of(batched=16)
    seen = [rank.scheduler.next_step.num_prefill]
    for request_id, length in (("a", 5), ("b", 9), ("c", 40)):
        rank.scheduler.add(request_of(request_id, length))
        seen.append(rank.scheduler.next_step.num_prefill)
    assert seen == [0, 5, 14, 16]
    left = []
    for _ in range(4):
        rank.plan()
        left.append(rank.scheduler.next_step.num_prefill)
    assert left == [16, 16, 10, 0]


def test_who_waits_for_a_seat_or_for_blocks_is_no_prompt_of_the_next_step() -> None:
    rank = rank_of(seqs=2)
    for name, max_tokens in (("a", 9), ("b", 4), ("c", 4)):
        rank.scheduler.add(request_of(name, 4, max_tokens=max_tokens))
    seen = []
    while rank.scheduler.stats.num_waiting:
        rank.plan()
        coming = rank.scheduler.next_step
        seen.append((coming.has_prefill, coming.num_prefill))
        rank.finish()
    assert seen == [(False, 0)] * 3 + [(True, 4), (False, 0)], "the last token of b must be known as last"
    full = rank_of(8, seqs=4, length=32, caching=False)
    full.scheduler.add(request_of("a", 20, max_tokens=9))
    step(full)
    step(full)
    full.scheduler.add(request_of("b", 20, max_tokens=1))
    step(full)
    assert full.scheduler.stats.num_waiting == 1 and not full.scheduler.next_step.has_prefill


def test_a_prefix_hit_skips_whole_blocks_and_is_reported_with_the_first_token() -> None:
    rank = rank_of()
    prompt = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)
    rank.scheduler.add(request_of("a", prompt, max_tokens=1))
    rank.drain()
    rank.scheduler.add(request_of("b", prompt, max_tokens=3))
    assert step(rank) == [("b", 8, 2, True)]
    rank.drain()
    assert [output.num_cached_tokens for output in rank.outputs["b"]] == [8, 0, 0]
    stats = rank.scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)
    assert rank.tokens_of("b")[:1] == rank.tokens_of("a")


def test_only_requests_with_the_same_salt_share_a_prefix() -> None:
    rank = rank_of()
    for request_id, salt, num_cached in (
        ("a", "x", 0),
        ("b", "y", 0),
        ("c", "", 0),
        ("d", "x", 8),
        ("e", "", 8),
    ):
        rank.scheduler.add(
            replace(request_of(request_id, (1, 2, 3, 4, 5, 6, 1, 2, 3, 4), max_tokens=1), cache_salt=salt)
        )
        assert step(rank) == [(request_id, num_cached, 10 - num_cached, True)]
        rank.drain()


def test_only_requests_with_the_same_adapter_share_a_prefix() -> None:
    rank = rank_of()
    for request_id, adapter, salt, num_cached in (
        ("a", "1" * 32, "", 0),
        ("b", "2" * 32, "", 0),
        ("c", "", "1" * 32, 0),
        ("d", "", "", 0),
        ("e", "1" * 32, "x", 0),
        ("f", "1" * 32, "", 8),
    ):
        asked = request_of(request_id, (1, 2, 3, 4, 5, 6, 1, 2, 3, 4), max_tokens=1)
        rank.scheduler.add(replace(asked, adapter=adapter, cache_salt=salt))
        assert step(rank) == [(request_id, num_cached, 10 - num_cached, True)]
        rank.drain()


def test_generated_tokens_are_reused_by_the_next_turn_of_a_chat() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", (1, 2, 3), max_tokens=6))
    rank.drain()
    rank.scheduler.add(request_of("b", (1, 2, 3, *rank.tokens_of("a"), 5), max_tokens=1))
    assert step(rank) == [("b", 8, 2, True)]


def test_without_prefix_caching_nothing_is_looked_up_or_kept() -> None:
    rank = rank_of(caching=False)
    for request_id in "ab":
        rank.scheduler.add(request_of(request_id, (1,) * 9, max_tokens=1))
        assert step(rank) == [(request_id, 0, 9, True)]
    assert rank.pool.num_cached == rank.scheduler.stats.prefix_query_tokens == 0


def test_running_sequences_share_prompt_blocks_by_reference() -> None:
    rank = rank_of(16)
    prompt = (1, 2, 3, 4, 5, 6, 1, 2, 3)
    rank.scheduler.add(request_of("a", prompt))
    step(rank)
    rank.scheduler.add(request_of("b", prompt))
    items = rank.plan().items
    tables = {item.sequence.request.request_id: item.sequence.block_ids for item in items}
    assert tables["a"][:2] == tables["b"][:2]
    assert not set(tables["a"][2:]) & set(tables["b"][2:])
    rank.drain()


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
    assert starts["b"][1] > 0, "its prefix must still be cached when it resumes"


def test_admission_leaves_a_block_free_for_every_running_sequence() -> None:
    rank = rank_of(6, length=24)
    rank.scheduler.add(request_of("a", 11))  # three blocks with one free row
    rank.scheduler.add(request_of("b", 11))  # three blocks are left, but one is for a
    rank.scheduler.add(request_of("c", 4))  # would fit, but came later
    assert step(rank) == [("a", 0, 11, True)]
    rank.scheduler.abort("b")
    assert step(rank) == [("a", 11, 1, True), ("c", 0, 4, True)]


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
    raise AssertionError("a long prompt starved behind short ones that arrived later")


def test_a_head_of_the_queue_that_does_not_fit_is_not_looked_up_anew_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost must not depend on the prompt's length: all ranks pay it in lock-step."""
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
    )  # 15 of its 34 blocks are held
    step(rank)
    monkeypatch.setattr(PrefixIndex, "_key", counted)
    waits = []
    while rank.scheduler.stats.num_waiting:
        before = num_hashes
        items = step(rank)
        published = sum((start + length) // 4 - start // 4 for _, start, length, _ in items)
        waits.append(num_hashes - before - published)
    assert len(waits) > 20 and max(waits[:-1]) <= 2, (
        "plan and look-ahead may each check one block that could have become cached"
    )


def test_who_waits_starts_just_when_a_full_look_would_let_it() -> None:
    """Compare the remembered lookup with a full one while blocks are published, evicted and freed."""
    num_waits = num_starts = 0
    for seed in range(12):
        rng = random.Random(seed)
        rank = rank_of(20, length=60, seqs=6, batched=32)
        for number in range(40):
            shared = (rng.randrange(2),) * rng.choice([0, 8, 24])
            tail = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
            rank.scheduler.add(request_of(str(number), shared + tail, max_tokens=rng.randint(1, 16)))
        while rank.scheduler.has_work:
            waiting = rank.scheduler._roster.waiting
            head = waiting.head if waiting else None
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
    """Share all cached blocks and count, which is too slow for long prompts in every step."""
    matched = pool.match(sequence.token_ids[:-1])
    pool.share(matched)
    fits = pool.blocks_for(len(sequence.token_ids)) - len(matched) + num_spare_blocks <= pool.num_free
    pool.release(matched)
    return fits
