"""Real services sleep and wake: streams that are kept continue unchanged, tiers keep prefixes, and lost processes change nothing."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.faults.test_drains import PIECES, bodies
from tests.server.faults.test_faults import kill
from tests.server.faults.test_moves_between_ranks import metric, wait_until_nothing_is_open
from tests.server.memory.test_kv_tiers import PROMPTS, ask
from tests.support.requests.timed_streams import open_streams, stream_all
from tests.support.service.real_service import RealService
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

CALL_S = 120.0


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve` on two ranks that share a tier in host memory."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    flags = ("-dp=2", "--max-num-seqs=32", "--max-rank-restarts=20", "--kv-offloading-size=64M")
    with RealService.serve(model, log, *flags) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(service: RealService) -> list[tuple[object, ...]]:
    """The answers without a sleep."""
    return [each.said for each in stream_all(service.url, bodies())]


@pytest.fixture(autouse=True)
def whole(service: RealService) -> Iterator[None]:
    """After a test, wake the service, and wait until both ranks serve."""
    yield
    service.wait_whole()
    call(service, "/wake_up")
    wait_until_nothing_is_open(service)


def call(service: RealService, path: str, **query: Any) -> dict[str, Any]:
    answer = httpx.post(f"{service.url}{path}", params=query, timeout=CALL_S)
    assert answer.status_code == 200, f"{answer.text}\n{service.output()[-3000:]}"
    return dict(answer.json())


def sleep(service: RealService, level: int, mode: str = "abort") -> None:
    assert call(service, "/sleep", level=level, mode=mode)["is_sleeping"] is True


def wake(service: RealService) -> None:
    assert call(service, "/wake_up") == {"is_sleeping": False, "level": 0, "is_waking": False}


def sleeps(service: RealService, level: int, count: int) -> Callable[[], None]:
    """Return a function that lets the service sleep, and wakes it, with all streams kept."""

    def run() -> None:
        for _ in range(count):
            sleep(service, level, "keep")
            assert metric(service, "vllm:num_requests_running") == 0
            wake(service)

    return run


def serves_the_same(service: RealService, first: list[str]) -> list[dict[str, Any]]:
    """Ask again, and return where the cached tokens came from."""
    answers = [ask(service, prompt) for prompt in PROMPTS]
    assert [text for text, _ in answers] == first
    return [details for _, details in answers]


@pytest.mark.parametrize("level", [1, 2])
def test_prompts_from_before_the_sleep_are_loaded_from_host_memory(service: RealService, level: int) -> None:
    httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()
    first = [ask(service, prompt)[0] for prompt in PROMPTS]
    sleep(service, level)
    refused = httpx.post(f"{service.url}/v1/completions", json={"prompt": "hello"}, timeout=30)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert metric(service, "vllm:kv_cache_usage_perc") == 0
    wake(service)
    found = serves_the_same(service, first)
    assert all(details["cached_tokens"] > 0 for details in found)
    assert all(details["cached_tokens_details"]["device"] == 0 for details in found)


@pytest.mark.parametrize(("level", "num_sleeps"), [(1, 2), (2, 1)])
def test_streams_that_are_kept_continue_unchanged(
    service: RealService, expected: list[tuple[object, ...]], level: int, num_sleeps: int
) -> None:
    streams = stream_all(service.url, bodies(), pieces=PIECES, then=sleeps(service, level, num_sleeps))
    assert [each.said for each in streams] == expected


def test_streams_end_before_the_service_sleeps_if_it_waits(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    streams = stream_all(service.url, bodies(), pieces=PIECES, then=lambda: sleep(service, 1, "wait"))
    assert [each.said for each in streams] == expected
    assert service.get("/is_sleeping").json()["level"] == 1


def test_clients_that_leave_while_their_requests_are_kept_leave_nothing_behind(service: RealService) -> None:
    with httpx.Client(timeout=60) as client:
        leaving = open_streams(client, service.url, bodies())
        for response in leaving:
            next(response.iter_lines())
        sleep(service, 1, "keep")
        for response in leaving:
            response.close()
    wait_until_nothing_is_open(service)
    wake(service)
    assert metric(service, "vllm:kv_cache_usage_perc") == 0


def killing_a_rank(service: RealService) -> None:
    kill(service, 1)
    wait_until(lambda: service.status()["members"] == [0], service.output)


def killing_all_ranks(service: RealService) -> None:
    engines = service.engines()
    kill(service, 0, 1)
    assert all(has_ended(pid, CALL_S) for pid in engines.values())


def killing_the_front(service: RealService) -> None:
    front = service.find("front")
    os.kill(front, signal.SIGKILL)
    assert has_ended(front, CALL_S)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kill_some", [killing_a_rank, killing_all_ranks, killing_the_front])
def test_processes_that_die_and_return_while_asleep_wake_with_the_others(
    service: RealService, kill_some: Callable[[RealService], None], level: int
) -> None:
    first = [ask(service, prompt)[0] for prompt in PROMPTS]
    sleep(service, level)
    kill_some(service)
    service.wait_whole()
    assert service.get("/is_sleeping").json() == {"is_sleeping": True, "level": level, "is_waking": False}
    sleep(service, level)  # waits until the ranks that returned sleep too
    wake(service)
    serves_the_same(service, first)


def test_a_rank_that_dies_while_waking_does_not_keep_the_service_asleep(service: RealService) -> None:
    first = [ask(service, prompt)[0] for prompt in PROMPTS]
    sleep(service, 2)
    kill(service, 0)
    wake(service)
    serves_the_same(service, first)
