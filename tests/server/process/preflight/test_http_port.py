"""Whether HTTP can listen."""

import socket

import pytest

from server.process.preflight.checks import check_port
from tests.support.starts import complaint_of


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in complaint_of(lambda: check_port("127.0.0.1", port))
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    assert f"--host is {host!r}, which is no address of this machine" in complaint_of(
        lambda: check_port(host, 0)
    )
