"""The router alone: load, prefixes, ties, and that no load is ever left on a rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.front.routing.loads import EXPECTED_OUTPUT_TOKENS, STEP_PROMPT_TOKENS, MoveCause
from server.front.routing.prefixes import PREFIX_CHUNK_TOKENS
from server.front.routing.router import SESSION_ROOM_TOKENS, ReleasedRequest, Router
from server.front.routing.routers import RoundRobin

LONG = list(range(10 * PREFIX_CHUNK_TOKENS))


def test_the_rank_with_the_fewest_outstanding_tokens_is_picked() -> None:
    router = Router(3)
    router.admit("a", 0, [1] * 100, 10)
    router.admit("b", 1, [1] * 50, 10)
    assert router.pick([2]) == 2
    router.admit("c", 2, [1] * 500, 10)
    assert router.pick([2]) == 1


def test_a_rank_that_left_is_not_picked_and_what_it_held_is_forgotten() -> None:
    router = Router(2)
    router.admit("a", 1, LONG, 1)
    router.retire("a")
    assert router.pick(LONG) == 1
    router.leave(1)
    assert router.pick(LONG) == 0
    router.leave(0)
    assert not router.has_ranks
    router.enter(1)
    router.enter(0)
    assert router.pick(LONG) == 0, "no rank has the prefix any more"


def test_forgotten_prefixes_decide_no_more() -> None:
    router = Router(2)
    router.admit("a", 1, LONG, 1)
    router.retire("a")
    assert router.pick(LONG) == 1
    router.forget_prefixes()
    assert router.pick(LONG) == 0


def test_a_paused_router_picks_no_rank_and_gives_all_requests_back() -> None:
    router = Router(2)
    router.admit("begun", 0, [1] * 50, 10)
    router.begin("begun")
    router.admit("waits", 1, [1] * 50, 10)
    router.is_paused = True
    assert not router.has_ranks
    assert router.plan_pause() == {"begun": 0, "waits": 1}
    assert router.plan_drains() == {} == router.plan_moves(lambda _name: [])
    for name in ("begun", "waits"):
        assert router.take_back(name, [1] * 50) == ReleasedRequest(MoveCause.SLEEP)
    router.is_paused = False
    assert router.has_ranks and router.outstanding_tokens == (0, 0)


def test_a_session_stays_at_its_rank_until_that_has_much_more_to_do_or_is_lost() -> None:
    router = Router(2)
    router.admit("a", 1, [1] * 100, 10, "s")
    assert (router.pick([2], "s"), router.pick([2], "t"), router.pick([2])) == (1, 0, 0)
    router.admit("b", 1, [3] * SESSION_ROOM_TOKENS, 10)
    assert router.pick([2], "s") == 0
    router.admit("c", 0, [4] * 200, 10)
    assert router.pick([2], "s") == 1, "rank 1 no longer has much more to do"
    router.retire("b")
    router.leave(1)
    assert router.pick([2], "s") == 0
    router.admit("d", 0, [2], 10, "s")
    router.enter(1)
    assert router.pick([2], "s") == 0, "the session's last request went there"


def test_a_bounded_number_of_sessions_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.routing.router.MAX_SESSIONS", 2)
    router = Router(2)
    router.admit("load", 0, [1] * 50, 1)
    for session in "abac":
        router.admit(session + str(len(router._loads)), 0, [1], 1, session)
    assert list(router._sessions) == ["a", "c"]


def test_equal_load_is_spread_over_the_ranks() -> None:
    router = Router(4)
    picked = []
    for number in range(8):
        rank = router.pick([number])
        router.admit(str(number), rank, [number], 5)
        router.progress(str(number), 5)
        router.retire(str(number))
        picked.append(rank)
    assert sorted(picked) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_round_robin_takes_one_rank_after_the_other_of_those_that_are_there_and_moves_nothing() -> None:
    router = RoundRobin(3)
    router.admit("busy", 0, list(range(900)), 100)
    assert [router.pick([1]) for _ in range(4)] == [0, 1, 2, 0]
    router.leave(1)
    assert [router.pick([1]) for _ in range(4)] == [2, 0, 2, 0]
    assert router.plan_moves({}.__getitem__) == {}


def test_with_equal_load_the_longest_known_prefix_decides() -> None:
    router = Router(2)
    router.admit("a", 1, LONG, 1)
    router.retire("a")
    router.admit("b", 0, LONG[: 2 * PREFIX_CHUNK_TOKENS], 1)
    router.retire("b")
    assert router.pick([*LONG, 5, 6]) == 1
    assert router.pick([9, *LONG]) in (0, 1), "the same tokens at another position are no prefix"


def test_a_prefix_is_worth_a_queue_as_long_as_itself_and_no_longer() -> None:
    router = Router(2)
    router.admit("a", 0, LONG, 1)
    router.retire("a")
    router.admit("short queue", 0, [7] * (len(LONG) - 10), 1)
    assert router.pick(LONG) == 0
    router.admit("longer", 0, [7] * 20, 1)
    assert router.pick(LONG) == 1


def test_a_wait_for_a_seat_costs_as_many_tokens_as_run_until_enough_requests_have_ended() -> None:
    router, until_one_ends = Router(2), EXPECTED_OUTPUT_TOKENS // 2 * STEP_PROMPT_TOKENS
    for rank in (0, 1):
        router.note_size(rank, seats=2, block_tokens=16)
    for name in "ab":
        router.admit(name, 0, [ord(name)] * 10, 1)
    router.admit("long", 1, [1] * (22 + until_one_ends - 1), 0)
    assert router.pick([2]) == 1, "rank 1 has more tokens to run, but a free seat"
    router.admit("longer", 0, [2] * 300, 0)
    router.admit("another", 1, [3] * 300, 0)
    assert router.pick([2]) == 1, "one must end on rank 1, and two on rank 0"
    router.retire("a")
    assert router.pick([2]) == 0, "one must end on each"


def test_a_session_leaves_a_rank_where_it_would_wait_long_for_a_seat() -> None:
    router = Router(2)
    router.note_size(1, seats=2, block_tokens=16)
    for name in "ab":
        router.admit(name, 1, [1], 1, "s")
    assert router.pick([2], "s") == 1
    router.admit("c", 1, [1], 1, "s")
    assert router.pick([2], "s") == 0


def test_a_default_max_tokens_does_not_look_like_work() -> None:
    router = Router(1)
    router.admit("a", 0, [1], 100_000)
    assert router.outstanding_tokens == (1 + EXPECTED_OUTPUT_TOKENS,)


def test_the_first_token_takes_the_prompt_off_the_rank() -> None:
    router = Router(1)
    router.admit("a", 0, [1] * 100, 10)
    router.progress("a", 1)
    assert router.outstanding_tokens == (9,)


def test_progress_and_retirement_of_unknown_requests_change_nothing() -> None:
    router = Router(1)
    router.progress("x", 3)
    router.retire("x")
    assert router.outstanding_tokens == (0,)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 600), st.lists(st.integers(0, 50), max_size=20)),
        max_size=30,
    )
)
def test_after_every_request_retired_nothing_is_outstanding(
    requests: list[tuple[int, int, list[int]]],
) -> None:
    router = Router(3)
    for number, (num_prompt, max_tokens, steps) in enumerate(requests):
        rank = router.pick([number] * num_prompt)
        assert router.outstanding_tokens[rank] == min(router.outstanding_tokens), "no prefix is shared here"
        router.admit(str(number), rank, [number] * num_prompt, max_tokens)
        for step in steps:
            router.progress(str(number), step)
            assert min(router.outstanding_tokens) >= 0
    for number in range(len(requests)):
        router.retire(str(number))
    assert router.outstanding_tokens == (0, 0, 0)


@pytest.mark.parametrize("kind", [Router, RoundRobin])
def test_a_rank_that_was_added_gets_requests_once_it_has_entered(kind: type[Router]) -> None:
    router = kind(2)
    router.admit("a", router.pick([1]), [1] * 100, 10)
    router.admit("b", router.pick([1]), [1] * 100, 10)
    router.grow(4)
    router.grow(3)
    assert router.num_ranks == 4 and router.outstanding_tokens[2:] == (0, 0)
    assert router.pick([1]) in (0, 1)
    router.enter(3)
    assert router.pick([1]) == 3
    router.note_size(3, seats=1, block_tokens=16)
    router.admit("c", 3, [1] * 100, 10)
    for name in ("a", "b", "c"):
        router.retire(name)
    assert router.outstanding_tokens == (0, 0, 0, 0)
