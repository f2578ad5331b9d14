import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.serve.error_file import FIRST, absences, first_failure, write_absence, write_failure


def test_a_failure_is_read_back(tmp_path: Path) -> None:
    write_failure(tmp_path / "error.json", "why")
    assert first_failure(tmp_path) == "why"


def test_a_cause_known_to_be_the_first_wins_over_earlier_stamps(tmp_path: Path) -> None:
    for name, time_ns in (("a", None), ("b", FIRST)):
        (tmp_path / name).mkdir()
        write_failure(tmp_path / name / "error.json", name, time_ns=time_ns)
    assert first_failure(tmp_path) == "b"


def test_the_first_of_several_failures_is_the_cause(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    for rank, text in enumerate(
        (
            '{"message": {"message": "later"}, "time_ns": 20}',
            '{"message": {"message": "first"}, "time_ns": 10}',
            '{"message": "of another program"}',
            '{"half',
        )
    ):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / "error.json").write_text(text)
    assert first_failure(tmp_path) == "first"


def test_folders_that_come_and_go_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front removes the files of an update, and the launcher those of a rank that left."""
    for name in ("rank_0", "rank_1", "rank_0/kept/weights/1"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    write_absence(tmp_path / "rank_0" / "error.json", 0, "too little memory")

    def vanishing(look: Callable[..., Any]) -> Callable[..., Any]:
        def look_later(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).name in ("rank_1", "weights"):
                shutil.rmtree(path, ignore_errors=True)
            return look(path)

        return look_later

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, vanishing(getattr(os, name)))
    assert absences(tmp_path) == ["too little memory"]
    assert first_failure(tmp_path) is None and not (tmp_path / "rank_1").exists()
    assert first_failure(tmp_path / "rank_1") is None == first_failure(tmp_path / "rank_1" / "none")
