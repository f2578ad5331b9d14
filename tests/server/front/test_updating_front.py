"""POST /pause, /finish_weight_update and their like on a front with scripted ranks: what clients and operators see."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.weights.versions import WeightAction
from tests.server.front.test_front_recovery import BODIES, ask, present, status
from tests.server.front.test_sleeping_front import ANSWER, open_streams
from tests.server.front.test_weight_updates import safetensors, write_folder
from tests.support.service.fake_rank import FakeRank
from tests.support.service.front_process import TIMEOUT_S, FrontProcess, operated_front
from tests.support.service.service_processes import wait_until


@pytest.fixture(scope="module")
def front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with operated_front(model_dir, tmp_path_factory.mktemp("keys")) as process:
        yield process


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> str:
    config = json.loads((model_dir / "config.json").read_text())
    return write_folder(tmp_path / "new", "a", "b", model_type=config["model_type"])


@pytest.fixture(autouse=True)
def calm(front: FrontProcess) -> Iterator[None]:
    """End pauses and updates after a test."""
    yield
    assert front.post("/resume").json() == {"status": "resumed", "is_paused": False}
    assert front.post("/abort_weight_update").status_code == 200
    for rank in front.ranks:
        rank.refuses_weights, rank.delays_weights = "", False


def update(front: FrontProcess, folder: str, **begin: Any) -> dict[str, Any]:
    """Update the weights in vLLM's three calls. Return the last answer."""
    assert front.post("/start_weight_update", json=begin).json() == {"status": "started"}
    added = front.post("/update_weights", json={"path": folder})
    assert added.json() == {"status": "added", "tensors": 2, "bytes": 8}
    finished = front.post("/finish_weight_update")
    assert finished.status_code == 200, finished.text
    return dict(finished.json())


def delay(front: FrontProcess) -> list[FakeRank]:
    """Let the ranks follow no order about weights before `follow`."""
    ranks = [present(front, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.weight_orders.clear()
        rank.delays_weights = True
    return ranks


def wait_for_orders(ranks: list[FakeRank]) -> None:
    for rank in ranks:
        rank.wait_for(lambda rank: bool(rank.weight_orders))


def follow(ranks: list[FakeRank]) -> None:
    """Follow the last order about weights, and later ones at once."""
    for rank in ranks:
        rank.delays_weights = False
        rank.follow_weights(rank.weight_orders[-1])


@pytest.mark.parametrize("kind", ["a stream of choices"])
def test_kept_requests_continue_after_a_pause_and_new_ones_wait(front: FrontProcess, kind: str) -> None:
    with ThreadPoolExecutor() as threads:
        asked, gate, expected = open_streams(front, threads, kind, 2)
        assert front.post("/pause?mode=keep").json() == {"status": "paused", "is_paused": True}
        assert all(present(front, rank).wait_idle(TIMEOUT_S) for rank in (0, 1))
        gate.set()
        path, body = BODIES[kind]
        later = threads.submit(ask, front, path, body)
        num_kept = 3 * body.get("n", 1)
        wait_until(lambda: status(front)["waiting_requests"] == num_kept, lambda: "it is not kept")
        assert front.get("/health").status_code == 200 and not later.done()
        assert front.get("/is_paused").json() == {"is_paused": True}
        front.post("/resume")
        assert [each.result(TIMEOUT_S) for each in (*asked, later)] == [expected] * 3
    assert all(not rank.wrong_replays for rank in front.ranks)


def test_answers_carry_the_label_of_the_weights(front: FrontProcess, folder: str) -> None:
    front.script("w-say", ANSWER)
    body = {"model": "m", "prompt": "w-say", "max_tokens": 40}
    assert front.post("/generate", json={"text": "w-say"}).json()["meta_info"]["weight_version"] == "default"
    assert "weight_version" not in front.post("/v1/completions", json=body).json()
    finished = update(front, folder, weight_version="5")
    assert (finished["weight_version"], finished["status"]) == ("5", "finished")
    for path, more in (("/v1/completions", body), ("/v1/chat/completions", chat())):
        assert front.post(path, json=more).json()["weight_version"] == "5"
        events = front.post(path, json={**more, "stream": True}).text.split("\n\n")
        told = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert [event.get("weight_version") for event in told if event["choices"][0]["finish_reason"]] == [
            "5"
        ]
    assert front.post("/generate", json={"text": "w-say"}).json()["meta_info"]["weight_version"] == "5"
    renamed = front.post("/update_weight_version", json={"new_version": 6})
    assert renamed.json()["success"] is True
    assert front.get("/get_weight_version").json() == {"weight_version": "6"}
    assert front.get("/model_info").json()["weight_version"] == "6"
    assert front.post("/v1/completions", json=body).json()["weight_version"] == "6"


def chat() -> dict[str, Any]:
    return {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "w-say"}]}


def test_the_service_shows_what_it_serves_and_ranks_get_one_version(front: FrontProcess, folder: str) -> None:
    before = front.get("/weight_info").json()
    after = update(front, folder)
    assert (
        after["number"] > before["number"] and after["folders"] == [folder] and not after["uses_checkpoint"]
    )
    assert front.get("/weight_info").json() == {key: after[key] for key in before}
    for rank in (0, 1):
        orders = present(front, rank).weight_orders
        assert [each.action for each in orders[-2:]] == [WeightAction.STAGE, WeightAction.SERVE]
        assert {each.version.number for each in orders[-2:]} == {after["number"]}
    checked = front.post("/weight_checker", json={"action": "compare"})
    assert checked.json()["success"] is True
    assert status(front)["events"][-1]["kind"] == "weights"


