"""A small soak test on a real model and two ranks: concurrent answers equal single ones, and all blocks are freed."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.hard.test_fuzz import TIMEOUT_S, hostile_requests, wrong_with
from tests.support.requests.raw_http import RawClient
from tests.support.requests.streams import Manner, Streamed, run
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow
NUM_STREAMS, ROUNDS, NUM_TOKENS = 48, 3, 24
HOSTILE = 400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, "--data-parallel-size", "2") as running:
        yield running.wait_ready()


def body_of(number: int) -> dict[str, Any]:
    """Return the body of a greedy completion."""
    fields = {"prompt": f"{number} the cat sat on the mat", "max_tokens": NUM_TOKENS, "temperature": 0}
    return {**fields, "ignore_eos": True, "stream_options": {"include_usage": True}}


def alone(service: RealService, number: int) -> str:
    """Return the answer to a single request."""
    response = service.post("/v1/completions", json=body_of(number) | {"stream_options": None})
    return str(response.json()["choices"][0]["text"])


def figures(service: RealService) -> dict[str, float]:
    """Return the metrics, summed over ranks."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(service.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def is_idle(service: RealService) -> bool:
    """Return whether nothing runs, waits or is held."""
    held = figures(service)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(
        held[name] for name in (*names, "wideep:front_open_choices", "wideep:router_outstanding_tokens")
    )


def wait_idle(service: RealService) -> None:
    """Wait until all blocks are free."""
    wait_until(lambda: is_idle(service), lambda: f"still held: {figures(service)}", within_s=30)


def test_answers_beside_leavers_and_slow_readers_are_those_given_alone(service: RealService) -> None:
    expected = {number: alone(service, number) for number in range(0, NUM_STREAMS, 4)}
    for seed in range(ROUNDS):
        choice = random.Random(seed)
        manners = choice.choices((Manner.LEAVES, Manner.SLOW, Manner.WHOLE), (10, 3, 17), k=NUM_STREAMS)
        asked = [
            Streamed(body=body_of(number), manner=manner, leaves_after=choice.randrange(1, 6))
            for number, manner in enumerate(manners)
        ]
        asyncio.run(run(service.url, asked))
        for number, each in enumerate(asked):
            assert each.status == 200
            if each.manner is not Manner.LEAVES:
                assert each.usage is not None and each.usage["completion_tokens"] == NUM_TOKENS
                assert number not in expected or each.text[0] == expected[number]
        wait_idle(service)


def test_hostile_requests_cost_no_rank_its_life(service: RealService) -> None:
    before, wrong = alone(service, 1), []
    connection = RawClient(service.url, timeout_s=TIMEOUT_S)
    for request in hostile_requests(11, HOSTILE):
        if "expert" not in request.path and (problem := wrong_with(request, connection.send(request))):
            wrong.append(f"{request.path}, {request.what}: {problem}; sent {request.body[:300]!r}")
    connection.close()
    assert not wrong, "\n".join(wrong[:10])
    wait_idle(service)
    assert alone(service, 1) == before, f"the same answer as before:\n{service.output()}"
