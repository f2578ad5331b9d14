"""The standby's front leads when the node of the leading front is lost: two real fronts with scripted ranks."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from dispatch.ports import free_port
from expert_placement.placement import linear_placement
from server.link.messages import Served
from server.serve.standby.first_front import leave_first
from server.serve.store.meeting import Endpoint
from tests.support.service.fake_rank import EXPERT_BYTES, experts_of
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow
HOME = linear_placement(2, 4, 2)
KEPT = {"model": "m", "prompt": "f-kept", "max_tokens": 40}


class Pair(NamedTuple):
    """A leading front with two ranks, the standby's front, and torchrun's agent of the first node."""

    first: FrontProcess
    standby: FrontProcess
    agent: socket.socket

    def take_over(self) -> None:
        """Lose the first node with rank 0, and let rank 1 attach to the standby's front."""
        os.kill(self.first.process.pid, signal.SIGKILL)
        self.agent.close()
        for rank in self.first.ranks:
            rank.kill()
        self.attach_to_standby()

    def attach_to_standby(self) -> None:
        """Attach rank 1 to the standby's front, and wait until it serves."""
        standby = self.standby
        standby.token = self.first.token
        standby._scripts.update(self.first._scripts)
        served = Served(0, HOME.version, HOME, EXPERT_BYTES, experts_of(HOME))
        standby.attach(1, served=served)
        wait_until(lambda: status(standby)["members"] == [1], lambda: standby.said)


def status(front: FrontProcess) -> dict[str, Any]:
    """Return the state of the service."""
    return dict(front.get("/v1/fault_tolerance/status").json())


def kinds(front: FrontProcess) -> list[str]:
    """Return the kinds of the events so far."""
    return [event["kind"] for event in status(front)["events"]]


def port_of(front: FrontProcess) -> int:
    return int(front.url.rpartition(":")[2])


@pytest.fixture
def pair(model_dir: Path, tmp_path: Path) -> Iterator[Pair]:
    """Two fronts, of which the second follows the first."""
    agent = socket.create_server(("127.0.0.1", 0))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    flags = ("--served-model-name=m", "--standby=127.0.0.1:1")
    first, standby = (
        FrontProcess(
            model_dir, *flags, f"--port={free_port()}", *more, environment={"WIDEEP_KEPT": str(folder)}
        )
        for folder, more in zip(folders, ((), ("--stands-by",)), strict=True)
    )
    front = {"ranks_address": first.ranks_address, "token": first.token}
    leave_first(folders[1], front, Endpoint("127.0.0.1", agent.getsockname()[1]))
    first.attach_all().ranks[0].begin(HOME)
    wait_until(lambda: "standby_follows" in kinds(first), lambda: first.said + standby.said)
    yield Pair(first, standby, agent)
    agent.close()
    for each in (first, standby):
        each.close()


def test_answers_responses_and_batches_are_there_after_the_loss(pair: Pair) -> None:
    first, standby, _ = pair
    first.script("f-kept", "one two three")
    gate = threading.Event()
    first.script("f-open", "four five six", gates={1: gate})
    first.script("f-line", "seven eight", gates={1: gate})
    key = {"Idempotency-Key": "k"}
    kept = first.post("/v1/completions", json=KEPT, headers=key)
    run = first.post("/v1/responses", json={"model": "m", "input": "f-open", "background": True}).json()
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {**KEPT, "prompt": "f-line"},
    }
    file = first.post(
        "/v1/files", files={"file": ("in.jsonl", json.dumps(line).encode())}, data={"purpose": "batch"}
    ).json()
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = first.post("/v1/batches", json=fields).json()
    assert kept.status_code == 200 and run["status"] in ("queued", "in_progress"), (kept.text, run)
    with pytest.raises(httpx.ConnectError):
        standby.get("/health")

    pair.take_over()
    gate.set()
    again = standby.post("/v1/completions", json=KEPT, headers=key)
    assert (again.content, again.headers["idempotent-replayed"]) == (kept.content, "true")
    wait_until(
        lambda: standby.get(f"/v1/responses/{run['id']}").json()["status"] == "completed",
        lambda: standby.said,
    )
    response = standby.get(f"/v1/responses/{run['id']}").json()
    assert response["output"][-1]["content"][0]["text"] == "four five six"
    wait_until(
        lambda: standby.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed",
        lambda: standby.said,
    )
    output = standby.get(f"/v1/batches/{batch['id']}").json()["output_file_id"]
    [answer] = map(json.loads, standby.get(f"/v1/files/{output}/content").text.splitlines())
    assert answer["response"]["body"]["choices"][0]["text"] == "seven eight"
    assert kinds(standby)[0] == "took_over" and "this front takes over" in standby.said


def test_a_front_that_replaces_the_one_that_took_over_leads_at_once(
    pair: Pair, model_dir: Path, tmp_path: Path
) -> None:
    pair.take_over()
    standby = pair.standby
    os.kill(standby.process.pid, signal.SIGKILL)
    standby.wait()
    announced = {"http": standby.url, "ranks_address": standby.ranks_address, "token": "unused"}
    environment = {"WIDEEP_KEPT": str(tmp_path / "second"), "WIDEEP_FRONT": json.dumps(announced)}
    flags = ("--served-model-name=m", "--standby=127.0.0.1:1", f"--port={port_of(standby)}", "--stands-by")
    with socket.create_server(("127.0.0.1", 0)):  # another program on the first node
        again = FrontProcess(model_dir, *flags, environment=environment)
    try:
        assert again.ranks_address == standby.ranks_address
        Pair(pair.first, again, pair.agent).attach_to_standby()
        assert again.get("/health").status_code == 200
    finally:
        again.close()


def test_a_killed_front_on_a_living_node_is_awaited(pair: Pair, model_dir: Path, tmp_path: Path) -> None:
    first, standby, _ = pair
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    announced = {"http": first.url, "ranks_address": first.ranks_address, "token": first.token}
    environment = {"WIDEEP_KEPT": str(tmp_path / "first"), "WIDEEP_FRONT": json.dumps(announced)}
    flags = ("--served-model-name=m", "--standby=127.0.0.1:1", f"--port={port_of(first)}")
    again = FrontProcess(model_dir, *flags, environment=environment)
    try:
        wait_until(lambda: "standby_follows" in kinds(again), lambda: standby.said)
        assert "takes over" not in standby.said
    finally:
        status, _ = again.close()
    assert status == 0
    with pytest.raises(httpx.ConnectError):
        standby.get("/health")
    assert standby.process.poll() is None, "a service that ends in order is not taken over"
    standby.process.send_signal(signal.SIGINT)
    assert standby.process.wait(TIMEOUT_S) == 0
