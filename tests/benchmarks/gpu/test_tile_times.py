"""Candidates of a tuner: one that cannot be launched costs itself, one that breaks the device ends the process's use."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from benchmarks.gpu import tile_times
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rows import Row

BENCH = Bench(torch.device("cpu"), torch.float32)


def tried(monkeypatch: pytest.MonkeyPatch, trouble: str) -> Any:
    """Candidates 2.0, "bad" and 4.0, which take that part of the choice's time; the second one has trouble."""

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
    assert next(candidates).times == pytest.approx(2.0), "known before the next one is tried"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(candidates)
