"""Waiting requests move to a rank with room, between real processes: answers stay the same; none is lost or sent twice."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.faults.test_faults import kill
from tests.support.requests.timed_streams import TimedStream, stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

# Sends nearly all requests to one rank, as may happen when answers grow unexpectedly.
SESSION = {"x-session-id": "all of them"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve` on two ranks that run eight requests each."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, "-dp=2", "--max-num-seqs=8", "--max-rank-restarts=20") as running:
        yield running.wait_ready()


def bodies() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5},
    ]
    return [
        {"model": "tiny", "prompt": f"{number} the cat", "max_tokens": 120, "ignore_eos": True}
        | kinds[number % 2]
        for number in range(14)
    ]


@pytest.fixture(scope="module")
def undisturbed(service: RealService) -> list[tuple[object, ...]]:
    """The answers to the requests when they are sent one after the other."""
    return [stream_all(service.url, [body])[0].said for body in bodies()]


def metric(service: RealService, name: str) -> float:
    text = service.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def moved(service: RealService) -> float:
    return metric(service, "wideep:moved_requests_total")


def said(streams: list[TimedStream]) -> list[tuple[object, ...]]:
    return [stream.said for stream in streams]


def stream_until_moved(service: RealService, pool: ThreadPoolExecutor) -> "Future[list[TimedStream]]":
    """Send all requests, and again if none has moved: on a busy machine they may run one after the other."""
    for _ in range(20):
        before = moved(service)
        streams = pool.submit(stream_all, service.url, bodies(), headers=SESSION)
        wait_until(lambda: moved(service) > before or streams.done(), lambda: "no stream ends", within_s=240)  # noqa: B023
        if moved(service) > before:
            return streams
    raise AssertionError("nothing moved")


def wait_until_nothing_is_open(service: RealService) -> None:
    wait_until(
        lambda: metric(service, "wideep:front_open_choices") == 0, lambda: "a choice is open", within_s=60
    )
    tokens = metric(service, "wideep:router_outstanding_tokens")
    assert tokens == 0, "the router counts no tokens of ended requests"


def check_freed_within_a_second(service: RealService) -> None:
    """Wait until no request runs and the KV caches are empty. Call it when all clients have left."""
    left_s = time.monotonic()
    wait_until(
        lambda: (
            metric(service, "vllm:num_requests_running") == metric(service, "vllm:kv_cache_usage_perc") == 0
        ),
        service.output,
    )
    assert time.monotonic() - left_s < 1.0


def test_requests_that_wait_move_to_the_idle_rank_and_answers_stay_the_same(
    service: RealService, undisturbed: list[tuple[object, ...]]
) -> None:
    with ThreadPoolExecutor() as pool:
        assert said(stream_until_moved(service, pool).result()) == undisturbed
    wait_until_nothing_is_open(service)


def test_clients_that_leave_amid_moves_leave_nothing_behind(
    service: RealService, undisturbed: list[tuple[object, ...]]
) -> None:
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=60) as client:
        leaving = [
            client.send(
                client.build_request(
                    "POST",
                    f"{service.url}/v1/completions",
                    json={**body, "stream": True, "prompt": f"left {number}"},
                    headers=SESSION,
                ),
                stream=True,
            )
            for number, body in enumerate(bodies()[:6])
        ]
        staying = stream_until_moved(service, pool)
        for response in leaving:
            response.close()
        assert said(staying.result()) == undisturbed
    wait_until_nothing_is_open(service)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_amid_moves_costs_no_answer(
    service: RealService, undisturbed: list[tuple[object, ...]], rank: int
) -> None:
    with ThreadPoolExecutor() as pool:
        streams = stream_until_moved(service, pool)
        kill(service, rank)
        assert said(streams.result()) == undisturbed
    wait_until_nothing_is_open(service)
    wait_until(
        lambda: (service.status()["phase"], len(service.status()["members"])) == ("serving", 2),
        lambda: f"a rank is away: {service.status()}",
        within_s=START_S,
    )
