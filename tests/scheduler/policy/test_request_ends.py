"""How requests end in the local scheduler, and when prompt logprobs are delivered."""

from dataclasses import replace

import pytest

from scheduler.policy.request import FinishReason, Logprobs, Request
from tests.support.engines.policy_cases import rank_of, request_of, step
from tests.support.models.fake_model import prompt_logprobs_of, serve_alone


def position_of_first_new_token(prompt: tuple[int, ...], most: int) -> tuple[int, int]:
    """Return a token that greedy output has first at index >= 2, and that index."""
    output, _ = serve_alone(request_of("x", prompt, max_tokens=most), 64)
    for index in range(2, most):
        if output[index] not in output[:index]:
            return output[index], index
    raise AssertionError("choose another prompt")


def test_a_stop_token_ends_the_request_and_is_delivered() -> None:
    prompt = (1, 2, 3, 4, 5)
    token, index = position_of_first_new_token(prompt, 20)
    rank = rank_of()
    rank.scheduler.add(request_of("a", prompt, max_tokens=20, stop_token_ids=(token,)))
    rank.drain()
    assert rank.end_of("a") is FinishReason.STOP
    assert (len(rank.tokens_of("a")), rank.tokens_of("a")[-1]) == (index + 1, token)


def test_a_stop_token_among_the_first_min_tokens_does_not_end_the_request() -> None:
    prompt = (1, 2, 3, 4, 5)
    token, index = position_of_first_new_token(prompt, 20)
    ends = []
    for min_tokens in (index, index + 1):  # as many tokens before it as required, then one too few
        rank = rank_of()
        rank.scheduler.add(
            request_of("a", prompt, max_tokens=20, stop_token_ids=(token,), min_tokens=min_tokens)
        )
        rank.drain()
        ends.append(len(rank.tokens_of("a")))
    assert ends[0] == index + 1 < ends[1]


def test_cached_tokens_of_a_replayed_request_come_with_its_first_new_token() -> None:
    whole = request_of("a", 6, max_tokens=9)
    rank = rank_of()
    rank.scheduler.add(whole)
    rank.drain()
    again = replace(whole, request_id="b", replayed_ids=tuple(rank.tokens_of("a")[:4]))
    rank.scheduler.add(again)
    assert step(rank) == [("b", 8, 2, True)]
    rank.drain()
    # Prompt tokens only: the second cached block ends with two replayed tokens.
    assert [output.num_cached_tokens for output in rank.outputs["b"]] == [6, 0, 0, 0, 0]


@pytest.mark.parametrize("num_replayed", [8, 9])
def test_a_replay_that_is_complete_already_ends_at_once(num_replayed: int) -> None:
    tokens, _ = serve_alone(request_of("a", 6, max_tokens=9), 64)
    rank = rank_of()
    rank.scheduler.add(request_of("a", 6, max_tokens=8, replayed_ids=tuple(tokens[:num_replayed])))
    rank.scheduler.add(request_of("b", 6, max_tokens=8, replayed_ids=(3,), stop_token_ids=(3,)))
    rank.drain()
    assert (rank.tokens_of("a"), rank.end_of("a")) == ([], FinishReason.LENGTH)
    assert (rank.tokens_of("b"), rank.end_of("b")) == ([], FinishReason.STOP)


def test_abort_while_waiting_and_running_ends_once_and_frees_blocks() -> None:
    rank = rank_of(seqs=1)
    for request_id in "ab":
        rank.scheduler.add(request_of(request_id, 9))
    step(rank)
    for request_id in "ba":
        output = rank.scheduler.abort(request_id)
        assert output is not None and output.finish_reason is FinishReason.ABORT and output.token_ids == []
        assert rank.scheduler.abort(request_id) is None
    assert rank.scheduler.abort("unknown") is None
    assert not rank.scheduler.has_work and rank.pool.num_free == rank.pool.num_blocks


