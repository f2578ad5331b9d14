import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dispatch.ports import free_port
from server.options.pools import Pool, Role
from server.serve.store import rendezvous
from server.serve.store.meeting import Endpoint
from server.serve.store.rendezvous import (
    Place,
    PlaceError,
    find_agent,
    front_host,
    listens_on,
    place_from,
    rendezvous_endpoint,
    store_variables,
)
from tests.support.service.namespaces import hosts_files
from tests.support.service.service_processes import TIME_OUT_S, wait_until
from tests.support.service.starts import options_for

_PRINT = str(Path(__file__).parents[2] / "support" / "service" / "print_front_host.py")
GOOD = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


class Line(NamedTuple):
    """The output of one worker."""

    rank: int
    local_rank: int
    node: str
    host: str


def test_a_place_is_read_from_torchruns_variables() -> None:
    assert place_from(GOOD) == Place(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="head", master_port=29500
    )


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(PlaceError, match=f"{name} is not set: torchrun must start `wideep worker`"):
        place_from({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "name, value",
    [("RANK", "-1"), ("RANK", "4"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "x")],
)
def test_a_wrong_variable_is_an_error(name: str, value: str) -> None:
    with pytest.raises(PlaceError):
        place_from({**GOOD, name: value})


C10D = ["torchrun", "--rdzv-backend", "c10d"]


@pytest.mark.parametrize(
    "command, environment, endpoint",
    [
        ([*C10D, "--rdzv-endpoint", "head:29400"], {}, Endpoint("head", 29400)),
        ([*C10D, "--rdzv_endpoint=head:1"], {}, Endpoint("head", 1)),
        (["torchrun", "--rdzv-backend=wideep", "--rdzv-endpoint=head:1"], {}, Endpoint("head", 1)),
        ([*C10D, "--rdzv-endpoint=head"], {}, Endpoint("head", 29400)),
        ([*C10D, "--rdzv-endpoint=[fe80::1]:7"], {}, Endpoint("fe80::1", 7)),
        (C10D, {"PET_RDZV_ENDPOINT": "head:2"}, Endpoint("head", 2)),
        ([*C10D, "--rdzv-endpoint=new:3"], {"PET_RDZV_ENDPOINT": "old:2"}, Endpoint("new", 3)),
        (["x"], {"PET_RDZV_ENDPOINT": "head:2", "PET_RDZV_BACKEND": "c10d"}, Endpoint("head", 2)),
        (["torchrun", "--master-addr=head", "--master-port=1"], {}, None),
        (["torchrun", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=etcd:2379"], {}, None),
        (C10D, {}, None),
    ],
)
def test_the_endpoint_is_found_however_it_was_given(
    command: list[str], environment: dict[str, str], endpoint: Endpoint | None
) -> None:
    assert rendezvous_endpoint(command, environment) == endpoint


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=head:29500"],
            {"MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        ),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], {}),
        (["--standalone"], {}),
    ],
)
def test_the_store_is_on_the_node_with_the_front(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], variables: dict[str, str]
) -> None:
    monkeypatch.setattr(rendezvous, "_command_line", lambda _pid: ["torchrun", *flags])
    assert store_variables(1, {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == variables
    assert store_variables(1, {}) == {}, "no agent, no own store"


@pytest.mark.parametrize("family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_the_process_that_holds_the_listening_socket_listens(family: int, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"needs {host}: {error}")
        port = server.getsockname()[1]
        assert not listens_on(os.getpid(), port)  # bound, but not listening yet
        server.listen()
        assert listens_on(os.getpid(), port)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            assert not listens_on(other.pid, port)
            other.communicate(b"\n", timeout=30)
        with socket.create_connection((host, port)) as client:
            assert not listens_on(os.getpid(), client.getsockname()[1])
    assert not listens_on(os.getpid(), port)


def test_one_node_has_the_front_whoever_its_parent_is() -> None:
    place = place_from({**GOOD, "WORLD_SIZE": "2", "RANK": "1"})
    assert front_host(place, os.getpid(), {}) == "127.0.0.1"


def test_a_node_to_which_pools_may_come_has_the_front_at_an_endpoint_that_they_can_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = place_from({**GOOD, "WORLD_SIZE": "2", "RANK": "1"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"--rdzv-endpoint=head:{server.getsockname()[1]}"
        monkeypatch.setattr(
            rendezvous, "_command_line", lambda _pid: ["torchrun", "--rdzv-backend=c10d", endpoint]
        )
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert front_host(place, os.getpid(), environment, may_grow=True) == "head"
    for flags in (["--standalone"], ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]):
        monkeypatch.setattr(rendezvous, "_command_line", lambda _pid: ["torchrun", *flags])  # noqa: B023
        with pytest.raises(PlaceError, match="other torchruns join a service with --pool at its rendezvous"):
            front_host(place, os.getpid(), {}, may_grow=True)


def test_a_pool_that_a_service_assigned_is_part_of_the_place() -> None:
    pool = Pool("decode", Role.DECODE, 2, 2)
    place = place_from({**GOOD, "WIDEEP_POOL": "decode:decode:2:2"})
    assert place.pool == pool == place.pool_in(options_for(Path("m"), "--pool=decode", "--role=decode"))
    assert place_from(GOOD).pool_in(options_for(Path("m"), "--role=prefill")) == Pool(
        "prefill", Role.PREFILL, 0, 4
    )


def test_without_torchrun_the_node_of_rank_0_has_the_front() -> None:
    assert front_host(place_from({**GOOD, "RANK": "0", "LOCAL_RANK": "0"}), os.getpid(), {}) == "head"
    assert front_host(place_from({**GOOD, "RANK": "2", "LOCAL_RANK": "0"}), os.getpid(), {}) is None


def test_without_a_torchrun_above_us_the_parent_counts_as_the_agent() -> None:
    assert find_agent() == os.getppid()


def run_agents(
    common: list[str], own: list[list[str]], prefixes: list[list[str]] | None = None
) -> list[Line]:
    """Run one torchrun with two workers per entry of `own`, all at the same time, and return the output of all workers."""
    agents = [
        subprocess.Popen(
            [
                *prefix,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                *common,
                *flags,
                "--no-python",
                sys.executable,
                _PRINT,
            ],
            env={**os.environ, "NODE": str(node), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, (flags, prefix) in enumerate(zip(own, prefixes or [[]] * len(own), strict=True))
    ]
    try:
        outputs = [agent.communicate(timeout=TIME_OUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    found = re.findall(r"rank=(\d+) local_rank=(\d+) node=(\d) host=(\S+)", "".join(outputs))
    assert len(found) == 2 * len(own), outputs
    return [Line(int(rank), int(local_rank), node, host) for rank, local_rank, node, host in found]


@pytest.mark.slow
def test_of_two_agents_on_one_host_the_one_with_the_endpoint_has_the_front(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    common = ["--nnodes=2", "--rdzv-backend=c10d", endpoint, "--rdzv-id=one", f"--log-dir={tmp_path}"]
    lines = run_agents(common, [[], []])
    fronts = {line.node for line in lines if line.host != "None"}
    assert len(fronts) == 1
    assert [line.host for line in lines if line.node in fronts] == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.slow
def test_a_static_rendezvous_has_the_front_on_node_rank_0(tmp_path: Path) -> None:
    common = [
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        f"--log-dir={tmp_path}",
    ]
    lines = run_agents(common, [["--node-rank=1"], ["--node-rank=0"]])
    assert {(line.node, line.host) for line in lines} == {("0", "None"), ("1", "127.0.0.1")}


@pytest.mark.slow
def test_of_two_nodes_the_one_with_the_endpoint_has_the_front(namespaces: list[str], tmp_path: Path) -> None:
    common = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.213.7.2:29400", "--rdzv-id=two"]
    common += [f"--log-dir={tmp_path}"]
    own = [[f"--rdzv-conf=is_host={node}", f"--local-addr=10.213.7.{node + 1}"] for node in (0, 1)]
    lines = run_agents(common, own, [["ip", "netns", "exec", name] for name in namespaces])
    assert {(line.node, line.host) for line in lines} == {("0", "None"), ("1", "10.213.7.2")}


LOOPBACK_HOSTS = {
    "an address, Debian's line": ("10.213.7.2", "127.0.0.1 localhost\n127.0.1.1 {host}\n", ""),
    "an address, the host name on 127.0.0.1": ("10.213.7.2", "127.0.0.1 localhost {host}\n", ""),
    "a name, on loopback at home": ("head", "127.0.1.1 head {host}\n", "127.0.1.1 {host}\n10.213.7.2 head\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPBACK_HOSTS)
def test_nodes_meet_where_host_names_resolve_to_loopback(
    namespaces: list[str], tmp_path: Path, kind: str
) -> None:
    """HEAD is the second node. It hosts the store because it has the endpoint's address, regardless of its host name."""
    head, own, others = (text.format(host=socket.gethostname()) for text in LOOPBACK_HOSTS[kind])
    common = ["--nnodes=2", "--rdzv-backend=wideep", f"--rdzv-endpoint={head}:29400", f"--log-dir={tmp_path}"]
    with hosts_files({namespaces[0]: others or own, namespaces[1]: own}):
        lines = run_agents(common, [[], []], [["ip", "netns", "exec", name] for name in namespaces])
    assert {(line.node, line.host) for line in lines} == {("0", "None"), ("1", head)}


@pytest.mark.slow
def test_a_head_whose_host_name_resolves_to_loopback_says_for_whom_it_waits(
    namespaces: list[str], tmp_path: Path
) -> None:
    command = [
        *("ip", "netns", "exec", namespaces[1], sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
        *("--rdzv-backend=wideep", "--rdzv-endpoint=10.213.7.2:29400", "--no-python", "true"),
    ]
    output = tmp_path / "output.txt"
    with hosts_files({namespaces[1]: f"127.0.1.1 {socket.gethostname()}\n"}), output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: "wideep: waiting for 1 of 2 nodes (joined: " in output.read_text(), output.read_text
            )
        finally:
            process.kill()
            process.wait()
