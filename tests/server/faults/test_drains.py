"""Ranks drain under load, between real processes: streams continue unchanged, also if a rank dies or a client leaves."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli import main
from tests.server.faults import test_faults
from tests.server.faults.test_faults import kill
from tests.server.faults.test_moves_between_ranks import (
    check_freed_within_a_second,
    metric,
    wait_until_nothing_is_open,
)
from tests.support.requests.timed_streams import open_streams, stream_all
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
NUM_TOKENS = 400  # of a stream, so that it runs through several drains
PIECES = 3  # received by every stream before a drain
DRAIN_S = 60.0


def bodies() -> list[dict[str, Any]]:
    """Return long requests of every kind, some of them structured."""
    form = {"structured_outputs": {"regex": f"[a-z ]{{{NUM_TOKENS - 9}}}"}}
    return [
        each | {"max_tokens": NUM_TOKENS} | (form if "structured_outputs" in each else {})
        for each in test_faults.bodies()
    ]


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve` on two ranks with seats for all requests."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, "-dp=2", "--max-num-seqs=32", "--max-rank-restarts=20") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(service: RealService) -> list[tuple[object, ...]]:
    """The answers without a drain."""
    return [each.said for each in stream_all(service.url, bodies())]


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of the shared service, let both ranks take requests again."""
    yield
    if "service" in request.fixturenames:
        service: RealService = request.getfixturevalue("service")
        wait_until(lambda: service.status()["members"] == [0, 1], service.output, within_s=START_S)
        for rank in (0, 1):
            drain(service, rank, undo=True)
        wait_until_nothing_is_open(service)


def drain(service: RealService, rank: int, *, timeout_s: float = DRAIN_S, undo: bool = False) -> Any:
    body = {"rank": rank, "timeout_s": timeout_s, "undo": undo}
    response = httpx.post(f"{service.url}/ranks/drain", json=body, timeout=2 * DRAIN_S)
    assert response.status_code == 200, response.text
    return response.json()


def back_and_forth(service: RealService, count: int = 4) -> Callable[[], None]:
    """Return a function that drains one rank after the other, and checks that each one becomes empty."""

    def run() -> None:
        for number in range(count):
            rank = number % 2
            assert drain(service, rank) == {"rank": rank, "draining": True, "requests": 0}
            drain(service, rank, undo=True)

    return run


def moves(service: RealService) -> float:
    return metric(service, "wideep:request_moves_total")


def test_streams_continue_unchanged_while_ranks_drain(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    before = moves(service)
    streams = stream_all(service.url, bodies(), pieces=PIECES, then=back_and_forth(service))
    assert [each.said for each in streams] == expected
    assert moves(service) > before, "on a busy machine few streams still run at the drains"
    assert metric(service, "wideep:request_move_pause_seconds_count") > 0
    assert metric(service, "wideep:replayed_requests_total") == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-config", NGRAM),
        ("--no-enable-prefix-caching", "--max-num-batched-tokens=32"),
    ],
)
def test_streams_continue_unchanged_with_drafts_and_without_a_prefix_cache(
    model: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with RealService.serve(model, tmp_path / "output.txt", "-dp=2", "--max-num-seqs=32", *flags) as service:
        service.wait_ready()
        expected = [each.said for each in stream_all(service.url, bodies())]
        check_drains(service, bodies(), expected)


def check_drains(
    service: RealService, wanted: list[dict[str, Any]], expected: list[tuple[object, ...]]
) -> None:
    """Drain ranks while streams run, until some have moved: on a busy machine, all may end before the drain begins."""
    for _ in range(10):
        streams = stream_all(service.url, wanted, pieces=PIECES, then=back_and_forth(service))
        assert [each.said for each in streams] == expected
        if moves(service):
            break
    assert moves(service) > 0
    wait_until_nothing_is_open(service)


@pytest.mark.parametrize("is_source", [True, False])
def test_a_rank_that_is_killed_during_a_drain_costs_no_answer(
    service: RealService, expected: list[tuple[object, ...]], is_source: bool
) -> None:
    def drain_and_kill() -> None:
        drain(service, 0, timeout_s=0.0)
        kill(service, 0 if is_source else 1)

    streams = stream_all(service.url, bodies(), pieces=PIECES, then=drain_and_kill)
    assert [each.said for each in streams] == expected
    wait_until(lambda: service.status()["members"] == [0, 1], service.output, within_s=START_S)
    assert bool(service.status()["draining"]) != is_source, "a lost rank is not draining any more"


def test_clients_that_leave_during_a_drain_free_both_ranks_within_a_second(service: RealService) -> None:
    with httpx.Client(timeout=60) as client:
        leaving = open_streams(client, service.url, bodies())
        for response in leaving:
            next(response.iter_lines())
        drain(service, 0, timeout_s=0.0)
        for response in leaving:
            response.close()
    check_freed_within_a_second(service)


def test_the_command_drains_a_rank_and_its_state_is_visible(
    service: RealService, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "1", service.url, "--timeout", "60"]) == 0
    assert "rank 1 has no requests left after" in capfd.readouterr().out
    assert main(["status", service.url]) == 0
    assert "rank 1 is draining for" in capfd.readouterr().out
    assert main(["drain", "0", service.url]) == 1
    assert "Rank 0 is the last rank that takes requests" in capfd.readouterr().err
    assert main(["drain", "1", service.url, "--undo"]) == 0
    assert json.loads(httpx.get(f"{service.url}/v1/fault_tolerance/status").text)["draining"] == []


def test_a_drained_rank_serves_its_experts_and_its_death_is_an_ordinary_loss(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    drain(service, 1)
    assert [each.said for each in stream_all(service.url, bodies())] == expected
    os.kill(service.engines()[1], signal.SIGKILL)
    wait_until(lambda: service.status()["members"] == [0], service.output)
    assert [each.said for each in stream_all(service.url, bodies())] == expected
