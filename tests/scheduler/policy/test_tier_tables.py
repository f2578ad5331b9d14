"""How a scheduler uses its tiers: what waits for a load, for how long, and what is counted."""

from dataclasses import replace
from typing import Any

import pytest

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from kvcache.tiers.jobs import MOST_LOAD_S, LoadJob
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.tier_tables import LOOK_AGAIN_S, MOST_LONG_LOAD_S
from tests.support.engines.fake_tiers import FakeTiers
from tests.support.models.fake_model import PlannedRank, serve_alone

LENGTH = 64


def rank_with_tiers(
    *, num_blocks: int = 12, max_num_seqs: int = 4, states: int = 0, overlaps: bool = False
) -> PlannedRank:
    pool = BlockPool(num_blocks, 4)
    slots = StatePool(states) if states else None
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        max_model_len=num_blocks * 4,
        states=slots,
        overlaps=overlaps,
    )
    rank = PlannedRank(pool, scheduler, 32, slots)
    rank.tiers = FakeTiers(rank, seed=1, loss=0.0)
    rank.tiers.chance = 1.0
    scheduler.use_tiers(rank.tiers)
    return rank


def ask(name: str, tokens: list[int], max_tokens: int = 2, **more: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_ids=tuple(tokens), params=params, arrival_s=0.0)


def serve(rank: PlannedRank, *requests: Request) -> None:
    """Serve requests to their ends, with tiers that do their jobs at once."""
    for request in requests:
        rank.scheduler.add(request)
    rank.drain()
    for request in requests:
        assert rank.tokens_of(request.request_id) == serve_alone(request, LENGTH)[0]


PREFIX = [1, 2, 3, 4, 5, 6] * 4  # six blocks
OTHER = [6, 0, 1, 0, 2, 0, 3, 0] * 5


@pytest.mark.parametrize("states", [0, 8])
def test_an_evicted_prefix_is_loaded_and_counted_as_cached(states: int) -> None:
    rank = rank_with_tiers(states=states)
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    serve(rank, ask("again", [*PREFIX, 3]))
    assert rank.tiers.num_loads > 0
    (output, *_) = rank.outputs["again"]
    assert output.num_cached_tokens == output.num_host_tokens == len(PREFIX)
    assert rank.tiers.figures.host_hit_tokens == len(PREFIX)


def test_others_pass_a_request_whose_prefix_loads() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(ask("loads", [*PREFIX, 3]))
    rank.scheduler.add(ask("passes", [0, 0, 1]))
    batch = rank.plan()
    assert [item.sequence.request.request_id for item in batch.items] == ["passes"]
    assert rank.scheduler.stats.num_waiting == 1
    rank.finish()
    rank.tiers.chance = 1.0
    assert [item.sequence.request.request_id for item in rank.plan().items] == ["passes", "loads"]


def moved(name: str, tokens: list[int]) -> Request:
    """Return a request with `tokens`, the last two of which it generated on another rank."""
    return replace(ask(name, tokens[:-2], max_tokens=9), replayed_ids=tuple(tokens[-2:]))


def rank_that_lost_its_memory(*prefixes: list[int], **settings: Any) -> PlannedRank:
    """Return a rank that has prefixes in its tiers only, and does not load anything yet."""
    rank = rank_with_tiers(num_blocks=40, **settings)
    for number, prefix in enumerate(prefixes):
        serve(rank, ask(f"first {number}", [*prefix, 0]))
    rank.scheduler.free_cached()
    rank.lose_memory()
    rank.tiers.is_prompt, rank.tiers.chance, rank.tiers.num_loads = False, 0.0, 0
    return rank


def test_a_rank_announces_the_last_tokens_of_moved_requests_while_they_load() -> None:
    rank = rank_that_lost_its_memory(PREFIX)
    rank.scheduler.add(ask("fresh", [*PREFIX, 3]))
    assert not rank.plan().items
    assert rank.scheduler.next_step == (0, False, 0), "a fresh request may wait for a step"
    rank.scheduler.add(moved("moved", [*PREFIX, 3, 5, 1]))
    assert not rank.plan().items
    assert rank.scheduler.next_step == (0, True, 3)
    rank.scheduler.abort("fresh")
    rank.tiers.chance = 1.0
    assert [(item.start, item.num_tokens) for item in rank.plan().items] == [(len(PREFIX), 3)]


def test_moved_requests_load_together_although_a_step_has_room_for_one() -> None:
    prefixes = [PREFIX[at:] + PREFIX[:at] for at in range(3)]
    rank = rank_that_lost_its_memory(*prefixes)
    for number, prefix in enumerate(prefixes):
        rank.scheduler.add(moved(f"moved {number}", [*prefix, 3, 5, 1]))
    rank.scheduler.schedule(prefill_budget=0)
    assert rank.tiers.num_loads == len(prefixes)


