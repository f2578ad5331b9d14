"""Clients that never finish a request are cut off, and slow but complete requests are answered."""

import asyncio
import contextlib
import gc
import json
import socket
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.http.wire.http_server import HttpServer
from server.http.wire.protocol import DIRECT_BODY, HEAD_S, MAX_HEAD_BYTES, DirectBody, PunctualProtocol
from server.options.table import HttpOptions

TIMEOUT_S = 30.0
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


class Impatient(PunctualProtocol):
    """Wait only briefly for a head."""

    head_s = 0.2


async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads no body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def answer_to_body(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads the whole body."""
    while (await receive()).get("more_body"):
        pass
    await answer_at_once(scope, receive, send)


def talk(
    with_server: Talk, app: Any = answer_at_once, protocol: type[PunctualProtocol] | None = None
) -> bytes:
    """Connect a client to a server, with a timeout. The server is impatient by default."""
    protocol = protocol or Impatient

    async def scenario() -> bytes:
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, port=0)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await with_server(reader, writer)
            finally:
                writer.close()

    return asyncio.run(scenario())


def sends(request: bytes, *, until_ok: bool = False) -> Talk:
    """Return a client that sends a request at once and reads the answer, up to "ok" or to the end."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        return await (reader.readuntil(b"ok") if until_ok else hear(reader))

    return client


def drips(begun: bytes) -> Talk:
    """Return a client that begins a request and never finishes it."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(begun)
        return await drip(reader, writer)

    return client


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send single bytes until the server hangs up, and return its answer."""
    hearing = asyncio.create_task(hear(reader))
    while not hearing.done():
        writer.write(b"x")
        await asyncio.wait((hearing,), timeout=0.02)
    return await hearing


async def hear(reader: asyncio.StreamReader) -> bytes:
    """Return all received bytes until the server hangs up in any way."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            said += part
    return said


def test_a_head_that_never_ends_is_a_408() -> None:
    said = talk(drips(HEAD + b"x-slow: "))
    assert said.startswith(b"HTTP/1.1 408 ") and b"connection: close" in said


def test_a_connection_without_a_word_is_closed() -> None:
    assert talk(sends(b"")).startswith(b"HTTP/1.1 408 ")


def test_a_second_request_s_head_has_the_same_limit() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD + b"\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD)
        return await drip(reader, writer)

    assert talk(client).startswith(b"HTTP/1.1 408 ")


def test_a_connection_rests_between_requests_for_as_long_as_uvicorn_lets_it() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            said = await reader.readuntil(b"ok")
            await asyncio.sleep(1.5 * Impatient.head_s)
        return said

    assert talk(client).startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_reads_is_not_waited_for() -> None:
    said = talk(drips(HEAD + b"content-length: 1000000\r\n\r\n"))
    assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"ok")


def test_a_body_that_is_read_has_other_limits() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD + b"content-length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(Impatient.head_s / 2)
            writer.write(b"x")
        return await reader.readuntil(b"ok")

    assert talk(client, answer_to_body).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_slow", [False, True])
def test_an_answer_may_take_longer_than_a_head(is_slow: bool) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(2 * Impatient.head_s * is_slow)
        await answer_at_once(scope, receive, send)

    assert talk(sends(HEAD + b"\r\n", until_ok=True), slow).startswith(b"HTTP/1.1 200")


def test_line_ends_are_no_head() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        hearing = asyncio.create_task(hear(reader))
        while not hearing.done():
            writer.write(b"\r\n")
            await asyncio.wait((hearing,), timeout=0.02)
        return await hearing

    assert talk(client).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("name", [b"x-long: ", b"x-many: 1\r\n"])
def test_a_head_that_is_too_long_is_a_431(name: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD + name)
        hearing = asyncio.create_task(hear(reader))
        for _ in range(64):  # 1 MiB in parts of 16 KiB, unless the server hangs up
            writer.write((name * (1 << 14))[: 1 << 14])
            await asyncio.wait((hearing,), timeout=0.001)
        return await hearing

    assert MAX_HEAD_BYTES < 64 << 14
    assert talk(client, protocol=PunctualProtocol).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("num_bytes", "status"), [(65_000, b"200"), (66_000, b"431"), (70_000, b"431")])
@pytest.mark.parametrize("before", [b"", HEAD + b"content-length: 2\r\n\r\nhi"])
def test_a_head_that_comes_in_one_go_has_the_same_limit(num_bytes: int, status: bytes, before: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if before:
            writer.write(before)
            await reader.readuntil(b"ok")
        head = HEAD + b"connection: close\r\nx-long: "
        writer.write(head.ljust(num_bytes - 4, b"x") + b"\r\n\r\n")
        return await hear(reader)

    assert talk(client, answer_to_body).startswith(b"HTTP/1.1 " + status)


def test_a_long_body_before_a_head_does_not_count_for_it() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        length = 2 * MAX_HEAD_BYTES
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % length + b"x" * length + HEAD)
        first = await reader.readuntil(b"ok")
        writer.write(b"connection: close\r\n\r\n")
        return first + await hear(reader)

    assert talk(client, answer_to_body).count(b"HTTP/1.1 200") == 2


def test_long_bodies_are_no_long_heads() -> None:
    length = 4 * MAX_HEAD_BYTES
    request = HEAD + b"content-length: %d\r\n\r\n" % length + b"x" * length
    assert talk(sends(request, until_ok=True), answer_to_body).startswith(b"HTTP/1.1 200")


def test_requests_in_one_go_are_answered_in_turn() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(3 * (HEAD + b"content-length: 2\r\n\r\nhi"))
        answers = [await reader.readuntil(b"ok") for _ in range(3)]
        await asyncio.sleep(1.5 * Impatient.head_s)
        writer.write(HEAD + b"connection: close\r\n\r\n")
        return b"".join(answers) + await hear(reader)

    assert talk(client, answer_to_body).count(b"HTTP/1.1 200") == 4


# Java's client sends these headers with every request.
OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with its path and body."""
    body, goes_on = b"", True
    while goes_on:
        message = await receive()
        body, goes_on = body + message["body"], message["more_body"]
    said = b"%s %s ok" % (scope["path"].encode(), body)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]}
    )
    await send({"type": "http.response.body", "body": said})


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "head",
    [
        b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n",
        b"POST /x HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n",  # as a proxy forwards it
    ],
)
@pytest.mark.parametrize("body", [b"content-length: 2\r\n\r\nhi", CHUNKED])
def test_an_offer_in_a_connection_s_last_request_is_passed_over(head: bytes, body: bytes, size: int) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for start in range(0, len(head + body), size):
            writer.write((head + body)[start : start + size])
            await asyncio.sleep(0)
        return await hear(reader)

    assert talk(client, echo).endswith(b"/x hi ok")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_offer_of_another_protocol_is_passed_over(size: int) -> None:
    """Independent of how the requests are split into packets."""
    requests = HEAD + OFFER + b"content-length: 2\r\n\r\nhi" + HEAD + OFFER + CHUNKED + HEAD + OFFER + b"\r\n"
    requests += b"POST /last HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbye"

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(requests), size):
            writer.write(requests[start : start + size])
            await asyncio.sleep(0)
        return await hear(reader)

    said = talk(client, echo)
    assert said.count(b"HTTP/1.1 200") == 4
    assert [said.count(word) for word in (b"/x hi ok", b"/x  ok", b"/last bye ok")] == [2, 1, 1]


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW /x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhix",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"x y: z\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n-1\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx y: z\r\n\r\n",
    ],
)
def test_what_is_no_http_is_not_guessed_at_and_answered_in_the_shape_of_other_errors(request_: bytes) -> None:
    head, _, body = talk(sends(request_), answer_to_body).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400) and "not a valid HTTP/1.1" in error[
        "message"
    ]


