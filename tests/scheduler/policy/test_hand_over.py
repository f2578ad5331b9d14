"""A rank releases a request with its first token, and another rank of the host continues it from the tiers."""

from dataclasses import replace

import pytest

from kvcache.blocks import BlockPool
from kvcache.images import Image
from kvcache.prefix import ROOT_KEY, with_weights
from kvcache.states import StatePool
from kvcache.tiers.jobs import MOST_LOAD_S
from scheduler.policy.request import Expected, Request, RequestOutput
from scheduler.policy.scheduler import MOST_COMING_S, Scheduler
from scheduler.policy.tier_tables import MOST_AWAIT_S, MOST_JOIN_S
from tests.scheduler.policy.test_tier_tables import ask
from tests.support.engines.fake_tiers import FakeTiers
from tests.support.engines.policy_cases import BLOCK_TOKENS, rank_of, request_of, step
from tests.support.models.fake_model import PlannedRank, serve_alone

LENGTH = 96


def rank_of_host(
    *,
    states: int = 0,
    batched: int = 32,
    other: PlannedRank | None = None,
    num_blocks: int = 24,
    repeats_decodes: bool = False,
) -> PlannedRank:
    """Return a rank with tiers that do their jobs at once. `other`: a rank that shares the host's records."""
    pool, slots = BlockPool(num_blocks, BLOCK_TOKENS), StatePool(states) if states else None
    scheduler = Scheduler(
        pool,
        max_num_seqs=4,
        max_num_batched_tokens=batched,
        max_model_len=LENGTH,
        states=slots,
        repeats_decodes=repeats_decodes,
    )
    rank = PlannedRank(pool, scheduler, batched, slots)
    rank.tiers = FakeTiers(rank, 1, loss=0.0, shared=other.tiers if other else None)
    rank.tiers.chance = 1.0
    scheduler.use_tiers(rank.tiers)
    return rank


def prompt_of(length: int) -> list[int]:
    return [1 + (3 * each) % 6 for each in range(length)]


def begin(rank: PlannedRank, request: Request) -> RequestOutput:
    """Run a request that hands over to its release."""
    rank.scheduler.add(replace(request, hands_over=True))
    rank.drain()
    output = rank.outputs[request.request_id][-1]
    assert output.is_returned and len(output.token_ids) == 1 and output.finish_reason is None
    return output


def go_on(rank: PlannedRank, request: Request, output: RequestOutput) -> int:
    """Serve the rest of a request at another rank. Returns the number of tokens that this rank computed again."""
    first = tuple(output.token_ids)
    rank.scheduler.add(replace(request, replayed_ids=first, num_awaited_tokens=output.num_saved_tokens))
    rank.drain()
    assert [*first, *rank.tokens_of(request.request_id)] == serve_alone(request, LENGTH)[0]
    return len(request.prompt_ids) + 1 - rank.outputs[request.request_id][0].num_cached_tokens


