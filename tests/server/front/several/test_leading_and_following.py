"""The state that the leading front publishes, and how another front follows it."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler.policy.request import FinishReason
from server.front.routing.loads import MoveCause
from server.front.several.board import Board, Cell
from server.front.several.followed_adapters import FollowedAdapters
from server.front.several.following import FollowingFront
from server.front.several.front_map import FENCE_S
from server.front.several.leading import LeadingFront, watch_fronts
from server.front.several.service_state import EngineOfRank, ServiceState, WeightLabel
from server.options.pools import Pool, Role
from tests.support.requests.desk import Desk

READY = ServiceState(
    sizes=(2, 2), serving=(EngineOfRank(0, 0), EngineOfRank(1, 0)), pools=(Pool("both", Role.BOTH, 0, 2),)
)
PREFILL, DECODE = Pool("prefill", Role.PREFILL, 0, 1), Pool("decode", Role.DECODE, 1, 1)


class Streams:
    """The attached ranks of a front."""

    def __init__(self) -> None:
        self.num_ranks, self.sizes = 2, (2, 2)
        self.attached: dict[int, Any] = {}
        self.dropped: list[int] = []
        self.on_drop: Any = None

    def attach(self, rank: int, num_restarts: int = 0) -> None:
        self.attached[rank] = SimpleNamespace(facts=facts(rank, num_restarts))

    def resize(self, num_ranks: int, next_num: int) -> None:
        self.num_ranks, self.sizes = num_ranks, (num_ranks, next_num)

    def give_up(self, rank: int, _reason: str) -> None:
        del self.attached[rank]
        self.dropped.append(rank)
        self.on_drop(rank)


def facts(rank: int, num_restarts: int = 0) -> Any:
    return SimpleNamespace(
        rank=rank, num_restarts=num_restarts, max_num_seqs=8, block_tokens=16, max_num_batched_tokens=64, host="h", kv_peer=None
    )  # fmt: skip


class Fronts:
    """A leading front and another one, with two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boards = [Board(folder / "board", number=each, num_fronts=2, num_ranks=2) for each in range(2)]
        for board in self.boards:
            board.begin()
        self.decided = READY
        self.leader, self.other = (Desk(shared=board) for board in self.boards)
        self.leading = self.lead()
        self.streams = Streams()
        self.levels: list[int] = []
        self.following = self.join()

    def join(self) -> FollowingFront:
        """Start the other front, or its replacement."""
        other, streams = self.other, self.streams
        self.adapters = FollowedAdapters(self.folder, self.boards[1], is_enabled=True)
        following = FollowingFront(
            self.boards[1], self.folder, ranks=streams, router=other.router, requests=other.requests,  # type: ignore[arg-type]
            moves=other.moves, adapters=self.adapters, on_level=self.levels.append, on_size=lambda _now, most: other.router.grow(most),
        )  # fmt: skip
        streams.on_drop = following.lose
        return following

    def lead(self) -> LeadingFront:
        return LeadingFront(self.leader.requests, self.boards[0], self.folder, lambda: self.decided)

    def serve(self) -> None:
        """Attach both ranks, and let the other front follow."""
        for rank in range(2):
            self.streams.attach(rank)
            self.following.attach(facts(rank))
        self.follow()

    def follow(self) -> None:
        self.leading.publish()
        self.following.look()

    def cut_off(self) -> None:
        """Let the other front look while its node does not hear of the leading one."""
        self.following._is_near = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Board, "leader_silent_s", FENCE_S + 1.0)
            self.following.look()

    def hear(self) -> None:
        """Let the other front look when its node hears of the leading one again."""
        self.boards[1].note_leader()
        self.following.look()


def test_a_front_accepts_requests_once_it_has_a_state_and_routes_them_once_it_has_a_link(
    tmp_path: Path,
) -> None:
    fronts = Fronts(tmp_path)
    assert fronts.following.why_not_ready() == "waiting for the front that leads the service"
    fronts.follow()
    assert fronts.following.why_not_ready() is None, "the service serves, so requests wait here for a rank"
    fronts.streams.attach(1)
    fronts.following.attach(facts(1))
    fronts.other.open("a")
    assert fronts.other.rank_of("a") == 1, "rank 0 has no link"
    fronts.decided = READY._replace(why_not_ready="it sleeps")
    fronts.follow()
    assert fronts.following.why_not_ready() == "it sleeps"


