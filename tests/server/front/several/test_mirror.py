"""The board of each node has what the fronts of all nodes have written, in an order that no decision can misread."""

import json
from pathlib import Path

import numpy as np
import pytest

from server.front.routing.prefixes import PREFIX_CHUNK_TOKENS
from server.front.several.board import Cell
from server.front.several.front_map import FENCE_S, LOST_S, FrontMap
from server.front.several.mirror import Mirror
from server.front.several.seat import Seat
from server.front.several.service_state import ServiceState
from server.link.messages import BoardChange, MirroredFile, TableRows, decode, encode

NUM_RANKS = 2
PROMPT = list(range(2 * PREFIX_CHUNK_TOKENS))


class Nodes:
    """Nodes with two fronts each. Number 0 leads."""

    def __init__(self, folder: Path, num_nodes: int = 3) -> None:
        addresses = tuple(f"n{front // 2}:{front}" for front in range(2 * num_nodes))
        self.fronts: list[Seat] = []
        for node in range(num_nodes):
            (kept := folder / str(node)).mkdir()
            found = FrontMap(node, 2, addresses, "t")
            self.fronts += [
                Seat.take(kept, number=each, num_fronts=len(addresses), num_ranks=NUM_RANKS, fronts=found)
                for each in found.near
            ]
        self.mirrors = [Mirror(seat, seat.fronts) for seat in self.fronts[::2] if seat.fronts is not None]

    def exchange(self, node: int) -> BoardChange | None:
        """Let the other nodes have the changes of one, over the wire."""
        change = self.mirrors[node].take_changes(of_all=True)
        for other, mirror in enumerate(self.mirrors):
            if change is not None and other != node:
                mirror.apply(node, decode(encode(change)))
        return change

    def state_at(self, number: int) -> ServiceState | None:
        return ServiceState.read(self.fronts[number].kept)


