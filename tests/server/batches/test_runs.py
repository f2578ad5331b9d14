"""Batches in one process: taken up again, given up when their window closes, stopped by a full disk, and in their places."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.batches.batch_store import WINDOW_S, Batch, BatchStore
from server.batches.file_store import FileStore
from server.batches.output_lines import BatchOutput
from server.batches.runs import MAX_ERRORS, MAX_LINES, BatchRuns, LinePlaces

URL = "/v1/completions"
TIMEOUT_S = 30.0
WITHIN_S = 0.01  # between two looks


class Service:
    """A folder with files and batches, and endpoints that answer with the prompt, some of them never."""

    def __init__(self, directory: Path, *, places: int = 1000, now_s: float | None = None) -> None:
        self.now_s = now_s
        self.asked: list[str] = []
        self.places = places
        self.files = FileStore(directory, max_bytes=1 << 20, **self._clock())
        self.batches = BatchStore(directory / "batches", **self._clock())
        self.room = LinePlaces(lambda: self.places, lambda: self.room.num_taken)
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
    """Do something while batches run; afterwards they are stopped, as at a service's end."""
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
    assert not list((tmp_path / "batches").glob("*.jsonl")), "answers have become files"


def test_what_has_no_answer_when_the_window_closes_is_told_line_by_line(tmp_path: Path) -> None:
    service = Service(tmp_path, now_s=1000.0)

    async def stop_in_the_middle(service: Service) -> None:
        batch = await service.begin("a", "never", "never")
        await until(lambda: batch.num_good == 1)

    asyncio.run(serving(service, stop_in_the_middle))
    late = Service(tmp_path, now_s=1000.0 + WINDOW_S)

    async def wait(service: Service) -> Batch:
        [batch] = service.batches.open_batches
        await until(lambda: batch.has_ended)
        return batch

    batch = asyncio.run(serving(late, wait))
    assert (batch.status, batch.num_lines, batch.num_good, batch.num_failed) == ("expired", 3, 1, 2)
    assert {each["error"]["code"] for each in late.lines(batch.error_file_id)} == {"batch_expired"}
    assert len(late.lines(batch.output_file_id)) == 1 and batch.times["expired"] == 1000 + WINDOW_S


def test_a_batch_that_is_cancelled_while_its_files_are_opened_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class SlowOutput(BatchOutput):
        def __init__(self, path: Path) -> None:
            begun.set()
            assert may_go_on.wait(TIMEOUT_S)
            super().__init__(path)

    monkeypatch.setattr("server.batches.runs.BatchOutput", SlowOutput)

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

    monkeypatch.setattr("server.batches.output_lines.os.write", write_to_a_small_disk)

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
            patched.setattr("server.batches.runs.answer_entry", fail)
            made.append(await service.begin("c"))
            await until(lambda: made[-1].has_ended)
        return made

    service = Service(tmp_path)
    made = asyncio.run(serving(service, wait))
    assert [each.status for each in made] == ["completed", "completed", "failed"]
    assert made[-1].errors[0]["message"] == "The batch broke off: ZeroDivisionError."


def test_too_many_lines_and_many_errors_are_told_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.runs.MAX_LINES", 3)

    async def wait(service: Service) -> tuple[Batch, Batch]:
        many = await service.begin("a", "b", "c", "d")
        await until(lambda: many.has_ended)
        monkeypatch.setattr("server.batches.runs.MAX_LINES", MAX_LINES)
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
        room = LinePlaces(lambda: num_places, lambda: room.num_taken + num_others)
        assert room.limit == 4
        for _ in range(4):
            await room.enter()
        waiting = [asyncio.create_task(room.enter()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        room.leave()
        await waiting[0]
        assert not waiting[1].done() and room.num_taken == 4
        num_others = 2
        assert room.limit == 2
        num_others = 50
        assert room.limit == 1, "batches never stand still"
        num_places = 0
        assert room.limit == 0, "but while no rank serves"
        waiting[1].cancel()

    asyncio.run(asyncio.wait_for(take(), TIMEOUT_S))