def test_a_safetensors_file_in_the_body_is_an_update(front: FrontProcess) -> None:
    front.post("/start_weight_update", json={"partial": True})
    sent = front.post(
        "/update_weights",
        content=safetensors("a", "b", "c"),
        headers={**front.headers, "Content-Type": "application/octet-stream"},
    )
    assert sent.json() == {"status": "added", "tensors": 3, "bytes": 12}
    info = front.post("/finish_weight_update").json()
    assert info["number"] > 0
    assert (Path(info["folders"][-1]) / "model.safetensors").read_bytes() == safetensors("a", "b", "c")


def test_sglang_s_call_updates_at_once(front: FrontProcess, folder: str) -> None:
    done = front.post("/update_weights_from_disk", json={"model_path": folder, "flush_cache": True}).json()
    assert done["success"] is True and done["folders"] == [folder]
    refused = front.post("/update_weights_from_disk", json={"model_path": "/none"})
    assert refused.status_code == 400 and "/none is not a folder" in refused.text
    assert front.get("/weight_info").json()["update"] is None


def test_sglang_s_call_leaves_no_update_open_if_it_is_refused(front: FrontProcess, folder: str) -> None:
    ranks = delay(front)
    with ThreadPoolExecutor() as threads:
        check = threads.submit(front.post, "/weight_checker")
        wait_for_orders(ranks)
        refused = front.post("/update_weights_from_disk", json={"model_path": folder})
        follow(ranks)
        assert check.result(TIMEOUT_S).json()["success"] is True
    assert refused.status_code == 409 and "the weights are being checked" in refused.text
    assert front.get("/weight_info").json()["update"] is None


def test_a_rank_that_refuses_leaves_the_old_version(front: FrontProcess, folder: str) -> None:
    before = front.get("/weight_info").json()
    present(front, 1).refuses_weights = "missing: lm_head.weight"
    refused = front.post("/update_weights_from_disk", json={"model_path": folder})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "Rank 1 cannot use the new weights: missing: lm_head.weight."
    )
    assert front.get("/weight_info").json() == before
    assert present(front, 0).weight_orders[-1].action is WeightAction.DROP


def test_the_service_does_not_fall_asleep_while_ranks_load(front: FrontProcess, folder: str) -> None:
    ranks = delay(front)
    front.post("/start_weight_update")
    front.post("/update_weights", json={"path": folder})
    with ThreadPoolExecutor() as threads:
        finish = threads.submit(front.post, "/finish_weight_update")
        wait_for_orders(ranks)
        refused = front.post("/sleep?level=2")
        follow(ranks)
        assert finish.result(TIMEOUT_S).status_code == 200
    assert refused.status_code == 409 and "new weights are being loaded" in refused.text
    assert front.get("/is_sleeping").json()["is_sleeping"] is False


@pytest.mark.parametrize(
    ("path", "body", "status_code", "word"),
    [
        ("/pause?mode=never", None, 400, "mode"),
        ("/pause?timeout_s=nan", None, 400, "timeout_s"),
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, "is_checkpoint_format"),
        ("/start_weight_update", {"weight_version": [1]}, 400, "weight_version"),
        ("/start_weight_update", {"other": 1}, 400, "other"),
        ("/update_weights", {"path": "/x"}, 409, "No weight update has begun"),
        ("/finish_weight_update", None, 409, "No weight update has begun"),
        ("/update_weight_version", {}, 400, "new_version"),
        ("/weight_checker", {"action": "reset_tensors"}, 400, "checksum or compare"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, 400, "load_format"),
    ],
)
def test_wrong_calls_are_refused_by_name(
    front: FrontProcess, path: str, body: Any, status_code: int, word: str
) -> None:
    refused = front.post(path) if body is None else front.post(path, json=body)
    assert (refused.status_code, word in refused.json()["error"]["message"]) == (status_code, True), (
        refused.text
    )


def test_only_operators_may_pause_the_service_and_change_its_weights(front: FrontProcess) -> None:
    paths = (
        *(
            "/pause",
            "/resume",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/abort_weight_update",
        ),
        *("/update_weight_version", "/weight_checker", "/weights_checker", "/update_weights_from_disk"),
    )
    for headers, code in (({}, 401), ({"Authorization": "Bearer other"}, 403)):
        assert {path: front.post(path, headers=headers).status_code for path in paths} == dict.fromkeys(
            paths, code
        )
        assert front.get("/weight_info", headers=headers).status_code == code
    assert httpx.get(f"{front.url}/is_paused").status_code == 200


def test_a_rank_that_returns_gets_the_serving_version_before_it_joins(
    front: FrontProcess, folder: str
) -> None:
    number = update(front, folder)["number"]
    present(front, 1).kill()
    wait_until(lambda: status(front)["members"] == [0], lambda: "the loss is not seen")
    present(front, 0).wait_for(lambda rank: any(order.weights == number for order in rank.orders))
    back = front.attach(1, num_restarts=1)
    wait_until(lambda: status(front)["members"] == [0, 1], lambda: "the rank is not back")
    back.wait_for(lambda rank: bool(rank.orders))
    assert back.weight_orders[0].version.number == back.orders[-1].weights == number
    wait_until(
        lambda: front.post("/weight_checker").json().get("success") is True,
        lambda: "the ranks do not serve it",
    )
