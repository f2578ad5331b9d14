"""A front with two pools of scripted ranks: each pool has its own epochs and placement, and one pool suffices to serve."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert_placement.files import to_json
from expert_placement.placement import Placement, linear_placement
from server.link.messages import Fault, Regrouped
from tests.server.front.test_front_recovery import metric, present, status
from tests.support.service.fake_rank import FakeRank
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

HOME = linear_placement(2, 4, 2)
POOLS = ("both-0", "both-1")
BODY = {"model": "m", "prompt": "f-say", "max_tokens": 40, "n": 4, "seed": 3}


def front_of(model_dir: Path, *flags: str) -> FrontProcess:
    """Return a front with two pools of two ranks. Their first ranks have reported their placements."""
    front = FrontProcess(model_dir, "--served-model-name=m", "--pools=both:2,both:2", *flags, num_ranks=4)
    front.attach_all()
    for rank in (0, 2):
        front.ranks[rank].begin(HOME)
    for pool in POOLS:
        wait_until(
            lambda: front.get(f"/experts/history?pool={pool}").status_code == 200,  # noqa: B023
            lambda: f"the placement of {pool} is not known",  # noqa: B023
        )
    return front


@pytest.fixture
def front(model_dir: Path) -> Iterator[FrontProcess]:
    front = front_of(model_dir)
    yield front
    assert front.close()[0] == 0


def pool_of(front: FrontProcess, name: str) -> dict[str, Any]:
    """Return a pool's state."""
    return next(each for each in status(front)["pools"] if each["pool"] == name)


def serves_with(front: FrontProcess, name: str, ranks: list[int]) -> bool:
    pool = pool_of(front, name)
    return (pool["phase"], pool["members"]) == ("serving", ranks)


def said(front: FrontProcess) -> str:
    return "\n".join(event["text"] for event in status(front)["events"])


def outstanding(front: FrontProcess, rank: int) -> bool:
    """Return whether the router counts tokens of a rank."""
    name = f'wideep:router_outstanding_tokens{{engine="{rank}"'
    lines = front.get("/metrics").text.splitlines()
    return any(line.startswith(name) and float(line.rsplit(" ", 1)[1]) > 0 for line in lines)


def choices(front: FrontProcess) -> Any:
    """Return the choices of an answer to BODY."""
    return front.post("/v1/completions", json=BODY).json()["choices"]


@contextmanager
def held_choices(front: FrontProcess) -> Iterator[Any]:
    """Hold four choices after their third token. At the end, let them continue, and compare them with the yielded ones."""
    gate = threading.Event()
    script = front.script("f-say", "one two three four", num_cached_tokens=1)
    wanted = choices(front)
    script.gates[3] = gate
    with ThreadPoolExecutor(1) as threads:
        before = metric(front, "vllm:generation_tokens_total")
        asked = threads.submit(choices, front)
        wait_until(
            lambda: metric(front, "vllm:generation_tokens_total") >= before + 3 * 4, lambda: "no tokens come"
        )
        yield wanted
        gate.set()
        assert asked.result(TIMEOUT_S) == wanted
    script.gates.clear()


def test_a_service_is_ready_when_all_pools_are_and_its_status_has_each(model_dir: Path) -> None:
    front = FrontProcess(model_dir, "--served-model-name=m", "--pools=both:1,both:1")
    try:
        front.attach(0)
        health = front.get("/health")
        assert health.status_code == 503
        assert "pool both-1: waiting for rank 1" in health.json()["error"]["message"]
        assert status(front)["phase"] == "starting"
        front.attach(1)
        assert front.get("/health").status_code == 200
        assert status(front)["pools"] == [
            {"pool": name, "role": "both", "ranks": [rank], "phase": "serving", "epoch": 0, "members": [rank]}
            for rank, name in enumerate(POOLS)
        ]
        server = front.get("/server_info").json()
        assert (server["dp_size"], server["ep_size"]) == (2, 1)
        assert server["pools"] == [
            {"pool": name, "role": "both", "ranks": [rank]} for rank, name in enumerate(POOLS)
        ]
    finally:
        assert front.close()[0] == 0


@pytest.mark.slow
def test_a_lost_rank_begins_an_epoch_of_its_own_pool_only(front: FrontProcess) -> None:
    front.script("f-say", "one two three")
    present(front, 3).kill()
    wait_until(lambda: serves_with(front, "both-1", [2]), lambda: f"{status(front)}")
    order = present(front, 2).orders[-1]
    assert order.members == (2,), "the numbers are those of the service"
    assert order.placement.num_ranks == 1 and order.placement.num_experts == HOME.num_experts
    assert [present(front, rank).orders for rank in (0, 1)] == [[], []]
    assert pool_of(front, "both-0")["epoch"] == 0 and pool_of(front, "both-1")["epoch"] == 1
    now = status(front)
    assert (now["phase"], now["members"], now["epoch"], now["losses"]) == ("serving", [0, 1, 2], 1, 1)
    assert [each["rank"] for each in now["missing"]] == [3]
    assert [each["status"] for each in now["engines"]] == ["healthy"] * 3 + ["dead"]
    assert "rank 3 of pool both-1 is lost" in said(front) and "epoch 1 of pool both-1: ranks 2 serve" in said(
        front
    )
    lines = front.get("/metrics").text.splitlines()
    assert 'wideep:members{model_name="m",pool="both-1"} 1.0' in lines
    assert metric(front, "wideep:members") == 3 and metric(front, "vllm:engine_healthy") == 3
    front.attach(3, num_restarts=1)
    wait_until(lambda: serves_with(front, "both-1", [2, 3]), lambda: f"{status(front)}")
    assert present(front, 3).orders[-1].placement.digest() == HOME.digest()
    assert [present(front, rank).orders for rank in (0, 1)] == [[], []]


