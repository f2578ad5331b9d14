"""Background runs in files."""

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.api.openai.responses.kept import ResponseStore
from server.api.openai.responses.left_runs import LeftRun, LeftRuns
from server.api.openai.responses.routes import responses_routes
from server.api.served import ServedModel
from server.front.adapters.registry import AdapterUse, KnownAdapters, NamedAdapter
from server.front.generations import Answer, Ask
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.exchanges import asker_of_exchange
from tests.support.models.tiny_tokenizer import MAX_LEN, write_tokenizer
from tests.support.requests.answers import ByteDecoder


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


def test_a_file_that_cannot_be_read_stays_for_the_next_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    LeftRuns(tmp_path).note(run_named("resp_a"))

    def fail(_path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", fail)
        assert resumed(tmp_path) == []
    assert "resp_a cannot be read" in caplog.text
    assert resumed(tmp_path) == [run_named("resp_a")]


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


class OneAdapter(KnownAdapters):
    """An adapter that only one API key may use."""

    def __init__(self, owner: str) -> None:
        super().__init__(is_enabled=True)
        self._owner = owner

    def load(self) -> None:
        """Register the adapter."""
        self._names = {"mine": NamedAdapter("mine", "/adapter", "digest", 0, owners=(self._owner,))}

    def uses(self) -> Iterator[AdapterUse]:
        return iter(())

    def why_not_ready(self) -> str | None:
        return None if self._names else "its adapters are being loaded"


def test_a_run_runs_again_for_the_key_that_began_it_once_its_adapter_is_loaded(tmp_path: Path) -> None:
    adapters = OneAdapter("owner-of-key-a")
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path / "model", chat_template="{{ messages[0].content }}")))
    model = ServedModel(
        names=("tiny",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: MAX_LEN,
        created=0,
        structures=StructureChecks(tokenizer.vocabulary),
        adapters=adapters,
    )
    accepted: list[tuple[str, str]] = []

    def accept(request_id: str, asks: Sequence[Ask]) -> Answer:
        accepted.append((asker_of_exchange().key_id, asks[0].request.adapter))
        answer = Answer(request_id, lambda _: None)
        answer.add(asks[0], 0, ByteDecoder())
        return answer

    async def scenario() -> None:
        left, store = LeftRuns(tmp_path / "background"), ResponseStore()
        responses_routes(model, SimpleNamespace(open=accept), left=left, store=store)  # type: ignore[arg-type]
        run = LeftRun(
            {"id": "resp_a", "status": "queued", "created_at": 1},
            {"model": "mine", "input": "x", "background": True, "seed": 5},
            [{"role": "user", "content": "x"}],
            "owner-of-key-a",
        )
        running = asyncio.ensure_future(left.run_again(run))
        await settled()
        assert store.is_running("resp_a") and not running.done()
        adapters.load()
        await running
        assert store.is_running("resp_a")

    asyncio.run(scenario())
    assert accepted == [("owner-of-key-a"[:16], "digest")]