def rank_that_loads() -> tuple[PlannedRank, LoadJob]:
    """Return a rank that began to load three blocks for its only request at 10 s. They come when a test wants it."""
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(ask("loads", [*PREFIX[:12], 3]))
    assert not rank.plan(now_s=10.0).items
    [load] = rank.tiers._loads
    return rank, load


def test_a_load_that_hangs_is_given_up_and_its_blocks_come_back_later() -> None:
    rank, load = rank_that_loads()
    rank.tiers.hangs = True
    assert not rank.plan(now_s=9.7 + MOST_LOAD_S).items and not load.should_stop
    assert not rank.plan(now_s=9.8 + MOST_LOAD_S).items and load.should_stop
    num_free = rank.pool.num_free
    batch = rank.plan(now_s=10.1 + MOST_LOAD_S)
    assert [item.start for item in batch.items] == [0], "it computes its prompt"
    rank.finish()
    assert rank.pool.num_free < num_free
    rank.tiers.hangs = False
    rank.drain()  # checks that all blocks are free in the end


def test_a_long_load_goes_on_while_it_gets_blocks_and_is_faster_than_computing() -> None:
    rank, load = rank_that_loads()
    rank.tiers.prompt_token_s = 1.0  # 4 s for a block
    now_s = 9.8 + MOST_LOAD_S
    for num_loaded in (1, 2):
        rank.tiers.fill(1)
        assert not rank.plan(now_s=now_s).items and not load.should_stop
        assert load.num_loaded == num_loaded
        now_s += 1.1 * LOOK_AGAIN_S
    assert not rank.plan(now_s=now_s).items and load.should_stop, "no block has come since"
    assert [(item.start, item.num_tokens) for item in rank.plan(now_s=now_s).items] == [(8, 5)]
    rank.finish()
    rank.drain()
    (output, *_) = rank.outputs["loads"]
    assert output.num_cached_tokens == output.num_host_tokens == 8
    assert rank.tiers.num_loads == 1, "the rest is not loaded"


@pytest.mark.parametrize("token_s", [0.25, 0.0], ids=["fast", "unknown"])
def test_a_long_load_that_is_slower_than_computing_stops_and_its_blocks_are_used(token_s: float) -> None:
    rank, load = rank_that_loads()
    rank.tiers.prompt_token_s = token_s  # at most 1 s for a block
    rank.tiers.fill(1)
    assert not rank.plan(now_s=9.8 + MOST_LOAD_S).items and load.should_stop, "2.3 s for a block"
    assert [item.start for item in rank.plan(now_s=9.8 + MOST_LOAD_S).items] == [4]
    rank.finish()
    rank.drain()


def test_no_load_lasts_longer_than_its_bound() -> None:
    rank, load = rank_that_loads()
    rank.tiers.prompt_token_s = 100.0
    rank.tiers.fill(1)
    assert not rank.plan(now_s=10.0 + MOST_LONG_LOAD_S).items and not load.should_stop
    rank.tiers.fill(1)
    assert not rank.plan(now_s=10.1 + MOST_LONG_LOAD_S + LOOK_AGAIN_S).items and load.should_stop
    rank.drain()


def test_a_long_load_of_forgotten_prefixes_stops() -> None:
    rank, load = rank_that_loads()
    rank.tiers.prompt_token_s = 100.0
    rank.tiers.fill(1)
    rank.scheduler.forget_prefixes(5)
    rank.plan(now_s=9.8 + MOST_LOAD_S)
    assert load.should_stop
    rank.drain()


def test_blocks_without_their_state_are_of_no_use_so_a_long_load_is_compared_with_all_of_them() -> None:
    rank = rank_with_tiers(states=8)
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(ask("loads", [*PREFIX, 3]))
    assert not rank.plan(now_s=10.0).items
    [load] = rank.tiers._loads
    num_blocks = len(load.keys)
    rank.tiers.fill(num_blocks - 1)
    # One block is computed sooner than it is loaded, but all of them are not.
    rank.tiers.prompt_token_s = 2 * 2.3 / (num_blocks - 1) / (4 * num_blocks)
    assert not rank.plan(now_s=9.8 + MOST_LOAD_S).items and not load.should_stop
    assert not rank.plan(now_s=9.9 + MOST_LOAD_S + LOOK_AGAIN_S).items and load.should_stop
    rank.drain()
    (output, *_) = rank.outputs["loads"]
    assert output.num_cached_tokens == output.num_host_tokens == 0
    assert rank.tiers.figures.host_hit_tokens == 0


