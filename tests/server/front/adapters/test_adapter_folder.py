"""A watched folder: subfolders are loaded once they are complete, follow changes, and are unloaded when they are gone."""

import asyncio
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.front.adapters.folder import AdapterFolder
from server.front.events import EventLog
from tests.server.front.adapters.test_adapters import Service, in_loop, write


def open_folder(root: Path, **how: Any) -> tuple[Service, AdapterFolder, Path]:
    service, folder = Service(root, **how), root / "folder"
    folder.mkdir()
    return service, AdapterFolder(folder, service.adapters, EventLog()), folder


@in_loop
async def test_a_subfolder_is_loaded_once_it_is_unchanged_for_a_look(tmp_path: Path) -> None:
    service, watch, folder = open_folder(tmp_path)
    write(folder / "a")
    (folder / "b").mkdir()
    await watch.look()
    assert not service.adapters.names
    await watch.look()
    assert service.adapters.names == ("a",)


@in_loop
async def test_changed_and_removed_subfolders_are_followed(tmp_path: Path) -> None:
    service, watch, folder = open_folder(tmp_path)
    write(folder / "a")
    for _ in range(2):
        await watch.look()
    first = service.adapters.find("a")
    write(folder / "a", alpha=77)
    for _ in range(2):
        await watch.look()
    second = service.adapters.find("a")
    assert first is not None and second is not None and first.digest != second.digest
    shutil.rmtree(folder / "a")
    await watch.look()
    assert service.adapters.names == ()


@in_loop
async def test_a_refused_subfolder_is_reported_once_and_tried_again_when_it_changes(tmp_path: Path) -> None:
    service, watch, folder = open_folder(tmp_path)
    events = watch._events
    write(folder / "a", use_dora=True)
    for _ in range(4):
        await watch.look()
    said = [event["text"] for event in events.to_json() if event["kind"] == "adapter_refused"]
    assert len(said) == 1 and "DoRA" in said[0]
    write(folder / "a")
    for _ in range(2):
        await watch.look()
    assert service.adapters.names == ("a",)


@in_loop
async def test_a_name_that_was_loaded_in_another_way_is_left_alone(tmp_path: Path) -> None:
    service, watch, folder = open_folder(tmp_path)
    [digest] = await service.load("a")
    write(folder / "a", alpha=77)
    for _ in range(2):
        await watch.look()
    shutil.rmtree(folder / "a")
    await watch.look()
    named = service.adapters.find("a")
    assert named is not None and named.digest == digest


@in_loop
async def test_a_restarted_front_follows_the_subfolders_that_the_former_one_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.json"
    service, watch, folder = open_folder(tmp_path, kept=kept)
    for name in "abc":
        write(folder / name)
    for _ in range(2):
        await watch.look()
    await service.adapters.load("c", str(folder / "c"), replaces=True, owners=("0f",))
    again = Service(tmp_path, kept=kept)
    await again.adapters.start({}, lambda: True)
    old = again.adapters.find("a")
    write(folder / "a", alpha=77)
    shutil.rmtree(folder / "b")
    events = EventLog()
    watch = AdapterFolder(folder, again.adapters, events)
    make_stale(monkeypatch, "stat", folder / "c" / "adapter_model.safetensors")
    for _ in range(2):
        await watch.look()
    new, owned = again.adapters.find("a"), again.adapters.find("c")
    assert again.adapters.names == ("a", "c") and not events.to_json()
    assert old is not None and new is not None and new.digest != old.digest
    assert owned is not None and owned.owners == ("0f",), "the keys that may use it stay the same"


def make_stale(
    monkeypatch: pytest.MonkeyPatch, call: str, path: Path, *, num_times: int = 1
) -> Callable[[], bool]:
    """Let calls of a method of this path fail, as on a network file system. Returns whether they have failed."""
    working, left = getattr(Path, call), [num_times]

    def fail(self: Path, *arguments: Any, **how: Any) -> Any:
        if self == path and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return working(self, *arguments, **how)

    monkeypatch.setattr(Path, call, fail)
    return lambda: not left[0]


@in_loop
async def test_a_folder_that_cannot_be_read_is_logged_once_and_watched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.front.adapters.folder.LOOK_EVERY_S", 0.001)
    service, watch, folder = open_folder(tmp_path)
    write(folder / "a")
    make_stale(monkeypatch, "mkdir", folder)
    watching = asyncio.create_task(watch.run())
    while not service.adapters.names:
        await asyncio.sleep(0.001)
    has_failed = make_stale(monkeypatch, "iterdir", folder, num_times=5)
    write(folder / "b")
    while len(service.adapters.names) < 2 and not watching.done():
        await asyncio.sleep(0.001)
    watching.cancel()
    assert has_failed() and service.adapters.names == ("a", "b")
    assert caplog.text.count("Stale file handle") == 2


@pytest.mark.parametrize("call", ["stat", "open"])
@in_loop
async def test_a_subfolder_that_cannot_be_read_once_stays_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    service, watch, folder = open_folder(tmp_path)
    write(folder / "a")
    for _ in range(2):
        await watch.look()
    write(folder / "a", alpha=77)
    write(folder / "b")
    await watch.look()
    before = service.adapters.find("a")
    has_failed = make_stale(monkeypatch, call, folder / "a" / "adapter_model.safetensors")
    await watch.look()
    assert has_failed() and service.adapters.names == ("a", "b")
    assert "Stale file handle" in caplog.text
    for _ in range(2):
        await watch.look()
    after = service.adapters.find("a")
    assert before is not None and after is not None and after.digest != before.digest


@in_loop
async def test_a_folder_is_watched_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.front.adapters.folder.LOOK_EVERY_S", 0.001)
    service, watch, folder = open_folder(tmp_path)
    write(folder / "a")
    working, errors = watch.look, [ZeroDivisionError()]

    async def look() -> None:
        if errors:
            raise errors.pop()
        await working()

    monkeypatch.setattr(watch, "look", look)
    watching = asyncio.create_task(watch.run())
    while not service.adapters.names:
        await asyncio.sleep(0.001)
    watching.cancel()
    assert "the adapters cannot follow --lora-dir" in caplog.text