def test_every_node_counts_the_requests_of_all(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.fronts[3].board.own_loads(NUM_RANKS).outstanding[1] += 7
    nodes.fronts[3].board.count_choice("alice", 2)
    nodes.fronts[3].board.count_connection("1.2.3.4", 1)
    assert nodes.exchange(1) is not None
    for seat in nodes.fronts:
        assert seat.board.loads(NUM_RANKS).outstanding.tolist() == [0, 7]
        assert seat.board.num_open == seat.board.num_of_key("alice") == 2
        assert seat.board.num_connections_of("1.2.3.4") == 1
    assert nodes.exchange(1) is None, "nothing has changed"
    nodes.fronts[3].board.count_choice("alice", -2)
    nodes.exchange(1)
    assert [seat.board.num_open for seat in nodes.fronts] == [0] * 6


def test_the_leading_fronts_state_arrives_before_its_number(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    leading = nodes.fronts[0]
    state = ServiceState(sizes=(2, 2), lost_fronts=(4, 5))
    version = state.publish(leading.kept, leading.board)
    nodes.exchange(0)
    assert nodes.state_at(2) == nodes.state_at(5) == state
    assert [seat.board.version for seat in nodes.fronts] == [version] * 6
    nodes.fronts[5].board.set(Cell.APPLIED, version)
    nodes.exchange(2)
    assert leading.board.read(Cell.APPLIED, 5) == version


def test_an_applied_state_is_never_seen_with_counts_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front applies a state, writes its file and counts a request, and then marks the state as applied."""
    nodes = Nodes(tmp_path, 2)
    sent: list[BoardChange] = []
    board, mirror = nodes.fronts[2].board, nodes.mirrors[1]
    rows = board.rows_of(range(2, 4))

    class Watched(np.ndarray):
        """Rows in which a front writes while they are copied."""

        def copy(self, order: str = "C") -> np.ndarray:  # type: ignore[override]
            copied = np.asarray(self).copy()
            if self.ndim == 1:  # the applied versions are read first
                board.count_choice("a", 1)
                board.set(Cell.APPLIED, 9)
            return copied

    monkeypatch.setattr(board, "rows_of", lambda _numbers: rows.view(Watched))
    for _ in range(2):
        change = mirror.take_changes(of_all=False)
        assert change is not None
        sent.append(change)
    monkeypatch.undo()
    nodes.mirrors[0].apply(1, sent[0])
    seen = nodes.fronts[0].board
    assert (seen.read(Cell.APPLIED, 2), seen.read(Cell.NUM_OPEN, 2)) == (0, 1)
    nodes.mirrors[0].apply(1, sent[1])
    assert seen.read(Cell.APPLIED, 2) == 9 and seen.read(Cell.NUM_OPEN, 2) >= 1


def test_prefixes_and_sessions_of_one_node_are_known_at_all_and_are_not_sent_back(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for mirror in nodes.mirrors:  # what they wrote at the start
        mirror.take_changes(of_all=True)
    nodes.fronts[2].board.prefixes.remember(PROMPT, 1)
    nodes.fronts[2].board.bind_session("s", 1)
    nodes.exchange(1)
    for seat in nodes.fronts:
        assert seat.board.prefixes.held_tokens(PROMPT) == {1: len(PROMPT)}
        assert seat.board.rank_of_session("s") == 1
    assert nodes.exchange(0) is None and nodes.exchange(2) is None
    nodes.fronts[5].board.prefixes.forget(PROMPT, 1)
    nodes.exchange(2)
    assert [seat.board.prefixes.held_tokens(PROMPT) for seat in nodes.fronts] == [{}] * 6


def test_a_node_that_missed_changes_gets_everything(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    leading, far = nodes.fronts[0], nodes.fronts[2]
    nodes.exchange(1)
    far.board.count_choice("a", 3)
    far.board.prefixes.remember(PROMPT, 0)
    nodes.mirrors[1].take_changes(of_all=True)  # lost on the way
    far.board.count_choice("b", 1)
    nodes.mirrors[0].lose(1)
    assert leading.board.num_open == 0 and not leading.board.is_running(2)
    nodes.mirrors[0].apply(1, decode(encode(nodes.mirrors[1].everything())))
    assert leading.board.num_open == 4 and leading.board.is_running(2)
    assert leading.board.prefixes.held_tokens(PROMPT) == {0: len(PROMPT)}


def test_a_lost_nodes_requests_are_cut_off_and_count_no_more(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    far = nodes.fronts[3].board
    far.own_loads(NUM_RANKS).num_open[0] += 2
    far.count_choice("a", 2)
    far.set(Cell.NUM_REPLAYED, 5)
    nodes.exchange(1)
    board = nodes.fronts[0].board
    assert board.num_at_ranks == board.num_open == 2
    nodes.mirrors[0].lose(1)
    assert board.num_at_ranks == board.num_open == 0
    assert (board.read(Cell.NUM_CUT_OFF, 3), board.read(Cell.NUM_REPLAYED, 3)) == (2, 5)
    assert board.is_running(0) and not board.is_running(3)


def test_whether_a_front_runs_is_seen_on_its_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nodes.exchange(1)
    assert nodes.fronts[0].board.is_running(3)
    nodes.fronts[3].board.set(Cell.IS_DONE, 1)
    nodes.exchange(1)
    assert not nodes.fronts[0].board.is_running(3) and nodes.fronts[0].board.is_alive(3)
    nodes.fronts[3].board.set(Cell.PID, 2**22 + 1)  # no process has this number
    nodes.exchange(1)
    assert not nodes.fronts[0].board.is_alive(3)


def test_small_files_of_each_front_travel_and_no_others(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    (nodes.fronts[3].folder / "speed-3.json").write_text(json.dumps([1]))
    (nodes.fronts[3].folder / "speed-1.json").write_text("not of this node")
    nodes.exchange(1)
    assert (nodes.fronts[0].folder / "speed-3.json").read_text() == "[1]"
    assert not (nodes.fronts[0].folder / "speed-1.json").exists()
    nothing = np.zeros((0, 2), np.int64)
    for name in ("speed-1.json", "../x", "service.json", "/etc/passwd"):
        with pytest.raises(ValueError, match="the fronts of node 1 do not write"):
            nodes.mirrors[0].apply(1, BoardChange(False, 0, [MirroredFile(name, "x")], nothing, []))


def test_the_needs_of_a_lost_nodes_fronts_are_removed_elsewhere_only(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    for number in (0, 2, 3):
        (nodes.fronts[number].folder / f"adapters-{number}.json").write_text("{}")
    nodes.exchange(1)
    assert {each.name for each in nodes.fronts[0].folder.glob("adapters-*")} == {
        f"adapters-{number}.json" for number in (0, 2, 3)
    }
    nodes.mirrors[0].lose(1)
    assert [each.name for each in nodes.fronts[0].folder.glob("adapters-*")] == ["adapters-0.json"]
    nodes.mirrors[0].apply(1, decode(encode(nodes.mirrors[1].everything())))
    assert (nodes.fronts[0].folder / "adapters-3.json").read_text() == "{}"


def test_a_change_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nothing = np.zeros((0, 2), np.int64)
    outside = np.array([[nodes.fronts[0].board.rows_of(range(2)).size, 1]])
    entry = np.array([[1 << 40, 0, 0]])
    for change, says in (
        (BoardChange(False, 0, [], outside, []), "a cell is outside"),
        (BoardChange(False, 0, [], np.array([[-1, 1]]), []), "a cell is outside"),
        (BoardChange(False, 0, [], nothing, [TableRows("other", entry)]), "unknown table 'other'"),
        (BoardChange(False, 0, [], nothing, [TableRows("sessions", entry)]), "an entry is outside"),
    ):
        with pytest.raises(ValueError, match=says):
            nodes.mirrors[0].apply(1, change)
    wider = TableRows("prefixes", np.zeros((1, 9), np.int64))  # from fronts with more ranks
    nodes.mirrors[0].apply(1, BoardChange(False, 0, [], nothing, [wider]))


def test_a_front_ends_its_requests_before_the_leading_one_forgets_them() -> None:
    assert FENCE_S < LOST_S - 5, "with time for a replacement of the first front of a node"
