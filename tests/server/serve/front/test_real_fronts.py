"""`wideep serve --api-server-count 2` with real engines: any front may be killed, and only its own connections break."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.models.families import write_checkpoint
from tests.support.requests import plain_http
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import command_of, wait_until

NUM_TOKENS = 300
BODY = {"prompt": "one two", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
NUM_STREAMS = 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    folder = tmp_path_factory.mktemp("fronts")
    model = write_tiny_model(folder / "model")
    flags = ("--data-parallel-size=2", "--threads=1", "--api-server-count=2", "--served-model-name=m")
    with RealService.serve(model, folder / "log", *flags, "--max-rank-restarts=20") as running:
        yield running.wait_ready()


def ask(service: RealService, *, key: str | None = None, prompt: str = "one two") -> str:
    """Return a streamed answer. Each call opens a connection."""
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"model": "m", **BODY, "prompt": prompt, "stream": True}
    response = plain_http.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=120)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.status_code == 200 and all("error" not in event for event in events), response.text
    return "".join(event["choices"][0]["text"] for event in events)


def fronts(service: RealService) -> list[int]:
    """Return the pids of the fronts, the leading one first."""
    found = {}
    for pid in service.descendants():
        words = command_of(pid)
        if "front" in words and "--front-number" in words:
            found[int(words[words.index("--front-number") + 1])] = pid
    return [found[number] for number in sorted(found)]


def wait_whole(service: RealService) -> None:
    """Wait until both fronts serve."""

    def is_whole() -> bool:
        try:
            answers = [service.get("/health", timeout_s=10).status_code for _ in range(12)]
        except httpx.TransportError:
            return False
        return len(fronts(service)) == 2 and answers == [200] * 12 and service.status()["phase"] == "serving"

    wait_until(is_whole, service.output)


def test_both_fronts_answer_with_the_same_tokens(service: RealService) -> None:
    wait_whole(service)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = Counter(threads.map(lambda _: ask(service), range(2 * NUM_STREAMS)))
    assert len(answers) == 1
    lines = service.get("/metrics").text.splitlines()
    tokens = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in tokens) == 2 * NUM_STREAMS * NUM_TOKENS


@pytest.mark.parametrize("number", [1, 0])
def test_a_killed_front_breaks_only_its_connections_and_every_retry_gets_the_answer(
    service: RealService, number: int
) -> None:
    wait_whole(service)
    expected = ask(service)
    with ThreadPoolExecutor(2 * NUM_STREAMS) as threads:
        asked = [threads.submit(ask, service, key=f"{number}-{each}") for each in range(NUM_STREAMS)]
        plain = [threads.submit(ask, service) for _ in range(NUM_STREAMS)]
        wait_until(lambda: service.get("/load").json()["server_load"] > 4, service.output)
        os.kill(fronts(service)[number], signal.SIGKILL)
        broken = 0
        for each in [*asked, *plain]:
            try:
                assert each.result(120) == expected
            except httpx.TransportError:
                broken += 1
    assert broken < 2 * NUM_STREAMS, "the other front's connections last"
    assert [ask(service, key=f"{number}-{each}") for each in range(NUM_STREAMS)] == [expected] * NUM_STREAMS
    wait_whole(service)
    assert ask(service, prompt="one two") == expected
    assert service.status()["waiting_requests"] == 0
    assert f"front {number} (pid " in service.output() and "Its answers are lost" in service.output()


def test_a_killed_engine_is_noticed_by_both_fronts(service: RealService) -> None:
    wait_whole(service)
    expected = ask(service)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asked = [threads.submit(ask, service) for _ in range(NUM_STREAMS)]
        wait_until(lambda: service.get("/load").json()["server_load"] > 2, service.output)
        os.kill(service.engines()[1], signal.SIGKILL)
        assert [each.result(300) for each in asked] == [expected] * NUM_STREAMS
    wait_until(lambda: service.status()["members"] == [0, 1], service.output)
    assert ask(service) == expected


@pytest.mark.parametrize("killed", [None, 1, 0])
def test_a_service_grows_and_shrinks_and_no_answer_changes(service: RealService, killed: int | None) -> None:
    """A killed front, if there is one, breaks its own connections. The leading one ends the resize: its former size serves."""
    wait_whole(service)
    expected = ask(service)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asked = [threads.submit(ask, service) for _ in range(NUM_STREAMS)]
        grow = {"new_data_parallel_size": 3, "wait": False, "operation_id": f"grow {killed}"}
        assert service.post("/scale_elastic_ep", json=grow).status_code == 202
        if killed is not None:
            wait_until(lambda: 2 in service.engines(), service.output, within_s=START_S)
            os.kill(fronts(service)[killed], signal.SIGKILL)
            wait_until(lambda: len(fronts(service)) == 2, service.output)
        size = 2 if killed == 0 else 3
        wait_until(lambda: service.status()["members"] == list(range(size)), service.output, within_s=START_S)
        broken = 0
        for each in asked:
            try:
                assert each.result(300) == expected
            except httpx.TransportError:
                broken += 1
        assert broken == 0 if killed is None else broken < NUM_STREAMS
        wait_whole(service)
        asked = [threads.submit(ask, service) for _ in range(2 * NUM_STREAMS)]
        shrunk = service.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}, timeout_s=START_S)
        assert shrunk.status_code == 200, shrunk.text
        assert [each.result(300) for each in asked] == [expected] * 2 * NUM_STREAMS
    wait_until(lambda: sorted(service.engines()) == [0, 1], service.output)
    assert ask(service) == expected


def test_new_weights_serve_at_both_fronts_under_their_label(service: RealService, tmp_path: Path) -> None:
    wait_whole(service)

    def answers() -> set[tuple[str, str | None]]:
        """Return texts and labels; each call opens a connection."""
        body = {"model": "m", **BODY, "max_tokens": 40}
        found = [service.post("/v1/completions", json=body).json() for _ in range(2 * NUM_STREAMS)]
        return {(each["choices"][0]["text"], each.get("weight_version")) for each in found}

    [(before, label)] = answers()
    assert label is None
    write_checkpoint("qwen3_moe", tmp_path, seed=3, vocab_size=320)
    body = {"model_path": str(tmp_path), "weight_version": "second"}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(ask, service) for _ in range(NUM_STREAMS)]
        updated = service.post("/update_weights_from_disk", json=body, timeout_s=300)
        assert updated.json()["weight_version"] == "second", updated.text
        [(after, label)] = answers()
        assert label == "second" and after != before
        assert all(stream.result(300) for stream in streams)
    assert service.post("/weight_checker", json={}, timeout_s=300).json()["success"] is True


def test_sigterm_drains_both_fronts(service: RealService) -> None:
    wait_whole(service)
    expected = ask(service)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asked = [threads.submit(ask, service) for _ in range(NUM_STREAMS)]
        wait_until(lambda: service.get("/load").json()["server_load"] == NUM_STREAMS, service.output)
        service.processes[0].send_signal(signal.SIGTERM)
        assert [each.result(120) for each in asked] == [expected] * NUM_STREAMS
    assert service.wait_ended() == [0]
    assert service.output().endswith("wideep: stopped\n")
