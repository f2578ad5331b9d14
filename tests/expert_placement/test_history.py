"""A history goes on after a restart, and the placement that served lies beside it."""

from pathlib import Path

import pytest

from expert_placement.files import load_placement
from expert_placement.history import BACK, History
from expert_placement.placement import linear_placement


def test_entries_and_the_serving_placement_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "moves.jsonl"
    placement = linear_placement(2, 4, 2).with_version(3)
    History(file).add({"time": 1.0, "kind": "repair"}, placement)
    again = History(file)
    again.add({"time": 2.0, "kind": "nothing"})
    assert [entry["kind"] for entry in History(file).entries] == ["repair", "nothing"]
    assert again.placement_file is not None
    kept = load_placement(again.placement_file)
    assert (kept.digest(), kept.version) == (placement.digest(), 3)


def test_the_way_back_survives_a_restart_and_is_bounded(tmp_path: Path) -> None:
    file, start = tmp_path / "moves.jsonl", linear_placement(2, 4, 2)
    history = History(file)
    history.add({"time": 1.0, "kind": "repair", "digest": start.digest()})
    for version in range(BACK + 4):
        history.push(start.with_version(version))
    again = History(file)
    assert [placement.version for placement in again.before] == list(range(4, BACK + 4))
    assert again.pop().version == BACK + 3 and again.last_digest == start.digest()
    assert len(History(file).before) == BACK - 1
    History(tmp_path / "moves").push(
        start
    )  # another history beside it, whose name is the beginning of this one's
    again.forget_before()
    assert not History(file).before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moves.before-0.json", "moves.jsonl"]


def test_a_way_back_that_is_damaged_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "h").touch()
    (tmp_path / "h.before-3.json").write_text("{")
    with pytest.raises(ValueError, match=r"h\.before-3\.json is not a placement"):
        History(tmp_path / "h")


def test_without_a_file_it_lasts_as_long_as_the_process() -> None:
    history = History()
    history.add({"time": 1.0, "kind": "repair"}, linear_placement(1, 4, 2))
    history.push(linear_placement(1, 4, 2))
    assert history.pop().version == 0 and history.last_digest is None
    assert len(history.entries) == 1 and history.placement_file is None


def test_a_file_that_is_no_history_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "h").write_text('{"kind": "repair"}\n[]\n')
    with pytest.raises(ValueError, match="line 2: an entry is an object"):
        History(tmp_path / "h")
