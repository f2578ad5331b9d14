"""Candidates of a tuner: a failed launch skips one candidate, a device error ends the use of the process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from attention.gpu.tiles import read_table
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import tile_times
from benchmarks.gpu.kernels.tile_times import Tried, best_of, fields_of, with_entry, write_table
from benchmarks.gpu.results import Row

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


BENCH = Bench(torch.device("cpu"), torch.float32)


def tried(monkeypatch: pytest.MonkeyPatch, trouble: str) -> Any:
    """Try candidates 2.0, "bad" and 4.0: that many times as fast as the default. The second one fails."""

    def check(_bench: Bench, _name: str, tile: Any) -> Row:
        if tile == "bad":
            raise RuntimeError(trouble)
        return Row(name="right", figures={"error": 0.0})

    monkeypatch.setattr(tile_times, "check", check)
    monkeypatch.setattr(tile_times, "_seconds", lambda _bench, _case, tile: [1.0 / tile])
    case: Any = SimpleNamespace(
        kernel="k", choice=1.0, candidates=[2.0, "bad", 4.0], calls=lambda tile: [tile]
    )
    return tile_times.try_all(BENCH, case)


def test_a_candidate_that_the_device_lacks_room_for_is_out_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = tried(monkeypatch, "Triton Error [CUDA]: out of resource\nand more")
    assert (first.times, third.times) == (pytest.approx(2.0), pytest.approx(4.0))
    assert (second.times, second.trouble) == (0.0, "RuntimeError: Triton Error [CUDA]: out of resource")


def test_a_candidate_that_breaks_the_device_is_not_followed_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = tried(monkeypatch, "CUDA error: an illegal memory access was encountered")
    assert next(candidates).times == pytest.approx(2.0), "times must be known before the next candidate runs"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(candidates)
