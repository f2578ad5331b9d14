"""The standby's front has the leading front's files, and notices the loss of its node."""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc.aio
import numpy as np
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.link.messages import Copied, FileGone, FilePart, Follow, KeptFile, ServiceEnds
from server.link.rank_link import LinkError
from server.link.ranks import Ranks
from server.serve.standby import first_front, waiting
from server.serve.standby.first_front import (
    FileCopies,
    FirstFront,
    Following,
    end_first,
    find_first,
    has_taken_over,
    leave_first,
    note_taken_over,
    why_lost,
)
from server.serve.standby.leading import CopiedFirst, KeptFiles, ranks_near
from server.serve.store.meeting import Endpoint

KEY = b"k" * 32
LONG = 1_500_000  # bytes: three parts
WITHIN_S = 30.0


class Leading:
    """A leading front without HTTP, and torchrun's agent."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.key, self.events = key, list[str]()
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.files = KeptFiles(folder, lambda kind, _text: self.events.append(kind), "torchrun of first")
        self.ranks = Ranks(1, "token", cluster_key=key)
        self.ranks.on_follow = self.files.serve
        self.agent = socket.create_server(("127.0.0.1", 0))
        address = self.ranks.bind("127.0.0.1")
        self.first = FirstFront(address, "token", Endpoint("127.0.0.1", self.agent.getsockname()[1]))

    async def serve(self) -> None:
        """Accept the standby."""
        await self.ranks.serve(lambda *_: None, _refuse, _refuse)

    async def close(self) -> None:
        """End as a killed process does."""
        self.agent.close()
        await self.ranks.close()
        self.files.close()


def _refuse(_message: object) -> Any:
    raise AssertionError("no rank comes")


class Standby:
    """The standby's front as far as it follows."""

    def __init__(
        self, first: FirstFront, folder: Path, key: bytes | None = None, *, silence_s: float = 0.0
    ) -> None:
        self.copies, self.said = FileCopies(folder), list[str]()
        self.following = Following(first, self.copies, cluster_key=key, silence_s=silence_s)
        self.lost = asyncio.create_task(asyncio.to_thread(self.following.follow, self.said.append))

    async def close(self) -> None:
        """End."""
        self.following.stop()
        await self.lost


@contextlib.asynccontextmanager
async def following(directory: Path, key: bytes | None) -> AsyncIterator[tuple[Leading, Standby]]:
    """Run a leading front, and a standby that follows it."""
    leading = Leading(directory / "first", key)
    await leading.serve()
    standby = Standby(leading.first, directory / "copies", key)
    await until(lambda: leading.events == ["standby_follows"])
    try:
        yield leading, standby
    finally:
        await standby.close()
        await leading.close()


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


with_and_without_key = pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a cluster key"])


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(WITHIN_S):
        while not is_true():
            await asyncio.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def copied(leading: Leading, standby: Standby) -> bool:
    """Wait until the standby has answered, and return whether the folders are equal."""
    async with asyncio.timeout(WITHIN_S):
        await leading.files.wait_until_copied()
    return contents(leading.folder) == contents(standby.copies.folder)


@with_and_without_key
@in_a_loop
async def test_every_change_is_there_when_the_leading_front_has_waited(
    tmp_path: Path, key: bytes | None
) -> None:
    async with following(tmp_path, key) as (leading, standby):
        folder = leading.folder
        (folder / "answers").mkdir()
        (folder / "answers" / "a").write_bytes(b"accepted\n")
        assert await copied(leading, standby)
        with (folder / "answers" / "a").open("ab") as file:
            file.write(b"the answer")
        (folder / "empty").touch()
        assert await copied(leading, standby)
        (folder / "long").write_bytes(os.urandom(LONG))
        assert await copied(leading, standby)
        with (folder / "long").open("ab") as file:
            file.write(os.urandom(LONG))
        assert await copied(leading, standby)
        (folder / "long").write_bytes(b"short again")
        (folder / "answers" / "a").unlink()
        assert await copied(leading, standby)
        assert contents(folder) == {"empty": b"", "long": b"short again"}


