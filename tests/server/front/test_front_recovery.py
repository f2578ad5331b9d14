"""A front with ranks that die and return: clients get the same answers and notice nothing."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dispatch.ports import free_port
from expert_placement.placement import linear_placement
from scheduler.epochs.heartbeat import Heartbeat
from server.link.messages import Fault
from server.serve.child_messages import FrontAddresses, announcement
from tests.support.service.fake_rank import FakeRank
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

HOME = linear_placement(2, 4, 2)
ANSWER = "one two three four"
GATE = 3  # tokens before the gate
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "choices with scores of the prompt": (
        "/v1/completions",
        {"prompt": "f-say", "n": 3, "logprobs": 2, "echo": True},
    ),
    "a stop string": ("/v1/completions", {"prompt": "f-say", "stop": ["three"], "logprobs": 0}),
    "a stream of choices": (
        "/v1/completions",
        {"prompt": "f-say", "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "f-say"}], "logprobs": True, "top_logprobs": 1},
    ),
}


@pytest.fixture(scope="module")
def front(model_dir: Path) -> Iterator[FrontProcess]:
    """A running front with two ranks. Rank 0 has reported the placement."""
    process = FrontProcess(model_dir, "--served-model-name=m").attach_all()
    process.ranks[0].begin(HOME)
    wait_until(
        lambda: process.get("/experts/history").status_code == 200, lambda: "the placement is not known"
    )
    yield process
    status, _ = process.close()
    assert status == 0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for waiting clients."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


def ask(front: FrontProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer, with a stream's pieces merged, without the fields that always differ."""
    response = front.post(path, json={"model": "m", "max_tokens": 40, "seed": 3, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return {key: value for key, value in response.json().items() if key not in ("id", "created")}
    joined: dict[str, Any] = {"text": {}, "ends": {}}
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, lines):
        joined["usage"] = event.get("usage") or joined.get("usage")
        for choice in event["choices"]:
            index = choice["index"]
            joined["text"][index] = joined["text"].get(index, "") + choice["text"]
            joined["ends"][index] = choice["finish_reason"] or joined["ends"].get(index)
    return joined


def status(front: FrontProcess) -> dict[str, Any]:
    """Return the answer of GET /v1/fault_tolerance/status."""
    content: dict[str, Any] = front.get("/v1/fault_tolerance/status").json()
    return content


def metric(front: FrontProcess, name: str) -> float:
    """Return a metric, summed over its labels."""
    lines = front.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def present(front: FrontProcess, rank: int) -> FakeRank:
    """Return the rank's current engine."""
    return next(each for each in reversed(front.ranks) if each.rank == rank)


def bring_back(front: FrontProcess, rank: int, *, num_restarts: int) -> None:
    """Attach a rank's next engine, and wait until it serves."""
    front.attach(rank, num_restarts=num_restarts)
    wait_until(lambda: rank in status(front)["members"], lambda: f"rank {rank} is not a member")
    wait_until(lambda: status(front)["phase"] == "serving", lambda: f"it does not serve: {status(front)}")


def begin(
    front: FrontProcess, threads: ThreadPoolExecutor, path: str, body: dict[str, Any]
) -> tuple[Future[dict[str, Any]], threading.Event]:
    """Send a request, and wait until every choice has reached the gate."""
    gate = threading.Event()
    front.script("f-say", ANSWER, num_cached_tokens=1, gates={GATE: gate})
    wanted = metric(front, "vllm:generation_tokens_total") + GATE * body.get("n", 1)
    asked = threads.submit(ask, front, path, body)
    wait_until(
        lambda: metric(front, "vllm:generation_tokens_total") >= wanted, lambda: "the tokens do not come"
    )
    return asked, gate


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", BODIES)
def test_a_rank_is_killed_in_the_middle_and_the_answer_is_what_it_would_have_been(
    front: FrontProcess, threads: ThreadPoolExecutor, name: str
) -> None:
    path, body = BODIES[name]
    front.script("f-say", ANSWER, num_cached_tokens=1)
    wanted = ask(front, path, body)
    before = status(front)
    asked, gate = begin(front, threads, path, body)
    victim = next(rank for rank in (0, 1) if metric_of_rank(front, rank) > 0)
    other = present(front, 1 - victim)
    present(front, victim).kill()
    other.wait_for(lambda rank: bool(rank.orders) and rank.orders[-1].epoch == before["epoch"] + 1)
    order = other.orders[-1]
    assert order.members == (1 - victim,) and order.placement.num_ranks == 1
    assert order.placement.num_experts == HOME.num_experts and order.placement.version > HOME.version
    wait_until(lambda: status(front)["phase"] == "serving", lambda: "the other one does not serve")
    now = status(front)
    assert (now["members"], now["engines"][victim]["status"]) == ([1 - victim], "dead")
    assert now["missing"][0]["rank"] == victim and "connection" in now["missing"][0]["reason"]
    assert front.get("/health").status_code == 200
    gate.set()
    assert asked.result(TIMEOUT_S) == wanted
    assert status(front)["replays"] > before["replays"]
    assert not any(rank.wrong_replays for rank in front.ranks)
    bring_back(front, victim, num_restarts=len(front.ranks))
    again = present(front, victim).orders[-1]
    assert again.members == (0, 1) and again.placement.digest() == HOME.digest()
    assert again.placement.version > order.placement.version


def metric_of_rank(front: FrontProcess, rank: int) -> float:
    """Return the tokens that the router counts as outstanding on a rank."""
    wanted = f'engine="{rank}"'
    lines = front.get("/metrics").text.splitlines()
    found = [
        line for line in lines if line.startswith("wideep:router_outstanding_tokens{") and wanted in line
    ]
    return float(found[0].rsplit(" ", 1)[1])


def test_all_ranks_are_killed_and_requests_wait_for_one_to_come_back(
    front: FrontProcess, threads: ThreadPoolExecutor
) -> None:
    path, body = BODIES["a stream of choices"]
    front.script("f-say", ANSWER, num_cached_tokens=1)
    wanted = ask(front, path, body)
    asked, gate = begin(front, threads, path, body)
    held = threading.Event()
    front.script("f-held", "abc", gates={0: held})
    also = threads.submit(ask, front, "/v1/completions", {"prompt": "f-held"})
    front.served("f-held")
    for rank in (0, 1):
        present(front, rank).kill()
    wait_until(lambda: status(front)["phase"] == "waiting", lambda: "it does not wait")
    health = front.get("/health")
    assert health.status_code == 503 and "rank 0 is lost" in health.json()["error"]["message"]
    refused = front.post("/v1/completions", json={"model": "m", "prompt": "f-say"})
    assert refused.status_code == 503 and "Retry-After" in refused.headers
    assert metric(front, "wideep:members") == 0 and metric(front, "wideep:parked_choices") == 3
    gate.set()
    held.set()
    bring_back(front, 1, num_restarts=40)
    assert front.get("/health").status_code == 200
    assert asked.result(TIMEOUT_S) == wanted
    assert also.result(TIMEOUT_S)["choices"][0]["text"] == "abc"
    assert metric(front, "wideep:parked_choices") == 0
    bring_back(front, 0, num_restarts=40)
    assert status(front)["missing"] == [] and metric(front, "vllm:engine_healthy") == 2


def test_no_placement_changes_while_a_rank_is_away(front: FrontProcess) -> None:
    present(front, 1).kill()
    wait_until(lambda: status(front)["members"] == [0], lambda: "rank 1 is still there")
    for path in ("/experts/plan", "/experts/apply"):
        refused = front.post(path, json={})
        assert refused.status_code == 409 and "rank 1 is lost" in refused.json()["error"]["message"]
    bring_back(front, 1, num_restarts=50)
    assert front.get("/experts/history").json()["serving"]["digest"] == HOME.digest()


def test_a_fault_that_nothing_explains_makes_the_same_ranks_meet_again(front: FrontProcess) -> None:
    before = status(front)
    present(front, 0).link.send(Fault(before["epoch"], "a time-out"))
    wait_until(lambda: status(front)["epoch"] == before["epoch"] + 1, lambda: "nothing was ordered")
    wait_until(lambda: status(front)["phase"] == "serving", lambda: "it does not serve")
    assert status(front)["members"] == [0, 1] and status(front)["losses"] == before["losses"]


def test_an_engine_that_starts_again_before_its_stream_has_ended_takes_its_place(front: FrontProcess) -> None:
    before, old = status(front), present(front, 0)
    bring_back(front, 0, num_restarts=60)
    old.wait_for(lambda rank: bool(rank.losses))
    assert status(front)["epoch"] == before["epoch"] + 2 and status(front)["members"] == [0, 1]


def test_a_rank_whose_step_is_stuck_is_given_up_on_the_word_of_another(front: FrontProcess) -> None:
    epoch, stuck, other = status(front)["epoch"], present(front, 0), present(front, 1)
    beat = Heartbeat(0, epoch, 7, 10, is_idle=False, is_waiting=False, stalled_s=9.5, patience_s=2.0)
    stuck.link.send(beat)
    assert status(front)["members"] == [0, 1], "no other rank has confirmed it yet"
    other.link.send(beat._replace(rank=1, position=11, is_waiting=True))
    wait_until(lambda: status(front)["members"] == [1], lambda: "rank 0 is not lost")
    stuck.wait_for(lambda rank: bool(rank.losses))
    [missing] = status(front)["missing"]
    assert missing["reason"].startswith("its step 7 has not moved for 9.5 s, and rank 1 waits for it")
    bring_back(front, 0, num_restarts=70)


def test_the_front_says_what_happened(front: FrontProcess) -> None:
    assert "wideep front: rank 1 is lost: its connection" in front.said
    assert "wideep front: rank 1 is back" in front.said


def test_a_front_that_was_killed_with_all_engines_orders_an_epoch_that_no_rank_has_met_in(
    model_dir: Path,
) -> None:
    killed = announcement([FrontAddresses("", f"127.0.0.1:{free_port()}", "t")])
    front = FrontProcess(model_dir, environment={"WIDEEP_FRONT": killed})
    for rank, newest in ((0, 7), (1, 6)):
        front.attach(rank, num_restarts=1, loaded=HOME, newest_epoch=newest)
    present(front, 1).wait_for(lambda rank: bool(rank.orders))
    assert [present(front, rank).orders[-1][:2] for rank in (0, 1)] == [(8, (0, 1))] * 2
    assert front.close()[0] == 0
