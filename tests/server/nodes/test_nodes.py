"""A service on two nodes that share only a network: real torchrun agents and engines in namespaces."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.service.forked import WIDEEP
from tests.support.service.namespaces import (
    ask,
    close_ports,
    made_namespaces,
    other_version,
    set_link,
    threads_inside,
)
from tests.support.service.namespaces import members as members_at
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import has_ended, wait_until
from tests.support.service.torchruns import Torchrun

OTHER_NODE, ENDPOINT_NODE, HTTP_PORT = 0, 1, 8000  # Inside its namespace every port is free.
ENDPOINT = f"10.213.7.{ENDPOINT_NODE + 1}:29400"
URL = f"http://10.213.7.{ENDPOINT_NODE + 1}:{HTTP_PORT}"
INTERFACE = {"GLOO_SOCKET_IFNAME": "veth0"}  # of the namespaces
PIECES = 10  # received by every stream before a fault
NUM_STREAMS = 4  # over two ranks
STREAMS_S = 300.0  # for streams to begin or to end
END_S = 120.0  # of an isolated node: 50 s to drop the link, 30 s of looking for the front, 10 s for torchrun


def start(namespaces: Sequence[str], directory: Path, *flags: str) -> RealService:
    model = write_tiny_model(directory / "tiny")
    return RealService(HTTP_PORT, torchruns(namespaces, model, *flags), directory / "output.txt")


def torchruns(namespaces: Sequence[str], model: Path, *flags: str) -> list[Torchrun]:
    """Return the torchrun of each node."""
    return [
        Torchrun(
            [
                *(f"--nnodes={len(namespaces)}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
                *(f"--local-addr=10.213.7.{node + 1}", f"--rdzv-endpoint={ENDPOINT}"),
                f"--rdzv-conf=is_host={int(node == ENDPOINT_NODE)}",
            ],
            worker(model, *flags),
            network=name,
            environment=INTERFACE,
        )
        for node, name in enumerate(namespaces)
    ]


def worker(model: Path, *flags: str) -> list[str]:
    """Return the words of `wideep` on each node."""
    host = f"10.213.7.{ENDPOINT_NODE + 1}"
    words = ["worker", str(model), "--host", host, "--kv-cache-memory", "16M", "--all2all-backend", "gloo"]
    return [*words, *flags]


def joining(
    namespace: str, model: Path, log: Path, *flags: str, program: Sequence[str] = WIDEEP
) -> RealService:
    """Start a separate torchrun on a node. Its worker joins the service."""
    torchrun = Torchrun(
        ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        worker(model, "--join", ENDPOINT, *flags),
        network=namespace,
        environment={**INTERFACE, "PYTHONPATH": ""},  # another program is a copy of this checkout
        program=program,
    )
    return RealService(HTTP_PORT, [torchrun], log)


def end_node(service: RealService, node: int) -> None:
    """Kill a node's torchrun and all its descendants, as a power cut would."""
    for pid in [service.processes[node].pid, *service.descendants(node)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_healthy(service: RealService, namespaces: Sequence[str]) -> None:
    def is_healthy() -> bool:
        service.check_any_runs()
        return ask(namespaces[ENDPOINT_NODE], "GET", f"{URL}/health") is not None

    wait_until(is_healthy, service.output, within_s=START_S)


def stream_all(
    namespace: str,
    *,
    pieces: int = PIECES,
    then: Callable[[], object] = lambda: None,
    prompt: str = "the cat",
    url: str = URL,
) -> list[str]:
    """Stream completions from inside a namespace and return their texts. Call `then` when all streams have begun.

    Args:
        prompt: What all prompts have after their number.
        url: Of the front.
    """
    fields = {"model": "tiny", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    are_under_way = threading.Barrier(NUM_STREAMS + 1)

    def read(text: str) -> list[str]:
        """Return the lines of a stream up to its end, or up to the end of the front."""
        lines: list[str] = []
        sent = httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={**fields, "prompt": text},
            timeout=STREAMS_S,
            verify=False,
        )
        with contextlib.suppress(httpx.TransportError), sent as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if sum(line.startswith("data: {") for line in lines) == pieces and line.startswith("data: {"):
                    are_under_way.wait(STREAMS_S)
        if sum(line.startswith("data: {") for line in lines) < pieces:
            are_under_way.abort()  # it was refused
        return lines

    with threads_inside(namespace, NUM_STREAMS) as readers:
        readings = [readers.submit(read, f"{number} {prompt}") for number in range(NUM_STREAMS)]
        try:
            are_under_way.wait(STREAMS_S)
            then()
            return [_text(reading.result(STREAMS_S)) for reading in readings]
        finally:
            are_under_way.abort()


def _text(lines: Sequence[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events), events[-1]
    assert any(line.startswith("data: [DONE]") for line in lines), "the stream ended without [DONE]"
    return "".join(event["choices"][0]["text"] for event in events)


def engine_of(service: RealService, namespace: str) -> int:
    for pid in service.engines().values():
        answer = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True)
        if answer.stdout.strip() == namespace:
            return pid
    raise LookupError(f"no engine runs in {namespace}")


def members(namespace: str) -> list[int]:
    return members_at(namespace, URL)


@pytest.mark.slow
def test_a_node_that_is_cut_off_ends_and_the_other_goes_on(namespaces: list[str], tmp_path: Path) -> None:
    with start(namespaces, tmp_path, "--distributed-timeout-seconds=5") as service:
        wait_until_healthy(service, namespaces)
        here, other = namespaces[ENDPOINT_NODE], namespaces[OTHER_NODE]
        expected = stream_all(here)

        assert stream_all(here, then=lambda: set_link(other, "down")) == expected
        assert len(members(here)) == 1
        service.processes[OTHER_NODE].wait(END_S)
        assert "rejoin it from this node with: torchrun --nnodes 1" in service.output()
        assert f"--join {ENDPOINT}" in service.output()
        assert stream_all(here) == expected, "the end of the other node's torchrun does not end this one"
        assert service.processes[ENDPOINT_NODE].poll() is None


@pytest.mark.slow
def test_a_node_that_is_gone_comes_back_with_a_torchrun_of_its_own(
    namespaces: list[str], tmp_path: Path
) -> None:
    with start(namespaces, tmp_path) as service:
        wait_until_healthy(service, namespaces)
        here, other = namespaces[ENDPOINT_NODE], namespaces[OTHER_NODE]
        expected = stream_all(here)
        assert stream_all(here, then=lambda: end_node(service, OTHER_NODE)) == expected
        assert len(members(here)) == 1
        with joining(other, tmp_path / "tiny", tmp_path / "joined.txt") as node:
            assert stream_all(here, pieces=1) == expected, "streams continue while the node loads and joins"
            node.wait_until(lambda: members(here) == [0, 1])
            node.wait_until(lambda: "serving on 2 ranks" in node.output())
            assert stream_all(other) == expected
            assert service.processes[ENDPOINT_NODE].poll() is None
        wait_until(lambda: len(members(here)) == 1, service.output)
        assert stream_all(here) == expected, "streams continue when the node leaves"


@pytest.mark.slow
def test_nodes_end_by_themselves_when_that_of_the_front_is_gone(
    namespaces: list[str], tmp_path: Path
) -> None:
    with start(namespaces, tmp_path) as service:
        wait_until_healthy(service, namespaces)
        left = [service.processes[OTHER_NODE].pid, *service.descendants(OTHER_NODE)]
        end_node(service, ENDPOINT_NODE)
        assert service.processes[OTHER_NODE].wait(END_S) != 0
        assert all(has_ended(pid, END_S) for pid in left)


def with_another_checkpoint(node: Torchrun, directory: Path, _: Sequence[str]) -> Torchrun:
    shutil.copytree(directory / "tiny", directory / "changed")
    weights = directory / "changed" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    return node._replace(worker=worker(directory / "changed"))


def with_a_wrong_interface(node: Torchrun, _: Path, __: Sequence[str]) -> Torchrun:
    return node._replace(environment={"GLOO_SOCKET_IFNAME": "lo"})


def with_other_versions(node: Torchrun, directory: Path, _: Sequence[str]) -> Torchrun:
    packages = other_version("transformers", "5.21.0", directory)  # a version that starts
    return node._replace(environment={**INTERFACE, "PYTHONPATH": str(packages)})


def with_closed_ports(node: Torchrun, _: Path, namespaces: Sequence[str]) -> Torchrun:
    # Replies to these ports are blocked, too. The store's port stays open.
    close_ports(namespaces[ENDPOINT_NODE], "32768-60999")
    return node


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_another_checkpoint, "the nodes have different checkpoints: model.safetensors"),
        (with_a_wrong_interface, "set GLOO_SOCKET_IFNAME=veth0"),
        (with_other_versions, "5.21.0 on "),
        (with_closed_ports, "on veth0: 10.213.7.2 port"),
    ],
)
def test_a_node_that_does_not_go_with_the_other_ends_the_start_with_a_sentence_that_names_it(
    namespaces: list[str],
    tmp_path: Path,
    change: Callable[[Torchrun, Path, Sequence[str]], Torchrun],
    says: str,
) -> None:
    nodes = torchruns(namespaces, write_tiny_model(tmp_path / "tiny"))
    nodes[OTHER_NODE] = change(nodes[OTHER_NODE], tmp_path, namespaces)
    with RealService(HTTP_PORT, nodes, tmp_path / "output.txt") as service:
        for process in service.processes:
            assert process.wait(START_S) != 0
        said = service.output()
        assert said.count("NodesDifferError: ") >= 2, "both nodes report it"
        assert says in said
        assert ("gloo interface" in said) is (change is with_a_wrong_interface)