@with_and_without_key
@in_a_loop
async def test_a_long_file_that_grows_is_sent_from_where_it_grew(tmp_path: Path, key: bytes | None) -> None:
    async with following(tmp_path, key) as (leading, standby):
        (leading.folder / "long").write_bytes(bytes(LONG))
        assert await copied(leading, standby)
        inode = (standby.copies.folder / "long").stat().st_ino
        with (leading.folder / "long").open("ab") as file:
            file.write(b"more")
        assert await copied(leading, standby)
        assert (standby.copies.folder / "long").stat().st_ino == inode, "it was not written again"


@with_and_without_key
@in_a_loop
async def test_a_standby_that_returns_gets_only_what_has_changed(
    tmp_path: Path, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, key) as (leading, standby):
        for name in ("same", "changed", "removed"):
            (leading.folder / name).write_text(name)
        assert await copied(leading, standby)
        await standby.close()
        await until(lambda: leading.events[-1] == "standby_lost")
        (leading.folder / "changed").write_text("again")
        (leading.folder / "removed").unlink()
        taken: list[str] = []
        take = FileCopies.take

        def note(self: FileCopies, message: Any) -> None:
            taken.append(message.path)
            take(self, message)

        monkeypatch.setattr(FileCopies, "take", note)
        again = Standby(leading.first, standby.copies.folder, leading.key)
        await until(lambda: leading.events[-1] == "standby_follows")
        assert await copied(leading, again)
        assert sorted(taken) == ["changed", "removed"]
        await again.close()


@in_a_loop
async def test_the_standby_knows_which_ranks_are_lost_with_the_node_of_the_front(tmp_path: Path) -> None:
    async with following(tmp_path, None) as (leading, standby):
        assert ranks_near(standby.copies.folder) == []
        for rank, node in ((3, "torchrun of first"), (1, "another"), (2, "torchrun of first")):
            leading.files.note_rank(rank, node)
        assert await copied(leading, standby)
        assert ranks_near(standby.copies.folder) == [2, 3]


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd"])
@in_a_loop
async def test_the_leading_front_sends_no_file_outside_of_its_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("x")
    leading = Leading(tmp_path / "first")
    stream: Any = SimpleNamespace(first=Follow([KeptFile(path, 1, 1)]))
    with pytest.raises(ValueError, match="is outside of the folder"):
        await leading.files.serve(stream)
    assert leading.events == []
    await leading.close()


@in_a_loop
async def test_without_a_standby_nothing_waits(tmp_path: Path) -> None:
    leading = Leading(tmp_path / "first")
    await asyncio.wait_for(leading.files.wait_until_copied(), 1.0)
    await leading.close()


@with_and_without_key
@in_a_loop
async def test_a_standby_that_does_not_answer_delays_an_answer_only_for_a_while(
    tmp_path: Path, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, key) as (leading, standby):
        monkeypatch.setattr("server.serve.standby.leading.COPY_TIMEOUT_S", 0.1)
        halted, take = threading.Event(), FileCopies.take

        def take_later(self: FileCopies, message: Any) -> None:
            halted.wait(WITHIN_S)
            take(self, message)

        monkeypatch.setattr(FileCopies, "take", take_later)
        (leading.folder / "file").write_text("1")
        await asyncio.wait_for(leading.files.wait_until_copied(), WITHIN_S)
        assert contents(standby.copies.folder) == {}
        assert leading.events == ["standby_follows", "standby_lost"]
        monkeypatch.setattr("server.serve.standby.leading.COPY_TIMEOUT_S", 3600.0)
        await asyncio.wait_for(leading.files.wait_until_copied(), WITHIN_S)
        halted.set()
        await until(lambda: leading.events[-1] == "standby_follows")
        (leading.folder / "next").write_text("2")
        assert await copied(leading, standby), "answers wait again"