def test_a_request_behind_an_answer_that_is_not_read_gives_no_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Impatient, "write_s", 0.2)

    async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % (32 << 20))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        reader._limit = 1  # type: ignore[attr-defined]  # stop reading at once
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        return b"%d" % len(await hear(reader))

    assert int(talk(client, answer_at_length)) < 32 << 20, "the connection was cut"


async def answer_directly(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that streams its answer: the first and the last part with `send`, those between directly."""
    direct: DirectBody = scope["extensions"][DIRECT_BODY]
    assert not direct.is_free(), "the response has not begun"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"1", "more_body": True})
    for part in (b"2" * 300, scope["path"].encode()):
        assert direct.is_free()
        direct.write(part)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})
    assert not direct.is_free(), "the response has ended"


def test_parts_that_are_written_directly_are_chunks_of_their_own_response() -> None:
    """Also of requests that came together: each has its own response."""
    told = talk(
        sends(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\nconnection: close\r\n\r\n"), answer_directly
    )
    answers = [each.partition(b"\r\n\r\n")[2] for each in told.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    chunks = b"1\r\n1\r\n12c\r\n" + b"2" * 300 + b"\r\n2\r\n%b\r\n3\r\nend\r\n0\r\n\r\n"
    assert answers == [chunks % b"/a", chunks % b"/b"]


def test_a_request_is_freed_without_a_collection() -> None:
    """Collections stop all streams, so requests leave no cycles of references."""
    extensions: list[weakref.ref[DirectBody]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/b":
            assert extensions[0]() is None
        extensions.append(weakref.ref(scope["extensions"][DIRECT_BODY]))
        await answer_at_once(scope, receive, send)

    gc.disable()
    try:
        told = talk(sends(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\nconnection: close\r\n\r\n"), app)
    finally:
        gc.enable()
    assert told.count(b"200 OK") == 2


def test_nothing_is_written_directly_into_a_body_of_known_length() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        assert not scope["extensions"][DIRECT_BODY].is_free()
        await send({"type": "http.response.body", "body": b"ok"})

    assert talk(sends(HEAD + b"\r\n", until_ok=True), app).endswith(b"ok")


@pytest.mark.parametrize("leaves", [False, True])
def test_nothing_is_written_directly_while_a_client_does_not_read_or_after_it_left(leaves: bool) -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        direct: DirectBody = scope["extensions"][DIRECT_BODY]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        while leaves and (await receive())["type"] != "http.disconnect":
            pass
        while direct.is_free():
            direct.write(b"x" * (1 << 16))
        seen.append(direct.is_free())
        await send(
            {"type": "http.response.body", "body": b"", "more_body": False}
        )  # waits until the client reads
        seen.append(direct.is_free())

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        begun = await reader.readuntil(b"ok")
        if leaves:
            writer.transport.abort()
        while len(seen) < (2 if leaves else 1):
            await asyncio.sleep(0)
        return begun if leaves else begun + await hear(reader)

    told = talk(client, app)
    assert seen == [False, False] and told.count(b"ok") == 1
    assert leaves or told.endswith(b"x\r\n0\r\n\r\n")


def test_the_service_uses_it() -> None:
    assert HttpServer(answer_at_once, HttpOptions()).config.http is PunctualProtocol
    assert PunctualProtocol.head_s == HEAD_S <= 60
