"""A service with a standby loses the node with the store: real torchrun agents and engines in namespaces."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from server.options.table import STANDBY_PORT
from tests.server.nodes.test_nodes import END_S, INTERFACE, end_node, engine_of
from tests.support.service.namespaces import ask, made_namespaces, set_link, threads_inside
from tests.support.service.namespaces import members as members_at
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until
from tests.support.service.torchruns import Torchrun

STANDBY, HEAD, OTHER = 0, 1, 2  # nodes
PORT = 8000
ENDPOINT, SECOND = "10.213.7.2:29400", "10.213.7.1"
URLS = {node: f"http://10.213.7.{node + 1}:{PORT}" for node in (STANDBY, HEAD)}
NUM_CLIENTS = 4
RECOVERY_S = 20.0  # after the loss is noticed; 5 s on a machine that is not busy
NOTICE_S = 15.0  # for a cut link: 3 s without an answer, 0.5 s until that is looked at, and 0.5 s for a connection to torchrun
ANSWER_S = 120.0
TEXT = {"model": "tiny", "max_tokens": 400, "ignore_eos": True}


def worker(model: Path, num_fronts: int) -> list[str]:
    """Return the words of `wideep` on each node."""
    return [
        *("worker", str(model), "--host", "0.0.0.0", "--kv-cache-memory", "16M", "--all2all-backend", "gloo"),
        *("--standby", SECOND, "--api-server-count", str(num_fronts)),
    ]


def torchruns(namespaces: Sequence[str], model: Path, num_fronts: int) -> list[Torchrun]:
    """Return the torchrun of each node."""
    return [
        Torchrun(
            [
                *(f"--nnodes={len(namespaces)}", "--nproc-per-node=1", "--rdzv-backend=wideep"),
                *(f"--local-addr=10.213.7.{node + 1}", f"--rdzv-endpoint={ENDPOINT}"),
            ],
            worker(model, num_fronts),
            network=name,
            environment=INTERFACE,
        )
        for node, name in enumerate(namespaces)
    ]


class Nodes(NamedTuple):
    """A running service."""

    names: list[str]  # of the namespaces
    service: RealService

    def members(self, node: int) -> list[int]:
        """Return the serving ranks as reported by the front on a node."""
        return members_at(self.names[node], URLS[node])

    def said(self, text: str) -> bool:
        """Return whether a process has printed a text."""
        return text in self.service.output()


@contextlib.contextmanager
def serving(directory: Path, num_nodes: int, num_fronts: int) -> Iterator[Nodes]:
    """Run a service with a standby in namespaces. Only the nodes of the endpoint and the standby have fronts."""
    model = write_tiny_model(directory / "tiny")
    with made_namespaces(num_nodes) as names:
        commands = torchruns(names, model, num_fronts)
        with RealService(PORT, commands, directory / "output.txt") as service:
            service.wait_until(lambda: ask(names[HEAD], "GET", f"{URLS[HEAD]}/health") is not None)
            yield Nodes(names, service)


class Answer(NamedTuple):
    """An answer and its way."""

    text: str
    cut_off: list[str]  # what came of it before connections broke
    done_s: float  # time.monotonic() at its end


def stream(key: str, body: dict[str, Any], is_under_way: Callable[[], object]) -> Answer:
    """Stream an answer, with retries at both addresses. `is_under_way` is called when its first tokens are there."""
    cut_off: list[str] = []
    until_s = time.monotonic() + ANSWER_S
    while True:
        for url in (URLS[HEAD], URLS[STANDBY]):
            text = ""
            with contextlib.suppress(httpx.TransportError):
                sent = httpx.stream(
                    "POST",
                    f"{url}/v1/completions",
                    json={**body, "stream": True},
                    headers={"Idempotency-Key": key},
                    timeout=httpx.Timeout(10.0, connect=0.5),
                )
                with sent as answer:
                    for line in answer.iter_lines() if answer.status_code == 200 else ():
                        if line == "data: [DONE]":
                            return Answer(text, cut_off, time.monotonic())
                        if line.startswith("data: {") and "choices" in (event := json.loads(line[6:])):
                            text += event["choices"][0]["text"]
                            if len(text) > 10:
                                is_under_way()
            if text:
                cut_off.append(text)
        assert time.monotonic() < until_s, f"{key} was not answered"
        time.sleep(0.05)


def bodies(kind: str) -> list[dict[str, Any]]:
    """Return a request for each client: half of them greedy, half sampled without a seed."""
    return [
        {**TEXT, "prompt": f"{number} the {kind} cat", "temperature": float(number % 2)}
        for number in range(NUM_CLIENTS)
    ]


def lose(nodes: Nodes, how: str) -> None:
    """Lose the node with the store."""
    if how == "killed":
        end_node(nodes.service, HEAD)
    elif how == "without torchrun":
        os.kill(nodes.service.processes[HEAD].pid, signal.SIGKILL)
    else:
        set_link(nodes.names[HEAD], "down")


def recovery_s(nodes: Nodes, how: str, clients: ThreadPoolExecutor) -> list[float]:
    """Lose the first node under streams. Check the answers, and return the seconds from the loss to the notice and from there to the
    service."""
    greedy = [body for body in bodies("last") if not body["temperature"]]
    expected = {
        body["prompt"]: clients.submit(stream, f"before {body['prompt']}", body, lambda: None).result().text
        for body in greedy
    }
    under_way = [threading.Event() for _ in range(NUM_CLIENTS)]
    asked = [
        clients.submit(stream, f"key {number}", body, under_way[number].set)
        for number, body in enumerate(bodies("last"))
    ]
    for each in under_way:
        assert each.wait(ANSWER_S)
    begun_s = time.monotonic()
    lose(nodes, how)
    wait_until(lambda: nodes.said("this front takes over"), nodes.service.output)
    noticed_s = time.monotonic()
    wait_until(
        lambda: ask(nodes.names[STANDBY], "GET", f"{URLS[STANDBY]}/health") is not None, nodes.service.output
    )
    served_s = time.monotonic()
    for body, asking in zip(bodies("last"), asked, strict=True):
        answer = asking.result(ANSWER_S)
        assert answer.cut_off, "the loss was under its tokens"
        assert all(answer.text.startswith(part) for part in answer.cut_off), "a retry has the same tokens"
        assert answer.text == expected.get(body["prompt"], answer.text)
    return [noticed_s - begun_s, served_s - noticed_s]


def rejoining(nodes: Nodes, directory: Path, num_fronts: int) -> RealService:
    """Start a separate torchrun on the lost node, which joins at the standby's store."""
    torchrun = Torchrun(
        [
            *("--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=wideep"),
            *("--rdzv-endpoint=localhost:0", "--local-addr=localhost"),
        ],
        [*worker(directory / "tiny", num_fronts), "--join", f"{SECOND}:{STANDBY_PORT}"],
        network=nodes.names[HEAD],
        environment=INTERFACE,
    )
    return RealService(PORT, [torchrun], directory / "joined.txt")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "num_fronts"), [("killed", 1), ("without torchrun", 2), ("cut off", 2)])
