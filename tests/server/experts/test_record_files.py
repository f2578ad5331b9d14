"""Dumps of records: readable only by their owner, limited to the newest, and refused in folders that others created."""

from pathlib import Path

import pytest

from server.experts.record_files import MAX_DUMPS, default_folder, dump, remove_old
from server.experts.recorder import Record
from server.front.errors import ApiError
from tests.support.placement.load_reports import expert_map

EMPTY = Record("m", expert_map(), [])


def test_the_newest_dumps_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    others = {"notes.txt", "expert_distribution_recorder_mine.pt"}
    for other in others:
        (tmp_path / other).write_text("")
    for number in range(8, 12 + MAX_DUMPS):  # names with another order as text
        for ending in ("pt", "json", "npz"):
            (tmp_path / f"expert_distribution_recorder_{number}.5.{ending}").write_text("")
    remove_old(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - others
    assert len(left) == 3 * MAX_DUMPS and not any("_8.5" in name or "_11.5" in name for name in left)
    assert others <= {path.name for path in tmp_path.iterdir()}


def test_a_folder_that_somebody_else_made_in_the_temporary_directory_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    default_folder().symlink_to(tmp_path / "theirs")
    with pytest.raises(ApiError, match=r"cannot be written to .*: another user created it"):
        dump(EMPTY, default_folder())
    default_folder().unlink()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ApiError, match="another user created it"):
        dump(EMPTY, default_folder())
    assert not list((tmp_path / "theirs").iterdir())
    assert default_folder().stat().st_mode & 0o777 == 0o700
