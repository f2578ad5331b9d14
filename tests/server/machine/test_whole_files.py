"""Files that are replaced as a whole."""

from pathlib import Path

import pytest

from server.machine.whole_files import replace_text


def test_a_file_has_its_old_content_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old")

    def write_half(written: Path, text: str) -> None:
        with written.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="full"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    replace_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
