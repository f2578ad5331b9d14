"""Batches in one process: resumed, expired with their window, stopped by a full disk, and limited to their places."""

import asyncio
import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.api.openai.batches import file_store
from server.api.openai.batches.batch_store import WINDOW_S, Batch, BatchStatus, BatchStore
from server.api.openai.batches.file_store import LIFETIME_S, FileStore
from server.api.openai.batches.input_lines import BatchLine
from server.api.openai.batches.output_lines import BatchOutput
from server.api.openai.batches.runs import MAX_ERRORS, MAX_LINES, BatchRuns, LinePlaces, num_choices
from server.machine.steady_clock import GRACE_S
from tests.server.api.openai.batches.test_file_store import fail_to_remove

URL = "/v1/completions"
TIMEOUT_S = 30.0
WITHIN_S = 0.01  # polling interval


class Service:
    """A folder with files and batches, and endpoints that answer with the prompt. Some requests are never answered."""

    def __init__(
        self,
        directory: Path,
        *,
        places: int = 1000,
        now_s: float | None = None,
        files: dict[str, Any] | None = None,
    ) -> None:
        self.now_s = now_s
        self.asked: list[str] = []
        self.places = places
        self.files = FileStore(directory, **{"max_bytes": 1 << 20, **(files or {})}, **self._clock())
        self.batches = BatchStore(directory / "batches", **self._clock())
        self.room = LinePlaces(lambda: self.places, lambda: 0)
        app = Starlette(routes=[Route(URL, self._answer, methods=["POST"])])
        self.runs = BatchRuns(self.batches, self.files, self.room, app)

    def _clock(self) -> dict[str, Any]:
        return {} if self.now_s is None else {"clock": lambda: self.now_s}

    async def _answer(self, request: HttpRequest) -> Response:
        prompt = (await request.json())["prompt"]
        self.asked.append(prompt)
        if prompt == "never":
            await asyncio.Event().wait()
        return JSONResponse({"said": prompt}, 400 if prompt == "wrong" else 200)

    async def begin(self, *prompts: str, owner: str = "") -> Batch:
        content = b"".join(
            json.dumps({"custom_id": str(n), "method": "POST", "url": URL, "body": {"prompt": each}}).encode()
            + b"\n"
            for n, each in enumerate(prompts)
        )
        file = await self.files.add(content, owner=owner, filename="in.jsonl")
        return self.create(file.id, owner)

    def create(self, file_id: str, owner: str = "") -> Batch:
        batch = self.batches.create(
            owner=owner, endpoint=URL, input_file_id=file_id, metadata=None, answers_lifetime_s=3600
        )
        self.runs.start(batch)
        return batch

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(each) for each in self.files.path_of(file_id).read_text().splitlines()]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(WITHIN_S)


async def serving(service: Service, act: Callable[[Service], Any]) -> Any:
    """Run an action while batches run. Afterwards they are stopped, as at a service's end."""
    task = asyncio.create_task(service.runs.serve())
    try:
        return await act(service)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_batch_that_was_stopped_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    first = Service(tmp_path)

    async def stop_in_the_middle(service: Service) -> Batch:
        batch = await service.begin("a", "wrong", "never", "never")
        await until(lambda: (batch.num_good, batch.num_failed) == (1, 1) and len(service.asked) == 4)
        return batch

    batch = asyncio.run(serving(first, stop_in_the_middle))
    assert batch.status == "in_progress" and first.room.num_taken == 0
    second = Service(tmp_path)
    second.places = 0  # no rank yet

    async def wait(service: Service) -> Batch:
        [again] = service.batches.open_batches
        await until(lambda: (again.num_good, again.num_failed) == (1, 1))
        assert service.asked == []
        service.places = 4  # one line at a time
        await until(lambda: service.asked == ["never"])
        service.runs.cancel(again)
        await until(lambda: again.has_ended)
        return again

    again = asyncio.run(serving(second, wait))
    assert (again.status, again.id, second.asked) == ("cancelled", batch.id, ["never"])
    assert [each["custom_id"] for each in second.lines(again.output_file_id)] == ["0"]
    assert [each["response"]["status_code"] for each in second.lines(again.error_file_id)] == [400]
    assert not list((tmp_path / "batches").glob("*.jsonl")), "answers are stored as files"


