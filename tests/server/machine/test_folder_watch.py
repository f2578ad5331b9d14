"""The watch reports files that changed below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.machine.folder_watch import FolderWatch
from server.machine.whole_files import replace_text


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[FolderWatch]:
    """A watch of a folder with the subfolders `a` and `large`; `large` is left out."""
    for name in ("a", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "old").write_text("1")
    found = FolderWatch(tmp_path, left_out=frozenset({"large"}))
    yield found
    found.close()


def test_a_created_a_written_and_a_removed_file_are_reported_once(watch: FolderWatch, tmp_path: Path) -> None:
    assert watch.take().is_new == {}
    (tmp_path / "a" / "new").write_text("1")
    with (tmp_path / "a" / "old").open("a") as file:
        file.write("2")
    assert watch.take().is_new == {"a/new": True, "a/old": False}
    (tmp_path / "a" / "old").unlink()
    assert watch.take() == ({"a/old": True}, False)
    assert watch.take().is_new == {}


def test_a_replaced_file_is_reported_without_its_partial_one(watch: FolderWatch, tmp_path: Path) -> None:
    replace_text(tmp_path / "a" / "old", "2")
    assert watch.take().is_new == {"a/old": True}


def test_a_file_in_a_later_folder_is_reported(watch: FolderWatch, tmp_path: Path) -> None:
    inner = tmp_path / "b" / "c"
    inner.mkdir(parents=True)
    (inner / "first").write_text("1")
    assert watch.take().is_new["b/c/first"]
    (inner / "second").write_text("1")
    assert watch.take().is_new == {"b/c/second": True}


def test_a_folder_that_is_removed_while_it_is_added_loses_no_other_report(
    watch: FolderWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def remove_first(path: Any) -> Any:
        if Path(path).name == "short":
            Path(path).rmdir()
        return scandir(path)

    (tmp_path / "short").mkdir()
    (tmp_path / "a" / "new").touch()
    monkeypatch.setattr(os, "scandir", remove_first)
    assert watch.take().is_new == {"a/new": True}


def test_a_folder_that_is_left_out_is_not_reported(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "large" / "file").write_text("1")
    assert watch.take().is_new == {}
    assert watch.files() == ["a/old"]


def test_links_and_pipes_are_no_files(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a/old")
    assert watch.files() == ["a/old"]


def test_a_lost_report_is_noticed(watch: FolderWatch, tmp_path: Path) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 1 << 15:
        pytest.skip("this machine keeps very many reports")
    for number in range(most + 1):
        (tmp_path / f"{number}").touch()
    assert watch.take().is_overrun


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot watch a folder for changes") as error:
        FolderWatch(tmp_path / "missing")
    assert error.value.filename == str(tmp_path / "missing")
