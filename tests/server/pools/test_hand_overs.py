"""Separate pools for prompts and answers, between real processes: the same answers, also if ranks are killed or clients leave."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli import main
from tests.server.faults import test_faults
from tests.server.faults.test_drains import NGRAM
from tests.server.faults.test_moves_between_ranks import (
    check_freed_within_a_second,
    metric,
    wait_until_nothing_is_open,
)
from tests.support.requests.timed_streams import open_streams, stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

POOLS = ("--pools=prefill:1,decode:1", "--kv-offloading-size=64M", "--max-rank-restarts=20")
SEATS = "--max-num-seqs=32"
PREFILL, DECODE = 0, 1  # ranks
LONG = "the cat sat on the mat and looked at the dog " * 8
CONTINUE_S = 10.0  # longest pause of a stream after a loss; 3 s if nothing else runs on the machine
PIECES = 5


def bodies() -> list[dict[str, Any]]:
    """Return requests of every kind with long prompts, some of which share them."""
    return [each | {"prompt": f"{each['prompt']} {LONG}"} for each in test_faults.bodies()]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    """The answers of one group of two ranks."""
    log = tmp_path_factory.mktemp("plain") / "output.txt"
    with RealService.serve(model, log, "-dp=2", SEATS) as service:
        return [each.said for each in stream_all(service.wait_ready().url, bodies())]


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, *POOLS, SEATS) as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of the shared service, wait until all ranks serve in their first roles."""
    yield
    if "service" in request.fixturenames:
        service: RealService = request.getfixturevalue("service")
        wait_until_whole(service)
        for name, role in (("prefill", "both"), ("decode", "decode"), ("prefill", "prefill")):
            change(service, name, role)
        wait_until_nothing_is_open(service)


def pools(service: RealService) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in service.get("/pools").json()["pools"]}


def wait_until_whole(service: RealService) -> None:
    wait_until(
        lambda: all(each["serving"] == len(each["ranks"]) for each in pools(service).values()),
        service.output,
        within_s=START_S,
    )


def change(service: RealService, name: str, role: str) -> None:
    service.post("/pools", json={"pool": name, "role": role}).raise_for_status()


def handed_over(service: RealService) -> float:
    text = service.get("/metrics").text
    (count,) = re.findall(r'^wideep:request_moves_total{cause="hand_over".*} (\S+)$', text, re.MULTILINE)
    return float(count)


def computed_again(service: RealService) -> tuple[float, float]:
    """Return the number of hand-overs, and the prompt tokens that decoding ranks computed again."""
    name = "wideep:request_hand_over_computed_tokens"
    return metric(service, f"{name}_count"), metric(service, f"{name}_sum")


def test_requests_are_handed_over_and_answers_are_as_without_hand_overs(tmp_path: Path) -> None:
    """Blocks of heads. tests/server/memory/test_moved_state.py has states, latents and indexes, and
    tests/scheduler/test_tiered_answers.py all kinds of models.

    Without hand-overs, pools answer as one group does (test_pools).
    """
    model = write_tiny_model(tmp_path / "tiny")
    flags = ("--speculative-config", NGRAM)
    scored = {
        "model": "tiny", "prompt": LONG, "max_tokens": 12, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1,
    }  # fmt: skip

    def answers(service: RealService) -> tuple[list[tuple[object, ...]], Any]:
        streams = stream_all(service.url, bodies())
        whole = httpx.post(f"{service.url}/v1/completions", json=scored, timeout=120)
        return [each.said for each in streams], whole.raise_for_status().json()["choices"]

    length = "--max-model-len=512"
    with RealService.serve(model, tmp_path / "output.txt", *POOLS, SEATS, length, *flags) as service:
        service.wait_ready()
        for name in ("prefill", "decode"):
            change(service, name, "both")
        expected = answers(service)
        assert handed_over(service) == 0
        service.post("/flush_cache").raise_for_status()
        for name in ("decode", "prefill"):
            change(service, name, name)
        assert answers(service) == expected
        num_choices = sum(each.get("n", 1) for each in bodies()) + 1
        assert handed_over(service) == num_choices
        num_handed_over, num_computed = computed_again(service)
        assert num_handed_over == num_choices
        assert num_computed < 17 * num_choices, "less than a block of each prompt is computed again"
        wait_until_nothing_is_open(service)


def test_short_prompts_run_where_answers_do(service: RealService) -> None:
    before = handed_over(service)
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "temperature": 0}
    httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert handed_over(service) == before


def test_without_tiers_requests_are_handed_over_and_computed_again(
    model: Path, expected: list[tuple[object, ...]], tmp_path: Path
) -> None:
    with RealService.serve(model, tmp_path / "output.txt", "--pools=both:1,both:1", SEATS) as service:
        service.wait_ready()
        change(service, "both-0", "prefill")
        change(service, "both-1", "decode")
        assert [each.said for each in stream_all(service.url, bodies())] == expected
        num_handed_over, num_computed = computed_again(service)
        assert num_handed_over > 0 and num_computed > 100 * num_handed_over


def test_clients_that_leave_free_both_ranks_within_a_second(service: RealService) -> None:
    """Some leave while their prompts run or wait, others when their first token has come."""
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        before, after = (open_streams(client, service.url, bodies()) for _ in range(2))
        for response in before:
            response.close()
        for response in after:
            next(response.iter_lines())
            response.close()
    check_freed_within_a_second(service)


@pytest.mark.parametrize("pieces", [0, 1, PIECES], ids=["prompts", "hand-over", "answers"])
@pytest.mark.parametrize("rank", [PREFILL, DECODE])
def test_a_pool_that_is_killed_costs_no_answer(
    service: RealService, expected: list[tuple[object, ...]], rank: int, pieces: int
) -> None:
    killed_s = 0.0

    def kill() -> None:
        nonlocal killed_s
        os.kill(service.engines()[rank], signal.SIGKILL)
        killed_s = time.monotonic()

    streams = stream_all(service.url, bodies(), pieces=pieces, then=kill)
    assert [each.said for each in streams] == expected
    assert max(each.goes_on_after(killed_s) for each in streams) < CONTINUE_S


def test_roles_change_while_streams_run(
    service: RealService, expected: list[tuple[object, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    def swap() -> None:
        for words in (("prefill", "both"), ("decode", "prefill"), ("prefill", "decode")):
            assert main(["pools", *words, service.url]) == 0

    streams = stream_all(service.url, bodies(), pieces=PIECES, then=swap)
    assert [each.said for each in streams] == expected
    assert {name: each["role"] for name, each in pools(service).items()} == {
        "prefill": "decode",
        "decode": "prefill",
    }
    assert "decode   prefill  rank 1" in capfd.readouterr().out
    assert main(["pools", "prefill", "prefill", service.url]) == 1
    assert "no other pool has the role decode or both" in capfd.readouterr().err
    kinds = [event["kind"] for event in service.status()["events"]]
    assert "role" in kinds
    assert [each.said for each in stream_all(service.url, bodies())] == expected
