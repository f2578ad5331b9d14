"""The counts that fronts share: what one writes, all read, and a killed front's row is cleared by its replacement."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.policy.request import FinishReason
from server.front.errors import ApiError
from server.front.generations import Asker
from server.front.routing.prefixes import PREFIX_CHUNK_TOKENS
from server.front.several.board import Board, Cell
from server.http.wire.connections import ConnectionBound
from tests.server.http.wire.test_connections import entered
from tests.support.requests.desk import Desk


def boards(folder: Path, num_fronts: int = 2) -> list[Board]:
    made = [
        Board(folder / "board", number=each, num_fronts=num_fronts, num_ranks=3) for each in range(num_fronts)
    ]
    for board in made:
        board.begin()
    return made


def test_every_front_sees_the_sum_of_all_rows(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    first.own_loads(3).outstanding[1] += 5
    second.own_loads(3).outstanding[1] += 7
    second.own_loads(3).num_open[2] += 1
    for board in (first, second):
        assert board.loads(3).outstanding.tolist() == [0, 12, 0]
        assert board.loads(3).num_open.tolist() == [0, 0, 1]
    assert first.own_loads(3).outstanding.tolist() == [0, 5, 0]
    second.set(Cell.NUM_PARKED, 4)
    assert (
        first.read(Cell.NUM_PARKED, 1),
        first.of_others(Cell.NUM_PARKED),
        second.of_others(Cell.NUM_PARKED),
    ) == (4, 4, 0)


def test_counts_are_kept_while_fronts_make_room_for_more_ranks(tmp_path: Path) -> None:
    """A resize reaches one front after the other. A replacement begins with the number of ranks at its start."""
    first, second = (Desk(num_ranks=2, shared=board) for board in boards(tmp_path))
    first.open("a", "b")
    first.router.grow(4)
    first.router.enter(3)
    first.open("c")
    assert first.rank_of("c") == 3 and second.router.num_open(1) == 1
    second.router.grow(4)
    second.router.enter(3)
    assert [second.router.num_open(rank) for rank in range(4)] == [1, 1, 0, 1]
    second.open("d")
    assert second.rank_of("d") != 3
    again = Board(tmp_path / "board", number=1, num_fronts=2, num_ranks=4)
    assert again.num_at_ranks == 4
    again.begin()
    assert again.loads(4).num_open.tolist() == [1, 1, 0, 1]


def test_a_front_that_begins_with_fewer_ranks_ignores_what_others_know_of_the_rest(tmp_path: Path) -> None:
    first_board, second_board = boards(tmp_path)
    first = Desk(num_ranks=3, shared=first_board)
    first.asker, prompt = Asker(session="s"), tuple(range(PREFIX_CHUNK_TOKENS))
    for rank in (0, 1):
        first.router.leave(rank)
    first.open("a", prompt_ids=prompt)
    assert first.rank_of("a") == 2
    second = Desk(num_ranks=2, shared=second_board)
    second.asker = first.asker
    second.open("b", prompt_ids=prompt)
    assert second.rank_of("b") in (0, 1)


def test_keys_are_counted_over_all_fronts(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    first.count_choice("a", 1)
    second.count_choice("a", 1)
    second.count_choice("b", 1)
    assert (first.num_open, first.num_of_key("a"), first.num_of_key("c")) == (3, 2, 0)
    assert (first.num_keys("a"), first.num_keys("c")) == (2, 3)
    second.count_choice("b", -1)
    assert (first.num_open, first.num_keys("a")) == (2, 1)


def test_connections_of_an_address_are_counted_over_all_fronts(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    bounds = [ConnectionBound(8, 3, shared=board) for board in (first, second)]
    kept = [entered(bounds[number], "10.0.0.1", 1)[0] for number in (0, 1, 1)]
    assert not any(each.is_closed for each in kept)
    bounds[0].work(kept[0])
    (refused,) = entered(bounds[0], "10.0.0.1", 1)
    assert refused.is_closed and not any(each.is_closed for each in kept), "the idle ones are another front's"
    (late,) = entered(bounds[1], "10.0.0.1", 1)
    assert not late.is_closed and kept[1].is_closed and first.num_connections_of("10.0.0.1") == 3
    assert not entered(bounds[0], "10.0.0.2", 1)[0].is_closed
    assert not any(each.is_closed for each in entered(bounds[0], "127.0.0.1", 4)), "loopback is exempt"
    second.begin()  # the replacement of a killed front
    assert not entered(bounds[0], "10.0.0.1", 1)[0].is_closed and first.num_connections_of("10.0.0.1") == 2


def test_an_address_may_have_half_of_all_fronts_connections_by_default(tmp_path: Path) -> None:
    bounds = [ConnectionBound(4, shared=board) for board in boards(tmp_path)]
    for bound in bounds:
        for each in entered(bound, "10.0.0.1", 2):
            bound.work(each)
            assert not each.is_closed
    assert all(entered(bound, "10.0.0.1", 1)[0].is_closed for bound in bounds)


def test_a_replacement_clears_the_row_and_reports_the_choices_that_were_cut_off(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    for _ in range(3):
        second.count_choice("a", 1)
    second.own_loads(3).outstanding[0] += 9
    again = Board(tmp_path / "board", number=1, num_fronts=2, num_ranks=3)
    assert again.begin() == 3
    assert (first.num_open, first.num_keys("b")) == (0, 1)
    assert not first.loads(3).outstanding.any()
    assert first.read(Cell.NUM_CUT_OFF, 1) == 3
    again.set(Cell.IS_DONE, 1)
    assert Board(tmp_path / "board", number=1, num_fronts=2, num_ranks=3).begin() == 0, "it ended in order"


def test_a_front_runs_until_it_is_done_or_its_process_ends(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    assert first.is_running(1)
    second.set(Cell.IS_DONE, 1)
    assert not first.is_running(1)
    second.begin()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    second.set(Cell.PID, child.pid)
    assert first.is_running(1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not first.is_running(1)


@pytest.mark.parametrize("num_fronts", [1, 2, 4])
def test_fronts_route_like_one_front_with_all_their_requests(tmp_path: Path, num_fronts: int) -> None:
    """The oracle is one router that gets every request."""
    shared = boards(tmp_path, num_fronts)
    desks = [Desk(num_ranks=3, shared=board) for board in shared]
    alone = Desk(num_ranks=3)
    for number in range(24):
        prompt = tuple(range(number, 1 + number + number * 7 % 40))
        name = str(number)
        desk = desks[number % num_fronts]
        desk.open(name, prompt_ids=prompt)
        alone.open(name, prompt_ids=prompt)
        assert desk.rank_of(name) == alone.rank_of(name)
        if number % 3 == 0:
            desk.deliver(name, "ab")
            alone.deliver(name, "ab")
    assert shared[0].loads(3).outstanding.tolist() == list(alone.router.outstanding_tokens)
    assert shared[0].loads(3).prompt_tokens.sum() == sum(
        load.prompt_tokens for load in alone.router._loads.values()
    )


def test_a_session_keeps_its_rank_at_every_front(tmp_path: Path) -> None:
    first, second = (Desk(num_ranks=3, shared=board) for board in boards(tmp_path))
    for desk in (first, second):
        desk.asker = Asker(session="s")
    first.open("a")
    rank = first.rank_of("a")
    second.open("b")
    assert second.rank_of("b") == rank
    second.asker = Asker(session="other")
    second.open("c")
    assert second.rank_of("c") != rank


def test_the_limit_of_open_requests_counts_those_of_all_fronts(tmp_path: Path) -> None:
    shared = boards(tmp_path)
    first, second = (Desk(most_open=3, num_ranks=3, shared=board) for board in shared)
    first.open("a", "b")
    second.open("c")
    for desk in (first, second):
        with pytest.raises(ApiError, match="3 open requests and accepts at most 3"):
            desk.open("d")
    second.deliver("c", "x", FinishReason.STOP)
    second.open("d")


def test_a_key_with_less_than_its_share_is_admitted_by_any_front(tmp_path: Path) -> None:
    first, second = (Desk(most_open=4, num_ranks=3, shared=board) for board in boards(tmp_path))
    first.asker = Asker("flood")
    first.open("a", "b", "c", "d")
    second.asker = Asker("flood")
    with pytest.raises(ApiError, match="4 open requests"):
        second.open("e")
    second.asker = Asker("other")
    second.open("f")