@in_a_loop
async def test_a_killed_front_is_followed_again_while_its_node_is_there(tmp_path: Path) -> None:
    leading = Leading(tmp_path / "first")
    await leading.serve()
    standby = Standby(leading.first, tmp_path / "copies")
    await until(lambda: leading.events == ["standby_follows"])
    await leading.ranks.close()
    leading.files.close()
    await until(lambda: leading.events[-1] == "standby_lost")
    again = Leading(tmp_path / "first")
    port = int(leading.first.ranks_address.rpartition(":")[2])
    again.ranks = Ranks(1, "token")
    again.ranks.bind("127.0.0.1", port)
    again.ranks.on_follow = again.files.serve
    (again.folder / "file").write_text("1")
    await again.serve()
    await until(lambda: again.events == ["standby_follows"])
    assert await copied(again, standby)
    assert not standby.lost.done()
    leading.agent.close()
    await again.close()
    async with asyncio.timeout(WITHIN_S):
        why = await standby.lost
    assert why is not None and f"torchrun does not answer at 127.0.0.1:{leading.first.store.port}" in why


@pytest.mark.parametrize("is_silent", [True, False])
@in_a_loop
async def test_one_short_attempt_to_connect_confirms_that_a_silent_machine_is_lost(
    is_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s, broken = list[float](), threading.Event()

    def look(timeout_s: float) -> int:
        assert timeout_s == 3.0
        return int(is_silent and broken.is_set())

    def answers(_store: Endpoint, timeout: float) -> socket.socket:
        limits_s.append(timeout)
        if len(limits_s) < 3:  # a stumble of the network
            return socket.socket()
        raise TimeoutError("timed out")

    def is_away(*_: object) -> None:
        raise LinkError("the front is away")

    monkeypatch.setattr(first_front, "break_silent", look)
    monkeypatch.setattr(first_front, "LOOK_EVERY_S", 0.01)
    leading = Leading(tmp_path / "first")
    await leading.serve()
    standby = Standby(leading.first, tmp_path / "copies", silence_s=3.0)
    await until(lambda: leading.events == ["standby_follows"])
    monkeypatch.setattr(socket, "create_connection", answers)
    monkeypatch.setattr(first_front, "reach", is_away)
    broken.set()
    await until(lambda: standby.following._was_silent.is_set() is is_silent)
    await leading.close()
    async with asyncio.timeout(WITHIN_S):
        why = await standby.lost
    assert why is not None and "timed out" in why
    assert limits_s == [0.5 if is_silent else 2.0, 2.0, 2.0]


@in_a_loop
async def test_a_stream_that_is_cancelled_twice_is_noted_as_lost(tmp_path: Path) -> None:
    """gRPC may cancel it at the end of the connection, and again when the server stops."""
    leading = Leading(tmp_path / "first")
    silent = Mock(first=Follow([]), send=AsyncMock(), received=lambda: _silence(Copied(1)))
    serving = asyncio.create_task(leading.files.serve(silent))
    await until(lambda: leading.events == ["standby_follows"])
    for _ in range(2):
        serving.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(serving, return_exceptions=True)
    assert leading.events == ["standby_follows", "standby_lost"]
    await leading.close()


@in_a_loop
async def test_an_error_that_ends_a_stream_is_logged_unless_it_is_grpc_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leading = Leading(tmp_path / "first")
    for error in (grpc.aio.UsageError("it has ended"), ZeroDivisionError("it divides")):
        (leading.folder / "a").write_text("content")
        await leading.files.serve(
            Mock(first=Follow([]), send=AsyncMock(side_effect=error), received=lambda: _silence())
        )
    assert [record.getMessage() for record in caplog.records if "cannot follow" in record.getMessage()] == [
        "the standby cannot follow: ZeroDivisionError: it divides"
    ]
    await leading.close()


async def _silence(*messages: object) -> AsyncIterator[object]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


@with_and_without_key
@in_a_loop
async def test_a_service_that_ends_in_order_is_not_taken_over(tmp_path: Path, key: bytes | None) -> None:
    async with following(tmp_path, key) as (leading, standby):
        leading.files.end()
        async with asyncio.timeout(WITHIN_S):
            assert await standby.lost is None


@in_a_loop
async def test_another_cluster_key_is_refused(tmp_path: Path) -> None:
    leading = Leading(tmp_path / "first", KEY)
    await leading.serve()
    standby = Standby(leading.first, tmp_path / "copies", b"another key that is long enough..")
    await until(lambda: any("the cluster keys differ" in said for said in standby.said))
    assert leading.events == []
    await standby.close()
    await leading.close()


@in_a_loop
async def test_a_standby_that_leads_ends_the_former_front(tmp_path: Path) -> None:
    leading, ended = Leading(tmp_path / "first", KEY), list[bool]()
    leading.files.on_replaced = lambda: ended.append(True)
    await leading.serve()
    assert await asyncio.to_thread(end_first, leading.first, KEY)
    assert ended == [True]
    await leading.close()
    assert not await asyncio.to_thread(end_first, leading.first, KEY)


@in_a_loop
async def test_a_standby_tries_again_to_end_the_former_front_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_END_EVERY_S", 0.001)
    monkeypatch.setattr(waiting, "end_first", Mock(side_effect=[ValueError("no message"), False, True]))
    on_ended = Mock()
    await waiting.keep_ending(FirstFront("", "", Endpoint("", 0)), None, on_ended)
    on_ended.assert_called_once_with()
    assert "ValueError: no message" in caplog.text


def part(path: str, offset: int, content: bytes, *, is_last: bool = True) -> FilePart:
    return FilePart(path, offset, np.frombuffer(content, np.uint8), 1, is_last)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "."])
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    copies = FileCopies(tmp_path / "copies")
    for message in (part(path, 0, b"x"), FileGone(path)):
        with pytest.raises(ValueError, match="is outside of the folder"):
            copies.take(message)
    assert contents(tmp_path) == {}


