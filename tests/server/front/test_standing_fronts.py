"""Two fronts of the standby lead when the node of two leading fronts is lost: four real fronts with scripted ranks."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from dispatch.ports import free_port
from server.link.messages import Served
from server.serve.child_messages import FrontAddresses, announcement
from server.serve.standby.first_front import leave_first
from server.serve.store.meeting import Endpoint
from tests.server.front.test_standby_front import HOME, KEPT, kinds, port_of, status
from tests.support.service.fake_rank import EXPERT_BYTES, experts_of
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until

KEYS = [{"Idempotency-Key": f"k{number}"} for number in range(6)]  # of both fronts


class Node(NamedTuple):
    """The fronts of a node, the leading one first."""

    fronts: list[FrontProcess]
    kept: Path
    announced: str  # their addresses

    def kill(self) -> None:
        for front in self.fronts:
            os.kill(front.process.pid, signal.SIGKILL)
            for rank in front.ranks:
                rank.kill()


def start(model: Path, kept: Path, number: int, announced: str, *flags: str, port: int = 0) -> FrontProcess:
    """Start one front of a node."""
    flags = ("--served-model-name=m", "--standby=127.0.0.1:1", "--api-server-count=2", *flags)
    environment = {"WIDEEP_KEPT": str(kept)} | ({"WIDEEP_FRONT": announced} if announced else {})
    port = port or free_port()
    return FrontProcess(model, *flags, f"--front-number={number}", f"--port={port}", environment=environment)


def started(model: Path, kept: Path, *flags: str) -> Node:
    """Start the fronts of a node."""
    kept.mkdir()
    fronts: list[FrontProcess] = []
    addresses: list[FrontAddresses] = []
    for number in range(2):
        fronts.append(start(model, kept, number, announcement(addresses) if addresses else "", *flags))
        addresses.append(FrontAddresses(fronts[-1].url, fronts[-1].ranks_address, fronts[-1].token))
    return Node(fronts, kept, announcement(addresses))


class Service(NamedTuple):
    """Two nodes with fronts, and torchrun's agent of the first one."""

    first: Node
    standby: Node
    agent: socket.socket

    def take_over(self) -> None:
        """Lose the first node with rank 0, and let rank 1 attach to the standby's fronts."""
        self.first.kill()
        self.agent.close()
        for front in self.standby.fronts:
            self.attach(front)
        leading = self.standby.fronts[0]
        wait_until(lambda: status(leading)["members"] == [1], lambda: leading.said)
        self.wait_ready()

    def attach(self, front: FrontProcess) -> None:
        """Attach rank 1 to a front of the standby."""
        front.token = self.first.fronts[0].token
        front._scripts.update(self.first.fronts[0]._scripts)
        front.attach(1, served=Served(0, HOME.version, HOME, EXPERT_BYTES, experts_of(HOME)))

    def wait_ready(self) -> None:
        """Wait until both fronts of the standby accept requests."""
        for front in self.standby.fronts:
            wait_ready(front)


def wait_ready(front: FrontProcess) -> None:
    wait_until(lambda: front.get("/health").status_code == 200, lambda: front.said)


@pytest.fixture
def service(model_dir: Path, tmp_path: Path) -> Iterator[Service]:
    """Two nodes with two fronts each. The second node's follow the first one's."""
    agent = socket.create_server(("127.0.0.1", 0))
    first = started(model_dir, tmp_path / "first")
    standby = started(model_dir, tmp_path / "second", "--stands-by")
    addresses = {"ranks_address": first.fronts[0].ranks_address, "token": first.fronts[0].token}
    leave_first(standby.kept, addresses, Endpoint("127.0.0.1", agent.getsockname()[1]))
    for front in first.fronts:
        for rank in range(2):
            front.attach(rank)
    first.fronts[0].ranks[0].begin(HOME)
    for front in first.fronts:
        wait_ready(front)
    wait_until(lambda: "standby_follows" in kinds(first.fronts[0]), lambda: standby.fronts[0].said)
    yield Service(first, standby, agent)
    agent.close()
    for each in (*reversed(first.fronts), *reversed(standby.fronts)):
        each.close()


@pytest.mark.slow
def test_every_front_of_the_standby_has_the_answers_of_its_counterpart(service: Service) -> None:
    first, standby = service.first.fronts, service.standby.fronts
    gate = threading.Event()
    for front in first:
        front.script("f-kept", "one two three")
        front.script("f-open", "four five six", gates={1: gate})
    kept = [first[0].post("/v1/completions", json=KEPT, headers=key) for key in KEYS]
    background = {"model": "m", "input": "f-open", "background": True}
    runs = [front.post("/v1/responses", json=background).json()["id"] for front in first]
    assert [each.status_code for each in kept] == [200] * len(KEYS)
    for front in standby:
        with pytest.raises(httpx.ConnectError):
            front.get("/health")

    service.take_over()
    gate.set()
    for key, before in zip(KEYS, kept, strict=True):
        for front in standby:
            again = front.post("/v1/completions", json=KEPT, headers=key)
            assert (again.content, again.headers["idempotent-replayed"]) == (before.content, "true")
    for run in runs:
        found = lambda run=run: standby[0].get(f"/v1/responses/{run}").json()  # noqa: E731
        wait_until(lambda found=found: found()["status"] == "completed", lambda: standby[1].said)
        assert found()["output"][-1]["content"][0]["text"] == "four five six"
        assert standby[1].get(f"/v1/responses/{run}").json() == found()
    assert kinds(standby[0])[0] == "took_over"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_front_of_the_standby_that_leads_is_replaced(
    service: Service, model_dir: Path, number: int
) -> None:
    service.take_over()
    standby = service.standby.fronts
    killed = standby[number]
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    again = start(
        model_dir,
        service.standby.kept,
        number,
        service.standby.announced,
        "--stands-by",
        port=port_of(killed),
    )
    standby[number] = again.wait_listening()
    service.attach(again)
    service.wait_ready()
    again.script("f-say", "one two")
    answer = again.post("/v1/completions", json={**KEPT, "prompt": "f-say"})
    assert answer.json()["choices"][0]["text"] == "one two"


@pytest.mark.slow
def test_a_killed_front_on_a_living_node_is_awaited(service: Service, model_dir: Path) -> None:
    first, node = service.first.fronts, service.first
    os.kill(first[0].process.pid, signal.SIGKILL)
    first[0].wait()
    first[0] = again = start(model_dir, node.kept, 0, node.announced, port=port_of(first[0]))
    again.wait_listening()
    wait_until(lambda: "standby_follows" in kinds(again), lambda: service.standby.fronts[0].said)
    assert "takes over" not in service.standby.fronts[0].said
    assert json.loads((service.standby.kept / "copies" / "service.json").read_text())["serving"]
