"""Requests with an Idempotency-Key are answered once, across retries, lost connections and restarted fronts."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from server.front.errors import ApiError
from server.http.app import build_app
from server.http.exchanges import ExchangeWatch, draw_seed, seeds_from
from server.http.guards import ApiKeys
from server.http.retries import idempotency, kept_answers
from server.http.retries.idempotency import IdempotentAnswers
from server.http.retries.kept_answers import MAX_AGE_S, MAX_KEYS, KeptAnswers, WholeAnswer
from server.options.table import HttpOptions
from tests.support.requests.asgi import client_of

PATH = "/v1/completions"
KEY = {"Idempotency-Key": "k-1", "Content-Type": "application/json"}


class Model:
    """An endpoint that counts its answers and may be paused."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.status = 200
        self.num_gone = 0
        self.pieces = [b"data: a\n\n", b"data: b\n\n"]

    async def answer(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.seeds.append(draw_seed(seeds_from(None)))
        number = len(self.seeds)
        if body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        await self._wait(http)
        return JSONResponse({"number": number, "asked": body}, self.status)

    async def _wait(self, http: HttpRequest) -> None:
        gone = asyncio.create_task(_gone(http))
        passed = asyncio.create_task(self.gate.wait())
        await asyncio.wait([gone, passed], return_when=asyncio.FIRST_COMPLETED)
        self.num_gone += gone.done()
        for task in (gone, passed):
            task.cancel()

    async def _stream(self) -> AsyncIterator[bytes]:
        yield self.pieces[0]
        await self.gate.wait()
        for piece in self.pieces[1:]:
            yield piece


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def app_of(
    model: Model, folder: Path, *, keys: ApiKeys | None = None, max_keys: int = MAX_KEYS, **how: Any
) -> ASGIApp:
    """Return a front that keeps answers in `folder`."""
    kept = KeptAnswers(folder, max_keys=max_keys)
    routes = Starlette(routes=[Route(path, model.answer, methods=["POST"]) for path in (PATH, "/tokenize")])
    return build_app(
        [],
        version="0",
        keys=keys or ApiKeys(),
        http=HttpOptions(),
        answer_once=lambda _: IdempotentAnswers(routes, kept, "secret", **how),
    )


async def ask(
    app: ASGIApp, body: Any = None, headers: dict[str, str] | None = None, path: str = PATH
) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(
            path, json=body or {"prompt": "p"}, headers=KEY if headers is None else headers
        )


def test_who_asks_again_gets_the_answer_that_was_given_even_from_another_front(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        first, again = await ask(app), await ask(app)
        other = await ask(app_of(model, tmp_path))
        assert first.status_code == 200 and len(model.seeds) == 1
        assert first.content == again.content == other.content
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == other.headers["idempotent-replayed"] == "true"
        assert again.headers["content-type"] == "application/json"

    asyncio.run(run())


def test_without_a_key_or_on_other_paths_every_request_is_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        for _ in range(2):
            await ask(app, headers={})
            await ask(app, path="/tokenize")
        assert len(model.seeds) == 4 and len(set(model.seeds)) == 4
        assert not list(tmp_path.iterdir())

    asyncio.run(run())


def test_another_body_with_the_same_key_is_a_422_that_names_the_header(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        await ask(app_of(model, tmp_path))
        refused = await ask(app_of(model, tmp_path), {"prompt": "other"})
        assert refused.status_code == 422 and refused.json()["error"]["param"] == "Idempotency-Key"

    asyncio.run(run())


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "a\tb"])
def test_what_is_no_key_is_a_400_that_names_the_header(tmp_path: Path, key: str) -> None:
    response = asyncio.run(ask(app_of(Model(), tmp_path), headers={**KEY, "Idempotency-Key": key}))
    assert response.status_code == 400 and response.json()["error"]["param"] == "Idempotency-Key"


def test_two_owners_of_api_keys_do_not_share_idempotency_keys(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path, keys=ApiKeys(["one", "two"]))
        bodies = [
            (await ask(app, headers={**KEY, "Authorization": f"Bearer {owner}"})).json()
            for owner in ("one", "two", "one")
        ]
        assert [body["number"] for body in bodies] == [1, 2, 1]
        assert model.seeds[0] != model.seeds[1]

    asyncio.run(run())


def test_who_asks_while_it_is_answered_gets_the_same_answer(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        model.gate.clear()
        asked = [asyncio.create_task(ask(app, {"stream": True})) for _ in range(3)]
        while not model.seeds:
            await asyncio.sleep(0)
        model.gate.set()
        answers = [await each for each in asked]
        assert {each.content for each in answers} == {b"data: a\n\ndata: b\n\n"} and len(model.seeds) == 1
        assert [each.headers.get("idempotent-replayed") for each in answers] == [None, "true", "true"]

    asyncio.run(run())


def test_another_body_is_refused_even_if_its_key_is_forgotten_while_it_is_answered(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path, max_keys=2)
        model.gate.clear()
        first = asyncio.create_task(ask(app))
        newer = [
            asyncio.create_task(ask(app, headers={**KEY, "Idempotency-Key": f"n-{n}"})) for n in range(3)
        ]
        while len(model.seeds) < 4:
            await asyncio.sleep(0)
        refused = asyncio.create_task(ask(app, {"prompt": "other"}))
        again = asyncio.create_task(ask(app))
        assert (await asyncio.wait_for(refused, 10.0)).status_code == 422
        model.gate.set()
        assert (await first).content == (await again).content and len(model.seeds) == 4
        await asyncio.gather(*newer)
        assert (await ask(app, {"prompt": "other"})).json()["asked"] == {"prompt": "other"}

    asyncio.run(run())


def test_a_front_that_finds_an_unfinished_request_runs_it_again_with_the_same_seed(tmp_path: Path) -> None:
    async def run() -> None:
        killed, model = Model(), Model()
        killed.gate.clear()
        asked = asyncio.create_task(ask(app_of(killed, tmp_path)))
        while not killed.seeds:
            await asyncio.sleep(0)
        answer = await ask(app_of(model, tmp_path))
        assert answer.status_code == 200 and model.seeds == killed.seeds
        assert (await ask(app_of(model, tmp_path))).content == answer.content and len(model.seeds) == 1
        asked.cancel()

    asyncio.run(run())


def test_an_answer_that_was_cut_off_while_it_was_written_is_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        await ask(app_of(model, tmp_path))
        [path] = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-3])
        for _ in range(2):
            again = await ask(app_of(model, tmp_path))
            assert again.json()["number"] == 2
        path.write_bytes(b'{"finger')
        assert (await ask(app_of(model, tmp_path))).json()["number"] == 3
        begun = path.read_bytes().split(b"\n")[0]
        for content, number in ((begun + b'\n{"headers": [', 4), (begun, 5)):
            path.write_bytes(content)
            for _ in range(2):
                assert (await ask(app_of(model, tmp_path))).json()["number"] == number

    asyncio.run(run())