@pytest.mark.parametrize("states", [3, 4, 5])
def test_no_load_writes_a_state_that_a_step_in_flight_reads(states: int) -> None:
    """A thread loads while the device runs the step. The next step of the sequence that reads the state is planned already."""
    first, second = [PREFIX[at:] + PREFIX[:at] for at in range(2)]
    rank = rank_that_lost_its_memory(first, second, states=states, overlaps=True)
    runs, waits = ask("runs", [*first, 3], max_tokens=8), ask("waits", [*second, 3], max_tokens=3)
    rank.scheduler.add(runs)
    rank.plan()
    rank.tiers.chance = 1.0
    assert rank.plan().items, "its prefix is loaded"
    rank.tiers.chance = 0.0
    rank.scheduler.add(waits)
    for _ in range(3):
        assert rank.plan().items
        read = {
            piece.read for launched in rank.launched for item in launched.batch.items for piece in item.pieces
        }
        assert read.isdisjoint(load.slot for load in rank.tiers._loads)
        rank.finish()
    assert len(rank.tiers._loads) == (states > 3), "of three slots, only the one that is read is left over"
    rank.tiers.chance = 1.0
    rank.drain()
    for request in (runs, waits):
        assert rank.tokens_of(request.request_id) == serve_alone(request, LENGTH)[0]
    assert rank.outputs["waits"][0].num_cached_tokens == (len(PREFIX) if states > 3 else 0)


def test_prefixes_forgotten_during_a_load_are_not_used() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(ask("loads", [*PREFIX, 3]))
    assert not rank.plan().items
    rank.scheduler.forget_prefixes(5)
    rank.tiers.chance = 1.0
    assert [item.start for item in rank.plan().items] == [0]


def test_an_aborted_request_leaves_what_was_loaded_to_the_next() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(ask("leaves", [*PREFIX, 3]))
    assert not rank.plan().items
    rank.tiers.fill(2)
    assert rank.scheduler.abort("leaves") is not None
    rank.scheduler.collect(0.0)
    [*matched] = rank.pool.match(PREFIX)
    assert not rank.scheduler.holds_blocks and len(matched) >= 2
    rank.tiers.chance = 1.0
    serve(rank, ask("next", [*PREFIX, 2]))
    assert rank.outputs["next"][0].num_cached_tokens == len(PREFIX)


@pytest.mark.parametrize("end", ["aborted", "withdrawn"])
def test_loads_of_a_request_that_ends_stop_also_behind_another_one(end: str) -> None:
    """The thread that loads may be busy for long. What it has not begun comes back at once."""
    first, second = [PREFIX[at:] + PREFIX[:at] for at in range(2)]
    rank = rank_that_lost_its_memory(first, second)
    rank.tiers.hangs = True
    for name, prefix in (("begun", first), ("behind", second)):
        rank.scheduler.add(ask(name, [*prefix, 3]))
        assert not rank.plan(now_s=10.0).items
    loads = list(rank.tiers._loads)
    assert len(loads) == 2 and rank.pool.num_free == 40 - 12
    for name in ("begun", "behind"):
        if end == "aborted":
            rank.scheduler.abort(name)
        else:
            rank.scheduler.withdraw(name)
    assert all(load.should_stop for load in loads)
    rank.scheduler.collect(10.0)
    assert rank.tiers._loads == loads[:1] and rank.pool.num_free == 40 - 6
    rank.tiers.hangs = False
    rank.scheduler.collect(10.0)
    assert rank.pool.num_free == 40 and not rank.scheduler.holds_blocks


def test_saves_hold_at_most_a_fourth_of_the_blocks_and_the_rest_is_counted() -> None:
    rank = rank_with_tiers()
    rank.tiers.chance = 0.0
    rank.scheduler.add(ask("one", [*PREFIX, 0], max_tokens=1))
    rank.plan()
    rank.finish()
    assert rank.tiers.num_open == 3
    assert rank.tiers.figures.num_dropped == 3


@pytest.mark.parametrize("states", [0, 8])
def test_a_rank_that_loses_its_memory_loads_its_prefixes_from_tiers(states: int) -> None:
    rank = rank_with_tiers(states=states)
    serve(rank, ask("first", [*PREFIX, 0]))
    assert not rank.scheduler.holds_blocks
    rank.scheduler.free_cached()
    rank.lose_memory()
    assert (rank.pool.num_cached, rank.pool.num_free) == (0, 12)
    serve(rank, ask("again", [*PREFIX, 3]))
    (output, *_) = rank.outputs["again"]
    assert output.num_cached_tokens == output.num_host_tokens == len(PREFIX)