def test_abort_during_a_step_keeps_the_blocks_until_its_commit() -> None:
    rank = rank_of(5, length=20)
    rank.scheduler.add(request_of("a", 17))
    rank.scheduler.add(request_of("b", 5, max_tokens=1))
    rank.plan()
    held = rank.pool.num_free
    assert rank.scheduler.abort("a") is not None
    assert rank.pool.num_free == held < rank.pool.num_blocks
    assert rank.plan().items == [], "b must not get blocks that the running step writes"
    rank.finish()
    assert rank.pool.num_free == rank.pool.num_blocks
    assert "a" not in rank.outputs, "commit must return no output of an ended request"
    rank.drain()
    assert rank.end_of("b") is FinishReason.LENGTH


def test_a_deadline_ends_requests_earliest_first_also_during_a_step() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 3, deadline_s=7.0))
    rank.scheduler.add(request_of("b", 3, deadline_s=5.0))
    rank.scheduler.add(request_of("c", 3))
    assert rank.scheduler.expire(4.9) == []
    rank.plan()
    ends = rank.scheduler.expire(7.0)
    assert [(o.request_id, o.finish_reason) for o in ends] == [
        ("b", FinishReason.DEADLINE),
        ("a", FinishReason.DEADLINE),
    ]
    assert rank.scheduler.expire(100.0) == []
    rank.drain()
    assert sorted(rank.outputs) == ["c"]


def test_an_old_deadline_does_not_end_a_new_request_of_the_same_id() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 3, deadline_s=5.0))
    rank.scheduler.abort("a")
    rank.scheduler.add(request_of("a", 3, deadline_s=9.0))
    assert rank.scheduler.expire(6.0) == []
    assert len(rank.scheduler.expire(9.0)) == 1


def test_logprobs_are_delivered_with_their_tokens() -> None:
    rank = rank_of()
    for request_id in "ab":
        rank.scheduler.add(request_of(request_id, 3, max_tokens=1))
    batch = rank.scheduler.schedule()
    logprobs = Logprobs(5, -0.5, [5], [-0.5])
    outputs = rank.scheduler.commit(batch, [4, 5], [None, logprobs])
    assert [(o.request_id, o.token_ids, o.logprobs) for o in outputs] == [
        ("a", [4], []),
        ("b", [5], [logprobs]),
    ]


def scoring(request: Request) -> Request:
    """Return the request with prompt logprobs."""
    return replace(request, params=replace(request.params, num_prompt_logprobs=0))


def test_a_prompt_whose_logprobs_are_wanted_is_computed_although_it_is_cached() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 13, max_tokens=1))
    rank.drain()
    queried = rank.scheduler.stats.prefix_query_tokens
    again = replace(scoring(request_of("a", 13, max_tokens=1)), request_id="b")
    rank.scheduler.add(again)
    rank.drain()
    assert rank.outputs["b"][0].prompt_logprobs == prompt_logprobs_of(again)
    assert rank.outputs["b"][0].num_cached_tokens == 0
    assert rank.scheduler.stats.prefix_query_tokens == queried, (
        "a prefix that is not looked up does not count as a miss"
    )
    rank.scheduler.add(replace(request_of("a", 13, max_tokens=1), request_id="c"))
    rank.drain()
    assert rank.outputs["c"][0].num_cached_tokens == 12, "other requests must still hit the prefix"


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    rank = rank_of(num_blocks=7, batched=8, length=28)
    rank.scheduler.add(request_of("a", 3, max_tokens=22))
    step(rank)
    second = scoring(request_of("b", 14, max_tokens=2))
    rank.scheduler.add(second)
    while not rank.scheduler.stats.num_preemptions:  # b gets one token per step, while a grows
        step(rank, prefill_budget=1)
        assert "b" not in rank.outputs, "it must be preempted in the middle of its prompt"
    assert rank.num_scored > 4
    rank.drain()
    assert rank.outputs["b"][0].prompt_logprobs == prompt_logprobs_of(second)
    assert rank.num_scored == 13, "each prompt token must be scored once"