def test_the_standby_serves_when_the_node_with_the_store_is_lost(
    tmp_path: Path, how: str, num_fronts: int
) -> None:
    with (
        serving(tmp_path, 2, num_fronts) as nodes,
        threads_inside(nodes.names[STANDBY], NUM_CLIENTS) as clients,
    ):
        figures = recovery_s(nodes, how, clients)
        print(
            f"standby: {how}, {num_fronts} fronts: noticed after {figures[0]:.2f} s, served {figures[1]:.2f} s later"
        )
        assert figures[0] < NOTICE_S
        assert figures[1] < RECOVERY_S
        assert len(nodes.members(STANDBY)) == 1
        assert nodes.service.processes[STANDBY].poll() is None
        if how == "cut off":
            set_link(nodes.names[HEAD], "up")
            assert nodes.service.processes[HEAD].wait(END_S) != 0
            assert nodes.said("this node was cut off, and the standby has taken over")
        with rejoining(nodes, tmp_path, num_fronts) as node:
            node.wait_until(lambda: nodes.members(STANDBY) == [0, 1])
        assert nodes.service.processes[STANDBY].poll() is None


@pytest.mark.slow
def test_a_third_node_and_its_restarted_engine_stay_in_the_service(tmp_path: Path) -> None:
    with (
        serving(tmp_path, 3, num_fronts=2) as nodes,
        threads_inside(nodes.names[STANDBY], NUM_CLIENTS) as clients,
    ):
        recovery_s(nodes, "killed", clients)
        wait_until(lambda: len(nodes.members(STANDBY)) == 2, nodes.service.output)
        victim = engine_of(nodes.service, nodes.names[OTHER])
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: nodes.said("serves again, after"), nodes.service.output, within_s=START_S)
        assert len(nodes.members(STANDBY)) == 2
        assert [nodes.service.processes[node].poll() for node in (STANDBY, OTHER)] == [None, None]


@pytest.mark.slow
def test_an_orderly_end_of_the_first_node_ends_the_service(tmp_path: Path) -> None:
    with serving(tmp_path, 2, num_fronts=2) as nodes:
        nodes.service.processes[HEAD].terminate()
        assert nodes.service.processes[STANDBY].wait(END_S) == 0, nodes.service.output()
        assert not nodes.said("takes over")
