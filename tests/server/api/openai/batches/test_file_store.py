"""The folder of files: bounded, private, cleaned up after a killed front, and used by one service at a time."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from server.api.openai.batches.file_store import LIFETIME_S, FileStore, StoredFile, is_in_use, new_id
from server.front.errors import ApiError
from server.machine.steady_clock import GRACE_S, SteadyClock
from server.options.flag import OptionsError


def store(directory: Path, **how: Any) -> FileStore:
    return FileStore(directory, **{"max_bytes": 1000, **how})


def add(files: FileStore, content: bytes = b"{}", owner: str = "me", **how: Any) -> StoredFile:
    return asyncio.run(files.add(content, owner=owner, filename="a.jsonl", **how))


def test_a_folder_is_in_use_until_its_service_ends(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path / "none")
    files = store(tmp_path / "a")
    assert is_in_use(tmp_path / "a")
    files.close()
    assert not is_in_use(tmp_path / "a")
    store(tmp_path / "a").close()


def test_the_next_front_finds_what_was_kept_and_removes_halves(tmp_path: Path) -> None:
    files = store(tmp_path / "a" / "b")
    kept = add(files, b"content")
    files.close()
    folder = files.directory
    for ending in ("jsonl", "json", "draft"):
        (folder / f"{new_id('file-')}.{ending}").write_text("{}")
    others = {"mine.txt", "file-report.pdf", "file-1.json"}
    for other in others:
        (folder / other).write_text("not a file of ours")
    again = store(folder)
    assert again.all_of("me") == [kept] and again.path_of(kept.id).read_bytes() == b"content"
    assert {each.name for each in folder.iterdir()} == {
        "lock",
        f"{kept.id}.json",
        f"{kept.id}.jsonl",
        *others,
    }


def test_a_folder_is_private_and_one_service_s_at_a_time(tmp_path: Path) -> None:
    files = store(tmp_path / "kept")
    kept = add(files)
    assert files.directory.stat().st_mode & 0o777 == 0o700
    assert files.path_of(kept.id).stat().st_mode & 0o777 == 0o600
    with pytest.raises(OptionsError, match="is used by another service; give each service a separate folder"):
        store(files.directory)
    files.close()
    store(files.directory)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o750])
@pytest.mark.parametrize("has_files", [False, True])
def test_a_folder_that_others_can_use_becomes_private(
    tmp_path: Path, mode: int, has_files: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    if has_files:
        first = store(folder)
        add(first)
        (folder / "batches").mkdir()
        first.close()
    else:
        folder.mkdir()
    folder.chmod(mode)
    files = store(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and len(files.all_of("me")) == has_files
    assert f"is accessible to other users (mode {mode:o}); its mode is now 700" in caplog.text


def test_a_folder_of_others_is_left_as_it_is_and_refused(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letters.txt").write_text("")
    with pytest.raises(
        OptionsError, match=r"mode 755.* contains other files; run chmod 700 on it, or give a separate folder"
    ):
        store(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    folder.chmod(0o700)
    store(folder)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    tmp_path.chmod(0o770)
    monkeypatch.setattr(Path, "chmod", fail)
    with pytest.raises(OptionsError, match="has another owner; give a folder below it"):
        store(tmp_path)


def test_with_several_owners_each_leaves_room_for_others(tmp_path: Path) -> None:
    """A floods the shared bound with uploads. Small files of B and C still fit."""
    files = store(tmp_path, are_several=lambda: True)

    def fill(owner: str) -> int:
        for number in range(11):
            try:
                add(files, b"x" * 100, owner)
            except ApiError as refused:
                assert (
                    refused.status == 413 and "yours" in refused.message and "stays free" in refused.message
                )
                return number
        raise AssertionError("the uploads were never refused")

    assert [fill(owner) for owner in "abc"] == [5, 2, 1]
    for file in files.all_of("a"):
        files.delete(file)
    assert fill("c") == 3 and files._bytes.held_by("c") == 400


def test_with_several_owners_each_leaves_numbers_of_files_for_others(tmp_path: Path) -> None:
    files = store(tmp_path, max_files=4, are_several=lambda: True)
    add(files, owner="a")
    add(files, owner="a")
    with pytest.raises(
        ApiError, match="2 files are stored, 2 of them yours; this server stores up to 4, and each API key"
    ):
        add(files, owner="a")
    add(files, owner="b")


def test_a_calendar_that_jumps_deletes_nothing_at_once(tmp_path: Path) -> None:
    """A running service ignores jumps. At a start, files that seem expired stay an hour, and those from the future 30 days."""
    now_s = 1e9
    calendar, passed = [now_s], [0.0]
    files = store(tmp_path, clock=SteadyClock(lambda: calendar[0], lambda: passed[0]))
    kept = add(files, lifetime_s=3600)
    calendar[0] += 30 * 86_400
    assert files.all_of("me") == [kept]
    files.close()
    again = store(tmp_path, clock=SteadyClock(lambda: calendar[0], lambda: passed[0]))
    [found] = again.all_of("me")
    assert found.expires_at == calendar[0] + GRACE_S
    passed[0] += GRACE_S
    assert not again.all_of("me")
    add(again)
    again.close()
    calendar[0] -= 3650 * 86_400
    [found] = store(tmp_path, clock=SteadyClock(lambda: calendar[0], lambda: passed[0])).all_of("me")
    assert found.expires_at == calendar[0] + LIFETIME_S


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionsError, match="cannot be used: Not a directory"):
        store(tmp_path / "file" / "below")


def test_what_has_no_room_is_refused_and_deleting_makes_some(tmp_path: Path) -> None:
    files = store(tmp_path, max_files=3)
    first = add(files, b"x" * 900)
    with pytest.raises(
        ApiError, match=r"A file of 101 bytes exceeds the limit: .* 1000 in all \(--max-files-bytes\)"
    ) as full:
        add(files, b"x" * 101)
    assert full.value.status == 413
    add(files, b"x" * 100)
    files.delete(first)
    add(files)
    add(files)
    with pytest.raises(ApiError, match="3 files are stored, 3 of them yours; this server stores up to 3"):
        add(files)


def test_a_file_that_is_deleted_before_it_is_read_does_not_exist(tmp_path: Path) -> None:
    files = store(tmp_path / "files")
    kept, deleted = add(files, b"content"), add(files)
    files.delete(deleted)
    assert asyncio.run(files.content_of(kept)) == b"content"
    with pytest.raises(ApiError, match="No such File object") as caught:
        asyncio.run(files.content_of(deleted, "messages.0"))
    assert (caught.value.status, caught.value.param) == (404, "messages.0")


def test_files_go_when_they_are_too_old_but_for_those_that_a_batch_reads(tmp_path: Path) -> None:
    now_s = 1000.0
    files = store(tmp_path, clock=lambda: now_s)
    short, long, read = add(files, lifetime_s=3600), add(files), add(files, lifetime_s=3600)
    files.is_read = lambda file_id: file_id == read.id
    now_s += 3600
    assert {each.id for each in files.all_of("me")} == {long.id, read.id}
    with pytest.raises(ApiError, match="No such File object"):
        files.find(short.id, "me")
    assert not files.path_of(short.id).exists()
    now_s = 1000 + LIFETIME_S
    assert [each.id for each in files.all_of("me")] == [read.id]


def test_an_expired_file_that_cannot_be_removed_is_hidden_and_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    files = store(tmp_path, clock=lambda: now_s)
    stuck, other = (add(files, lifetime_s=3600) for _ in range(2))
    fail_to_remove(files.path_of(stuck.id))
    now_s += 3600
    assert not files.all_of("me") and not files.path_of(other.id).exists()
    assert "1 expired files cannot be removed now" in caplog.text
    assert files._bytes.held == stuck.num_bytes, "it is on the disk"
    files.path_of(stuck.id).rmdir()
    files.expire()
    assert not files._bytes.held and [each.name for each in tmp_path.iterdir()] == ["lock"]


def fail_to_remove(path: Path) -> None:
    """Let unlink of this file raise OSError."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (errno.ENOSPC, 507, "is full; delete some files"),
        (errno.EDQUOT, 507, "is full"),
        (errno.EACCES, 500, "Permission denied"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, words: str
) -> None:
    files = store(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(number, "Permission denied")

    monkeypatch.setattr("server.api.openai.batches.file_store.write_json", fail)
    with pytest.raises(ApiError, match=words) as refused:
        add(files)
    assert refused.value.status == status and files.all_of("me") == []
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]


def test_answers_become_a_file_once(tmp_path: Path) -> None:
    files = store(tmp_path)
    answers, file_id = tmp_path / "answers.jsonl", new_id("file-")
    answers.write_bytes(b"{}\n" * 1000)
    for _ in range(2):
        files.lend(answers, file_id, owner="me", filename="out.jsonl", lifetime_s=3600)
        assert files.path_of(file_id).exists()
        files.adopt(file_id)
    found = files.find(file_id, "me")
    assert (found.purpose, found.num_bytes, answers.exists()) == ("batch_output", 3000, False)


@pytest.mark.parametrize("about", ["{", "[]", '{"id": "x"}', '{"made": "by another version"}'])
def test_what_is_known_of_a_file_and_cannot_be_read_is_passed_over_and_stays(
    tmp_path: Path, about: str
) -> None:
    files = store(tmp_path)
    good, bad = add(files), add(files)
    files.close()
    (tmp_path / f"{bad.id}.json").write_text(about)
    assert store(tmp_path).all_of("me") == [good]
    assert files.path_of(bad.id).exists()
