"""The interfaces that gloo and NCCL choose by their rules."""

import socket
import subprocess
import sys

import pytest

from server.machine.interfaces import (
    Interface,
    bindable_address,
    check_gloo,
    check_nccl,
    find_interfaces,
    gloo_takes,
)
from server.machine.report import CheckStatus

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.7",))
DOCKER = Interface("docker0", ("172.17.0.1",))
IB0 = Interface("ib0", ("10.9.0.7",))
BARE = Interface("eth1", ())
ALL = [LO, DOCKER, ETH0, IB0, BARE]


def test_this_machines_interfaces_are_found_with_their_addresses() -> None:
    found = {each.name: each for each in find_interfaces()}
    assert list(found) == [name for _, name in socket.if_nameindex()]
    assert "127.0.0.1" in found["lo"].addresses
    assert bindable_address("127.0.0.1") == "127.0.0.1"
    assert bindable_address("198.51.100.1") == "" == bindable_address("no-such-host.invalid")


@pytest.mark.parametrize(
    ("environment", "resolved", "takes", "why"),
    [
        ({}, "10.0.0.7", ("eth0", "10.0.0.7"), "the host name node resolves to it"),
        ({}, "127.0.1.1", ("lo", "127.0.1.1"), "the host name node resolves to it"),
        ({}, "", ("lo", "127.0.0.1"), "the host name node resolves to no address of this node"),
        (
            {"GLOO_SOCKET_IFNAME": "ib0,eth0"},
            "10.0.0.7",
            ("ib0", "10.9.0.7"),
            "GLOO_SOCKET_IFNAME selects it",
        ),
    ],
)
def test_gloo_takes_what_it_is_told_else_the_host_names_address(
    environment: dict[str, str], resolved: str, takes: tuple[str, str], why: str
) -> None:
    taken = gloo_takes(environment, ALL, "node", lambda _host: resolved)
    assert (taken.interface, taken.address, taken.why) == (*takes, why)


@pytest.mark.parametrize(
    ("name", "says"), [("eth7", "there is no such interface"), ("eth1", "it has no address")]
)
def test_an_interface_that_cannot_be_taken_is_a_failure(name: str, says: str) -> None:
    taken = gloo_takes({"GLOO_SOCKET_IFNAME": name}, ALL, "node", lambda _host: "")
    check = check_gloo(taken, ALL, has_other_nodes=False)
    assert check.status is CheckStatus.FAILURE
    assert (
        says in check.sentence
        and "choose an interface with an address (lo, docker0, eth0, ib0)" in check.sentence
    )


def test_loopback_is_good_for_one_node_and_a_failure_with_others() -> None:
    taken = gloo_takes({}, ALL, "node", lambda _host: "127.0.1.1")
    assert check_gloo(taken, ALL, has_other_nodes=False).status is CheckStatus.OK
    check = check_gloo(taken, ALL, has_other_nodes=True)
    assert check.status is CheckStatus.FAILURE
    assert check.sentence == (
        "gloo uses lo (127.0.1.1), because the host name node resolves to it; other nodes cannot reach it: "
        "set GLOO_SOCKET_IFNAME=eth0 (10.0.0.7) on this node"
    )
    assert "connect this node to a network" in check_gloo(taken, [LO], has_other_nodes=True).sentence


@pytest.mark.parametrize(
    ("said", "interfaces", "status", "text"),
    [
        ("", ALL, CheckStatus.OK, "NCCL uses ib0 (10.9.0.7), because its name begins with ib"),
        (
            "",
            [LO, DOCKER, ETH0],
            CheckStatus.OK,
            "NCCL uses eth0 (10.0.0.7), because it is neither docker nor lo",
        ),
        (
            "",
            [LO, DOCKER],
            CheckStatus.WARNING,
            "because only docker interfaces are left, which is a container bridge",
        ),
        ("", [LO], CheckStatus.FAILURE, "because only lo is left; other nodes cannot reach it"),
        ("eth", ALL, CheckStatus.OK, "NCCL uses eth0 (10.0.0.7), because NCCL_SOCKET_IFNAME is eth"),
        (
            "=eth",
            ALL,
            CheckStatus.FAILURE,
            "NCCL finds no interface with an address (NCCL_SOCKET_IFNAME is =eth",
        ),
        ("^ib,docker,lo", ALL, CheckStatus.OK, "NCCL uses eth0 (10.0.0.7)"),
        ("=ib0,eth0", ALL, CheckStatus.OK, "NCCL uses eth0 (10.0.0.7), ib0 (10.9.0.7)"),
    ],
)
def test_nccl_takes_what_is_selected_else_ib_else_others(
    said: str, interfaces: list[Interface], status: CheckStatus, text: str
) -> None:
    check = check_nccl({"NCCL_SOCKET_IFNAME": said}, interfaces, has_gpus=True, has_other_nodes=True)
    assert check.status is status and text in check.text, check.text


def test_without_gpus_nccl_is_not_here() -> None:
    assert check_nccl({}, ALL, has_gpus=False, has_other_nodes=True).status is CheckStatus.NOT_HERE


TAKES = """
import os, socket
from server.machine.interfaces import find_interfaces, gloo_takes
print(gloo_takes(os.environ, find_interfaces(), socket.gethostname()).address)
"""
LISTENS = """
import os, socket, sys
import torch.distributed as dist

def addresses():
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
    rows = [row.split() for row in open("/proc/self/net/tcp").read().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}

device = dist.ProcessGroupGloo.create_default_device()
print(*(socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in addresses()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [1], indirect=True)
def test_gloo_itself_listens_where_we_say_that_it_does(namespaces: list[str]) -> None:
    """Compare with gloo itself, in a namespace with a host name that resolves to loopback, and here."""
    for inside in ([], ["ip", "netns", "exec", namespaces[0]]):
        answer = subprocess.run(
            [*inside, sys.executable, "-c", LISTENS], capture_output=True, text=True, timeout=300
        )
        expected = subprocess.run(
            [*inside, sys.executable, "-c", TAKES], capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.split() == [expected.stdout.strip()]