def test_blocks_that_a_tier_still_copies_are_not_released() -> None:
    rank = rank_with_tiers()
    rank.tiers.chance = 0.0
    rank.scheduler.add(ask("one", [*PREFIX, 0], max_tokens=1))
    rank.plan()
    rank.finish()
    assert not rank.scheduler.has_work and rank.scheduler.holds_blocks
    with pytest.raises(AssertionError, match="a request or a tier uses a block"):
        rank.scheduler.free_cached()
    rank.tiers.chance = 1.0
    rank.scheduler.collect(0.0)
    assert not rank.scheduler.holds_blocks
    rank.scheduler.free_cached()


def test_prompt_logprobs_load_nothing() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    num_loads = rank.tiers.num_loads
    rank.scheduler.add(ask("scored", [*PREFIX, 0], num_prompt_logprobs=0))
    rank.drain()
    assert rank.tiers.num_loads == num_loads


def at_peer(request: Request) -> Request:
    return replace(request, prefix_at="peer:1")


@pytest.mark.parametrize("states", [0, 8])
def test_a_prefix_of_another_node_is_fetched_before_the_request_starts_and_counted(states: int) -> None:
    rank = rank_with_tiers(states=states)
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.lose_all()
    serve(rank, at_peer(ask("again", [*PREFIX, 3])))
    assert rank.tiers.num_fetches == 1
    (output, *_) = rank.outputs["again"]
    assert (output.num_cached_tokens, output.num_peer_tokens, output.num_host_tokens) == (
        len(PREFIX),
        len(PREFIX),
        0,
    )
    assert (rank.tiers.figures.peer_hit_tokens, rank.tiers.figures.host_hit_tokens) == (len(PREFIX), 0)


def test_others_pass_a_request_that_is_fetched_and_it_waits_for_a_limited_time() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    rank.tiers.lose_all()
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(at_peer(ask("fetches", [*PREFIX, 3])))
    rank.scheduler.add(ask("passes", [0, 0, 1]))
    assert [item.sequence.request.request_id for item in rank.plan(now_s=10.0).items] == ["passes"]
    rank.finish()
    assert [item.sequence.request.request_id for item in rank.plan(now_s=10.0 + MOST_LOAD_S).items] == [
        "passes"
    ]
    rank.finish()
    [fetch] = rank.tiers._fetches
    batch = rank.plan(now_s=10.1 + MOST_LOAD_S)
    assert [(item.sequence.request.request_id, item.start) for item in batch.items] == [("fetches", 0)]
    assert fetch.is_unwanted
    rank.finish()
    rank.drain()


def test_an_aborted_request_ends_its_fetch_and_what_is_cached_is_not_fetched() -> None:
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]), at_peer(ask("cached", [*PREFIX, 1])))
    num_fetches = rank.tiers.num_fetches
    serve(rank, at_peer(ask("still cached", [*PREFIX, 2])))
    assert rank.tiers.num_fetches == num_fetches
    rank.tiers.is_prompt, rank.tiers.chance = False, 0.0
    rank.scheduler.add(at_peer(ask("leaves", OTHER)))
    rank.plan()
    [fetch] = rank.tiers._fetches
    rank.scheduler.abort("leaves")
    rank.plan()
    assert fetch.is_unwanted
    rank.tiers.chance = 1.0
    rank.drain()


def test_a_rank_without_peers_or_tiers_fetches_nothing() -> None:
    rank = rank_with_tiers()
    rank.tiers.has_peers = False
    serve(rank, at_peer(ask("one", [*PREFIX, 0])))
    assert rank.tiers.num_fetches == 0
    pool = BlockPool(12, 4)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48)
    serve(PlannedRank(pool, scheduler, 32), at_peer(ask("one", [*PREFIX, 0])))


def test_a_wrong_fake_is_noticed() -> None:
    """The fake's memory distinguishes blocks: a load that fills blocks wrongly fails the next read."""
    rank = rank_with_tiers()
    serve(rank, ask("first", [*PREFIX, 0]))
    serve(rank, ask("evicts", OTHER), ask("evicts more", OTHER[::-1]))
    fill = rank.tiers._fill

    def fill_wrongly(load: LoadJob) -> LoadJob:
        filled: LoadJob = fill(load)
        rank.put_row(load.block_ids[0], 0, (0, 6), is_long=False)
        return filled

    rank.tiers._fill = fill_wrongly
    with pytest.raises(AssertionError, match="a sequence read rows of another"):
        serve(rank, ask("again", [*PREFIX, 3]))