@pytest.mark.parametrize("length", [3, 4, 5, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("batched", [8, 9, 32, 80])
def test_the_next_rank_computes_only_the_last_token(length: int, batched: int) -> None:
    first = rank_of_host(batched=batched)
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(length), max_tokens=9)
    output = begin(first, request)
    assert output.num_saved_tokens == length
    assert go_on(second, request, output) == 1
    assert first.scheduler.stats.num_running == 0


@pytest.mark.parametrize("length", [3, 4, 5, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("batched", [8, 9, 32, 80])
def test_with_states_it_computes_at_most_two_blocks_again(length: int, batched: int) -> None:
    first = rank_of_host(batched=batched, states=12)
    second = rank_of_host(other=first, states=12)
    request = ask("r", prompt_of(length), max_tokens=9)
    output = begin(first, request)
    assert go_on(second, request, output) == length - output.num_saved_tokens + 1
    assert length - output.num_saved_tokens < BLOCK_TOKENS or length < BLOCK_TOKENS


def test_a_cached_prefix_that_the_tiers_lost_is_saved_again() -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    begin(first, ask("before", prompt_of(33)))
    first.tiers._blocks.clear()
    request = ask("r", prompt_of(35), max_tokens=5)
    output = begin(first, request)
    assert first.outputs["r"][-1].num_cached_tokens == 32
    assert go_on(second, request, output) == 1


def test_a_token_that_ends_the_request_ends_it_and_hands_nothing_over() -> None:
    rank = rank_of_host()
    rank.scheduler.add(replace(ask("r", prompt_of(9), max_tokens=1), hands_over=True))
    rank.drain()
    (output,) = rank.outputs["r"]
    assert output.finish_reason is not None and not output.is_returned


def test_a_seat_is_free_in_the_step_after_the_first_token() -> None:
    rank = rank_of(seqs=1)
    for name in "ab":
        rank.scheduler.add(replace(request_of(name, 5), hands_over=True))
    assert step(rank) == [("a", 0, 5, True)]
    assert rank.outputs["a"][-1].is_returned
    assert rank.scheduler.next_step.num_decodes == 0
    assert step(rank) == [("b", 0, 5, True)]


def test_no_decode_is_planned_behind_a_prompt_in_flight() -> None:
    rank = rank_of()
    rank.scheduler.add(replace(request_of("a", 5), hands_over=True))
    rank.plan()
    assert not rank.plan().items
    rank.drain()


def test_without_tiers_the_next_rank_waits_for_nothing() -> None:
    first, second = rank_of(length=LENGTH), rank_of(length=LENGTH)
    request = request_of("a", 21)
    output = begin(first, request)
    assert output.num_saved_tokens == 0
    assert go_on(second, request, output) == 22


def test_a_request_waits_for_blocks_that_are_being_saved_and_others_pass_it() -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(33), max_tokens=4)
    first.scheduler.add(replace(request, hands_over=True))
    first.tiers.chance = 0.0  # nothing is saved yet
    first.plan()
    first.finish()
    first.plan()
    first.finish()
    output = first.outputs["r"][-1]
    assert output.is_returned and first.tiers.num_open > 0
    second.scheduler.add(
        replace(request, replayed_ids=tuple(output.token_ids), num_awaited_tokens=output.num_saved_tokens)
    )
    second.scheduler.add(ask("passes", [6, 5, 6]))
    batch = second.plan(now_s=10.0)
    assert [item.sequence.request.request_id for item in batch.items] == ["passes"]
    second.finish()
    first.tiers.chance = 1.0
    first.scheduler.collect(0.0)
    assert not any(
        item.sequence.request.request_id == "r" for item in second.plan(now_s=10.1).items
    )  # it loads
    assert [
        item.start for item in second.plan(now_s=10.2).items if item.sequence.request.request_id == "r"
    ] == [output.num_saved_tokens]
    second.drain()


def test_it_waits_for_a_bounded_time_only_and_once() -> None:
    rank = rank_of_host()
    request = ask("r", prompt_of(33), max_tokens=4)
    expected, _ = serve_alone(request, LENGTH)
    rank.scheduler.add(replace(request, replayed_ids=(expected[0],), num_awaited_tokens=32))
    assert not rank.plan(now_s=5.0).items
    assert not rank.plan(now_s=5.0 + MOST_AWAIT_S).items
    assert [item.start for item in rank.plan(now_s=5.1 + MOST_AWAIT_S).items] == [0]
    rank.finish()
    rank.drain()
    assert rank.tokens_of("r") == expected[1:]


def test_an_aborted_request_waits_no_longer() -> None:
    rank = rank_of_host()
    rank.scheduler.add(replace(ask("r", prompt_of(33)), num_awaited_tokens=32))
    assert not rank.plan(now_s=5.0).items and rank.scheduler.stats.num_waiting == 1
    assert rank.scheduler.abort("r") is not None
    assert not rank.scheduler.has_work
    rank.drain()


def test_prompt_logprobs_go_with_the_first_token_and_are_not_computed_again() -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(33), max_tokens=5, num_prompt_logprobs=0)
    output = begin(first, request)
    assert len(output.prompt_logprobs) == 32
    assert go_on(second, request, output) == 1
    assert second.num_scored == 0


def expect(rank: PlannedRank, request: Request, now_s: float = 0.0) -> None:
    rank.scheduler.expect(Expected(request.request_id, request), now_s)


@pytest.mark.parametrize("images", [(), (Image("ab" * 32, 3, 20),)], ids=["text", "image"])
@pytest.mark.parametrize("states", [0, 12])
def test_a_rank_that_expects_a_request_loads_its_blocks_while_the_other_computes_them(
    states: int, images: tuple[Image, ...]
) -> None:
    first = rank_of_host(batched=8, states=states)
    second = rank_of_host(other=first, states=states)
    request = replace(ask("r", prompt_of(33), max_tokens=5), images=images)
    expect(second, request)
    first.scheduler.add(replace(request, hands_over=True))
    first.plan()
    first.finish()
    first.plan()  # takes back the saves of the first chunk
    second.scheduler.collect(0.0)
    (load,) = second.tiers._follows
    assert load.num_loaded == 2, "blocks of the first chunk are there before the prompt has ended"
    first.finish()
    first.drain()
    output = first.outputs["r"][-1]
    assert go_on(second, request, output) == len(request.prompt_ids) + 1 - output.num_saved_tokens
    assert not second.tiers._follows and second.pool.num_free == second.pool.num_blocks


def test_after_a_weight_update_blocks_of_the_new_weights_are_loaded_ahead() -> None:
    first = rank_of_host(batched=8)
    second = rank_of_host(other=first)
    for rank in (first, second):
        rank.scheduler.use_weights("new", 1)
    request = ask("r", prompt_of(33), max_tokens=5)
    expect(second, request)
    begin(first, request)
    second.scheduler.collect(0.0)
    assert not second.tiers._follows, "all blocks were found"
    assert second.pool.match(request.prompt_ids[:32], with_weights(ROOT_KEY, "new", ""))


def test_a_request_that_does_not_come_gives_its_blocks_back_at_once() -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    expect(second, ask("r", prompt_of(33)))
    assert second.pool.num_free == second.pool.num_blocks - second.pool.blocks_for(33)
    second.scheduler.expect(Expected("other", None), 0.0)
    second.scheduler.expect(Expected("r", None), 0.0)
    second.scheduler.collect(0.0)
    assert second.pool.num_free == second.pool.num_blocks and not second.scheduler.holds_blocks


@pytest.mark.parametrize("end", ["aborted", "withdrawn", "refused"])
def test_a_request_that_comes_and_ends_in_the_step_in_which_its_load_ends_leaves_no_block(end: str) -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(33), max_tokens=5)
    expect(second, request)
    tokens = tuple(begin(first, request).token_ids)
    [load] = second.tiers._follows
    while load.is_open:
        second.tiers._fill_next(load)
    comes = replace(request, replayed_ids=tokens)
    if end == "refused":  # it has all its tokens
        comes = replace(comes, params=replace(request.params, max_tokens=1))
    second.scheduler.add(comes)
    if end == "aborted":
        second.scheduler.abort("r")
    elif end == "withdrawn":
        second.scheduler.withdraw("r")
    second.scheduler.expire(0.0)
    second.scheduler.collect(0.0)
    assert not second.scheduler.holds_blocks and second.pool.num_free == second.pool.num_blocks


