"""POST /ranks/drain on a front with scripted ranks: streams move and continue, clients see no difference."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.front.test_front_recovery import BODIES, GATE, ask, metric, present, status
from tests.support.service.front_process import TIMEOUT_S, FrontProcess, operated_front
from tests.support.service.service_processes import wait_until

ANSWER = "one two three four"


@pytest.fixture(scope="module")
def front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with operated_front(model_dir, tmp_path_factory.mktemp("keys")) as process:
        yield process


@pytest.fixture(autouse=True)
def undrained(front: FrontProcess) -> Iterator[None]:
    """Let all ranks take requests after a test."""
    yield
    for rank in (0, 1):
        assert drain(front, rank, undo=True).json() == {"rank": rank, "draining": False}


def drain(front: FrontProcess, rank: int, **how: Any) -> httpx.Response:
    return front.post("/ranks/drain", json={"rank": rank, **how})


def wait_for_answers(front: FrontProcess, count: int) -> None:
    wait_until(lambda: metric(front, "wideep:front_open_choices") == count, lambda: "the choices do not open")


@pytest.mark.crossed("kind", every=2)
@pytest.mark.parametrize("kind", list(BODIES))
def test_running_requests_move_and_clients_get_the_same_answer(front: FrontProcess, kind: str) -> None:
    path, body = BODIES[kind]
    front.script("f-say", ANSWER)
    expected = ask(front, path, body)
    gate = threading.Event()
    front.script("f-say", ANSWER, gates={GATE: gate})
    before = metric(front, "wideep:request_moves_total")
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, front, path, body) for _ in range(4)]
        wait_for_answers(front, 4 * body.get("n", 1))
        for rank in (0, 1):  # one after the other
            answer = drain(front, rank, timeout_s=TIMEOUT_S).json()
            assert answer == {"rank": rank, "draining": True, "requests": 0}
            assert present(front, rank).wait_idle(TIMEOUT_S)
            draining = status(front)["draining"]
            assert [(each["rank"], each["requests"]) for each in draining] == [(rank, 0)]
            drain(front, rank, undo=True)
        gate.set()
        assert [each.result(TIMEOUT_S) for each in asked] == [expected] * 4
    assert all(not rank.wrong_replays for rank in front.ranks)
    assert metric(front, "wideep:request_moves_total") > before
    kinds = [event["kind"] for event in status(front)["events"]]
    assert {"draining", "drained", "undrained"} <= {*kinds}


def test_a_drained_rank_gets_no_request_and_the_last_one_stays(front: FrontProcess) -> None:
    front.script("g-say", ANSWER)
    assert drain(front, 1).json()["requests"] == 0
    refused = drain(front, 0)
    assert refused.status_code == 409 and "Rank 0 is the last rank that takes requests" in refused.text
    before = len(present(front, 1).requests)
    for _ in range(4):
        ask(front, "/v1/completions", {"prompt": "g-say"})
    assert len(present(front, 1).requests) == before


def test_a_client_that_leaves_during_a_drain_frees_both_ranks_at_once(front: FrontProcess) -> None:
    gate = threading.Event()
    front.script("i-say", ANSWER, gates={GATE: gate})
    body = {"model": "m", "prompt": "i-say", "stream": True, "max_tokens": 40}
    with (
        httpx.Client(timeout=TIMEOUT_S) as client,
        client.stream("POST", f"{front.url}/v1/completions", json=body) as stream,
    ):
        next(stream.iter_lines())
        home = front.served("i-say").rank
        drain(front, home, timeout_s=0)
    left_s = time.monotonic()
    for rank in (0, 1):
        assert present(front, rank).wait_idle(TIMEOUT_S)
    assert time.monotonic() - left_s < 1.0
    gate.set()


def test_only_operators_may_drain_and_values_are_checked(front: FrontProcess) -> None:
    for headers, code in (({}, 401), ({"Authorization": "Bearer other"}, 403)):
        assert front.post("/ranks/drain", json={"rank": 0}, headers=headers).status_code == code
    for body, word in (
        ({"rank": 2}, "Rank 2 does not exist"),
        ({"rank": -1}, "rank"),
        ({}, "rank"),
        ({"rank": 0, "timeout_s": -1}, "timeout_s"),
        ({"rank": 0, "how": 1}, "how"),
    ):
        refused = front.post("/ranks/drain", json=body)
        assert refused.status_code == 400 and word in refused.text
    assert status(front)["draining"] == []


def test_a_lost_rank_is_not_draining_when_it_returns(front: FrontProcess) -> None:
    drain(front, 1)
    present(front, 1).kill()
    wait_until(lambda: status(front)["members"] == [0], lambda: "the loss is not seen")
    assert status(front)["draining"] == []
    refused = drain(front, 1)
    assert refused.status_code == 409 and "Rank 1 is away" in refused.text
    front.attach(1, num_restarts=1)
    wait_until(lambda: status(front)["members"] == [0, 1], lambda: "the rank is not back")
    assert status(front)["draining"] == []