async def ended() -> None:
    """Let applications return: a stream is stored when its application returns, not when its client has read it."""
    for _ in range(20):
        await asyncio.sleep(0)


def fail_next(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    """Fail the `num_calls`-th next write of kept answers, as on a full disk."""
    append, left = kept_answers._append, [num_calls]

    def write(path: Path, content: bytes, flags: int = 0) -> None:
        left[0] -= 1
        if left[0] == 0:
            append(path, content[: len(content) // 2], flags)  # a full disk stores a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, content, flags)

    monkeypatch.setattr(kept_answers, "_append", write)


@pytest.mark.parametrize("body", [{"prompt": "p"}, {"prompt": "p", "stream": True}])
@pytest.mark.parametrize(("num_calls", "status", "num_made"), [(1, 503, 1), (2, 200, 2)])
def test_a_key_that_met_a_full_disk_works_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Any, num_calls: int, status: int, num_made: int
) -> None:
    """If the first write fails, the request is refused. If the second fails, the answer is not kept, and is made again."""

    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        fail_next(monkeypatch, num_calls)
        first = await ask(app, body)
        assert first.status_code == status
        if status == 503:
            assert "cannot be kept: No space left" in first.json()["error"]["message"]
        await ended()
        assert not list(tmp_path.iterdir()), "no file is left behind"
        again = [await ask(app, body) for _ in range(2)]
        await ended()
        again.append(await ask(app_of(model, tmp_path), body))
        assert {each.status_code for each in again} == {200} and len({each.content for each in again}) == 1
        assert len(model.seeds) == num_made and len(set(model.seeds)) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"not json\n[]\n",
        b'{"fingerprint": "f"}\n{"headers": []}\nbody',
        b"a\n\xff\nb",
        b"[]\n{}\n",
    ],
)
def test_a_kept_answer_that_cannot_be_read_counts_as_not_answered(tmp_path: Path, content: bytes) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        await ask(app)
        [path] = tmp_path.iterdir()
        for front in (app, None):
            path.write_bytes(content)
            answers = [await ask(front or app_of(model, tmp_path)) for _ in range(2)]
            assert [each.status_code for each in answers] == [200, 200]
        assert len(set(model.seeds)) == 1, "an answer that is made again has the same tokens"

    asyncio.run(run())