def test_a_refused_request_gives_up_a_load_that_goes_on() -> None:
    second = rank_of_host(other=rank_of_host())
    request = ask("r", prompt_of(33), max_tokens=1)
    expect(second, request)
    second.scheduler.add(replace(request, replayed_ids=(1,)))
    second.scheduler.expire(0.0)
    second.scheduler.collect(0.0)
    assert not second.scheduler.holds_blocks and second.pool.num_free == second.pool.num_blocks


def test_no_block_is_taken_for_a_request_that_is_expected_if_half_of_them_are_in_use() -> None:
    second = rank_of_host(num_blocks=24)
    expect(second, ask("r", prompt_of(53)))
    assert second.pool.num_free == 24, "14 blocks of 24"
    expect(second, ask("s", prompt_of(48)))
    expect(second, ask("s", prompt_of(48)))
    assert second.pool.num_free == 12, "12 blocks, once"


def test_a_request_does_not_wait_for_ever_for_a_load_that_hangs() -> None:
    second = rank_of_host(other=rank_of_host())
    request = ask("r", prompt_of(33), max_tokens=3)
    expect(second, request)
    second.tiers.chance = 0.0  # nothing is loaded, and the load does not end
    second.scheduler.add(replace(request, replayed_ids=(1,), num_awaited_tokens=33))
    assert not second.plan(now_s=0.0).items
    assert not second.plan(now_s=MOST_LOAD_S - 0.2).items, "the load should stop"
    assert [item.start for item in second.plan(now_s=MOST_LOAD_S + 0.1).items] == [0]
    second.tiers.chance = 1.0
    second.finish()
    second.drain()


