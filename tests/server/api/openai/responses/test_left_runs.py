"""Background runs in files."""

import asyncio
from pathlib import Path

from server.api.openai.responses.left_runs import LeftRun, LeftRuns


def run_named(response_id: str) -> LeftRun:
    return LeftRun(
        {"id": response_id, "status": "queued"}, {"input": "x", "seed": -1}, [{"role": "user"}], "owner"
    )


def resumed(folder: Path) -> list[LeftRun]:
    """Return the runs that a new front runs again."""
    found: list[LeftRun] = []

    async def note(run: LeftRun) -> None:
        found.append(run)

    async def resume() -> None:
        left = LeftRuns(folder)
        left.run_again = note
        resuming = asyncio.create_task(left.resume())
        await settled()
        resuming.cancel()

    asyncio.run(resume())
    return found


async def settled() -> None:
    """Let all tasks run that wait for nothing."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_runs_that_have_not_ended_are_run_again_by_the_next_front(tmp_path: Path) -> None:
    runs = LeftRuns(tmp_path / "background")
    for name in ("resp_a", "resp_b", "resp_c"):
        runs.note(run_named(name))
    runs.forget("resp_b")
    runs.forget("resp_b")
    assert resumed(tmp_path / "background") == [run_named("resp_a"), run_named("resp_c")]
    assert resumed(tmp_path / "background"), (
        "they stay until they end, because the next front may be killed, too"
    )


def test_files_of_other_content_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "resp_torn").write_text('{"response": {"id"')
    (tmp_path / "resp_list").write_text("[]")
    (tmp_path / "resp_other").write_text(
        '{"response": {"id": "resp_a"}, "body": {}, "messages": [], "owner": ""}'
    )
    (tmp_path / "partial_resp_x").write_text("{}")
    assert resumed(tmp_path) == []


def test_a_run_that_cannot_run_again_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    left, found = LeftRuns(tmp_path), []

    async def fail(run: LeftRun) -> None:
        found.append(run.response_id)
        raise ValueError("an older version wrote it")

    async def resume() -> None:
        left.run_again = fail
        resuming = asyncio.create_task(left.resume())
        for name in ("resp_a", "resp_b"):
            left.adopt(run_named(name))
            await settled()
        assert not resuming.done()
        resuming.cancel()

    asyncio.run(resume())
    assert found == ["resp_a", "resp_b"] and left.has("resp_a") and left.has("resp_b")


def test_a_full_disk_only_warns(tmp_path: Path) -> None:
    runs = LeftRuns(tmp_path / "background")
    (tmp_path / "background").rmdir()
    runs.note(run_named("resp_a"))
    assert not (tmp_path / "background").exists()
