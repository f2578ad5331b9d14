"""The local scheduler planning ahead of results."""

import pytest

from scheduler.policy.request import FinishReason
from tests.support.fake_model import next_token, serve_alone
from tests.support.policy_cases import rank_of, request_of, shape_of


def test_the_next_step_can_be_planned_before_the_last_one_is_committed() -> None:
    rank = rank_of()
    request = request_of("a", 5, max_tokens=3)
    rank.scheduler.add(request)
    plans = [shape_of(rank.plan()) for _ in range(4)]
    assert plans == [[("a", 0, 5, True)], [("a", 5, 1, True)], [("a", 6, 1, True)], []]
    rank.drain()
    assert rank.tokens_of("a") == serve_alone(request, 64)[0]


def test_planning_ahead_preempts_one_sequence_at_a_time_and_loses_none_of_its_tokens() -> None:
    rank = rank_of(12, length=40)
    requests = [request_of(request_id, 6, max_tokens=30) for request_id in "abc"]
    for request in requests:
        rank.scheduler.add(request)
    rank.plan()
    while rank.scheduler.has_work:
        num_preemptions = rank.scheduler.stats.num_preemptions
        rank.plan()
        assert rank.scheduler.stats.num_preemptions <= num_preemptions + 1
        if rank.launched:
            rank.finish()
    assert rank.scheduler.stats.num_preemptions > 0
    for request in requests:
        assert (rank.tokens_of(request.request_id), rank.end_of(request.request_id)) == serve_alone(
            request, 40
        )


def test_a_stop_found_late_drops_the_step_planned_ahead() -> None:
    prompt = (1, 2, 3, 4, 5)
    token = next_token(list(prompt))
    rank = rank_of()
    rank.scheduler.add(request_of("a", prompt, max_tokens=9, stop_token_ids=(token,)))
    rank.plan()
    rank.plan()
    rank.finish()
    assert rank.end_of("a") is FinishReason.STOP and rank.pool.num_free < rank.pool.num_blocks
    rank.finish()
    assert rank.tokens_of("a") == [token] and rank.pool.num_free == rank.pool.num_blocks


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
    """At most a step's; what is left of a prompt that runs, then those that wait."""
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
