"""POST /sleep and /wake_up on a front with scripted ranks: what clients, monitors and operators see."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from expert_placement.files import to_json
from expert_placement.placement import Placement, linear_placement
from scheduler.moves.reports import MoveState, PlacementReport
from server.link.messages import PlacementUpdate
from tests.server.front.test_front_recovery import BODIES, GATE, ask, metric, present, status
from tests.support.service.front_process import TIMEOUT_S, FrontProcess, operated_front
from tests.support.service.service_processes import wait_until

ANSWER = "one two three four"
REFUSED = "The service is not ready: it sleeps (level 1); POST /wake_up wakes it."


@pytest.fixture(scope="module")
def front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with operated_front(model_dir, tmp_path_factory.mktemp("keys")) as process:
        yield process


@pytest.fixture(autouse=True)
def awake(front: FrontProcess) -> Iterator[None]:
    """Wake the service after a test."""
    yield
    assert front.post("/wake_up").json() == {"is_sleeping": False, "level": 0, "is_waking": False}
    assert front.get("/health").status_code == 200


def open_streams(
    front: FrontProcess, threads: ThreadPoolExecutor, kind: str, count: int
) -> tuple[list[Any], threading.Event, dict[str, Any]]:
    """Begin answers that wait at a gate. Return them, the gate, and the undisturbed answer."""
    path, body = BODIES[kind]
    front.script("f-say", ANSWER)
    expected = ask(front, path, body)
    gate = threading.Event()
    front.script("f-say", ANSWER, gates={GATE: gate})
    wanted = metric(front, "vllm:generation_tokens_total") + GATE * count * body.get("n", 1)
    asked = [threads.submit(ask, front, path, body) for _ in range(count)]
    wait_until(
        lambda: metric(front, "vllm:generation_tokens_total") >= wanted, lambda: "the tokens do not come"
    )
    return asked, gate, expected


@pytest.mark.crossed("kind", every=2)
@pytest.mark.parametrize("kind", list(BODIES))
def test_kept_requests_continue_after_waking_and_clients_get_the_same_answer(
    front: FrontProcess, kind: str
) -> None:
    with ThreadPoolExecutor() as threads:
        asked, gate, expected = open_streams(front, threads, kind, 3)
        assert front.post("/sleep?mode=keep").json() == {"is_sleeping": True, "level": 1, "is_waking": False}
        assert all(present(front, rank).wait_idle(TIMEOUT_S) for rank in (0, 1))
        assert status(front)["waiting_requests"] == 3 * BODIES[kind][1].get("n", 1)
        gate.set()
        assert front.post("/wake_up").status_code == 200
        assert [each.result(TIMEOUT_S) for each in asked] == [expected] * 3
    assert all(not rank.wrong_replays for rank in front.ranks)


def test_waiting_for_open_requests_lets_them_end_and_refuses_new_ones(front: FrontProcess) -> None:
    with ThreadPoolExecutor() as threads:
        asked, gate, expected = open_streams(front, threads, "a stream of choices", 2)
        sleeping = threads.submit(front.post, "/sleep?mode=wait&level=2")
        wait_until(lambda: front.get("/is_sleeping").json()["is_sleeping"], lambda: "it does not sleep")
        assert front.post("/v1/completions", json={"prompt": "hello"}).status_code == 503
        assert not sleeping.done()
        gate.set()
        assert [each.result(TIMEOUT_S) for each in asked] == [expected] * 2
        assert sleeping.result(TIMEOUT_S).json()["level"] == 2


def test_aborted_requests_end_with_what_they_have(front: FrontProcess) -> None:
    gate = threading.Event()
    front.script("f-say", ANSWER, gates={GATE: gate})
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "m", "prompt": "f-say"},
        "/v1/messages": {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "f-say"}]},
        "/v1/responses": {"model": "m", "input": "f-say"},
        "/api/generate": {"model": "m", "prompt": "f-say", "stream": False},
        "/generate": {"text": "f-say"},
    }
    with ThreadPoolExecutor() as threads:
        wanted = metric(front, "vllm:generation_tokens_total") + GATE * len(bodies)
        asked = {path: threads.submit(front.post, path, json=body) for path, body in bodies.items()}
        wait_until(
            lambda: metric(front, "vllm:generation_tokens_total") >= wanted, lambda: "the tokens do not come"
        )
        assert front.post("/sleep").status_code == 200
        answers = {path: each.result(TIMEOUT_S) for path, each in asked.items()}
    assert {path: each.status_code for path, each in answers.items()} == dict.fromkeys(bodies, 200)
    choice = answers["/v1/completions"].json()["choices"][0]
    assert choice["finish_reason"] == "abort" and choice["text"] and ANSWER.startswith(choice["text"].strip())
    assert answers["/v1/messages"].json()["stop_reason"] == "max_tokens"
    assert answers["/v1/responses"].json()["status"] == "incomplete"
    assert answers["/api/generate"].json()["done_reason"] == "length"
    assert answers["/generate"].json()["meta_info"]["finish_reason"]["type"] == "abort"
    for rank in (0, 1):
        assert present(front, rank).wait_idle(TIMEOUT_S)
    gate.set()


def test_a_sleeping_service_refuses_requests_and_shows_why(front: FrontProcess) -> None:
    assert front.get("/is_sleeping").json() == {"is_sleeping": False, "level": 0, "is_waking": False}
    assert sleep_states(front) == {"awake": 2}
    front.post("/sleep?level=1")
    for path, body in (("/v1/completions", {"prompt": "hello"}), ("/health_generate", None)):
        refused = front.get(path) if body is None else front.post(path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == REFUSED
    assert front.get("/health").status_code == 503 and front.get("/ping").status_code == 200
    assert sleep_states(front) == {"weights_offloaded": 2}
    told = status(front)
    assert told["sleep"]["level"] == 1 and told["sleep"]["waking"] is False and told["phase"] == "serving"
    assert told["events"][-1]["kind"] == "asleep"
    front.post("/sleep?level=2")
    assert sleep_states(front) == {"discard_all": 2}
    front.post("/wake_up?tags=weights")
    assert front.get("/is_sleeping").json()["is_sleeping"] is True
    front.post("/wake_up?tags=kv_cache")
    assert front.get("/is_sleeping").json()["is_sleeping"] is False
    assert status(front)["events"][-1]["kind"] == "awake"


def sleep_states(front: FrontProcess) -> dict[str, int]:
    """Return the number of ranks by sleep state, from the metrics."""
    found: dict[str, int] = {}
    for line in front.get("/metrics").text.splitlines():
        if line.startswith("vllm:engine_sleep_state{") and line.endswith(" 1.0"):
            name = line.partition('sleep_state="')[2].partition('"')[0]
            found[name] = found.get(name, 0) + 1
    return found


def test_sglang_s_names_release_and_resume(front: FrontProcess) -> None:
    released = front.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    assert released.json() == {"is_sleeping": True, "level": 1, "is_waking": False}
    assert front.post("/release_memory_occupation").json()["level"] == 2
    assert front.post("/resume_memory_occupation", json={"tags": ["weights"]}).json()["is_sleeping"] is True
    assert front.post("/resume_memory_occupation", json={}).json()["is_sleeping"] is False
    graphs = {"tags": ["cuda_graph"]}
    assert front.post("/release_memory_occupation", json=graphs).json()["is_sleeping"] is False
    with ThreadPoolExecutor() as threads:
        asked, gate, expected = open_streams(front, threads, "a stop string", 1)
        refused = front.post("/release_memory_occupation", json={})
        assert refused.status_code == 409 and "1 requests are open" in refused.text
        gate.set()
        assert asked[0].result(TIMEOUT_S) == expected


def test_ranks_keep_their_memory_while_experts_move(front: FrontProcess) -> None:
    home, prepared = linear_placement(2, 4, 2), list[tuple[Any, int]]()
    for rank in (0, 1):
        present(front, rank)._on_prepare = lambda each, stage: prepared.append((each, stage.version))
    swapped = Placement(home.slot_expert[:, ::-1].copy(), home.num_experts, home.num_ranks)
    begun = front.post("/experts/apply", json={"placement": to_json(swapped), "wait": False})
    assert begun.status_code == 202, begun.text
    wait_until(lambda: len(prepared) == 2, lambda: f"only {prepared} move experts")
    num_orders = len(present(front, 0).memory_orders)
    refused = front.post("/sleep?level=2&timeout_s=0.1")
    assert refused.status_code == 504 and "Experts still move" in refused.json()["error"]["message"]
    assert len(present(front, 0).memory_orders) == num_orders
    for each, version in prepared:
        report = PlacementReport(rank=each.rank, version=version, state=MoveState.FAILED, reason="no")
        each.link.send(PlacementUpdate(report))
    assert front.post("/sleep?level=2").json()["level"] == 2


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/sleep?level=0", None, "level"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?mode=never", None, "mode"),
        ("/sleep?timeout_s=-1", None, "timeout_s"),
        ("/sleep?timeout_s=nan", None, "timeout_s"),
        ("/wake_up?tags=graphs", None, "tags"),
        ("/release_memory_occupation", {"tags": ["all"]}, "tags"),
        ("/resume_memory_occupation", {"tags": "weights"}, "tags"),
    ],
)
def test_wrong_values_are_refused_by_name(front: FrontProcess, path: str, body: Any, word: str) -> None:
    refused = front.post(path, json=body) if body else front.post(path)
    assert refused.status_code == 400 and word in refused.json()["error"]["message"]
    assert front.get("/is_sleeping").json()["is_sleeping"] is False


def test_only_operators_may_put_the_service_to_sleep(front: FrontProcess) -> None:
    for headers, code in (({}, 401), ({"Authorization": "Bearer other"}, 403)):
        for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
            assert front.post(path, headers=headers).status_code == code
    assert httpx.get(f"{front.url}/is_sleeping").status_code == 200


def test_a_rank_that_dies_and_returns_sleeps_with_the_others(front: FrontProcess) -> None:
    front.post("/sleep")
    present(front, 1).kill()
    wait_until(lambda: status(front)["members"] == [0], lambda: "the loss is not seen")
    assert front.get("/is_sleeping").json()["is_sleeping"] is True
    back = front.attach(1, num_restarts=1)
    wait_until(lambda: status(front)["members"] == [0, 1], lambda: "the rank is not back")
    back.wait_for(lambda rank: bool(rank.memory_orders))
    assert back.memory_orders[-1].has_cache is False
    assert front.post("/wake_up").status_code == 200
    back.wait_for(lambda rank: rank.memory_orders[-1].has_cache)
    front.script("g-say", ANSWER)
    assert json.dumps(ask(front, "/v1/completions", {"prompt": "g-say"})).count("four") == 1
