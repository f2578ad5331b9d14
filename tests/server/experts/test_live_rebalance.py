"""A whole service rebalances repeatedly while it answers: equal bits, no lost requests, a rollback, and a warm restart."""

import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from expert_placement.files import from_json, load_placement, to_json
from expert_placement.moves import align
from expert_placement.placement import Placement
from tests.support.placement.placements import held, random_placement
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

PROMPTS = [f"{index} the cat sat on the mat " * (1 + index % 4) for index in range(10)]
CLIENTS = 6
CHANGES = 6
DECIDING_S = 120.0  # for a controller that decides every 60 steps
pytestmark = pytest.mark.slow


def answer(service: RealService, prompt: str) -> tuple[str, list[float]]:
    """Return the text and the log-probabilities of a greedy completion."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1}
    told = service.post("/v1/completions", json={**body, "ignore_eos": True}, timeout_s=120)
    assert told.status_code == 200, told.text
    choice = told.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


class Load:
    """Clients that send requests without a pause. A context manager: leaving it waits for open requests."""

    def __init__(self, service: RealService) -> None:
        self.answers: list[tuple[int, tuple[str, list[float]]]] = []
        self._service, self._ended = service, threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients: list[Future[None]] = []

    def _ask(self, at: int) -> None:
        while not self._ended.is_set():
            self.answers.append((at % len(PROMPTS), answer(self._service, PROMPTS[at % len(PROMPTS)])))
            at += CLIENTS

    def __enter__(self) -> Self:
        self._clients = [self._pool.submit(self._ask, at) for at in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()  # raises what a client met


def get(service: RealService, path: str) -> Any:
    told = service.get(path)
    assert told.status_code == 200, told.text
    return told.json()


def post(service: RealService, path: str, body: Any = None) -> Any:
    told = service.post(path, json=body, timeout_s=180)
    assert told.status_code == 200, told.text
    return told.json()


def knows_experts(service: RealService) -> bool:
    """Return whether rank 0 has reported the placement. It does so just after it has attached."""
    return service.get("/experts/history").status_code == 200


def serving(service: RealService) -> Placement:
    return from_json(get(service, "/experts/history")["serving"])


def change(service: RealService, seed: int) -> dict[str, Any]:
    """Apply a placement that no planner would make."""
    now = serving(service)
    sizes = now.num_layers, now.num_experts, now.num_ranks, now.slots_per_rank
    target = align(random_placement(*sizes, seed=seed), now)
    entry: dict[str, Any] = post(service, "/experts/apply", {"placement": to_json(target)})
    assert entry["failed"] is None and entry["moves"] > 0 and entry["bytes"] > 0, entry
    assert held(serving(service)) == held(target)
    return entry


def test_a_service_that_rebalances_all_the_time_answers_as_one_that_does_not_and_restarts_warm(
    tmp_path: Path,
) -> None:
    model, history = write_tiny_model(tmp_path / "tiny"), tmp_path / "history.jsonl"
    eplb: dict[str, Any] = {"history_file": str(history), "max_bytes_per_step": 1 << 13}
    flags: tuple[str, ...] = ("--eplb-config", json.dumps({**eplb, "num_redundant_experts": 4}))
    with RealService.serve(model, tmp_path / "first.txt", *flags) as service:
        service.wait_ready()
        expected = [answer(service, prompt) for prompt in PROMPTS]
        with Load(service) as load:
            versions = [change(service, seed)["version"] for seed in range(CHANGES)]
            before = serving(service)
            versions.append(change(service, CHANGES)["version"])
            back = post(service, "/experts/rollback")
            assert back["kind"] == "rollback" and back["failed"] is None and back["moves"] > 0
            assert held(serving(service)) == held(before)
            wait_until(lambda: len(load.answers) > 4 * len(PROMPTS), lambda: "too few answers")
        assert versions == sorted(set(versions))
        wrong = [at for at, told in load.answers if told != expected[at]]
        assert not wrong, f"{len(wrong)} of {len(load.answers)} answers changed while experts moved"
        assert_nothing_is_open(service)
        last = serving(service)
        service.processes[0].send_signal(signal.SIGINT)
        assert service.wait_ended() == [0]
    kept = history.with_name(history.name + ".placement.json")
    assert load_placement(kept).digest() == last.digest()
    eager = json.dumps({**eplb, "window_size": 30, "step_interval": 60, "min_gain": 0.0})
    flags = ("--expert-placement", str(kept), "--enable-eplb", "--eplb-config", eager)
    with RealService.serve(model, tmp_path / "second.txt", *flags) as service:
        service.wait_ready()
        wait_until(lambda: knows_experts(service), service.output)
        told = get(service, "/experts/history")
        assert from_json(told["serving"]).digest() == last.digest(), "the restart is warm"
        assert [entry["version"] for entry in told["history"]] == [*versions, back["version"]]
        with Load(service) as load:
            wait_until(decided(service, len(told["history"])), service.output, within_s=DECIDING_S)
        assert all(told == expected[at] for at, told in load.answers), "answers changed after the restart"
        back = post(service, "/experts/rollback")
        assert back["kind"] == "rollback" and back["failed"] is None, "the rollback works across a restart"
        assert answer(service, PROMPTS[1]) == expected[1]
        assert_nothing_is_open(service)
        assert "wideep experts: " in service.output()


def decided(service: RealService, num_entries: int) -> Callable[[], bool]:
    """Return a condition: the controller has decided twice more."""
    return lambda: len(get(service, "/experts/history")["history"]) >= num_entries + 2


def assert_nothing_is_open(service: RealService) -> None:
    answer(service, PROMPTS[0])  # ranks send their statistics before they sleep
    lines = service.get("/metrics").text.splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    assert running and all(float(line.split()[-1]) == 0 for line in running)
