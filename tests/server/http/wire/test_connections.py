"""Connections: their bounds, which ones are closed for others, and acceptance without free descriptors or at the service's end."""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.http.wire import connections
from server.http.wire.connections import ConnectionBound, Listener, default_most
from server.http.wire.http_server import HttpServer, connection_bound
from server.http.wire.protocol import PunctualProtocol
from server.options.table import HttpOptions
from server.serve.preflight.unix_socket import listening_at

HEAD = b"GET /x HTTP/1.1\r\nhost: x\r\n"
TIMEOUT_S = 30.0


class Fake:
    """A connection that records whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def make_room(self) -> None:
        self.is_closed = True


def entered(bound: ConnectionBound, host: str | None, count: int) -> list[Fake]:
    """Let connections enter. Refused ones are marked closed."""
    found = [Fake() for _ in range(count)]
    for each in found:
        each.is_closed |= not bound.enter(each, host)
    return found


def test_the_longest_idle_connection_of_whom_has_most_makes_room() -> None:
    bound = ConnectionBound(6, 4)
    few, many = entered(bound, "10.0.0.1", 2), entered(bound, "10.0.0.2", 4)
    bound.work(many[0])
    (late,) = entered(bound, "10.0.0.3", 1)
    assert not late.is_closed and bound.num_open == 6
    assert [each.is_closed for each in (*few, *many)] == [False, False, False, True, False, False]


def test_where_none_is_idle_the_new_one_may_not_stay() -> None:
    bound = ConnectionBound(3)
    old = entered(bound, None, 3)
    for each in old:
        bound.work(each)
    assert entered(bound, None, 1)[0].is_closed and bound.num_open == 3
    bound.rest(old[1])
    assert not entered(bound, None, 1)[0].is_closed and old[1].is_closed
    bound.leave(old[0])
    bound.leave(old[0])
    assert bound.num_open == 2


@pytest.mark.parametrize(
    ("hosts", "num_stay"),
    [
        (["10.0.0.1", "::ffff:10.0.0.1"], 2),
        (["2001:db8::1", "2001:db8::ffff:1"], 2),
        (["2001:db8::1", "2001:db8:0:1::1"], 4),
        (["127.0.0.1", "::1", None], 9),
        (["10.9.0.1", "10.9.0.2"], 4),
        (["10.9.1.1"], 3),  # of a trusted network
    ],
)
def test_an_address_has_a_bound_of_its_own(hosts: list[str | None], num_stay: int) -> None:
    bound = ConnectionBound(100, 2, exempt=["10.9.1.0/24"])
    for host in hosts:
        entered(bound, host, 3)
    assert bound.num_open == num_stay


def test_the_defaults_follow_the_limit_of_open_files() -> None:
    assert [default_most(each) for each in (100, 1024, 1 << 20)] == [50, 768, 16_384]
    assert connection_bound(HttpOptions(max_connections=7)).most == 7


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with its scope's client."""
    said = str((scope["client"] or ["nobody"])[0]).encode()
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def serving(
    http: HttpOptions | None = None, bound: ConnectionBound | None = None
) -> AsyncIterator[tuple[HttpServer, tuple[str, int], asyncio.Task[None]]]:
    """Run a server on a free port."""
    http = http or HttpOptions()
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(answer, http, bound or ConnectionBound(100))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    address = listener.getsockname()
    while not server.started:
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield server, address, task
    finally:
        server.should_exit = True
        await task