def test_what_has_no_answer_when_the_window_closes_is_told_line_by_line(tmp_path: Path) -> None:
    service = Service(tmp_path, now_s=1000.0)

    async def stop_in_the_middle(service: Service) -> None:
        batch = await service.begin("a", "never", "never")
        await until(lambda: batch.num_good == 1)

    asyncio.run(serving(service, stop_in_the_middle))
    late = Service(tmp_path, now_s=1000.0 + WINDOW_S)
    [left] = late.batches.open_batches
    assert left.expires_at == 1000 + WINDOW_S + GRACE_S, (
        "a start drops no lines at once, even if the calendar has passed their window"
    )
    late.now_s = left.expires_at

    async def wait(service: Service) -> Batch:
        [batch] = service.batches.open_batches
        await until(lambda: batch.has_ended)
        return batch

    batch = asyncio.run(serving(late, wait))
    assert (batch.status, batch.num_lines, batch.num_good, batch.num_failed) == ("expired", 3, 1, 2)
    assert {each["error"]["code"] for each in late.lines(batch.error_file_id)} == {"batch_expired"}
    assert len(late.lines(batch.output_file_id)) == 1 and batch.times["expired"] == late.now_s


def test_a_batch_that_is_cancelled_while_its_files_are_opened_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class SlowOutput(BatchOutput):
        def __init__(self, path: Path, mode: int = 0o666) -> None:
            begun.set()
            assert may_go_on.wait(TIMEOUT_S)
            super().__init__(path, mode)

    monkeypatch.setattr("server.api.openai.batches.runs.BatchOutput", SlowOutput)

    async def cancel(service: Service) -> Batch:
        batch = await service.begin("a")
        await until(begun.is_set)
        service.runs.cancel(batch)
        asyncio.get_running_loop().call_soon(may_go_on.set)
        await until(lambda: batch.has_ended)
        return batch

    batch = asyncio.run(serving(Service(tmp_path), cancel))
    assert (batch.status, batch.output_file_id) == ("cancelled", None)


def test_a_full_disk_ends_a_batch_by_name_and_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, write = Service(tmp_path, places=1), os.write

    def write_to_a_small_disk(fd: int, content: bytes) -> int:
        if b'"b"' in content:
            return write(fd, content[:20])  # a torn line
        if content.endswith(b"\n") and not content.startswith(b'{"id"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content)

    monkeypatch.setattr("server.api.openai.batches.output_lines.os.write", write_to_a_small_disk)

    async def wait(service: Service) -> Batch:
        batch = await service.begin("a", "b", "c")
        await until(lambda: batch.has_ended)
        return batch

    batch = asyncio.run(serving(service, wait))
    assert batch.status == "failed" and batch.errors[0]["code"] == "disk_full"
    assert str(tmp_path) not in batch.errors[0]["message"]
    assert [each["response"]["body"] for each in service.lines(batch.output_file_id)] == [{"said": "a"}]


def test_a_bug_ends_its_batch_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def wait(service: Service) -> list[Batch]:
        made = [await service.begin("a"), await service.begin("b")]
        await until(lambda: all(each.has_ended for each in made))
        with monkeypatch.context() as patched:
            patched.setattr("server.api.openai.batches.runs.answer_entry", fail)
            made.append(await service.begin("c"))
            await until(lambda: made[-1].has_ended)
        return made

    service = Service(tmp_path)
    made = asyncio.run(serving(service, wait))
    assert [each.status for each in made] == ["completed", "completed", "failed"]
    assert made[-1].errors[0]["message"] == "The batch failed: ZeroDivisionError."


def test_too_many_lines_and_many_errors_are_told_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.openai.batches.runs.MAX_LINES", 3)

    async def wait(service: Service) -> tuple[Batch, Batch]:
        many = await service.begin("a", "b", "c", "d")
        await until(lambda: many.has_ended)
        monkeypatch.setattr("server.api.openai.batches.runs.MAX_LINES", MAX_LINES)
        file = await service.files.add(b"{\n" * (MAX_ERRORS + 9), owner="", filename="bad")
        bad = service.create(file.id)
        await until(lambda: bad.has_ended)
        return many, bad

    many, bad = asyncio.run(serving(Service(tmp_path), wait))
    assert many.status == "failed" and many.errors[0]["code"] == "too_many_lines"
    assert bad.status == "failed" and len(bad.errors) == MAX_ERRORS


def test_batches_take_turns_for_a_quarter_of_the_places_less_those_of_others() -> None:
    async def take() -> None:
        num_others, num_places = 0, 16
        room = LinePlaces(lambda: num_places, lambda: num_others)
        assert room.limit == 4
        assert [await room.enter(each) for each in (1, 2, 1)] == [1, 2, 1]
        waiting = [asyncio.create_task(room.enter(each)) for each in (2, 1)]
        await asyncio.sleep(0)
        room.leave(1)
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting), "the longest-waiting batch is first, even for more"
        room.leave(1)
        assert await waiting[0] == 2
        assert not waiting[1].done() and room.num_taken == 4
        num_others = 2
        assert room.limit == 2
        num_others = 50
        assert room.limit == 1, "batches always get at least one place"
        num_places = 0
        assert room.limit == 0, "batches get no place while no rank serves"
        waiting[1].cancel()

    asyncio.run(asyncio.wait_for(take(), TIMEOUT_S))