def test_what_cannot_be_removed_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    now_s = 0.0
    kept = KeptAnswers(tmp_path, clock=lambda: now_s)
    kept.accept("k", "old")
    kept.finish("k", WholeAnswer([], b"old"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stay)
        kept.forget("k")
    kept.accept("k", "new")
    kept.finish("k", WholeAnswer([], b"new"))
    assert kept.read("k") == KeptAnswers(tmp_path, clock=lambda: now_s).read("k") == WholeAnswer([], b"new")


def test_the_owner_that_holds_most_loses_the_oldest(tmp_path: Path) -> None:
    def fill(kept: KeptAnswers, owner: str, *numbers: int, body: bytes = b"1") -> None:
        for number in numbers:
            kept.accept(f"{owner}{number}", "f", owner)
            kept.finish(f"{owner}{number}", WholeAnswer([], body))

    def left(kept: KeptAnswers) -> str:
        return " ".join(f"{owner}{n}" for owner in "ab" for n in range(12) if kept.read(f"{owner}{n}"))

    kept = KeptAnswers(tmp_path, max_keys=6, clock=lambda: 0.0)
    fill(kept, "a", 0, 1)
    fill(kept, "b", *range(12))
    assert left(kept) == "a0 a1 b8 b9 b10 b11", "a flood of one key evicts only its own answers"
    kept = KeptAnswers(tmp_path, max_bytes=10, max_keys=6, clock=lambda: 0.0)
    assert left(kept) == "a0 a1 b8 b9 b10 b11", "another front knows the answers' owners"
    fill(kept, "b", 0, body=b"88888888")
    assert left(kept) == "a0 a1 b0"


def test_a_calendar_that_went_back_keeps_nothing_for_longer(tmp_path: Path) -> None:
    KeptAnswers(tmp_path, clock=lambda: 1e6).accept("k", "f")
    now_s = 1000.0
    kept = KeptAnswers(tmp_path, clock=lambda: now_s)
    assert kept.fingerprint_of("k") == "f"
    now_s += MAX_AGE_S + 1
    assert kept.fingerprint_of("k") is None


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        model.status = 503
        assert (await ask(app)).status_code == 503
        assert not list(tmp_path.iterdir())
        model.status = 200
        assert (await ask(app)).status_code == 200

    asyncio.run(run())


class Connection:
    """One hand-made request, with a client that may disconnect."""

    def __init__(self, app: ASGIApp, body: bytes = b'{"stream": true}', *, key: str = "k-1") -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self._body: bytes | None = body
        self.may_send = asyncio.Event()
        self.may_send.set()
        headers = [
            (name.lower().encode(), value.encode())
            for name, value in (KEY | {"Idempotency-Key": key}).items()
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "headers": headers,
        }
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_an_answer_goes_on_when_its_client_leaves_and_who_comes_back_gets_all_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        app = app_of(model, tmp_path)
        model.gate.clear()
        first = Connection(app)
        while not first.body:
            await asyncio.sleep(0)
        first.left.set()
        await first.task
        second = Connection(app)
        while not second.body:
            await asyncio.sleep(0)
        model.gate.set()
        await second.task
        assert second.body == b"data: a\n\ndata: b\n\n" and first.body == b"data: a\n\n"
        assert len(model.seeds) == 1

    asyncio.run(run())


def test_an_answer_that_nobody_comes_back_for_is_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        model = Model()
        model.gate.clear()
        connection = Connection(app_of(model, tmp_path, hold_s=0.0), b"{}")
        while not model.seeds:
            await asyncio.sleep(0)
        connection.left.set()
        await connection.task
        while not model.num_gone:
            await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("num_left", [3, 9])
def test_clients_that_ask_with_new_keys_and_leave_are_bounded(tmp_path: Path, num_left: int) -> None:
    """Each leaves an answer that continues without a connection. Beyond the bound, the oldest ends."""

    async def run() -> None:
        model = Model()
        model.gate.clear()
        app = app_of(model, tmp_path, max_unread=3)
        connections = []
        for number in range(num_left):
            connections.append(connection := Connection(app, b"{}", key=f"k-{number}"))
            while len(model.seeds) <= number:
                await asyncio.sleep(0)
            connection.left.set()
            await connection.task
        stays = Connection(app, b"{}", key="k-stays")
        while len(model.seeds) <= num_left or model.num_gone < num_left - 3:
            await asyncio.sleep(0)
        back = Connection(app, b"{}", key=f"k-{num_left - 1}")
        for _ in range(50):
            await asyncio.sleep(0)
        assert model.num_gone == num_left - 3
        model.gate.set()
        await asyncio.gather(stays.task, back.task)
        assert b'"number":%d' % num_left in back.body, "the newest is still being made"
        assert stays.body and len(model.seeds) == num_left + 1

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_answer_too_long_to_be_kept_ends_when_its_reader_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 20)

    async def run() -> None:
        model = Model()
        num_made, has_ended = 0, asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            nonlocal num_made
            try:
                while True:
                    num_made += 1
                    yield b"%09d\n" % num_made
                    await asyncio.sleep(0)
            finally:
                has_ended.set()

        model._stream = endless  # type: ignore[method-assign]
        connection = Connection(app_of(model, tmp_path))
        while num_made < 10:
            await asyncio.sleep(0)
        connection.left.set()
        await connection.task
        await has_ended.wait()  # long before the 60 s

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_stream_too_long_to_be_kept_waits_for_its_reader_and_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 20)

    async def run() -> None:
        model = Model()
        num_made = 0

        async def many() -> AsyncIterator[bytes]:
            nonlocal num_made
            for number in range(50):
                num_made += 1
                yield b"%09d\n" % number

        model._stream = many  # type: ignore[method-assign]
        connection = Connection(app_of(model, tmp_path))
        connection.may_send.clear()
        for _ in range(200):
            await asyncio.sleep(0)
        assert num_made < 5, "the answer is made only as fast as it is read"
        connection.may_send.set()
        await connection.task
        assert connection.body == b"".join(b"%09d\n" % number for number in range(50))
        assert not list(tmp_path.iterdir())

    asyncio.run(run())


