"""Copies of background runs at the leading front."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from server.api.openai.responses.left_runs import FOLDER, LeftRun, LeftRuns
from server.api.openai.responses.run_copies import RunCopies
from server.api.openai.responses.runs_of_others import RunsOfOthers
from tests.server.api.openai.responses.test_left_runs import run_named, settled


class Leader:
    """The leading front as front 3 of another node reaches it, and that front's runs."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.own = folder / "leader", folder / "own"
        self.kept.mkdir(exist_ok=True)
        self.left = LeftRuns(self.kept / FOLDER)
        self.others = RunsOfOthers(self.kept, self.left)
        self.num_refusals = 0  # connections that it refuses from now on
        self.error: Exception | None = None  # of the next request
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self.others))
        self.copies = RunCopies(self._ask, 3)
        self.runs = LeftRuns(self.own, self.copies)
        self.run_here: list[LeftRun] = []
        self.left.run_again = self._run

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        if self.num_refusals:
            self.num_refusals -= 1
            raise httpx.ConnectError("it is being restarted")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return await self._client.send(request)

    async def _run(self, run: LeftRun) -> None:
        self.run_here.append(run)

    @property
    def copied(self) -> list[str]:
        """The ids of the runs that it has copies of."""
        return sorted(path.name for path in (self.kept / f"{FOLDER}-3").glob("resp_*"))


@contextlib.asynccontextmanager
async def serving(leader: Leader) -> AsyncIterator[Leader]:
    tasks = [asyncio.create_task(each) for each in (leader.copies.serve(), leader.left.resume())]
    yield leader
    for task in tasks:
        task.cancel()


def run(check: Callable[[Leader], Awaitable[None]], folder: Path) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(20), serving(Leader(folder)) as leader:
            await check(leader)

    asyncio.run(all_of_it())


def test_a_copy_exists_from_the_begin_of_a_run_to_its_end(tmp_path: Path) -> None:
    async def check(leader: Leader) -> None:
        await leader.runs.copy(run_named("resp_a"))
        assert leader.copied == ["resp_a"]
        leader.runs.forget("resp_a")
        await leader.runs.copy(run_named("resp_b"))
        assert leader.copied == ["resp_b"], "messages are applied in order"

    run(check, tmp_path)


def test_a_lost_front_has_its_runs_taken_over_once(tmp_path: Path) -> None:
    async def check(leader: Leader) -> None:
        await leader.runs.copy(run_named("resp_a"))
        for _ in range(2):
            leader.others.take_over([2, 3])
            await settled()
        assert leader.run_here == [run_named("resp_a")] and leader.copied == []
        assert leader.left.has("resp_a"), "the next leading front must run it"
        assert await leader.runs.is_taken(run_named("resp_a"))
        leader.left.forget("resp_a")
        assert await leader.runs.is_taken(run_named("resp_a")), "it has ended there"
        assert not await leader.runs.is_taken(run_named("resp_b"))
        assert leader.copied == ["resp_b"]

    run(check, tmp_path)


def test_a_restarted_front_sends_its_runs_again_and_others_are_taken_over(tmp_path: Path) -> None:
    """A node that has returned with an empty folder knows nothing of its runs."""

    async def check(leader: Leader) -> None:
        for name in ("resp_a", "resp_b"):
            await leader.runs.copy(run_named(name))
        leader.runs.note(run_named("resp_b"))
        again = LeftRuns(leader.own, leader.copies)
        resuming = asyncio.create_task(again.resume())
        await settled()
        assert not await again.is_taken(run_named("resp_b"))
        resuming.cancel()
        assert leader.run_here == [run_named("resp_a")] and leader.copied == ["resp_b"]

    run(check, tmp_path)


def test_a_leading_front_that_is_restarted_gets_the_messages_later(tmp_path: Path) -> None:
    async def check(leader: Leader) -> None:
        leader.num_refusals = 3
        await leader.runs.copy(run_named("resp_a"))
        assert leader.copied == ["resp_a"] and leader.num_refusals == 0

    run(check, tmp_path)


def test_a_full_disk_of_the_leading_front_only_warns(tmp_path: Path) -> None:
    async def check(leader: Leader) -> None:
        (leader.kept / f"{FOLDER}-3").write_text("in the way")
        await leader.runs.copy(run_named("resp_a"))
        assert not await leader.runs.is_taken(run_named("resp_a"))

    run(check, tmp_path)


def test_later_runs_are_copied_after_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(leader: Leader) -> None:
        leader.error = RuntimeError("it is closed")
        assert not await leader.runs.is_taken(run_named("resp_a"))
        await leader.runs.copy(run_named("resp_b"))
        assert leader.copied == ["resp_b"]

    run(check, tmp_path)
    assert "RuntimeError: it is closed" in caplog.text


def test_a_front_runs_its_runs_again_even_if_their_files_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(leader: Leader) -> None:
        leader.runs.note(run_named("resp_a"))
        again = LeftRuns(leader.own, leader.copies)
        again.run_again = leader._run
        monkeypatch.setattr(Path, "glob", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        resuming = asyncio.create_task(again.resume())
        await settled()
        resuming.cancel()
        assert leader.run_here == [run_named("resp_a")]

    run(check, tmp_path)
    assert "Input/output error" in caplog.text