def test_a_line_with_more_choices_than_places_runs_alone_with_as_many_as_there_are() -> None:
    async def take() -> None:
        room = LinePlaces(lambda: 64, lambda: 4)
        assert await room.enter(3) == 3
        large = asyncio.create_task(room.enter(128))
        await asyncio.sleep(0)
        assert not large.done()
        room.leave(3)
        assert await large == room.num_taken == 12
        after = asyncio.create_task(room.enter(1))
        await asyncio.sleep(0)
        assert not after.done()
        room.leave(12)
        assert await after == 1

    asyncio.run(asyncio.wait_for(take(), TIMEOUT_S))


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 128}, 128),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"messages": [], "n": 4}, 4),
        ({"prompt": [], "n": 0}, 1),
        ({"n": "many"}, 1),
        ({"n": -3}, 1),
        ({"n": 2.5}, 1),
    ],
)
def test_the_choices_of_a_line_are_its_prompts_times_n(body: dict[str, Any], number: int) -> None:
    assert num_choices(BatchLine(key="k", number=1, custom_id="c", url=URL, body=body)) == number


def fill_disk(monkeypatch: pytest.MonkeyPatch, kept_lines: int) -> list[bool]:
    """Fail writes of all but `kept_lines` answers, and all small files, while the first item of the returned list is true."""
    write, write_small, is_full, left = os.write, file_store.write_json, [True], [kept_lines]

    def write_line(fd: int, content: bytes) -> int:
        if content.startswith(b'{"id"'):
            left[0] -= 1
        if is_full[0] and left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content)

    def write_json(path: Path, value: dict[str, Any]) -> None:
        if is_full[0] and left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_small(path, value)

    monkeypatch.setattr("server.api.openai.batches.output_lines.os.write", write_line)
    for module in ("file_store", "batch_store"):
        monkeypatch.setattr(f"server.api.openai.batches.{module}.write_json", write_json)
    return is_full


