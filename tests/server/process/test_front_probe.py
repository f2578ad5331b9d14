import errno
import socket
import time

import pytest

from server.process.engine import front_answers
from tests.support.service_processes import free_port


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_front_that_listens_answers(host: str, shown: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as front:
        assert front_answers(f"{shown}:{front.getsockname()[1]}")


def test_a_front_that_is_gone_is_known_at_once() -> None:
    started_s = time.monotonic()
    assert not front_answers(f"127.0.0.1:{free_port()}", patience_s=60.0)
    assert time.monotonic() - started_s < 30.0


def test_silence_is_waited_out_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def find_no_route(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.append(address)
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", find_no_route)
    assert not front_answers("10.0.0.1:29400", patience_s=0.3)
    assert len(attempts) > 1
    assert attempts[0] == ("10.0.0.1", 29400)


def test_a_cable_that_is_plugged_in_again_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, attempts = socket.create_connection, []

    def fail_once(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.append(address)
        if len(attempts) == 1:
            raise TimeoutError("timed out")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", fail_once)
    with socket.create_server(("127.0.0.1", 0)) as front:
        assert front_answers(f"127.0.0.1:{front.getsockname()[1]}")
    assert len(attempts) == 2
