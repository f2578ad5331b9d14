"""A history goes on after a restart, and the placement that served lies beside it."""

from pathlib import Path

import pytest

from expert_placement.history import History
from expert_placement.placement import linear_placement
from expert_placement.placement_file import load_placement


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


def test_without_a_file_it_lasts_as_long_as_the_process() -> None:
    history = History()
    history.add({"time": 1.0, "kind": "repair"}, linear_placement(1, 4, 2))
    assert len(history.entries) == 1 and history.placement_file is None


def test_a_file_that_is_no_history_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "h").write_text('{"kind": "repair"}\n[]\n')
    with pytest.raises(ValueError, match="line 2: an entry is an object"):
        History(tmp_path / "h")