def test_cached_blocks_that_an_expected_request_shares_do_not_count_as_free_for_its_loads() -> None:
    second = rank_of_host(num_blocks=24)
    second.scheduler.add(ask("before", prompt_of(48), max_tokens=1))  # leaves 12 cached blocks, not held
    second.plan()
    second.finish()
    second.drain()
    expect(second, ask("r", prompt_of(88)))  # 12 are shared, and 10 are not in the tiers yet
    assert second.pool.num_free == 24, "12 would be free after sharing, and twice 10 are needed"


@pytest.mark.parametrize(
    ("num_saving", "most_s"),
    [(33, MOST_AWAIT_S), (0, MOST_JOIN_S)],
    ids=["its last rank saves", "all is saved"],
)
def test_an_expected_request_that_comes_early_waits_for_its_blocks_a_bounded_time(
    num_saving: int, most_s: float
) -> None:
    first = rank_of_host(batched=8)
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(33), max_tokens=5)
    expect(second, request)
    tokens = (serve_alone(request, LENGTH)[0][0],)
    second.scheduler.add(replace(request, replayed_ids=tokens, num_awaited_tokens=num_saving))
    assert not second.plan(now_s=0.0).items, "it waits for the load that follows"
    second.tiers.now_s = 0.9 * most_s
    assert not second.plan(now_s=0.9 * most_s).items
    second.tiers.now_s = 1.1 * most_s
    assert second.plan(now_s=1.1 * most_s).items
    second.finish()
    second.drain()
    assert second.pool.num_free == second.pool.num_blocks


def test_an_expected_request_that_comes_during_a_slow_load_waits_as_for_any_load() -> None:
    first = rank_of_host()
    request = ask("r", prompt_of(33), max_tokens=5)
    begun = replace(request, replayed_ids=(begin(first, request).token_ids[0],))
    second = rank_of_host(other=first)
    second.tiers.chance = 0.0
    expect(second, begun)
    second.scheduler.add(begun)
    for now_s in (0.0, 2 * MOST_JOIN_S, 2 * MOST_AWAIT_S):
        assert not second.plan(now_s=now_s).items
    assert second.tiers.num_loads == 1, "it joins the load that has begun"
    second.tiers.chance = 1.0
    assert [(item.start, item.num_tokens) for item in second.plan(now_s=2 * MOST_AWAIT_S).items] == [(32, 2)]


def moved(rank: PlannedRank, request: Request, num_more: int = 0) -> Request:
    """Withdraw a request, perhaps after more steps, and return what another rank gets."""
    for _ in range(num_more):
        rank.plan()
        rank.finish()
    output = rank.scheduler.withdraw(request.request_id, even_if_begun=True)
    assert output is not None and output.is_returned
    rank.scheduler.collect(0.0)
    tokens = (*request.replayed_ids, *rank.tokens_of(request.request_id))
    return replace(request, replayed_ids=tokens, num_awaited_tokens=output.num_saved_tokens)


@pytest.mark.parametrize("length", [3, 4, 5, 31, 32, 33])
@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])
@pytest.mark.parametrize("num_unseen", [0, 1, 2])
def test_an_expected_request_continues_at_its_last_token(
    length: int, num_steps: int, num_unseen: int
) -> None:
    """When the front announces the request, it has not seen some of its newest tokens."""
    first = rank_of_host(batched=80)
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(length), max_tokens=9)
    first.scheduler.add(request)
    for _ in range(num_steps):
        first.plan()
        first.finish()
    seen = tuple(first.tokens_of("r")[: num_steps - num_unseen])
    expect(second, replace(request, replayed_ids=seen))
    comes = moved(first, request)
    assert first.pool.num_free == first.pool.num_blocks
    second.scheduler.add(comes)
    planned = next(items for items in (second.plan().items for _ in range(4)) if items)
    assert [(item.start, item.num_tokens) for item in planned] == [(length + num_steps - 1, 1)]
    second.finish()
    second.drain()
    assert [*comes.replayed_ids, *second.tokens_of("r")] == serve_alone(request, LENGTH)[0]
    assert second.pool.num_free == second.pool.num_blocks


@pytest.mark.parametrize("length", [3, 4, 5, 31, 32, 33])
def test_an_expected_request_that_is_handed_over_continues_at_its_first_token(length: int) -> None:
    first = rank_of_host(batched=80)
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(length), max_tokens=9)
    expect(second, request)
    output = begin(first, request)
    second.scheduler.collect(0.0)
    assert go_on(second, request, output) == 1
    assert second.pool.num_free == second.pool.num_blocks


