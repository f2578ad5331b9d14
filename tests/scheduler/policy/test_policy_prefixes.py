"""The local scheduler and the prefix cache: what is found is not computed again."""

from tests.support.policy_cases import rank_of, request_of, step


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