async def asked(address: tuple[str, int], head: bytes = HEAD) -> bytes:
    """Send a request on a new connection and return the answer."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head + b"connection: close\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


def test_idle_connections_make_room_and_busy_ones_do_not() -> None:
    async def scenario() -> None:
        async with serving(bound=ConnectionBound(3)) as (_, address, _):
            idle = [await asyncio.open_connection(*address) for _ in range(3)]
            assert (await asked(address)).startswith(b"HTTP/1.1 200")
            assert await idle[0][0].read() == b"", "it was closed"
            for _, writer in idle:
                writer.close()

    asyncio.run(scenario())


def test_who_finds_all_connections_busy_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bound = ConnectionBound(1)
        busy = Fake()
        bound.enter(busy, None)
        bound.work(busy)
        async with serving(bound=bound) as (_, address, _):
            said = await asked(address)
            assert (
                said.startswith(b"HTTP/1.1 503")
                and b"retry-after: 1" in said
                and b"--max-connections" in said
            )

    asyncio.run(scenario())


def test_a_connection_that_waits_when_the_service_ends_is_answered() -> None:
    """It is answered and not reset, because the kernel has accepted it."""

    async def scenario() -> None:
        async with serving() as (server, address, task):
            waiting = [socket.create_connection(address) for _ in range(100)]
            for client in waiting:
                client.sendall(HEAD + b"\r\n")
            server.should_exit = True
            time.sleep(0.15)  # blocks the loop: when it handles the exit, it has accepted only some
            await task
            for client in waiting:
                client.settimeout(TIMEOUT_S)
                said = client.recv(1 << 16)
                assert said.startswith(b"HTTP/1.1 200")
                client.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)

    asyncio.run(scenario())


class Exhausted:
    """A listening socket of a process without a free descriptor."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._pair = socket.socketpair()
        self._pair[1].send(b"x")  # makes the socket readable

    def fileno(self) -> int:
        return self._pair[0].fileno()

    def setblocking(self, _flag: bool) -> None:
        """Do nothing."""

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def listen(self, _backlog: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        for each in self._pair:
            each.close()


def test_without_descriptors_idle_connections_go_and_the_log_has_a_line_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_RETRY_S", 0.001)
    idle = 40

    async def scenario() -> int:
        bound = ConnectionBound(100)
        fakes = entered(bound, None, idle)
        listener = Exhausted()
        accepting = Listener([listener], asyncio.Protocol, bound)  # type: ignore[list-item]
        accepting.start()
        while listener.num_asked < 20:
            await asyncio.sleep(0.001)
        await accepting.close()
        assert all(each.is_closed for each in fakes)
        return listener.num_asked

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scenario()) < 200
    assert len(caplog.records) == 1
    assert "cannot accept a connection: Too many open files" in caplog.text


@pytest.mark.parametrize(("trusted", "shown"), [((), b"127.0.0.1"), (("127.0.0.0/8",), b"203.0.113.9")])
def test_forwarded_addresses_are_those_of_trusted_proxies(trusted: tuple[str, ...], shown: bytes) -> None:
    async def scenario() -> bytes:
        async with serving(HttpOptions(forwarded_allow_ips=trusted)) as (_, address, _):
            return await asked(address, HEAD + b"x-forwarded-for: 203.0.113.9\r\n")

    assert asyncio.run(scenario()).endswith(shown)


def test_a_unix_socket_has_no_addresses(tmp_path: Path) -> None:
    async def scenario() -> bytes:
        listener = listening_at(str(tmp_path / "socket"))
        with listener as bound_socket:
            server = HttpServer(answer, HttpOptions(), ConnectionBound(100, 1))
            task = asyncio.create_task(server.serve(sockets=[bound_socket]))
            said = b""
            for _ in range(3):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
                writer.write(HEAD + b"connection: close\r\n\r\n")
                said += await asyncio.wait_for(reader.read(), TIMEOUT_S)
                writer.close()
            server.should_exit = True
            await task
        return said

    assert asyncio.run(scenario()).count(b"nobody") == 3


class Hurried(PunctualProtocol):
    """Wait only briefly for readers."""

    write_s = 0.1


async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with 32 MB, at once or in pieces."""
    headers = [(b"content-length", b"%d" % (32 << 20))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    num_pieces = 1 if scope["path"] == "/whole" else 64
    for number in range(num_pieces):
        piece = bytes((32 << 20) // num_pieces)
        await send({"type": "http.response.body", "body": piece, "more_body": number < num_pieces - 1})


@pytest.mark.parametrize("path", [b"/whole", b"/pieces"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_is_cut_off_and_a_slow_one_is_not(path: bytes, reads: bool) -> None:
    async def scenario() -> None:
        config = uvicorn.Config(answer_at_length, http=Hurried, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Hurried(config, state, {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(TIMEOUT_S):
            client = socket.create_connection(server.sockets[0].getsockname())
            client.setblocking(False)
            await loop.sock_sendall(client, b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            num_read = 0
            while num_read < 32 << 20 and (reads or not num_read):
                await asyncio.sleep(0.002)
                num_read += len(await loop.sock_recv(client, 1 << 19))
            while state.connections and not reads:
                await asyncio.sleep(0.01)
            assert len(state.connections) == reads
            client.close()

    asyncio.run(scenario())