def test_the_service_waits_once_until_every_front_has_all_ranks(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    assert fronts.leading.why_not_ready() == "waiting for front 1"
    fronts.serve()
    assert fronts.leading.why_not_ready() is None
    fronts.boards[1].begin()  # a replacement
    assert fronts.leading.why_not_ready() is None


def test_requests_of_a_lost_rank_move_and_a_new_engine_gets_requests_when_it_serves(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    rank = fronts.other.rank_of("a")
    del fronts.streams.attached[rank]
    fronts.following.lose(rank)
    assert fronts.other.rank_of("a") == 1 - rank
    fronts.streams.attach(rank, num_restarts=1)
    fronts.following.attach(facts(rank, 1))
    assert not fronts.other.router.is_available(rank), "it has not met the others yet"
    fronts.decided = READY._replace(serving=(EngineOfRank(rank, 1), EngineOfRank(1 - rank, 0)))
    fronts.follow()
    assert fronts.other.router.is_available(rank)


def test_a_rank_that_the_leading_front_dropped_is_dropped_here_but_not_its_next_engine(
    tmp_path: Path,
) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.decided = READY._replace(serving=(EngineOfRank(1, 0),), given_up=(EngineOfRank(0, 0),))
    fronts.follow()
    assert fronts.streams.dropped == [0] and not fronts.other.router.is_available(0)
    fronts.streams.attach(0, num_restarts=1)
    fronts.following.attach(facts(0, 1))
    fronts.decided = fronts.decided._replace(draining=(1,))
    fronts.follow()
    assert fronts.streams.dropped == [0]


def test_a_rank_keeps_its_requests_while_it_meets_the_others_again(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    before = list(fronts.other.ranks.submitted)
    fronts.decided = READY._replace(serving=())
    fronts.follow()
    fronts.decided = READY
    fronts.follow()
    assert fronts.other.ranks.submitted == before


def test_drains_and_roles_are_followed(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    pools = (PREFILL._replace(role=Role.BOTH), DECODE)
    fronts.decided = READY._replace(draining=(0,), pools=pools)
    fronts.follow()
    router = fronts.other.router
    assert router.is_draining(0) and not router.is_draining(1)
    assert not router._runs_prompts[1] and router._runs_prompts[0]
    fronts.decided = READY
    fronts.follow()
    assert not router.is_draining(0) and router._runs_prompts[1]


def test_requests_of_a_pool_that_has_not_met_again_move_and_return_when_it_has(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    rank = fronts.other.rank_of("a")
    fronts.decided = READY._replace(serving=(READY.serving[1 - rank],))
    fronts.follow()
    assert fronts.other.rank_of("a") == rank, "its pool may meet again in time"
    fronts.decided = fronts.decided._replace(released=(rank,))
    fronts.follow()
    assert fronts.other.rank_of("a") == 1 - rank
    fronts.decided = READY
    fronts.follow()
    assert fronts.other.router.is_available(rank)


def test_pools_that_join_are_announced_and_followed(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    told: list[Any] = []

    def follow_pools(pools: Sequence[Pool], announced: Sequence[Pool]) -> None:
        told.append((pools, announced))
        fronts.other.router.grow(pools[-1].ranks.stop)

    fronts.following.on_pools = follow_pools
    more = Pool("more", Role.BOTH, 2, 2)
    fronts.decided = READY._replace(pools=(PREFILL, DECODE), announced=(more,))
    fronts.follow()
    fronts.decided = READY._replace(sizes=(4, 4), pools=(PREFILL, DECODE, more))
    fronts.follow()
    assert told == [((PREFILL, DECODE), (more,)), ((PREFILL, DECODE, more), ())]
    assert fronts.streams.sizes == (2, 2), "the pool brings its ranks"
    assert ServiceState.read(tmp_path) == fronts.decided


def test_ranks_that_a_resize_adds_get_requests_when_they_serve(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.decided = READY._replace(sizes=(2, 3))
    assert not fronts.leading.all_follow()
    fronts.follow()
    assert fronts.leading.all_follow() and fronts.streams.sizes == (2, 3), "rank 2 may attach"
    fronts.streams.attach(2, num_restarts=1)
    fronts.following.attach(facts(2, 1))
    assert not fronts.other.router.is_available(2), "it has not met the others yet"
    fronts.decided = READY._replace(sizes=(3, 3), serving=(*READY.serving, EngineOfRank(2, 1)))
    fronts.follow()
    fronts.other.open("a", "b", "c")
    assert fronts.other.rank_of("c") == 2


def test_a_rank_that_leaves_drains_until_it_ends_also_here(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.decided = READY._replace(draining=(1,))
    fronts.follow()
    fronts.decided = READY._replace(sizes=(2, 1), serving=READY.serving[:1])
    fronts.follow()
    fronts.other.open("a", "b")
    assert fronts.other.rank_of("a") == fronts.other.rank_of("b") == 0
    del fronts.streams.attached[1]
    fronts.following.lose(1)
    fronts.decided = fronts.decided._replace(sizes=(1, 1), pools=(READY.pools[0]._replace(num_ranks=1),))
    fronts.follow()
    assert fronts.streams.num_ranks == 1 and not fronts.other.router.is_available(1)


def test_a_resize_that_fails_gives_the_rank_its_requests_again(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    for decided in (READY._replace(draining=(1,)), READY._replace(sizes=(2, 1), draining=(1,)), READY):
        fronts.decided = decided
        fronts.follow()
    fronts.other.open("a", "b")
    assert {fronts.other.rank_of("a"), fronts.other.rank_of("b")} == {0, 1}


def test_a_front_that_starts_during_a_resize_accepts_new_ranks_at_once(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.decided = READY._replace(sizes=(2, 4))
    fronts.follow()
    fronts.boards[1].begin()
    fronts.other, fronts.streams = Desk(shared=fronts.boards[1]), Streams()
    fronts.following = fronts.join()
    assert fronts.streams.sizes == (2, 4) and fronts.other.router.num_ranks == 4


def test_the_service_sleeps_when_the_requests_of_every_front_are_gone(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a", "b")
    fronts.leader.open("c")
    assert fronts.leading.num_open == 3
    fronts.decided = READY._replace(why_not_ready="it sleeps", sleep_level=1)
    fronts.leading.abort_all()
    assert fronts.leading.num_open == 2 + 1, "the other front has not applied it yet, and counts as one more"
    fronts.following.look()
    assert fronts.leading.num_open == 0
    assert fronts.other.reasons() == [FinishReason.ABORT] * 2
    assert fronts.levels[-1] == 1


def test_kept_requests_of_every_front_leave_their_ranks_and_continue(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    fronts.decided = READY._replace(why_not_ready="it sleeps", sleep_level=1)
    fronts.leading.pause()
    assert fronts.leading.num_at_ranks == 2
    fronts.following.look()
    assert [each.request_id for each in fronts.other.ranks.withdrawals] == ["a"]
    assert fronts.leading.num_at_ranks == 1
    fronts.other.deliver("a", is_returned=True)
    assert fronts.leading.num_at_ranks == 0 and fronts.other.requests.num_parked == 1
    assert fronts.other.journal.num_moved[MoveCause.SLEEP] == 1
    fronts.decided = READY
    fronts.leading.resume()
    fronts.following.look()
    assert len(fronts.other.ranks.submitted) == 2 and fronts.other.requests.num_parked == 0


def test_prefixes_are_forgotten_everywhere(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    prompt = tuple(range(64))
    fronts.other.open("a", prompt_ids=prompt)
    assert fronts.other.router.held_tokens(prompt)
    fronts.leading.forget_prefixes()
    fronts.following.look()
    assert not fronts.other.router.held_tokens(prompt)


def test_a_replacement_of_the_leading_front_publishes_nothing_until_it_serves_again(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.leading.abort_all()
    fronts.following.look()
    fronts.boards[0].begin()
    fronts.leading = fronts.lead()
    fronts.decided = READY._replace(serving=(), why_not_ready="waiting for ranks 0, 1")
    fronts.follow()
    assert fronts.following.why_not_ready() is None
    fronts.other.open("a")
    fronts.decided = READY
    fronts.follow()
    assert fronts.other.requests.num_open == 1, "the abort before is not repeated"
    fronts.decided = READY._replace(why_not_ready="no rank is left")
    fronts.follow()
    assert fronts.following.why_not_ready() == "no rank is left"


def test_a_replacement_ends_a_pause_that_its_predecessor_did_not_finish(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.decided = READY._replace(why_not_ready="it sleeps", sleep_level=1)
    fronts.leading.pause()
    fronts.following.look()
    fronts.leading, fronts.decided = fronts.lead(), READY
    fronts.follow()
    assert fronts.other.router.has_ranks


def test_a_replaced_front_is_an_event_with_the_number_of_its_lost_choices(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    events: list[tuple[str, str]] = []
    look = watch_fronts(fronts.boards[0], lambda kind, text: events.append((kind, text)))
    look()
    for _ in range(3):
        fronts.boards[1].count_choice("", 1)
    fronts.boards[1].begin()
    fronts.boards[1].set(Cell.PID, os.getppid())  # another process
    look()
    look()
    assert events == [("front_back", "front 1 was killed with 3 open choices, and is back")]


def test_a_pause_holds_at_every_front_until_all_who_paused_resume(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    fronts.leading.pause(by="pause", withdraws=False)
    fronts.following.look()
    assert not fronts.other.ranks.withdrawals, "requests at ranks end there"
    fronts.other.open("b")
    assert fronts.other.requests.num_parked == 1, "later ones are kept"
    fronts.leading.pause(by="pause", withdraws=True)
    fronts.following.look()
    assert [each.request_id for each in fronts.other.ranks.withdrawals] == ["a"]
    fronts.other.deliver("a", is_returned=True)
    fronts.decided = READY._replace(sleep_level=1)
    fronts.leading.pause()
    fronts.following.look()
    fronts.leading.resume(by="pause")
    fronts.following.look()
    assert fronts.other.requests.num_parked == 2, "the service sleeps"
    fronts.decided = READY
    fronts.leading.resume()
    fronts.following.look()
    assert fronts.other.requests.num_parked == 0


def test_a_pause_that_waits_counts_requests_of_every_front_until_they_end(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.other.open("a")
    fronts.leading.pause(by="pause", withdraws=False)
    fronts.following.look()
    assert fronts.leading.num_at_ranks == 1
    for rank in (0, 1):
        del fronts.streams.attached[rank]
        fronts.following.lose(rank)
    assert fronts.other.requests.num_parked == fronts.leading.num_at_ranks == 1, (
        "it continues when a rank returns"
    )
    fronts.leading.pause(by="pause", withdraws=True)
    fronts.following.look()
    assert fronts.leading.num_at_ranks == 0, "it is kept now"
    fronts.leading.pause(by="pause", withdraws=False)
    fronts.following.look()
    assert fronts.leading.num_at_ranks == 0 and fronts.other.requests.num_parked == 1
    fronts.other.requests.abort_all()
    fronts.leading.resume(by="pause")
    fronts.following.look()
    assert fronts.leading.num_at_ranks == 0


def test_a_replacement_of_the_leading_front_ends_its_predecessor_s_pause(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.leading.pause(by="pause")
    fronts.following.look()
    assert not fronts.other.router.has_ranks
    fronts.leading = fronts.lead()
    fronts.follow()
    assert fronts.other.router.has_ranks


def test_a_front_that_was_cut_off_during_the_end_of_a_pause_does_not_stay_paused(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    fronts.leading.pause(by="pause")
    fronts.following.look()
    fronts.cut_off()
    assert "waiting for the front that leads" in (fronts.following.why_not_ready() or "")
    fronts.leading.resume(by="pause")
    fronts.hear()
    fronts.other.open("a")
    assert fronts.other.requests.num_parked == 0 and len(fronts.other.ranks.submitted) == 1


def test_a_front_that_was_cut_off_pauses_and_forgets_prefixes_afterwards(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.serve()
    forget: Any = Mock()
    fronts.other.requests.forget_prefixes = forget  # type: ignore[method-assign]
    fronts.cut_off()
    fronts.leading.pause(by="pause")
    fronts.leading.forget_prefixes()
    fronts.hear()
    fronts.other.open("a")
    assert fronts.other.requests.num_parked == 1
    forget.assert_called_once_with()


def test_labels_of_weights_are_known_at_every_front(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    assert fronts.following.label_of() == ""
    fronts.serve()
    fronts.decided = READY._replace(weights=2, labels=(WeightLabel(1, "old"), WeightLabel(2, "new")))
    assert not fronts.leading.all_follow()
    fronts.following.look()
    assert fronts.leading.all_follow()
    assert [fronts.following.label_of(number) for number in (None, 1, 2, 3)] == ["new", "old", "new", ""]
