"""Real fronts, each as if on a separate node (`--fronts per-node`), with scripted ranks: what only several nodes do."""

import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.front.test_front_recovery import status
from tests.server.serve.front.test_several_fronts import ANSWER, COMPLETION, answer_of, begin
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until
from tests.support.service.several_fronts import SeveralFronts, several_fronts

BODY = {"model": "m", **COMPLETION}
KEYS = [str(key) for key in range(8)]


def events(front: FrontProcess, kind: str) -> list[str]:
    return [event["text"] for event in status(front)["events"] if event["kind"] == kind]


def complete(front: FrontProcess, key: str) -> tuple[int, str]:
    response = front.post("/v1/completions", json=BODY, headers={"Idempotency-Key": key})
    return response.status_code, response.text


@pytest.mark.slow
def test_the_fronts_of_a_lost_node_are_replaced_by_the_others_until_they_return(
    model_dir: Path, tmp_path: Path
) -> None:
    with several_fronts(model_dir, tmp_path / "kept", on_nodes=True) as service:
        begin(service)
        service.script("f-say", ANSWER)
        first = service.fronts[0]
        before = {key: complete(first, key) for key in KEYS}
        service.kill(1)
        wait_until(lambda: events(first, "fronts_lost") != [], lambda: first.said)
        assert events(first, "fronts_lost") == ["the node of front 1 does not answer"]
        kept = {key: complete(first, key) for key in KEYS}
        assert {each for each, _ in kept.values()} == {200}
        assert sum(kept[key] == before[key] for key in KEYS) < len(KEYS), "some keys were those of front 1"
        second = service.start_again(1)
        service.wait_ready()
        wait_until(lambda: events(first, "fronts_back") != [], lambda: first.said)
        assert {key: complete(second, key) for key in KEYS} == before, "its answers are on its node"


@pytest.mark.slow
def test_a_front_ends_its_requests_while_its_node_does_not_hear_of_the_leading_one(
    model_dir: Path, tmp_path: Path
) -> None:
    """A stopped process answers as little as one behind a cut cable. The leading front may give the requests' ranks away."""
    gate = threading.Event()
    with (
        several_fronts(model_dir, tmp_path / "kept", on_nodes=True) as service,
        ThreadPoolExecutor() as threads,
    ):
        begin(service)
        service.script("f-say", ANSWER, gates={1: gate})
        first, second = service.fronts
        asked = threads.submit(second.post, "/v1/completions", json=BODY)
        second.served("f-say")
        first.process.send_signal(signal.SIGSTOP)
        try:
            failed = asked.result(60)
            assert failed.status_code == 503 and "node of the leading front does not answer" in failed.text
            refused = second.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and "waiting for the front that leads" in refused.text
        finally:
            first.process.send_signal(signal.SIGCONT)
            gate.set()
        service.wait_ready()
        assert answer_of(first) == answer_of(second) == ANSWER


def begun_at(service: SeveralFronts, number: int, gate: threading.Event) -> str:
    """Begin a background response at a front, and return its path. It ends when the gate opens."""
    service.script("f-say", ANSWER, gates={3: gate})
    body = {"model": "m", "input": "f-say", "background": True, "temperature": 1.0}
    response = service.fronts[number].post("/v1/responses", json=body).json()
    return f"/v1/responses/{response['id']}"


def wait_until_completed(front: FrontProcess, path: str) -> None:
    wait_until(lambda: front.get(path).json().get("status") == "completed", lambda: front.get(path).text)
    assert front.get(path).json()["output"][-1]["content"][0]["text"] == ANSWER


@pytest.mark.slow
def test_a_background_response_of_a_lost_node_is_finished_by_the_leading_front(
    model_dir: Path, tmp_path: Path
) -> None:
    gate = threading.Event()
    with several_fronts(model_dir, tmp_path / "kept", on_nodes=True) as service:
        begin(service)
        first, second = service.fronts
        path = begun_at(service, 1, gate)
        seed = second.asked("f-say").params.seed
        service.kill(1)
        wait_until(lambda: events(first, "fronts_lost") != [], lambda: first.said)
        assert first.get(path).json()["status"] in ("queued", "in_progress")
        assert first.asked("f-say").params.seed == seed, "the same tokens are drawn"
        # A new node has an empty folder.
        shutil.rmtree(service.kept_of(1) / "background-1")
        second = service.start_again(1)
        service.wait_ready()
        assert second.get(path).json()["status"] in ("queued", "in_progress")
        gate.set()
        for front in (first, second):
            wait_until_completed(front, path)
        assert second.get("/v1/responses/resp_none").status_code == 404
        assert not list((tmp_path / "kept").glob("*/background*/resp_*"))


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_background_response_of_a_node_that_was_cut_off_is_finished(
    is_lost: bool, model_dir: Path, tmp_path: Path
) -> None:
    gate = threading.Event()
    with several_fronts(model_dir, tmp_path / "kept", on_nodes=True) as service:
        begin(service)
        first, second = service.fronts
        path, cancelled = (begun_at(service, 1, gate) for _ in range(2))
        pid = (second if is_lost else first).process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            if is_lost:
                wait_until(lambda: events(first, "fronts_lost") != [], lambda: first.said)
            else:
                wait_until(lambda: second.get("/health").status_code == 503, lambda: second.said)
                assert second.get(path).json()["status"] in ("queued", "in_progress")
                assert second.post(f"{cancelled}/cancel").json()["status"] == "cancelled"
        finally:
            os.kill(pid, signal.SIGCONT)
            gate.set()
        service.wait_ready()
        for front in service.fronts:
            wait_until_completed(front, path)
            assert is_lost or front.get(cancelled).json()["status"] == "cancelled"
        wait_until(
            lambda: not list((tmp_path / "kept").glob("*/background*/resp_*")), lambda: "a run is left"
        )


@pytest.mark.slow
def test_a_limit_holds_over_the_fronts_of_all_nodes(model_dir: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    with (
        several_fronts(
            model_dir, tmp_path / "kept", "--max-num-queued-reqs=4", on_nodes=True, num_fronts=3
        ) as service,
        ThreadPoolExecutor() as threads,
    ):
        service.script("f-say", ANSWER, gates={1: gate})
        asked = [threads.submit(answer_of, service.fronts[each % 3]) for each in range(4)]

        def all_know() -> bool:
            return all(front.get("/load").json() == {"server_load": 4} for front in service.fronts)

        wait_until(all_know, lambda: "a front does not know the requests of the others")
        for front in service.fronts:
            assert front.post("/v1/completions", json=BODY).status_code == 429
        gate.set()
        assert [each.result(60) for each in asked] == [ANSWER] * 4
