"""Engines that are killed during expert moves of `--enable-eplb`, some exactly when a rank switches: streams stay the same."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatch.ports import free_port
from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.support.placement.placements import random_placement
from tests.support.requests.timed_streams import stream_all
from tests.support.service.forked import WIDEEP
from tests.support.service.real_service import REPOSITORY, START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

EAGER: dict[str, Any] = {
    "num_redundant_experts": 4, "window_size": 20, "step_interval": 40, "min_gain": 0.0, "max_bytes_per_step": 1 << 12,
}  # fmt: skip
MOVE_S = 240.0  # until the controller has found something to move
# Python imports this module at its start. The engine of rank 1 kills itself at its next switch if the file orders it.
AT_THE_SWITCH = """
import importlib.abc, importlib.util, os, signal, sys
from pathlib import Path

NAME, ORDER = "scheduler.moves.relocation", Path({order!r})

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            switch = module.Relocation.switch
            def die_at(self, version, step):
                moment = ORDER.read_text() if os.environ.get("RANK") == "1" and ORDER.exists() else ""
                if moment == "after":
                    switch(self, version, step)
                if moment:
                    ORDER.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                switch(self, version, step)
            module.Relocation.switch = die_at
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def bodies() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0, "seed": 7, "n": 2},
        {"temperature": 0.8, "seed": 8, "presence_penalty": 0.7},
    ]
    body = {"model": "tiny", "max_tokens": 80, "ignore_eos": True}
    return [
        {**body, "prompt": f"{copy} the cat {kind}", **options}
        for copy in range(2)
        for kind, options in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names the moment of a switch at which rank 1 kills itself."""
    return tmp_path_factory.mktemp("order") / "moment"


@pytest.fixture(scope="module")
def service(order: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve --enable-eplb` on two ranks, with experts moved as often as possible."""
    directory = tmp_path_factory.mktemp("service")
    model = write_tiny_model(directory / "tiny")
    (directory / "sitecustomize.py").write_text(AT_THE_SWITCH.format(order=str(order)))
    port = free_port()
    flags = ("--enable-eplb", "--eplb-config", json.dumps(EAGER), "--max-rank-restarts=20", "-dp=2")
    paths = f"PYTHONPATH={directory}:{REPOSITORY}"
    command = ["env", paths, *WIDEEP, "serve", str(model), f"--port={port}", "--kv-cache-memory=16M", *flags]
    with RealService(port, [command], directory / "output.txt") as running:
        yield running.wait_ready()


def unbalance(service: RealService, seed: int) -> None:
    """Apply a placement that the controller will want to improve. The service may refuse it if it is busy or lacks a rank.

    Also returns if a rank dies at its switch to the placement.
    """
    now = from_json(service.get("/experts/history").json()["serving"])
    sizes = now.num_layers, now.num_experts, now.num_ranks, now.slots_per_rank
    target = align(random_placement(*sizes, seed=seed), now)
    service.post("/experts/apply", json={"placement": to_json(target)}, timeout_s=120)


def moves_by_itself(service: RealService) -> bool:
    """Return whether experts are being moved by a decision of the controller."""
    told = service.get("/experts/history").json()["under_way"]
    return told is not None and told["kind"] != "apply"


def wait_until_whole(service: RealService) -> None:
    wait_until(lambda: service.status()["members"] == [0, 1], service.output, within_s=START_S)


def num_killed(service: RealService) -> int:
    return service.output().count("was killed by SIGKILL")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_streams_stay_the_same_when_a_rank_dies_at_its_switch(
    service: RealService, order: Path, moment: str
) -> None:
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    killed, deadline_s, seed = num_killed(service), time.monotonic() + MOVE_S, 0
    has_died = False
    while not has_died:
        assert time.monotonic() < deadline_s, f"no rank switched:\n{service.output()[-3000:]}"
        seed += 1
        order.write_text(moment)
        streams = stream_all(service.url, bodies(), pieces=5, then=lambda: unbalance(service, seed))  # noqa: B023
        assert [each.said for each in streams] == expected
        has_died = not order.exists()
        order.unlink(missing_ok=True)
    wait_until(lambda: num_killed(service) > killed, service.output)
    wait_until_whole(service)
    assert [each.said for each in stream_all(service.url, bodies())] == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_stay_the_same_when_a_rank_dies_while_experts_move_by_themselves(
    service: RealService, rank: int
) -> None:
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    killed: list[int] = []

    def kill_amid_a_move() -> None:
        deadline_s = time.monotonic() + 1.5  # the streams' own end
        while not killed and time.monotonic() < deadline_s:
            if moves_by_itself(service):
                killed.append(service.engines()[rank])
                os.kill(killed[0], signal.SIGKILL)

    deadline_s, seed = time.monotonic() + MOVE_S, 100
    while not killed:
        assert time.monotonic() < deadline_s, f"nothing moved:\n{service.output()[-3000:]}"
        unbalance(service, seed := seed + 1)
        streams = stream_all(service.url, bodies(), pieces=5, then=kill_amid_a_move)
        assert [each.said for each in streams] == expected
    wait_until_whole(service)
    assert [each.said for each in stream_all(service.url, bodies())] == expected