@pytest.mark.parametrize("is_killed", [False, True])
def test_on_a_full_disk_a_batch_has_failed_at_once_and_its_answers_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Even the failure cannot be written. It is stored once there is room, or by the next front."""
    monkeypatch.setattr("server.api.openai.batches.runs.SWEEP_S", 0.02)
    service = Service(tmp_path, places=1)
    shared: list[list[bool]] = []

    async def fail(service: Service) -> Batch:
        batch = await service.begin("a", "b", "c")
        shared.append(fill_disk(monkeypatch, 2))
        await until(lambda: batch.has_ended)
        assert (batch.status, batch.shown()["errors"]["data"][0]["code"]) == ("failed", "disk_full")
        assert [each["custom_id"] for each in service.lines(batch.output_file_id)] == ["0", "1"]
        [found] = [each for each in service.files.all_of("") if each.purpose == "batch_output"]
        assert found.num_bytes == service.files.path_of(found.id).stat().st_size
        if not is_killed:
            shared[0][0] = False
            await until(lambda: not service.runs._tasks)
        return batch

    batch = asyncio.run(serving(service, fail))
    shared[0][0] = False

    async def look(again: Service) -> None:
        found = again.batches.find(batch.id, "")
        await until(lambda: found.has_ended)
        assert found.status == ("completed" if is_killed else "failed")
        lines = again.lines(found.output_file_id)
        assert [each["custom_id"] for each in lines] == (["0", "1", "2"] if is_killed else ["0", "1"])
        assert again.asked == (["c"] if is_killed else []), "no line is answered twice"

    asyncio.run(serving(Service(tmp_path, places=1), look))
    assert not list((tmp_path / "batches").glob("*.jsonl"))


def test_answers_that_were_lent_and_deleted_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.openai.batches.runs.SWEEP_S", 0.02)

    async def delete(service: Service) -> None:
        batch = await service.begin("a", "b")
        is_full = fill_disk(monkeypatch, 1)
        await until(lambda: batch.has_ended)
        service.files.delete(service.files.find(str(batch.output_file_id), ""))
        is_full[0] = False
        await until(lambda: not service.runs._tasks)
        assert [each.purpose for each in service.files.all_of("")] == ["batch"]

    asyncio.run(serving(Service(tmp_path, places=1), delete))
    assert not list((tmp_path / "batches").glob("*.jsonl"))


def test_a_batch_of_one_of_several_owners_ends_when_its_answers_leave_others_no_room(tmp_path: Path) -> None:
    async def fill(service: Service) -> Batch:
        batch = await service.begin(*(["x" * 500] * 40), owner="a")
        await until(lambda: batch.has_ended)
        return batch

    service = Service(tmp_path, places=1, files={"max_bytes": 50_000, "are_several": lambda: True})
    batch = asyncio.run(serving(service, fill))
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "files_full")
    assert 0 < batch.num_good < 40 and len(service.lines(batch.output_file_id)) == batch.num_good
    assert service.files._bytes.held_by("a") < 27_000, "at most half of the bytes, plus one line"
    service = Service(tmp_path / "alone", places=1, files={"max_bytes": 24_000})
    assert asyncio.run(serving(service, fill)).status == "completed", "a single owner may use more than half"


def test_answers_are_counted_as_they_grow_and_are_for_their_owner_s_eyes(tmp_path: Path) -> None:
    async def look(service: Service) -> None:
        batch = await service.begin("a", "never")
        before = service.files._bytes.held
        await until(lambda: batch.num_good == 1)
        grown = service.files._bytes.held - before
        [path] = (tmp_path / "batches").glob("*.output.jsonl")
        assert grown == path.stat().st_size > 0 and path.stat().st_mode & 0o777 == 0o600
        service.runs.cancel(batch)
        await until(lambda: batch.has_ended)
        assert service.files._bytes.held == before + grown

    asyncio.run(serving(Service(tmp_path), look))


def test_a_flood_of_one_owner_s_batches_pushes_out_none_of_who_has_fewer(tmp_path: Path) -> None:
    now_s = 1000.0
    batches = BatchStore(tmp_path / "batches", max_batches=6, clock=lambda: now_s)

    def make(owner: str) -> Batch:
        about = {"endpoint": URL, "input_file_id": "f", "metadata": None, "answers_lifetime_s": 3600}
        batch = batches.create(owner=owner, **about)
        batches.enter(batch, BatchStatus.COMPLETED)
        return batch

    mine, theirs = [make("me") for _ in range(2)], [make("flood") for _ in range(12)]
    batches.expire()
    assert batches.all_of("me") == mine and batches.all_of("flood") == theirs[-4:]
    again = BatchStore(tmp_path / "batches", max_batches=6, clock=lambda: now_s + 40 * 86_400)
    again.expire()
    assert len(again.all_of("me")) == 2, "a start deletes nothing at once, even if the calendar has jumped"
    now_s += 40 * 86_400
    batches.expire()
    assert not batches.all_of("me") and not batches.all_of("flood")


def test_batches_run_on_while_expired_files_and_batches_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.api.openai.batches.runs.SWEEP_S", WITHIN_S)

    async def sweep(service: Service) -> None:
        old = await service.begin("a")
        await until(lambda: old.has_ended)
        running = await service.begin("never")
        await until(lambda: service.asked[-1] == "never")
        service.files.is_read = lambda file_id: file_id == running.input_file_id
        stuck = [service.files.path_of(str(old.output_file_id)), tmp_path / "batches" / f"{old.id}.json"]
        for path in stuck:
            fail_to_remove(path)
        assert service.now_s is not None
        running.closes_at = service.now_s + 2 * LIFETIME_S
        service.now_s += LIFETIME_S + 1
        await until(lambda: {"files", "batches"} == set(re.findall("1 expired (.*) cannot be", caplog.text)))
        assert running.status == "in_progress" and service.room.num_taken == 1
        for path in stuck:
            path.rmdir()
        await until(lambda: service.batches.all_of("") == [running])
        assert [each.purpose for each in service.files._files.values()] == ["batch"]

    asyncio.run(serving(Service(tmp_path, now_s=1000.0), sweep))


def test_too_many_batches_that_cannot_be_removed_end_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = BatchStore(tmp_path / "batches", max_batches=1)
    about = {"endpoint": URL, "input_file_id": "f", "metadata": None, "answers_lifetime_s": 3600}
    first = batches.create(owner="", **about)
    batches.enter(first, BatchStatus.COMPLETED)
    fail_to_remove(tmp_path / "batches" / f"{first.id}.json")
    second = batches.create(owner="", **about)
    assert batches.all_of("") == [first, second] and "cannot be removed now" in caplog.text
    (tmp_path / "batches" / f"{first.id}.json").rmdir()
    batches.expire()
    assert batches.all_of("") == [second]


def test_batches_run_on_after_an_error_in_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.api.openai.batches.runs.SWEEP_S", WITHIN_S)

    async def sweep(service: Service) -> None:
        running = await service.begin("never")
        expire = Mock(side_effect=ZeroDivisionError)
        monkeypatch.setattr(service.files, "expire", expire)
        await until(lambda: expire.call_count > 1 and service.asked == ["never"])
        assert running.status == "in_progress"

    asyncio.run(serving(Service(tmp_path), sweep))
    assert "expired files and batches cannot be removed now" in caplog.text
