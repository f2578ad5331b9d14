"""The benchmark of drains: its gaps, and a run with a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.kv import drain
from tests.support.service.real_service import write_tiny_model


def test_gaps_overlap_their_period() -> None:
    arrivals_s = [0.0, 1.0, 4.0, 5.0, 7.0]
    assert drain.gaps_of(arrivals_s, 1.5, 4.5) == [3.0, 1.0]
    assert drain.gaps_of(arrivals_s, 4.5, 4.5) == [1.0], "the gap at a time"
    assert drain.gaps_of(arrivals_s, 7.0, 9.0) == [] == drain.gaps_of([1.0], 0.0, 9.0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_services")
def test_every_stream_moves_at_every_drain_and_keeps_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_SETTLE_PIECES", 3)
    model = write_tiny_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    words = [str(model), "--streams=1,3", "--prompt-tokens=40", "--tokens=1200", "--rounds=2"]
    assert drain.main(words) == 0
    *_, told = capsys.readouterr().out.splitlines()
    rows = json.loads(told)["rows"]
    assert [(row["tier"], row["streams"]) for row in rows] == [
        (tier, streams) for tier in ("none", "host memory") for streams in (1, 3)
    ]
    assert all(row["moves"] >= 2 * row["streams"] and row["changed"] == 0 for row in rows)
    assert all((row["loaded_bytes_per_move"] > 0) == (row["tier"] != "none") for row in rows)
