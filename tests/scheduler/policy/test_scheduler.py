"""The local scheduler, rule by rule: order, budgets, seats, refusals. `test_policy_*` have the rest."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.policy.request import FinishReason, RequestOutput
from scheduler.policy.scheduler import DuplicateRequestError, SchedulerLimitsError
from tests.support.policy_cases import rank_of, request_of, step


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


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(64, "the prompt has 64 tokens; at most 63 fit"), (0, "the prompt has no tokens")],
)
def test_an_unservable_prompt_ends_with_an_error_and_costs_nobody_else(prompt: int, message: str) -> None:
    rank = rank_of(length=64)
    rank.scheduler.add(request_of("bad", prompt))
    rank.scheduler.add(request_of("good", 63, max_tokens=5))
    assert rank.scheduler.has_work
    rank.drain()
    (output,) = rank.outputs["bad"]
    assert output.finish_reason is FinishReason.ERROR and output.error.startswith(message)
    assert rank.end_of("good") is FinishReason.LENGTH and len(rank.tokens_of("good")) == 1


def test_an_unservable_prompt_alone_is_handed_out_by_expire() -> None:
    rank = rank_of(length=8)
    rank.scheduler.add(request_of("bad", 8))
    assert [output.finish_reason for output in rank.scheduler.expire(0.0)] == [FinishReason.ERROR]
    assert not rank.scheduler.has_work
    assert rank.scheduler.abort("bad") is None


def test_an_id_being_served_is_refused_and_may_come_again_afterwards() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 3))
    with pytest.raises(DuplicateRequestError, match="'a' is being served"):
        rank.scheduler.add(request_of("a", 4))
    rank.scheduler.abort("a")
    rank.scheduler.add(request_of("a", 4, max_tokens=1))
    rank.drain()


def test_an_idle_scheduler_plans_an_empty_batch_that_may_be_committed_or_dropped() -> None:
    rank = rank_of()
    batch = rank.scheduler.schedule()
    assert (batch.items, batch.num_tokens, batch.num_prefill_tokens) == ([], 0, 0)
    assert rank.scheduler.commit(batch, [], []) == []


def test_the_same_calls_give_the_same_batches_and_outputs() -> None:
    def history() -> list[object]:
        rank = rank_of(8, length=24)
        for request_id in "abcdef":
            rank.scheduler.add(request_of(request_id, 7, max_tokens=11))
        steps: list[object] = []
        while rank.scheduler.has_work:
            steps.append(step(rank))
        outputs: list[RequestOutput] = [one for outputs in rank.outputs.values() for one in outputs]
        return [*steps, *outputs]

    assert history() == history()