def test_a_request_with_more_tokens_than_announced_loads_its_own_tail() -> None:
    first = rank_of_host(batched=80)
    second = rank_of_host(other=first)
    request = ask("r", prompt_of(33), max_tokens=9)
    first.scheduler.add(request)
    first.plan()
    first.finish()
    expect(second, request)
    comes = moved(first, request, num_more=1)
    second.scheduler.add(comes)
    assert not second.plan(now_s=0.0).items, "it leaves out the announced tail, which is not saved"
    assert not second.plan(now_s=0.0).items
    assert [(item.start, item.num_tokens) for item in second.plan(now_s=0.0).items] == [(34, 1)]
    second.finish()
    second.drain()
    assert [*comes.replayed_ids, *second.tokens_of("r")] == serve_alone(request, LENGTH)[0]
    assert second.pool.num_free == second.pool.num_blocks


def announced(second: PlannedRank, first: PlannedRank) -> Request:
    """Return a request that moves to the second rank after all its blocks are loaded there."""
    request = ask("r", prompt_of(33), max_tokens=9)
    first.scheduler.add(request)
    for _ in range(2):
        first.plan()
        first.finish()
    expect(second, request)
    comes = moved(first, request)
    second.scheduler.collect(0.0)
    assert second.pool.num_free == second.pool.num_blocks - 1, "the last block is kept for the request"
    assert second.scheduler.holds_blocks
    return comes


@pytest.mark.parametrize(
    "end", ["stays", "ends", "is overdue", "gives way", "has other tokens", "prefixes are forgotten"]
)
def test_a_loaded_tail_that_is_not_used_is_given_back(end: str) -> None:
    first = rank_of_host()
    second = rank_of_host(other=first)
    comes = announced(second, first)
    if end == "stays":
        second.scheduler.expect(Expected("r", None), 0.0)
    elif end == "ends":
        second.scheduler.add(comes)
        second.scheduler.abort("r")
    elif end == "is overdue":
        second.scheduler.collect(2 * MOST_LOAD_S)
    elif end == "gives way":
        other = ask("other", prompt_of(94), max_tokens=2)  # it needs all blocks
        second.scheduler.add(other)
        assert not second.plan().items
        second.drain()
        assert second.tokens_of("other") == serve_alone(other, LENGTH)[0]
    else:
        if end == "has other tokens":
            comes = replace(comes, prompt_ids=(*comes.prompt_ids[:-1], 2))
        else:
            second.scheduler.forget_prefixes(1)
        second.scheduler.add(replace(comes, num_awaited_tokens=0))
        second.drain()
        assert second.outputs["r"][0].num_cached_tokens == (32 if end == "has other tokens" else 0)
    assert second.pool.num_free == second.pool.num_blocks


@pytest.mark.parametrize("end", ["comes", "stays", "is overdue"])
def test_a_rank_announces_the_last_tokens_of_a_begun_request_that_another_rank_releases(end: str) -> None:
    first = rank_of_host()
    request = ask("r", prompt_of(33), max_tokens=5)
    tokens = (begin(first, request).token_ids[0],)
    second = rank_of_host(other=first)
    expect(second, ask("fresh", prompt_of(40)))
    assert second.scheduler.next_step.num_prefill == 0, "it is not known when its prompt ends"
    begun = replace(request, replayed_ids=tokens)
    expect(second, begun, now_s=1.0)
    assert not second.scheduler.has_work
    assert second.scheduler.next_step == (0, True, 2), "32 of 34 tokens are in whole blocks"
    if end == "comes":
        second.scheduler.add(begun)
        second.drain()
        assert [*tokens, *second.tokens_of("r")] == serve_alone(request, LENGTH)[0]
        assert second.outputs["r"][0].num_cached_tokens == 32
    elif end == "stays":
        second.scheduler.expect(Expected("r", None), 1.1)
    else:
        second.scheduler.collect(1.01 + MOST_COMING_S)
    assert second.scheduler.next_step == (0, False, 0)


def test_blocks_for_an_expected_request_are_given_back_if_another_one_needs_them() -> None:
    second = rank_of_host(num_blocks=24)
    expect(second, ask("r", prompt_of(48)))
    other = ask("other", prompt_of(60), max_tokens=3)
    second.scheduler.add(other)
    assert not second.plan().items, "12 blocks are free"
    assert second.plan().items
    second.finish()
    second.drain()
    assert second.tokens_of("other") == serve_alone(other, LENGTH)[0]
