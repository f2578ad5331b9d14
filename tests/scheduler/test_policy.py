"""The local scheduler, rule by rule."""

from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest

from kvcache.blocks import BlockPool
from scheduler.limits import SchedulerLimitsError
from scheduler.policy import Batch, DuplicateRequestError, Scheduler
from scheduler.request import FinishReason, Logprobs, Request, RequestOutput, SamplingParams
from tests.support.fake_model import VOCABULARY, FakeRank, next_token, prompt_logprobs_of, serve_alone

BLOCK_TOKENS = 4


def request_of(
    request_id: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 8,
    *,
    replayed_ids: tuple[int, ...] = (),
    deadline_s: float | None = None,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> Request:
    """A request; an int is a prompt of that many tokens, different for each id."""
    if isinstance(prompt, int):
        prompt = tuple((ord(request_id[0]) + index) % VOCABULARY for index in range(prompt))
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=params,
        arrival_s=0.0,
        deadline_s=deadline_s,
        replayed_ids=replayed_ids,
    )


def rank_of(
    num_blocks: int = 64,
    *,
    seqs: int = 8,
    batched: int = 16,
    length: int = 64,
    caching: bool = True,
) -> FakeRank:
    pool = BlockPool(num_blocks, BLOCK_TOKENS)
    scheduler = Scheduler(
        pool,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=length,
        enable_prefix_caching=caching,
    )
    return FakeRank(pool, scheduler, batched)


def step(rank: FakeRank, prefill_budget: int | None = None) -> list[tuple[str, int, int, bool]]:
    """Plan and finish one step; return its items as (request, start, tokens, samples)."""
    batch = rank.plan(prefill_budget)
    if batch.items:
        rank.finish()
    return shape_of(batch)


def shape_of(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(i.sequence.request.request_id, i.start, i.num_tokens, i.samples) for i in batch.items]


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


def test_the_first_token_says_how_long_the_request_had_waited_to_be_started() -> None:
    rank = rank_of(seqs=1, batched=4)
    rank.scheduler.add(replace(request_of("a", 6, max_tokens=2), arrival_s=10.0))
    rank.scheduler.add(replace(request_of("b", 4, max_tokens=2), arrival_s=11.0))
    for now_s in (10.5, 11.0, 12.0, 14.0, 15.0):  # two steps of a's prompt, its second token, then b
        rank.plan(now_s=now_s)
        rank.finish()
    assert [output.queued_s for output in rank.outputs["a"]] == [0.5, 0.0]
    assert [output.queued_s for output in rank.outputs["b"]] == [3.0, 0.0]


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


def test_a_prefix_hit_never_covers_the_last_prompt_token() -> None:
    rank = rank_of()
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)  # two blocks to the token
    for request_id in "ab":
        rank.scheduler.add(request_of(request_id, prompt, max_tokens=1))
        items = step(rank)
    assert items == [("b", 4, 4, True)]


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


def position_of_first_new_token(prompt: tuple[int, ...], most: int) -> tuple[int, int]:
    """A token that greedy output first has at index >= 2, and that index."""
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
    for min_tokens in (index, index + 1):  # as many before it as asked for; one too few
        rank = rank_of()
        rank.scheduler.add(
            request_of("a", prompt, max_tokens=20, stop_token_ids=(token,), min_tokens=min_tokens)
        )
        rank.drain()
        ends.append(len(rank.tokens_of("a")))
    assert ends[0] == index + 1 < ends[1]


def test_without_stop_tokens_only_length_ends_a_request() -> None:
    rank = rank_of(length=32)
    rank.scheduler.add(request_of("a", 4, max_tokens=999))
    rank.drain()
    assert rank.end_of("a") is FinishReason.LENGTH and len(rank.tokens_of("a")) == 28


def test_a_stop_token_wins_over_length() -> None:
    prompt = (1, 2, 3, 4, 5)
    token, index = position_of_first_new_token(prompt, 20)
    rank = rank_of()
    rank.scheduler.add(request_of("a", prompt, max_tokens=index + 1, stop_token_ids=(token,)))
    rank.drain()
    assert rank.end_of("a") is FinishReason.STOP


def test_replayed_tokens_count_as_generated_and_are_not_delivered() -> None:
    whole = request_of("a", 6, max_tokens=9)
    tokens, _ = serve_alone(whole, 64)
    rank = rank_of()
    rank.scheduler.add(replace(whole, replayed_ids=tuple(tokens[:4])))
    assert step(rank) == [("a", 0, 10, True)]
    rank.drain()
    assert rank.tokens_of("a") == tokens[4:]


def test_cached_tokens_of_a_replayed_request_come_with_its_first_new_token() -> None:
    whole = request_of("a", 6, max_tokens=9)
    rank = rank_of()
    rank.scheduler.add(whole)
    rank.drain()
    again = replace(whole, request_id="b", replayed_ids=tuple(rank.tokens_of("a")[:4]))
    rank.scheduler.add(again)
    assert step(rank) == [("b", 8, 2, True)]
    rank.drain()
    # Prompt tokens only: the second cached block ends with two replayed ones.
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
    """The same, with its prompt's logprobs wanted."""
    return replace(request, params=replace(request.params, num_prompt_logprobs=0))


def test_a_prompt_s_logprobs_come_whole_with_the_first_token_however_it_is_cut() -> None:
    rank = rank_of(batched=8)
    request = scoring(request_of("a", 19, max_tokens=3))
    rank.scheduler.add(request)
    rank.drain()
    assert [len(output.prompt_logprobs) for output in rank.outputs["a"]] == [18, 0, 0]
    assert rank.outputs["a"][0].prompt_logprobs == prompt_logprobs_of(request)


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
    assert rank.scheduler.stats.prefix_query_tokens == queried, "what is not looked up is no miss"
    rank.scheduler.add(replace(request_of("a", 13, max_tokens=1), request_id="c"))
    rank.drain()
    assert rank.outputs["c"][0].num_cached_tokens == 12, "others find it as before"


def test_a_prompt_of_one_token_has_no_logprobs_to_tell() -> None:
    rank = rank_of()
    rank.scheduler.add(scoring(request_of("a", 1, max_tokens=2)))
    rank.drain()
    assert [output.prompt_logprobs for output in rank.outputs["a"]] == [[], []]


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    rank = rank_of(num_blocks=7, batched=8, length=28)
    rank.scheduler.add(request_of("a", 3, max_tokens=22))
    step(rank)
    second = scoring(request_of("b", 14, max_tokens=2))
    rank.scheduler.add(second)
    while not rank.scheduler.stats.num_preemptions:  # a token of it at a time, while the other grows
        step(rank, prefill_budget=1)
        assert "b" not in rank.outputs, "it was to be preempted in the middle of its prompt"
    assert rank.num_scored > 4
    rank.drain()
    assert rank.outputs["b"][0].prompt_logprobs == prompt_logprobs_of(second)
    assert rank.num_scored == 13, "each once"


def test_a_replay_delivers_no_prompt_logprobs_because_the_first_token_brought_them() -> None:
    rank = rank_of()
    tokens, _ = serve_alone(request_of("a", 6), 64)
    rank.scheduler.add(scoring(request_of("a", 6, replayed_ids=tuple(tokens[:2]))))
    rank.drain()
    assert not any(output.prompt_logprobs for output in rank.outputs["a"])
    assert rank.num_scored == 0


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
    assert "a" not in rank.outputs, "commit says nothing more of a request that ended"
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
