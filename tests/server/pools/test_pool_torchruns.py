"""A torchrun per pool, on nodes that share only a network: pools join a running service, are lost as a whole, and return."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.nodes.test_nodes import (
    END_S,
    ENDPOINT,
    ENDPOINT_NODE,
    HTTP_PORT,
    INTERFACE,
    OTHER_NODE,
    URL,
    end_node,
    joining,
    start,
    stream_all,
    wait_until_healthy,
    worker,
)
from tests.support.service.namespaces import ask, made_namespaces, members
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until
from tests.support.service.torchruns import Torchrun

pytestmark = pytest.mark.slow

TEXT = "the cat sat on the mat and looked at the dog " * 8
FLAGS = ("--max-model-len=512", "--max-rank-restarts=20", "--shutdown-timeout-seconds=1")
HEAD_POOL = ("--pool=first", "--role=prefill", "--kv-offloading-size=64M")
DECODE = ("--pool=decode", "--role=decode", "--kv-offloading-size=64M")


def torchrun(
    namespace: str, model: Path, node: int, num_ranks: int, *flags: str, meets: Sequence[str] = ()
) -> Torchrun:
    """Return a torchrun in a namespace with another host name, so that hosts share no memory.

    Args:
        meets: torchrun's flags for its rendezvous; by default, those of a torchrun of one node.
    """
    meets = meets or ("--nnodes=1", "--rdzv-endpoint=localhost:0", "--local-addr=localhost")
    return Torchrun(
        [f"--nproc-per-node={num_ranks}", "--rdzv-backend=c10d", *meets],
        worker(model, *FLAGS, *flags),
        network=namespace,
        host_name=f"node-{node}",
        environment=INTERFACE,
    )


def head(namespace: str, model: Path, *flags: str) -> Torchrun:
    """Return the torchrun that begins the service."""
    address = f"10.213.7.{ENDPOINT_NODE + 1}"
    meets = ("--nnodes=1", f"--rdzv-endpoint={ENDPOINT}", "--rdzv-conf=is_host=1", f"--local-addr={address}")
    return torchrun(namespace, model, ENDPOINT_NODE, 1, *HEAD_POOL, *flags, meets=meets)


class PoolsOfTorchruns(NamedTuple):
    """A service to which torchruns add pools."""

    names: list[str]  # of the namespaces
    service: RealService
    directory: Path

    @property
    def here(self) -> str:
        return self.names[ENDPOINT_NODE]

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        answer = ask(self.here, method, f"{URL}{path}", body)
        assert answer is not None, (path, self.service.output())
        return answer

    def pools(self) -> dict[str, dict[str, Any]]:
        """Return the pools' state; it is empty while the front is away."""
        answer = ask(self.here, "GET", f"{URL}/v1/fault_tolerance/status")
        return {each["pool"]: each for each in json.loads(answer)["pools"]} if answer else {}

    def metric(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}.* (\S+)$", self.call("GET", "/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def serving(self) -> list[int]:
        """Return the ranks of the pools that serve."""
        pools = self.pools().values()
        return [rank for each in pools if each["phase"] == "serving" for rank in each["members"]]

    def wait_for(self, ranks: list[int], node: RealService | None = None) -> None:
        """Wait until exactly these ranks serve, or fail when the torchrun of `node` has ended."""
        said = (node or self.service).output
        wait_until(
            lambda: self.serving() == ranks or (node is not None and has_ended(node)), said, within_s=START_S
        )
        assert self.serving() == ranks, said()

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the pool of the other node serves in a later epoch."""

        def is_later() -> bool:
            decode = self.pools().get("decode", {"epoch": 0, "phase": ""})
            return bool(decode["epoch"] > epoch and decode["phase"] == "serving")

        wait_until(is_later, self.service.output, within_s=START_S)

    @contextlib.contextmanager
    def adding(
        self, name: str, *flags: str, num_ranks: int = 2, model: str = "tiny"
    ) -> Iterator[RealService]:
        """Run a torchrun on the other node that joins the service; its output is in a file of this name."""
        joining = torchrun(
            self.names[OTHER_NODE], self.directory / model, OTHER_NODE, num_ranks, "--join", ENDPOINT, *flags
        )
        with RealService(HTTP_PORT, [joining], self.directory / f"{name}.txt") as node:
            yield node

    def refusal(self, name: str, *flags: str, num_ranks: int = 1, model: str = "tiny") -> str:
        """Run a torchrun that joins until it ends, and return its output."""
        with self.adding(name, *flags, num_ranks=num_ranks, model=model) as node:
            return output_of_refused(node)


def output_of_refused(node: RealService) -> str:
    """Wait until a torchrun ends with an error, and return its output."""
    assert node.processes[0].wait(START_S) != 0
    return node.output()


def has_ended(node: RealService) -> bool:
    return node.processes[0].poll() is not None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolsOfTorchruns]:
    """A service with one pool and two fronts, which each test leaves alone again."""
    directory = tmp_path_factory.mktemp("pools")
    model = write_tiny_model(directory / "tiny")
    with made_namespaces(2) as names:
        command = head(names[ENDPOINT_NODE], model, "--api-server-count=2")
        with RealService(HTTP_PORT, [command], directory / "output.txt") as service:
            wait_until_healthy(service, names)
            yield PoolsOfTorchruns(names, service, directory)


@pytest.fixture(scope="module")
def expected(running: PoolsOfTorchruns) -> list[str]:
    """The answers of the first pool alone."""
    return stream_all(running.here, prompt=TEXT)


def test_a_pool_joins_late_is_lost_amid_streams_and_returns(
    running: PoolsOfTorchruns, expected: list[str]
) -> None:
    assert list(running.pools()) == ["first"]
    with running.adding("late", *DECODE) as late:
        assert stream_all(running.here, prompt=TEXT, pieces=1) == expected, "streams continue while it loads"
        running.wait_for([0, 1, 2], late)
        wait_until(lambda: "pool decode (decode, ranks 1 to 2) serves at" in late.output(), late.output)
        before = running.metric('wideep:request_moves_total{cause="hand_over"')
        assert stream_all(running.here, prompt=TEXT) == expected
        assert running.metric('wideep:request_moves_total{cause="hand_over"') > before, "none was handed over"
        assert running.metric("wideep:kv_peer_fetches_total") > 0, (
            "hosts share no memory, so blocks are fetched"
        )

        running.call("POST", "/flush_cache")
        assert stream_all(running.here, prompt=TEXT, then=lambda: end_node(late, 0)) == expected
        running.wait_for([0])
        assert running.pools()["decode"]["phase"] == "waiting"
        assert stream_all(running.here, prompt=TEXT) == expected
    epoch = running.pools()["decode"]["epoch"]
    with running.adding("back", *DECODE) as back:
        running.wait_for([0, 1, 2], back)
        assert running.pools()["decode"]["epoch"] > epoch
        assert running.pools()["first"]["epoch"] == 0, "the first pool has noticed nothing"
        assert stream_all(running.here, prompt=TEXT) == expected
    running.wait_for([0])


def test_a_joined_pool_outlives_its_engines_and_the_front_and_may_leave(
    running: PoolsOfTorchruns, expected: list[str]
) -> None:
    with running.adding("whole", *DECODE) as node:
        running.wait_for([0, 1, 2], node)
        wait_until(lambda: "pool decode (decode, ranks 1 to 2) serves at" in node.output(), node.output)
        epoch = running.pools()["decode"]["epoch"]
        os.kill(node.engines()[2], signal.SIGKILL)
        running.wait_for_epoch(epoch)
        running.wait_for([0, 1, 2], node)
        assert stream_all(running.here, prompt=TEXT) == expected

        front = running.service.find("front")
        os.kill(front, signal.SIGKILL)
        wait_until(lambda: has_another_front(running.service, front), running.service.output)
        running.wait_for([0, 1, 2], node)
        assert list(running.pools()) == ["first", "decode"]
        assert stream_all(running.here, prompt=TEXT) == expected

        node.processes[0].terminate()
        assert stream_all(running.here, prompt=TEXT, pieces=1) == expected
        node.processes[0].wait(END_S)
    running.wait_for([0])
    assert running.service.processes[0].poll() is None


def has_another_front(service: RealService, before: int) -> bool:
    try:
        return service.find("front") != before
    except LookupError:
        return False


def test_a_pool_that_does_not_fit_is_refused_in_one_sentence_and_disturbs_nothing(
    running: PoolsOfTorchruns, expected: list[str]
) -> None:
    before = running.pools()
    write_tiny_model(running.directory / "other", "deepseek_v3")
    first = ("--pool=first", "--role=prefill")
    with running.adding("name", *first, num_ranks=1) as same:  # it waits a minute for a node to go away
        said = running.refusal("model", "--pool=third", "--role=decode", model="other")
        assert said.count("the nodes have different checkpoints: ") >= 1
        said = running.refusal("role", "--pool=first", "--role=decode")
        assert "pool first has the role prefill, not decode; give that --role" in said
        said = running.refusal("size", *first, num_ranks=2)
        assert "pool first has 1 ranks, but this torchrun has 2" in said
        said = output_of_refused(same)
        assert "the service has a pool first (prefill, rank 0), and no node of it is away" in said
    assert running.pools() == before
    assert stream_all(running.here, prompt=TEXT) == expected


def test_a_torchrun_of_two_nodes_is_one_pool(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with made_namespaces(3) as names:
        commands = [head(names[ENDPOINT_NODE], model)]
        for node in (0, 2):
            address = f"10.213.7.{node + 1}"
            meets = [
                *("--nnodes=2", "--rdzv-endpoint=10.213.7.1:29500", f"--local-addr={address}"),
                f"--rdzv-conf=is_host={int(node == 0)}",
            ]
            flags = ("--join", ENDPOINT, "--pool=replica", "--role=both")
            commands.append(torchrun(names[node], model, node, 1, *flags, meets=meets))
        with RealService(HTTP_PORT, commands, tmp_path / "output.txt") as service:
            running = PoolsOfTorchruns(names, service, tmp_path)
            running.wait_for([0, 1, 2])
            assert running.pools()["replica"]["members"] == [1, 2]
            expected = stream_all(running.here, prompt=TEXT)
            assert stream_all(running.here, prompt=TEXT, then=lambda: end_node(service, 2)) == expected
            wait_until(lambda: len(running.serving()) == 2, service.output, within_s=START_S)
            assert stream_all(running.here, prompt=TEXT) == expected


def test_a_node_without_a_name_returns_into_its_pool(namespaces: list[str], tmp_path: Path) -> None:
    pools = ("--pools=prefill:1,decode:1", "--kv-offloading-size=64M")
    with start(namespaces, tmp_path, *pools, "--max-model-len=512") as service:
        wait_until_healthy(service, namespaces)
        running = PoolsOfTorchruns(namespaces, service, tmp_path)
        expected = stream_all(running.here, prompt=TEXT)
        assert running.metric('wideep:request_moves_total{cause="hand_over"') > 0
        lost = lambda: end_node(service, OTHER_NODE)  # noqa: E731
        assert stream_all(running.here, prompt=TEXT, then=lost) == expected
        wait_until(lambda: len(members(running.here, URL)) == 1, service.output)
        other, log = namespaces[OTHER_NODE], tmp_path / "joined.txt"
        with joining(other, tmp_path / "tiny", log, *pools, "--max-model-len=512") as node:
            node.wait_until(lambda: members(running.here, URL) == [0, 1])
            before = running.metric('wideep:request_moves_total{cause="hand_over"')
            running.call("POST", "/flush_cache")
            assert stream_all(running.here, prompt=TEXT) == expected
            assert running.metric('wideep:request_moves_total{cause="hand_over"') > before
