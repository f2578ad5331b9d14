"""Several real fronts with scripted ranks: every front gives the same answers, and only the connections of a killed front break.

Those on several nodes share nothing but their streams (`--fronts per-node`).
"""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.front.test_front_recovery import ask, metric, present, status
from tests.support.requests import plain_http
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until
from tests.support.service.several_fronts import HOME, SeveralFronts, several_fronts

ANSWER = "one two three four"
COMPLETION = {"prompt": "f-say", "max_tokens": 40}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "f-say"}], "stream": True}


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["on one node", "on two nodes"],
)
def service(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SeveralFronts]:
    """Two fronts with two ranks."""
    with several_fronts(model_dir, tmp_path_factory.mktemp("kept"), on_nodes=request.param) as fronts:
        begin(fronts)
        yield fronts


def begin(fronts: SeveralFronts) -> None:
    fronts.fronts[0].ranks[0].begin(HOME)
    wait_until(
        lambda: fronts.fronts[0].get("/experts/history").status_code == 200,
        lambda: "the placement is not known",
    )


def scale(front: FrontProcess, num_ranks: int, **how: Any) -> dict[str, Any]:
    response = front.post("/scale_elastic_ep", json={"new_data_parallel_size": num_ranks, **how})
    assert response.status_code in (200, 202), response.text
    return dict(response.json())


def resize(front: FrontProcess) -> dict[str, Any]:
    return dict(front.get("/is_scaling_elastic_ep").json())


def answer_of(front: FrontProcess) -> str:
    return str(ask(front, "/v1/completions", COMPLETION)["choices"][0]["text"])