def test_a_part_that_does_not_fit_its_copy_is_refused(tmp_path: Path) -> None:
    copies = FileCopies(tmp_path / "copies")
    copies.take(part("a", 0, b"12"))
    with pytest.raises(ValueError, match="the copy of a has another length"):
        copies.take(part("a", 3, b"4"))
    with pytest.raises(ValueError, match="unexpected Copied"):
        copies.take(Copied(1))


def test_a_copy_that_was_cut_off_is_not_seen(tmp_path: Path) -> None:
    copies = FileCopies(tmp_path / "copies")
    copies.take(part("a", 0, b"12"))
    copies.take(part("a", 0, b"345", is_last=False))
    assert (copies.folder / "a").read_bytes() == b"12"
    assert [each.path for each in copies.files()] == ["a"]
    assert contents(copies.folder) == {"a": b"12"}


def test_the_first_front_is_left_for_the_standbys_and_a_takeover_for_its_successor(tmp_path: Path) -> None:
    assert find_first(tmp_path) is None and not has_taken_over(tmp_path)
    leave_first(
        tmp_path, {"ranks_address": "10.0.0.1:5", "token": "t", "http": "h"}, Endpoint("10.0.0.1", 29400)
    )
    note_taken_over(tmp_path)
    assert find_first(tmp_path) == FirstFront("10.0.0.1:5", "t", Endpoint("10.0.0.1", 29400))
    assert has_taken_over(tmp_path)


