"""A free port: unused, and outside the range of outgoing connections."""

import random
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from dispatch import ports
from dispatch.ports import free_port


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(20)}
    assert all(10_000 <= port < first for port in found) or first <= 10_000
    assert len(found) > 1, "concurrent processes must get different ports"


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offered = iter([taken.getsockname()[1], free := ports._bound_port("127.0.0.1", 0)])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(offered))
        assert free_port() == free


def test_processes_that_choose_at_the_same_time_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = "from dispatch.ports import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        chosen = int(other.stdout.readline())
        offered = iter([chosen, free := ports._bound_port("127.0.0.1", 0), chosen])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(offered))
        assert free_port() == free, "the other process will listen on its port"
        other.stdin.write("\n")
    assert free_port() == chosen, "the other process has ended"


def test_a_process_reserves_its_newest_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MAX_RESERVED", 2)
    monkeypatch.setattr(ports, "_RESERVED", deque())
    first, _, third, fourth = (free_port() for _ in range(4))
    offered = iter([third, fourth, first])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(offered))
    assert free_port() == first


def test_where_outgoing_connections_may_take_any_port_one_of_theirs_is_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = tmp_path / "range"
    every.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_HANDED_OUT", every)
    assert free_port() > 0


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
