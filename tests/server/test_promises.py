"""What the README promises first, on two real ranks: answers stay the same through a rebalance, a kill and a return.

The slow tests do the same with more ranks, more kinds of requests and more faults (test_faults, test_live_rebalance).
"""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.support.placements import held, random_placement
from tests.support.real_service import START_S, RealService, write_tiny_model
from tests.support.service_processes import wait_until
from tests.support.timed_streams import stream_all

PIECES = 10  # that every stream has brought when something happens
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "n": 2, "presence_penalty": 0.7},
    {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-z ]{50}"}},
)
BODIES: list[dict[str, Any]] = [
    {"prompt": f"{copy} the cat {kind}", "max_tokens": 60, "ignore_eos": True, "model": "tiny", **options}
    for copy in range(2)
    for kind, options in enumerate(OPTIONS)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve` on two ranks, with room for copies of experts."""
    directory = tmp_path_factory.mktemp("service")
    model = write_tiny_model(directory / "tiny")
    flags = ("--eplb-config", '{"num_redundant_experts": 2}')
    with RealService.serve(model, directory / "output.txt", *flags) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(service: RealService) -> list[tuple[object, ...]]:
    """What every request says when nothing happens."""
    return [stream.said for stream in stream_all(service.url, BODIES)]


def test_answers_stay_the_same_while_experts_move(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    now = from_json(httpx.get(f"{service.url}/experts/history").json()["serving"])
    target = align(random_placement(now.num_layers, now.num_experts, 2, now.slots_per_rank, seed=3), now)
    applied: list[httpx.Response] = []

    def apply() -> None:
        url = f"{service.url}/experts/apply"
        applied.append(httpx.post(url, json={"placement": to_json(target)}, timeout=120))

    moving = threading.Thread(target=apply)
    streams = stream_all(service.url, BODIES, pieces=PIECES, then=moving.start)
    moving.join()
    assert [stream.said for stream in streams] == expected
    assert applied[0].status_code == 200 and applied[0].json()["moves"] > 0, applied[0].text
    serving = from_json(httpx.get(f"{service.url}/experts/history").json()["serving"])
    assert held(serving) == held(target)
    assert [stream.said for stream in stream_all(service.url, BODIES)] == expected


def test_streams_go_on_with_the_same_tokens_when_an_engine_is_killed_and_it_comes_back(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    status = f"{service.url}/v1/fault_tolerance/status"
    engine = service.engines()[1]
    streams = stream_all(service.url, BODIES, pieces=PIECES, then=lambda: os.kill(engine, signal.SIGKILL))
    assert [stream.said for stream in streams] == expected
    wait_until(lambda: httpx.get(status).json()["members"] == [0, 1], service.output, within_s=START_S)
    assert httpx.get(status).json()["losses"] == 1
    assert [stream.said for stream in stream_all(service.url, BODIES)] == expected
