"""Connections to hosts that do not answer are shut down. All others continue."""

import os
import select
import socket
import struct

import pytest

from scheduler.epochs import connections
from scheduler.epochs.connections import EpochConnections, break_silent, is_silent


def tcp_info(state: int, answered_ms: int, *, repeats: int = 0, probes: int = 0) -> bytes:
    """Return the kernel's record of a connection as in linux/tcp.h: eight bytes, then 32-bit numbers."""
    numbers = [0] * 24
    numbers[12] = answered_ms
    return struct.pack("=8B24I", state, 0, repeats, probes, *[0] * 4, *numbers)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (tcp_info(1, 3001, probes=2), True),
        (tcp_info(1, 3001, repeats=2), True),
        (tcp_info(1, 90_000, probes=1), False),  # idle until now, and the first probe is in flight
        (tcp_info(1, 90_000, repeats=1), False),
        (tcp_info(1, 90_000), False),  # idle, and not probed yet
        (tcp_info(1, 2999, probes=2), False),
        (tcp_info(10, 90_000, probes=2), False),  # it listens
        (tcp_info(1, 90_000, probes=2)[:40], False),  # an older kernel with a shorter record
    ],
)
def test_silence_is_an_open_connection_without_an_answer_for_too_long(info: bytes, expected: bool) -> None:
    assert is_silent(info, 3.0) is expected


def test_a_silent_connection_is_shut_down_and_its_waiter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server, (local, other) = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
    with server, local, other, socket.create_connection(server.getsockname()) as connection:
        accepted, _ = server.accept()
        with accepted:
            pipe = os.pipe()
            mine = [each.fileno() for each in (connection, accepted, local, other)] + [*pipe]
            monkeypatch.setattr(connections, "_descriptors", lambda: [*mine, 10_000])
            num_open = len(os.listdir("/proc/self/fd"))
            monkeypatch.setattr(connections, "is_silent", lambda _info, _timeout_s: False)
            assert break_silent(2.0) == 0, "the first call must only enable probes"
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert break_silent(2.0) == 0
            connection.sendall(b"x")
            assert accepted.recv(1) == b"x"
            monkeypatch.setattr(connections, "is_silent", lambda _info, timeout_s: timeout_s == 3.0)
            assert break_silent(2.0) == 2, "both ends are in this process"
            assert connection.recv(1) == b""
            assert len(os.listdir("/proc/self/fd")) == num_open, "descriptors were left open"
            for descriptor in pipe:
                os.close(descriptor)
            local.sendall(b"y")
            assert other.recv(1) == b"y", "sockets other than TCP must not be touched"


def test_connections_to_other_ports_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as connection:
        monkeypatch.setattr(connections, "_descriptors", lambda: [server.fileno(), connection.fileno()])
        monkeypatch.setattr(connections, "is_silent", lambda _info, _timeout_s: True)
        here, there = connection.getsockname()[1], server.getsockname()[1]
        break_silent(2.0)  # enables probes
        assert break_silent(2.0, port=1) == break_silent(2.0, port=1, peer_ports=[here]) == 0
        assert break_silent(2.0, port=1, peer_ports=[there]) == 1
        assert connection.recv(1) == b""


def test_a_connection_that_was_idle_before_anybody_asked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LEAST_TIMEOUT_S", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as connection:
        accepted, _ = server.accept()
        with accepted:
            monkeypatch.setattr(connections, "_descriptors", lambda: [connection.fileno()])
            select.select([accepted], [], [], 0.3)  # no data arrives: it is idle longer than the timeout
            assert (break_silent(0.1), break_silent(0.1)) == (0, 0)


def test_a_number_that_is_a_files_by_the_time_of_the_look_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = os.pipe()
    monkeypatch.setattr(connections, "_descriptors", lambda: [*pipe])
    monkeypatch.setattr("stat.S_ISSOCK", lambda _mode: True)
    num_open = len(os.listdir("/proc/self/fd"))
    assert break_silent(2.0) == 0
    assert len(os.listdir("/proc/self/fd")) == num_open
    for descriptor in pipe:
        os.close(descriptor)


def test_the_connections_of_an_epoch_end_with_it_and_no_others() -> None:
    epoch = EpochConnections()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as other,
    ):
        with epoch.opening(), socket.create_server(("127.0.0.1", 0)) as listening:
            own = socket.create_connection(server.getsockname())
            num_open = len(os.listdir("/proc/self/fd"))
            assert epoch.break_silent(0.0) == 0, "the first call must only enable probes"
        with own:
            epoch.close()
            assert own.recv(1) == b"", "its waiter must be woken"
            accepted, _ = server.accept()
            with accepted:
                other.sendall(b"x")
                assert accepted.recv(1) == b"x", "connections from before the epoch must not be touched"
            assert len(os.listdir("/proc/self/fd")) == num_open - 1, "descriptors were left open"
            assert listening.fileno() == -1
            epoch.close()


def test_a_silent_connection_of_an_epoch_is_shut_down_sooner_also_while_groups_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = EpochConnections()
    monkeypatch.setattr(connections, "is_silent", lambda _info, timeout_s: timeout_s == 1.2)
    server = socket.create_server(("127.0.0.1", 0))
    with (
        server,
        socket.create_connection(server.getsockname()) as before,
        epoch.opening(),
        socket.create_connection(server.getsockname()) as own,
    ):
        assert epoch.break_silent(1.2) == 0, "the first call must only enable probes"
        assert epoch.break_silent(1.2) == 1
        assert own.recv(1) == b""
        assert before.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