def test_old_and_many_answers_are_forgotten_oldest_first(tmp_path: Path) -> None:
    now_s = 1000.0
    kept = KeptAnswers(tmp_path, max_bytes=10, max_keys=3, clock=lambda: now_s)
    for number in range(3):
        kept.accept(f"k{number}", "f")
        kept.finish(f"k{number}", WholeAnswer([], b"12345"))
    assert [kept.read(f"k{number}") is not None for number in range(3)] == [False, True, True]
    kept.accept("k3", "f")
    kept.accept("k4", "f")
    assert kept.fingerprint_of("k1") is None and kept.fingerprint_of("k2") == "f"
    now_s += MAX_AGE_S + 1
    assert kept.fingerprint_of("k4") is None and not list(tmp_path.iterdir())


def test_a_failure_within_a_stream_says_how_to_go_on() -> None:
    said: list[str] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        said.append(idempotency.with_way_on(ApiError(503, "The service is stopping.")).message)

    async def run(headers: list[tuple[bytes, bytes]]) -> None:
        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": b"", "headers": headers}
        await ExchangeWatch(app, ())(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(run([(b"idempotency-key", b"k-1")]))
    asyncio.run(run([]))
    assert "same Idempotency-Key, k-1, for the whole answer" in said[0]
    assert said[1].startswith("The service is stopping. Send the request again with an Idempotency-Key")