def test_every_front_answers_and_the_figures_are_those_of_all(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    first, second = service.fronts
    before = metric(first, "vllm:generation_tokens_total")
    assert answer_of(first) == answer_of(second) == ANSWER
    num_tokens = 2 * len(first.encode(ANSWER))
    for front in service.fronts:
        assert metric(front, "vllm:generation_tokens_total") == before + num_tokens
        assert front.get("/load").json() == {"server_load": 0}
        assert front.get("/throughput").json()["ranks"] == first.get("/throughput").json()["ranks"] != []
        assert status(front)["members"] == [0, 1]
        assert front.get("/experts/history").status_code == 200
        assert front.get("/dashboard").status_code == front.get("/v1/models").status_code == 200


def test_a_stream_is_one_whichever_front_answers(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    texts = []
    for front in service.fronts:
        response = front.post("/v1/chat/completions", json={"model": "m", **CHAT})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        texts.append("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    assert texts == [ANSWER] * 2


def test_files_and_batches_are_the_same_at_every_front(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    first, second = service.fronts
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", **COMPLETION},
    }
    upload = {"file": ("lines.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    uploaded = plain_http.post(f"{second.url}/v1/files", files=upload, timeout=60).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = second.post("/v1/batches", json=asked).json()
    wait_until(
        lambda: first.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", lambda: first.said
    )
    found = second.get(f"/v1/batches/{batch['id']}").json()
    content = second.get(f"/v1/files/{found['output_file_id']}/content").text
    assert json.loads(content)["response"]["body"]["choices"][0]["text"] == ANSWER


def test_a_stored_response_is_found_and_continued_at_every_front(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    first, second = service.fronts
    for made, read in ((first, second), (second, first)):
        response = made.post("/v1/responses", json={"model": "m", "input": "f-say"}).json()
        assert read.get(f"/v1/responses/{response['id']}").json()["id"] == response["id"]
        more = {"model": "m", "input": "f-say again", "previous_response_id": response["id"]}
        assert read.post("/v1/responses", json=more).status_code == 200
        assert read.post("/v1/responses", json={**more, "stream": True}).text.count("response.completed") >= 1
        assert httpx.delete(f"{read.url}/v1/responses/{response['id']}", timeout=60).json()["deleted"]
        assert made.get(f"/v1/responses/{response['id']}").status_code == 404


def test_a_key_gets_its_answer_once_at_whichever_front(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    first, second = service.fronts
    for number in range(4):
        headers = {"Idempotency-Key": f"key-{number}"}
        body = {"model": "m", **COMPLETION}
        answers = [
            front.post("/v1/completions", json=body, headers=headers) for front in (first, second, first)
        ]
        assert len({answer.text for answer in answers}) == 1 and answers[0].status_code == 200
        assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true"]
        changed = second.post("/v1/completions", json={**body, "max_tokens": 3}, headers=headers)
        assert changed.status_code == 422


def test_an_error_is_passed_on_with_its_status_and_id(service: SeveralFronts) -> None:
    second = service.fronts[1]
    response = second.get("/v1/batches/none", headers={"X-Request-Id": "mine"})
    assert response.status_code == 404 and "none" in response.json()["error"]["message"]
    assert (
        response.headers.get_list("x-request-id") == ["mine"] and len(response.headers.get_list("date")) == 1
    )
    assert second.get("/no/such/path").status_code == 404


def test_sleep_and_drain_at_one_front_hold_for_all(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    second = service.fronts[1]
    assert second.post("/sleep?mode=abort").json() == {"is_sleeping": True, "level": 1, "is_waking": False}
    for front in service.fronts:
        wait_until(lambda: front.get("/health").status_code == 503, lambda: front.said)  # noqa: B023
        assert "sleeps" in front.post("/v1/completions", json={"model": "m", **COMPLETION}).text
        assert front.get("/is_sleeping").json()["is_sleeping"]
    assert second.post("/wake_up").json()["is_sleeping"] is False
    service.wait_ready()
    assert second.post("/ranks/drain", json={"rank": 0}).json() == {
        "rank": 0,
        "draining": True,
        "requests": 0,
    }
    wait_until(lambda: status(second)["draining"], lambda: "it does not drain")
    num_before = [len(front.ranks[0].requests) for front in service.fronts]
    for front in service.fronts:
        assert answer_of(front) == ANSWER
    assert [len(front.ranks[0].requests) for front in service.fronts] == num_before, "rank 0 drains"
    assert second.post("/ranks/drain", json={"rank": 0, "undo": True}).json() == {
        "rank": 0,
        "draining": False,
    }


def test_kept_requests_of_both_fronts_continue_after_waking(service: SeveralFronts) -> None:
    gate = threading.Event()
    service.script("f-say", ANSWER, gates={3: gate})
    before = metric(service.fronts[0], "vllm:generation_tokens_total")
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(answer_of, front) for front in service.fronts]
        wait_until(
            lambda: metric(service.fronts[0], "vllm:generation_tokens_total") >= before + 6,
            lambda: "no tokens come",
        )
        assert service.fronts[1].post("/sleep?mode=keep").json()["is_sleeping"]
        wait_until(
            lambda: status(service.fronts[1])["waiting_requests"] == 2, lambda: str(status(service.fronts[0]))
        )
        gate.set()
        assert service.fronts[0].post("/wake_up").json()["is_sleeping"] is False
        assert [each.result(60) for each in asked] == [ANSWER] * 2


def test_a_pause_at_one_front_keeps_the_requests_of_all(service: SeveralFronts) -> None:
    service.script("f-say", ANSWER)
    first, second = service.fronts
    assert second.post("/pause?mode=keep").json() == {"status": "paused", "is_paused": True}
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(answer_of, front) for front in service.fronts]
        wait_until(lambda: status(first)["waiting_requests"] == 2, lambda: str(status(first)))
        assert first.get("/is_paused").json() == second.get("/is_paused").json() == {"is_paused": True}
        assert first.post("/resume").json()["is_paused"] is False
        assert [each.result(60) for each in asked] == [ANSWER] * 2


@pytest.mark.slow
def test_a_limit_holds_over_all_fronts(model_dir: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    with (
        several_fronts(model_dir, tmp_path / "kept", "--max-num-queued-reqs=4") as service,
        ThreadPoolExecutor() as threads,
    ):
        service.script("f-say", ANSWER, gates={1: gate})
        asked = [threads.submit(answer_of, service.fronts[each % 2]) for each in range(4)]
        wait_until(
            lambda: service.fronts[0].get("/load").json() == {"server_load": 4}, lambda: "not all are open"
        )
        for front in service.fronts:
            refused = front.post("/v1/completions", json={"model": "m", **COMPLETION})
            assert refused.status_code == 429 and "4 open requests" in refused.text
        gate.set()
        assert [each.result(60) for each in asked] == [ANSWER] * 4


@pytest.mark.slow
@pytest.mark.parametrize("on_nodes", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_front_breaks_its_own_connections_only(
    model_dir: Path, tmp_path: Path, number: int, on_nodes: bool
) -> None:
    gate = threading.Event()
    with (
        several_fronts(model_dir, tmp_path / "kept", on_nodes=on_nodes) as service,
        ThreadPoolExecutor() as threads,
    ):
        begin(service)
        service.script("f-say", ANSWER, gates={3: gate})
        killed, other = service.fronts[number], service.fronts[1 - number]
        before = metric(other, "vllm:generation_tokens_total")
        lost, kept = threads.submit(answer_of, killed), threads.submit(answer_of, other)
        wait_until(
            lambda: metric(other, "vllm:generation_tokens_total") >= before + 6, lambda: "no tokens come"
        )
        service.kill(number)
        with pytest.raises(httpx.TransportError):
            lost.result(60)
        assert other.get("/health").status_code == 200, "the others go on without the leading front"
        gate.set()
        assert kept.result(60) == answer_of(other) == ANSWER
        again = service.start_again(number)
        service.wait_ready()
        assert answer_of(again) == answer_of(other) == ANSWER
        assert metric(other, "vllm:generation_tokens_total") >= before + 6, "no counter becomes smaller"
        events = [event for event in status(other)["events"] if event["kind"] == "front_back"]
        assert [event["text"] for event in events] == [
            f"front {number} was killed with 1 open choices, and is back"
        ]


@pytest.mark.slow
def test_ranks_come_and_go_at_every_front(model: Path, tmp_path: Path) -> None:
    """A rank has a link to each front. Its ends here are the test's, because its engine is scripted."""
    with several_fronts(model, tmp_path / "kept") as service, ThreadPoolExecutor(64) as threads:
        begin(service)
        first, second = service.fronts
        gate = threading.Event()
        service.script("f-say", ANSWER, gates={3: gate})
        asked = {front: [threads.submit(answer_of, front) for _ in range(2)] for front in service.fronts}

        def reaches_new_rank(front: FrontProcess) -> bool:
            asked[front].append(threads.submit(answer_of, front))
            return bool(present(front, 2).requests)

        wait_until(lambda: first.get("/load").json() == {"server_load": 4}, lambda: "not all are open")
        scale(second, 3, wait=False, operation_id="grow")
        wait_until(lambda: "warm up" in resize(first)["stage"], lambda: str(resize(first)))
        for front in service.fronts:
            front.num_ranks = 3
            front.attach(2, num_restarts=1)
        assert scale(first, 3, operation_id="grow")["phase"] == "completed"
        for front in service.fronts:
            wait_until(lambda: reaches_new_rank(front), lambda: front.said)  # noqa: B023
        service.kill(1)
        second = service.start_again(1)
        service.wait_ready()
        assert status(second)["members"] == [0, 1, 2] and len(second.ranks) == 3
        scale(second, 2, wait=False, operation_id="shrink", drain_timeout=0.2)
        assert present(first, 2).stopped.wait(60)
        present(second, 2).close()
        assert scale(second, 2, operation_id="shrink")["phase"] == "completed"
        gate.set()
        assert {each.result(60) for each in asked[first]} == {ANSWER}, "requests of the first front last"
        for front in service.fronts:
            assert answer_of(front) == ANSWER
        assert status(second)["members"] == [0, 1] and status(second)["losses"] == 0


@pytest.mark.slow
def test_a_retry_waits_for_the_front_of_its_key_and_gets_the_same_answer(
    model_dir: Path, tmp_path: Path
) -> None:
    with several_fronts(model_dir, tmp_path / "kept") as service, ThreadPoolExecutor() as threads:
        begin(service)
        service.script("f-say", ANSWER)
        first = service.fronts[0]
        body = {"model": "m", **COMPLETION}
        before = [
            first.post("/v1/completions", json=body, headers={"Idempotency-Key": str(key)})
            for key in range(4)
        ]
        service.kill(1)
        retries = [
            threads.submit(first.post, "/v1/completions", json=body, headers={"Idempotency-Key": str(key)})
            for key in range(4)
        ]
        service.start_again(1)
        assert [retry.result(60).text for retry in retries] == [answer.text for answer in before]


@pytest.mark.slow
def test_a_background_response_of_a_killed_front_is_finished_by_its_replacement(
    model_dir: Path, tmp_path: Path
) -> None:
    gate = threading.Event()
    with several_fronts(model_dir, tmp_path / "kept") as service:
        begin(service)
        service.script("f-say", ANSWER, gates={3: gate})
        first, second = service.fronts
        body = {"model": "m", "input": "f-say", "background": True, "temperature": 1.0}
        response = second.post("/v1/responses", json=body).json()
        path = f"/v1/responses/{response['id']}"
        request = second.asked("f-say")
        service.kill(1)
        again = service.start_again(1)
        assert first.get(path).json()["status"] in ("queued", "in_progress")
        gate.set()
        wait_until(lambda: first.get(path).json()["status"] == "completed", lambda: first.get(path).text)
        found = first.get(path).json()
        assert found["output"][-1]["content"][0]["text"] == ANSWER
        assert found["created_at"] == response["created_at"]
        assert again.asked("f-say").params.seed == request.params.seed, "the same tokens are drawn"
        assert not list((tmp_path / "kept").glob("background*/resp_*")), (
            "nothing is left for the next replacement"
        )


@pytest.mark.slow
@pytest.mark.parametrize("on_nodes", [False, True])
def test_a_drain_ends_when_every_front_has_finished_its_requests(
    model_dir: Path, tmp_path: Path, on_nodes: bool
) -> None:
    gate = threading.Event()
    with (
        several_fronts(model_dir, tmp_path / "kept", on_nodes=on_nodes) as service,
        ThreadPoolExecutor() as threads,
    ):
        begin(service)
        service.script("f-say", ANSWER, gates={3: gate})
        first, second = service.fronts
        before = metric(first, "vllm:generation_tokens_total")
        asked = threads.submit(answer_of, second)
        wait_until(
            lambda: metric(first, "vllm:generation_tokens_total") >= before + 3, lambda: "no tokens come"
        )
        for front in service.fronts:
            front.process.terminate()
        wait_until(lambda: first.get("/health").status_code == 503, lambda: first.said)
        assert not any(rank.stopped.is_set() for rank in first.ranks), "the other front still has a request"
        gate.set()
        assert asked.result(60) == ANSWER
        wait_until(lambda: all(rank.stopped.is_set() for rank in first.ranks), lambda: first.said)
        for rank in second.ranks:
            rank.link.close()  # as a process that has stopped does
        assert [front.wait() for front in service.fronts] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_fronts_share_one_port(model_dir: Path, tmp_path: Path) -> None:
    with several_fronts(model_dir, tmp_path / "kept", num_fronts=2) as service:
        port = int(service.fronts[0].url.rpartition(":")[2])
        third = FrontProcess(
            model_dir, "--api-server-count=2", "--front-number=1", f"--port={port}",
            environment={"WIDEEP_KEPT": str(tmp_path / "kept"), "WIDEEP_FRONT": service.leading},
        )  # fmt: skip
        assert third.url == service.fronts[0].url
        third.close()
        with pytest.raises(AssertionError) as alone:
            FrontProcess(model_dir, f"--port={port}")
        assert f"port {port} on 127.0.0.1 is in use" in str(alone.value)
        assert os.path.exists(tmp_path / "kept" / "fronts" / "board")
