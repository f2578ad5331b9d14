"""POST /scale_elastic_ep on a front with scripted ranks: clients see no difference, and the state is visible everywhere."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from expert_placement.placement import linear_placement
from tests.server.front.adapters.test_adapters import write
from tests.server.front.test_front_recovery import BODIES, GATE, ask, metric, present, status
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow  # test_resize is the fast one

ANSWER = "one two three four"
NUM_EXPERTS = 8


@pytest.fixture
def front(model: Path, tmp_path: Path) -> Iterator[FrontProcess]:
    keys = tmp_path / "operators"
    keys.write_text("sesame\n")
    process = FrontProcess(model, "--served-model-name=m", f"--operator-key-file={keys}", "--device=cpu")
    process.headers = {"Authorization": "Bearer sesame"}
    process.attach_all()
    process.ranks[0].begin(linear_placement(2, NUM_EXPERTS, 2))
    wait_until(
        lambda: process.get("/experts/history").status_code == 200, lambda: "the placement is not known"
    )
    yield process
    code, _ = process.close()
    assert code == 0


def scale(front: FrontProcess, num_ranks: int, **how: Any) -> httpx.Response:
    return front.post("/scale_elastic_ep", json={"new_data_parallel_size": num_ranks, **how})


def grow(front: FrontProcess, num_ranks: int) -> dict[str, Any]:
    """Begin to add ranks, attach them, and return the state at the end."""
    assert scale(front, num_ranks, wait=False, operation_id=f"to {num_ranks}").status_code == 202
    wait_until_expected(front)
    before, front.num_ranks = front.num_ranks, num_ranks
    for rank in range(before, num_ranks):
        front.attach(rank, num_restarts=1)
    response = scale(front, num_ranks, operation_id=f"to {num_ranks}")
    assert response.status_code == 200, response.text
    return dict(response.json())


def wait_until_expected(front: FrontProcess) -> None:
    """Wait until new ranks may attach."""
    wait_until(lambda: "warm up" in state(front)["stage"], lambda: str(state(front)))


def state(front: FrontProcess) -> dict[str, Any]:
    return dict(front.get("/is_scaling_elastic_ep").json())


def begin(
    front: FrontProcess, threads: ThreadPoolExecutor, kind: str, count: int
) -> tuple[list[Future[dict[str, Any]]], threading.Event, dict[str, Any]]:
    """Begin requests, which stay at the gate. Also return their answer without a resize."""
    path, body = BODIES[kind]
    front.script("f-say", ANSWER)
    expected, gate = ask(front, path, body), threading.Event()
    front.script("f-say", ANSWER, gates={GATE: gate})
    asked = [threads.submit(ask, front, path, body) for _ in range(count)]
    wanted = count * body.get("n", 1)
    wait_until(
        lambda: metric(front, "wideep:front_open_choices") == wanted, lambda: "the choices do not open"
    )
    return asked, gate, expected


@pytest.mark.parametrize("kind", list(BODIES))
def test_ranks_come_and_go_and_clients_get_the_same_answers(front: FrontProcess, kind: str) -> None:
    with ThreadPoolExecutor() as threads:
        asked, gate, expected = begin(front, threads, kind, 4)
        grown = grow(front, 4)
        assert (grown["phase"], grown["effective_data_parallel_size"]) == ("completed", 4)
        assert status(front)["members"] == [0, 1, 2, 3]
        order = present(front, 3).orders[-1]
        assert (order.members, order.num_ranks, order.placement.num_ranks) == ((0, 1, 2, 3), 4, 4)
        more = [threads.submit(ask, front, *BODIES[kind]) for _ in range(8)]
        for rank in (2, 3):
            present(front, rank).wait_for(lambda each: bool(each.requests))
        shrunk = scale(front, 2).json()
        assert (shrunk["phase"], shrunk["effective_data_parallel_size"]) == ("completed", 2)
        for rank in (2, 3):
            assert present(front, rank).stopped.wait(TIMEOUT_S) and present(front, rank).num_open == 0
        gate.set()
        assert [each.result(TIMEOUT_S) for each in (*asked, *more)] == [expected] * 12
    now = status(front)
    assert (now["members"], now["missing"], now["losses"], now["total_engines"]) == ([0, 1], [], 0, 2)
    assert all(not rank.wrong_replays for rank in front.ranks)
    assert [each["kind"] for each in now["events"]].count("resized") == 2


def test_an_adapter_does_not_wait_for_a_rank_that_has_left(model: Path, tmp_path: Path) -> None:
    front = FrontProcess(model, "--served-model-name=m", "--device=cpu", "--enable-lora", num_ranks=3)
    front.attach_all()
    front.ranks[0].begin(linear_placement(2, NUM_EXPERTS, 3))
    leaving = front.ranks[2]
    leaving.delays_adapters = True
    with ThreadPoolExecutor() as threads:
        adapter = {"lora_name": "a", "lora_path": write(tmp_path / "a")}
        load = threads.submit(front.post, "/v1/load_lora_adapter", json=adapter)
        leaving.wait_for(lambda rank: bool(rank.adapter_orders))
        assert scale(front, 2).status_code == 200
        assert load.result(TIMEOUT_S).status_code == 200
    assert front.close()[0] == 0


def test_the_state_is_visible_everywhere(front: FrontProcess) -> None:
    assert state(front)["phase"] == "idle" and state(front)["is_scaling_elastic_ep"] is False
    operation = scale(front, 3, wait=False, operation_id="mine").json()
    assert (operation["operation_id"], operation["phase"]) == ("mine", "preparing")
    wait_until_expected(front)
    assert front.post("/is_scaling_elastic_ep").json() | {"seconds": 0} == status(front)["resize"] | {
        "seconds": 0
    }
    assert state(front)["requested_data_parallel_size"] == 3
    assert (metric(front, "wideep:requested_ranks"), metric(front, "wideep:effective_ranks")) == (3, 2)
    assert 'wideep:resize_phase{model_name="m",phase="preparing"} 1.0' in front.get("/metrics").text
    refused = front.post("/experts/rollback")
    assert refused.status_code in (400, 409)
    aborted = front.post("/scale_elastic_ep/abort", json={"operation_id": "mine"}).json()
    assert (aborted["phase"], aborted["error"]) == ("failed", "it was aborted")
    failed = scale(front, 3, operation_id="mine")
    assert failed.status_code == 409 and "it was aborted" in failed.text
    assert 'wideep:resizes_total{model_name="m",outcome="failed"} 1.0' in front.get("/metrics").text
    assert grow(front, 3)["phase"] == "completed"
    assert front.get("/server_info").json()["dp_size"] == 3
    healthy = [
        line for line in front.get("/metrics").text.splitlines() if line.startswith("vllm:engine_healthy{")
    ]
    assert len(healthy) == 3


def test_a_second_resize_is_refused_and_a_new_rank_that_dies_leaves_the_service_as_it_was(
    front: FrontProcess,
) -> None:
    scale(front, 3, wait=False, operation_id="mine")
    refused = scale(front, 4)
    assert refused.status_code == 409 and "Operation mine" in refused.text
    wait_until_expected(front)
    front.num_ranks = 3
    front.attach(2, num_restarts=1).kill()
    failed = scale(front, 3, operation_id="mine")
    front.num_ranks = 2
    assert failed.status_code == 500 and "rank 2 is lost" in failed.text
    assert status(front)["members"] == [0, 1] and state(front)["effective_data_parallel_size"] == 2


def test_a_rank_that_dies_while_ranks_meet_leaves_the_former_ranks(front: FrontProcess) -> None:
    present(front, 1).on_order = lambda _order: None
    scale(front, 3, wait=False, operation_id="mine")
    wait_until_expected(front)
    front.num_ranks = 3
    front.attach(2, num_restarts=1)
    wait_until(lambda: state(front)["phase"] == "committing", lambda: str(state(front)))
    present(front, 1).kill()
    failed = scale(front, 3, operation_id="mine")
    assert failed.status_code == 500 and "rank 1 is lost" in failed.text
    front.num_ranks = 2
    wait_until(lambda: status(front)["members"] == [0], lambda: str(status(front)))
    present(front, 2).wait_for(lambda each: bool(each.losses))
    assert present(front, 0).orders[-1].num_ranks == 2
    front.attach(1, num_restarts=1)
    wait_until(lambda: status(front)["members"] == [0, 1], lambda: str(status(front)))


def test_a_rank_that_no_resize_adds_is_refused(front: FrontProcess) -> None:
    front.num_ranks = 3
    with pytest.raises(ConnectionError, match="does not belong to this service of 2 ranks"):
        front.attach(2)
    front.num_ranks = 2


def test_bad_input_is_named(front: FrontProcess) -> None:
    for body, word in (
        ({}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ({"new_data_parallel_size": "two"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 3, "drain_timeout": -1}, "drain_timeout"),
        ({"new_data_parallel_size": 3, "how": 1}, "how"),
        ({"new_data_parallel_size": 9}, "the model has 8 experts in a layer"),
    ):
        refused = front.post("/scale_elastic_ep", json=body)
        assert refused.status_code == 400 and word in json.dumps(refused.json()), refused.text
    refused = front.post("/scale_elastic_ep/abort", json={})
    assert refused.status_code == 409 and "No operation can be aborted" in refused.text
    for path in ("/scale_elastic_ep", "/scale_elastic_ep/abort"):
        assert front.post(path, json={}, headers={"Authorization": "Bearer other"}).status_code == 403
    assert state(front)["phase"] == "idle"


def test_a_resize_and_an_update_of_the_weights_exclude_each_other(front: FrontProcess) -> None:
    assert front.post("/start_weight_update", json={}).status_code == 200
    refused = scale(front, 3)
    assert refused.status_code == 409 and "a weight update has begun" in refused.text
    assert front.post("/abort_weight_update").status_code == 200
    assert scale(front, 3, wait=False, operation_id="mine").status_code == 202
    wait_until_expected(front)
    refused = front.post("/start_weight_update", json={})
    assert refused.status_code == 409 and "operation mine resizes the service" in refused.text
    assert front.post("/scale_elastic_ep/abort").status_code == 200
    assert front.post("/start_weight_update", json={}).status_code == 200
    assert front.post("/abort_weight_update").status_code == 200
