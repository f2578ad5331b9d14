"""The table of tiles as the tuner changes it; timing itself runs in the slow test of the whole day."""

from pathlib import Path
from typing import NamedTuple

from attention.gpu.tiles import read_table
from benchmarks.gpu.tile_table import Tried, best_of, fields_of, with_entry, write_table

TABLE = {"sm_90": {"paged_decode": {"a": {"tokens": 32}}}, "other": {"x": {"y": {"z": 1}}}}
AT = ("sm_90", "paged_decode", "a")


class Tile(NamedTuple):
    tokens: int = 32
    warps: int = 4


def test_an_entry_is_changed_and_all_others_stay() -> None:
    whole = {"tokens": 32, "warps": 8}
    changed = with_entry(TABLE, AT, Tile(warps=8))
    assert changed == {"sm_90": {"paged_decode": {"a": whole}}, "other": TABLE["other"]}
    added = with_entry(TABLE, ("sm_90", "paged_prefill", "b"), Tile(warps=8))
    assert added["sm_90"] == {"paged_decode": {"a": {"tokens": 32}}, "paged_prefill": {"b": whole}}
    assert with_entry({}, AT, Tile(warps=8)) == {"sm_90": {"paged_decode": {"a": whole}}}


def test_what_is_written_is_what_kernels_read(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    write_table(path, TABLE)
    assert read_table(path) == TABLE
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiles.json"]


def test_the_best_is_right_and_worth_it() -> None:
    slow, wrong, good = (
        Tried(Tile(16), 1.01),
        Tried(Tile(64), 3.0, "wrong: error 1e-1"),
        Tried(Tile(64, 8), 1.3),
    )
    assert best_of([slow, wrong]) is None
    assert best_of([slow, wrong, good]) is good
    assert fields_of(good.tile, Tile()) == {"tokens": 64, "warps": 8}
    assert fields_of(Tile(), Tile()) == {}
