"""The block pool: counts, sharing, eviction order, and a random walk against a model of plain sets."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks import BlockPool, OutOfBlocks
from kvcache.prefix import PrefixIndex

SECRET = bytes(range(16))


def fill(pool: BlockPool, token_ids: list[int], *, reuse: bool = True) -> list[int]:
    """Hold and publish blocks for whole-block tokens, as a sequence does.

    reuse: Share blocks that the pool has. False simulates two sequences that compute the same prefix in parallel.
    """
    size = pool.block_tokens
    table = pool.match(token_ids) if reuse else []
    pool.share(table)
    num_cached = len(table)
    table += pool.acquire(len(token_ids) // size - num_cached)
    for index in range(num_cached, len(table)):
        pool.publish(
            table[index], token_ids[index * size : (index + 1) * size], table[index - 1] if index else None
        )
    return table


def test_acquire_is_all_or_nothing_and_says_what_was_wanted() -> None:
    pool = BlockPool(3, 4)
    pool.acquire(1)
    with pytest.raises(OutOfBlocks, match="3 KV blocks wanted, 2 of 3 free") as caught:
        pool.acquire(3)
    assert (caught.value.wanted, caught.value.free, pool.num_free) == (3, 2, 2)


@pytest.mark.parametrize(("num_blocks", "block_tokens"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        BlockPool(num_blocks, block_tokens)


def test_releasing_twice_and_sharing_unpublished_blocks_are_caught() -> None:
    pool = BlockPool(2, 2)
    table = pool.acquire(1)
    with pytest.raises(AssertionError, match="never published"):
        pool.share(table)
    pool.release(table)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.release(table)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.publish(table[0], [1, 2], None)


def test_freed_prefixes_are_not_found_and_keep_their_keys() -> None:
    pool = BlockPool(6, 2, secret=SECRET)
    free, held = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6])
    keys = pool.keys_of([1, 2, 3, 4])
    pool.release(free)
    assert pool.num_cached == 2
    pool.free_cached()
    assert (pool.num_cached, pool.num_free) == (0, 5)
    assert pool.match([1, 2, 3, 4]) == [] and pool.match([5, 6]) == held
    again = fill(pool, [1, 2, 3, 4])
    assert [pool.key_of(block_id) for block_id in again] == keys == pool.keys_of([1, 2, 3, 4])


def test_match_stops_at_the_first_difference_and_ignores_a_partial_block() -> None:
    pool = BlockPool(8, 2)
    table = fill(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match([1, 2, 3, 4, 9, 9]) == table[:2]
    assert pool.match([1, 2, 3, 4, 5]) == table[:2]
    assert pool.match([3, 4]) == []  # the same tokens at another position
    assert pool.match([1]) == pool.match([]) == []


def test_eviction_takes_forgotten_blocks_first_then_the_least_recently_used_prefix() -> None:
    pool = BlockPool(4, 1)
    first, second, third = (fill(pool, [token]) for token in (1, 2, 3))
    for table in (second, first, third):
        pool.release(table)
    pool.share(first)  # used again: now the most recent
    pool.release(first)
    assert pool.acquire(1)[0] not in first + second + third
    assert pool.acquire(3) == second + third + first
    assert pool.match([1]) == pool.match([2]) == pool.match([3]) == []


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(3, 1)
    table = fill(pool, [1, 2, 3])
    pool.release(table)
    assert pool.acquire(1) == [table[2]]
    assert pool.match([1, 2, 3]) == table[:2]
    assert pool.acquire(1) == [table[1]]
    assert pool.match([1, 2, 3]) == table[:1]


def test_a_prefix_computed_twice_stays_cached_once_whoever_leaves_first() -> None:
    for first_to_leave in (0, 1):
        pool = BlockPool(4, 1)
        tables = [fill(pool, [1, 2], reuse=False) for _ in range(2)]
        pool.release(tables[first_to_leave])
        assert pool.num_cached == 0, "copies of held blocks must not stay cached"
        assert pool.match([1, 2]) == tables[1 - first_to_leave]
        pool.release(tables[1 - first_to_leave])
        assert (pool.num_cached, pool.num_free) == (2, 4)
        assert pool.match([1, 2]) == tables[1 - first_to_leave]


def test_a_prefix_computed_again_replaces_its_cached_copy() -> None:
    pool = BlockPool(4, 1)
    old = fill(pool, [1])
    pool.release(old)
    new = fill(pool, [1], reuse=False)
    assert (pool.match([1]), pool.num_cached, pool.num_free) == (new, 0, 3)
    table = fill(pool, [1, 2])
    pool.release(table)
    pool.release(new)
    assert pool.acquire(4)[-2:] == [table[1], new[0]], "the child must be evicted before its parent"


def test_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "_key", lambda self, parent_key, packed_ids: bytes(16))
    pool = BlockPool(2, 2)
    table = fill(pool, [1, 2])
    assert pool.match([1, 2]) == table
    assert pool.match([1, 3]) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(4, 12))
def test_random_tables_never_overlap_and_parents_outlive_children(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 1, secret=SECRET)
    tables: list[tuple[list[int], list[int]]] = []
    for _ in range(80):
        if rng.random() < 0.55:
            token_ids = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
            if len(token_ids) <= pool.num_free:
                tables.append((fill(pool, token_ids, reuse=rng.random() < 0.6), token_ids))
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables)))[0])
        held = [block_id for table, _ in tables for block_id in table]
        assert pool.num_free == num_blocks - len(set(held))
        assert all(pool.num_holders(block_id) == held.count(block_id) for block_id in range(num_blocks))
        for _, token_ids in tables:
            assert len(pool.match(token_ids)) == len(token_ids), "held blocks must stay findable"
        findable = sum(pool.is_published(block_id) for block_id in range(num_blocks))
        assert findable == pool.num_cached + len(set(held))
        reachable = {
            block_id
            for bits in range(16)
            for block_id in pool.match([bits >> shift & 1 for shift in range(4)])
        }
        cached = {b for b in range(num_blocks) if pool.is_published(b) and not pool.num_holders(b)}
        assert cached <= reachable, "an evicted parent left a child that no prompt can find"
    for table, _ in tables:
        pool.release(table)
    assert pool.num_free == num_blocks


def test_what_is_forgotten_is_found_by_nobody_and_stays_with_its_holders() -> None:
    pool = BlockPool(6, 2, secret=SECRET)
    held, cached = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6])
    pool.release(cached)
    pool.forget_prefixes()
    assert pool.num_cached == 0 and pool.num_free == 4
    assert pool.match([1, 2, 3, 4]) == pool.match([5, 6]) == []
    assert pool.count_held([1, 2, 3, 4], 4, []) == 0
    held += pool.acquire(1)
    pool.publish(held[2], [7, 8], held[1])
    assert pool.match([1, 2, 3, 4, 7, 8]) == [], "blocks must not be found without their parent"
    again = fill(pool, [1, 2, 3, 4])
    assert not set(again) & set(held)
    pool.release(held)
    assert pool.match([1, 2, 3, 4]) == again, "blocks computed since then must be found"
    pool.release(again)
    assert pool.num_free == 6
    assert len(pool.acquire(6)) == 6, "unreachable blocks must be reused"


def test_a_hundred_thousand_blocks_cost_what_is_touched() -> None:
    pool = BlockPool(100_000, 16)
    started_s = time.perf_counter()
    tables = [fill(pool, [table_id] * 16 * 100) for table_id in range(1000)]
    for table in tables:
        pool.release(table)
    assert pool.num_free == pool.num_cached == 100_000
    pool.release(pool.acquire(100_000))  # evicts every prefix
    assert pool.num_free == 100_000 and pool.num_cached == 0
    assert time.perf_counter() - started_s < 10  # about 1 s; quadratic behaviour would take minutes
