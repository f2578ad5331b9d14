"""Placement files round-trip, histories continue after a restart, and invalid files are rejected with a message."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_placement.files import PlacementFileError, load_placement, save_placement, to_json
from expert_placement.history import BACK, History
from expert_placement.placement import EMPTY, Placement, linear_placement

PLACEMENT = Placement(
    np.array([[0, 1, EMPTY, 2, 0, 3], [3, 2, EMPTY, 1, 0, EMPTY]]),
    num_experts=4,
    num_ranks=2,
    share=np.array([[1 / 3, 1, 0, 1, 2 / 3, 1], [1, 1, 0, 1, 1, 0]]),
    version=5,
)


def test_a_placement_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_placement(PLACEMENT, tmp_path / "placement.json")
    again = load_placement(tmp_path / "placement.json")
    assert again.digest() == PLACEMENT.digest() and again.version == 5
    assert [path.name for path in tmp_path.iterdir()] == ["placement.json"], "temporary files were left"


def test_a_file_of_before_that_says_each_layers_slots_is_read(tmp_path: Path) -> None:
    content = to_json(PLACEMENT)
    for layer in content["layers"]:
        layer["slots_per_rank"] = 3
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert load_placement(tmp_path / "old.json").digest() == PLACEMENT.digest()


def test_a_file_written_by_hand_needs_only_the_slots(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    layer = {"slots": [[0, 1], [0, None]]}
    path.write_text(
        json.dumps(
            {
                "format": "wideep-placement",
                "format_version": 1,
                "num_experts": 2,
                "num_ranks": 2,
                "layers": [layer],
            }
        )
    )
    assert load_placement(path).share.tolist() == [[0.5, 1, 0.5, 0]]


def changed(**changes: Any) -> str:
    return json.dumps({**to_json(PLACEMENT), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a placement"),
        ("[]", 'it must be an object with "format": "wideep-placement"'),
        (changed(format_version=2), "format_version is 2; it must be 1"),
        (changed(colour=1), "colour is not known; the keys are digest, format"),
        (changed(layers=[]), "layers must be a list"),
        (changed(num_ranks=3), "slots has 2 lists per layer for 3 ranks"),
        (changed(num_ranks=0), "slots has 2 lists per layer for 0 ranks"),
        (changed(num_experts=5), r"experts \[4\] have no slot"),
        (changed(num_experts=None), "is not a placement"),
        (changed(layers=[{"slots": [[0, 1], [2]]}]), "the same number of ranks and of slots"),
        (changed(layers=[{"slots": [[0, 1.5], [2, 3]]}]), "whole numbers for slots"),
        (changed(layers=[{"slots": [["a", 1], [2, 3]]}]), "must be numbers"),
        (changed(layers=[{"shares": [[1]]}]), "'slots' is missing"),
        (changed(digest="0" * 16), "it was changed or cut off"),
    ],
)
def test_what_is_no_placement_is_refused_by_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(PlacementFileError, match=message) as caught:
        load_placement(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_recorded_load_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementFileError, match="No such file"):
        load_placement(tmp_path / "none.json")
    path = tmp_path / "load.npz"
    np.savez(path, load=np.ones((1, 2, 4)))
    with pytest.raises(
        PlacementFileError, match="a recorded load, from which `wideep experts plan` makes a placement"
    ):
        load_placement(path)
    with pytest.raises(PlacementFileError, match=r"is written as JSON; give it a name that ends in \.json"):
        save_placement(PLACEMENT, path)


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
    History(tmp_path / "moves").push(start)  # another history with a name that is a prefix of this one's
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
    with pytest.raises(ValueError, match="line 2: an entry must be an object"):
        History(tmp_path / "h")