def test_requests_of_a_lost_pool_continue_on_the_other(front: FrontProcess) -> None:
    with held_choices(front) as wanted:
        assert any(outstanding(front, rank) for rank in (2, 3)), "both pools get requests"
        for rank in (2, 3):
            present(front, rank).kill()
        wait_until(lambda: pool_of(front, "both-1")["phase"] == "waiting", lambda: f"{status(front)}")
        assert front.get("/health").status_code == 200 and status(front)["phase"] == "serving"
        assert metric(front, "wideep:parked_choices") == 0
    assert status(front)["replays"] > 0 and not any(rank.wrong_replays for rank in front.ranks)
    assert choices(front) == wanted
    assert not any(outstanding(front, rank) for rank in range(4))
    for rank in (2, 3):
        front.attach(rank, num_restarts=1)
    wait_until(lambda: serves_with(front, "both-1", [2, 3]), lambda: f"{status(front)}")
    assert choices(front) == wanted


@pytest.mark.slow
def test_requests_leave_a_pool_whose_living_ranks_do_not_meet_again(front: FrontProcess) -> None:
    with held_choices(front) as wanted:
        for rank in (2, 3):
            present(front, rank).on_order = lambda _order: None
        present(front, 2).link.send(Fault(0, "a peer is gone", is_final=False))
        wait_until(lambda: not any(outstanding(front, rank) for rank in (2, 3)), lambda: "requests stay")
        assert pool_of(front, "both-1")["phase"] == "regrouping" and status(front)["losses"] == 0
    assert present(front, 2).aborted or present(front, 3).aborted
    assert present(front, 2).orders[-1].stopped == (2,), "rank 3 need not wait for it"
    for rank in (2, 3):
        present(front, rank).link.send(Regrouped(present(front, rank).orders[-1].epoch))
    wait_until(lambda: serves_with(front, "both-1", [2, 3]), lambda: f"{status(front)}")
    assert choices(front) == wanted
    assert not any(rank.wrong_replays for rank in front.ranks)


@pytest.mark.slow
def test_experts_of_a_pool_are_asked_for_by_its_name(front: FrontProcess) -> None:
    loads = {name: front.get("/experts/load", params={"pool": name}).json() for name in POOLS}
    assert [[each["rank"] for each in loads[name]["ranks"]] for name in POOLS] == [[0, 1], [2, 3]]
    assert front.get("/experts/load").json()["ranks"] == loads["both-0"]["ranks"], "the first one by default"
    prepared: list[int] = []
    for rank in range(4):
        present(front, rank)._on_prepare = lambda each, _placement: prepared.append(each.rank)
    for path in ("/experts/plan", "/experts/apply", "/experts/rollback", "/start_expert_distribution_record"):
        refused = front.post(path, params={"pool": "decode"})
        assert refused.status_code == 400, refused.text
        assert (
            "Pool 'decode' does not exist; the pools are both-0, both-1" in refused.json()["error"]["message"]
        )
    assert front.get("/experts/history", params={"pool": ""}).status_code == 400
    swapped = Placement(HOME.slot_expert[:, ::-1].copy(), HOME.num_experts, HOME.num_ranks)
    body = {"placement": to_json(swapped), "wait": False}
    begun = front.post("/experts/apply", params={"pool": "both-1"}, json=body)
    assert begun.status_code == 202, begun.text
    wait_until(lambda: sorted(prepared) == [2, 3], lambda: f"only {prepared} move experts")
    assert front.get("/experts/history", params={"pool": "both-1"}).json()["under_way"] is not None
    assert front.get("/experts/history").json()["under_way"] is None


@pytest.mark.slow
def test_a_pool_that_stays_away_does_not_end_the_service_but_the_last_one_does(model_dir: Path) -> None:
    front = front_of(model_dir, "--rank-recovery-timeout=0.3")
    try:
        for rank in (2, 3):
            present(front, rank).kill()
        wait_until(
            lambda: "pool both-1 does not serve until its ranks return" in said(front),
            lambda: f"{status(front)}",
        )
        assert front.get("/health").status_code == 200
        front.attach(2, num_restarts=1)
        wait_until(lambda: serves_with(front, "both-1", [2]), lambda: f"{status(front)}")
        for rank in (0, 1):
            present(front, rank).kill()
        wait_until(
            lambda: "pool both-0 does not serve until its ranks return" in said(front),
            lambda: f"{status(front)}",
        )
        assert front.get("/health").status_code == 200, "the other pool serves again"
        present(front, 2).kill()
        code, text = front.wait()
        assert code == 1 and "no rank came back for 0.3 s: rank 2 is lost" in text
    finally:
        front.close()


@pytest.mark.slow
def test_a_rank_that_is_lost_before_its_pool_has_served_ends_the_service(model_dir: Path) -> None:
    front = FrontProcess(model_dir, "--served-model-name=m", "--pools=both:1,both:2", num_ranks=3)
    try:
        front.attach(0).begin(linear_placement(2, 4, 1))
        front.attach(1)
        rank: FakeRank = present(front, 1)
        rank.kill()
        code, text = front.wait()
        assert code == 1 and "rank 1 is lost" in text
    finally:
        front.close()