def test_a_node_is_lost_if_torchrun_refuses_connections_or_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        endpoint = Endpoint("127.0.0.1", agent.getsockname()[1])
        assert why_lost([endpoint]) is None
        assert why_lost([Endpoint("127.0.0.1", 9), endpoint]) is None, "one of its addresses answers"
    assert "refused" in str(why_lost([endpoint])).lower()

    def no_answer(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", no_answer)
    assert "timed out" in str(why_lost([endpoint]))


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), socket.gaierror(-3, "Temporary failure")]
)
def test_an_error_of_this_machine_is_no_loss_of_the_other_one(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
    assert why_lost([Endpoint("head", 29400)]) is None


@in_a_loop
async def test_the_node_s_address_is_known_when_its_name_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record may be removed with the node, as in Kubernetes."""
    leading = Leading(tmp_path / "first")
    leading.first = leading.first._replace(store=Endpoint("localhost", leading.first.store.port))
    await leading.serve()
    standby = Standby(leading.first, tmp_path / "copies")
    await until(lambda: leading.events == ["standby_follows"])
    resolve = socket.getaddrinfo

    def resolve_numbers(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(-2, "Name not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_numbers)
    await leading.close()
    async with asyncio.timeout(WITHIN_S):
        why = await standby.lost
    assert why is not None and "torchrun does not answer at 127.0.0.1:" in why


@in_a_loop
async def test_a_full_disk_of_the_leading_front_keeps_no_rank_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leading = Leading(tmp_path / "first")
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("server.serve.standby.leading.replace_text", full)
    leading.files.note_rank(1, "torchrun of first")
    assert leading.files.near == {1} and "No space left on device" in caplog.text
    await leading.close()


@in_a_loop
async def test_a_file_that_changes_again_is_sent_behind_those_that_changed_before(tmp_path: Path) -> None:
    """A batch's record names a file of answers that was written between its changes."""
    leading = Leading(tmp_path / "first")
    for name in ("record", "answers", "record"):
        with (leading.folder / name).open("a") as file:
            file.write("1")
        leading.files._look()
    assert list(leading.files._is_new) == ["answers", "record"]
    await leading.close()


@in_a_loop
async def test_an_orderly_end_does_not_wait_for_files(tmp_path: Path) -> None:
    leading, sent = Leading(tmp_path / "first"), list[object]()

    async def send(message: object) -> None:
        sent.append(message)
        leading.files.end()

    for number in range(3):
        (leading.folder / str(number)).write_text("1")
    stream = Mock(first=Follow([]), send=send, received=lambda: _silence())
    serving = asyncio.create_task(leading.files.serve(stream))
    await until(lambda: sent[-1:] == [ServiceEnds()])
    assert [type(message) for message in sent[:2]] == [FilePart, Copied] and len(sent) == 3
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await leading.close()


@in_a_loop
async def test_a_standby_that_is_refused_tries_again_a_second_later_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(first_front, "_PAUSE_S", 0.01)
    leading = Leading(tmp_path / "first")
    await leading.serve()
    standby = Standby(leading.first._replace(token="another"), tmp_path / "copies")
    wait = standby.following._is_stopped.wait

    def note_pause(timeout: float | None = None) -> bool:
        pauses.append(timeout or 0.0)
        return wait(timeout)

    monkeypatch.setattr(standby.following._is_stopped, "wait", note_pause)
    await until(lambda: pauses.count(0.01) >= 3)
    assert len(standby.said) == 1 and "broke" in standby.said[0]
    await standby.close()
    await leading.close()


@in_a_loop
async def test_a_standby_follows_when_it_has_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, full, take = (
        threading.Event(),
        OSError(errno.ENOSPC, "No space left on device"),
        FileCopies.take,
    )

    def take_later(self: FileCopies, message: Any) -> None:
        if not may_write.is_set():
            raise full
        take(self, message)

    monkeypatch.setattr(FileCopies, "take", take_later)
    leading = Leading(tmp_path / "first")
    (leading.folder / "file").write_text("1")
    await leading.serve()
    standby = Standby(leading.first, tmp_path / "copies")
    await until(lambda: len(standby.said) == 1)
    assert leading.events == [] and "No space left on device" in standby.said[0]
    may_write.set()
    await until(lambda: leading.events == ["standby_follows"])
    assert contents(leading.folder) == contents(standby.copies.folder)
    await standby.close()
    await leading.close()


@pytest.mark.parametrize(
    ("method", "path", "waits"),
    [
        ("POST", "/v1/responses", True),
        ("POST", "/v1/batches", True),
        ("DELETE", "/v1/files/file-1", True),
        ("GET", "/v1/files/file-1", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
@in_a_loop
async def test_only_answers_that_promise_something_wait_for_the_copies(
    method: str, path: str, waits: bool
) -> None:
    calls: list[str] = []

    async def wait_until_copied() -> None:
        calls.append("copied")

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def send(message: Message) -> None:
        calls.append(message["type"])

    receive: Callable[[], Awaitable[Message]] = asyncio.Queue[Message]().get
    await CopiedFirst(app, wait_until_copied)({"type": "http", "method": method, "path": path}, receive, send)
    expected = ["copied"] if waits else []
    assert calls == [*expected, "http.response.start", "http.response.body"]