class Nodes(NamedTuple):
    """A service of three nodes."""

    names: list[str]  # of the namespaces
    service: RealService


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Return a service that each test leaves whole."""
    directory = tmp_path_factory.mktemp("three")
    with made_namespaces(3) as names, start(names, directory, "--max-rank-restarts=20") as service:
        wait_until_healthy(service, names)
        yield Nodes(names, service)


@pytest.mark.slow
def test_engines_of_three_nodes_die_and_hang_and_streams_go_on(three: Nodes) -> None:
    names, service = three
    here, other = names[ENDPOINT_NODE], names[OTHER_NODE]
    expected = stream_all(here)
    killed = [(signal.SIGKILL, name) for name in names]
    for number, node in [*killed, (signal.SIGSTOP, here), (signal.SIGSTOP, other)]:
        victim = engine_of(service, node)
        assert stream_all(here, then=lambda: os.kill(victim, number)) == expected  # noqa: B023
        wait_until(lambda: members(here) == [0, 1, 2], service.output, within_s=START_S)
        assert engine_of(service, node) != victim
    hung = "hung and was killed: it is stopped"
    wait_until(lambda: service.output().count(hung) == 2, service.output)
    assert all(stream_all(name) == expected for name in names)
    assert service.output().count(URL) >= len(names), "each node prints the address"
    assert [process.poll() for process in service.processes] == [None] * 3


@pytest.mark.slow
def test_a_link_that_is_healed_within_a_minute_brings_its_node_back(three: Nodes) -> None:
    names, service = three
    here, other = names[ENDPOINT_NODE], names[OTHER_NODE]
    expected = stream_all(here)
    assert stream_all(here, then=lambda: set_link(other, "down")) == expected
    wait_until(lambda: len(members(here)) == 2, service.output)
    set_link(other, "up")
    wait_until(lambda: members(here) == [0, 1, 2], service.output, within_s=START_S)
    assert stream_all(other) == expected
    assert [process.poll() for process in service.processes] == [None] * 3


@pytest.mark.slow
def test_a_killed_front_is_back_and_the_engines_of_all_nodes_serve_on(three: Nodes) -> None:
    names, service = three
    here, engines, victim = names[ENDPOINT_NODE], service.engines(), service.find("front")
    expected = stream_all(here)
    with pytest.raises(AssertionError, match=r"the stream ended without \[DONE\]"):
        stream_all(here, then=lambda: os.kill(victim, signal.SIGKILL))
    wait_until(lambda: members(here) == [0, 1, 2], service.output, within_s=START_S)
    wait_until_healthy(service, names)
    assert service.find("front") != victim
    assert service.engines() == engines
    assert stream_all(names[OTHER_NODE]) == expected
    assert [process.poll() for process in service.processes] == [None] * 3
