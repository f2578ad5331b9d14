"""Pools that join a service with two fronts: every front gives them requests, also after a kill."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expert_placement.placement import Placement, linear_placement
from server.link.messages import Served
from tests.server.front.test_front_recovery import ask, metric, present, status
from tests.server.front.test_joined_pools import ANSWER, HOME, handed_over, has_joined, pools, wanted
from tests.support.service.fake_rank import EXPERT_BYTES, experts_of
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until
from tests.support.service.several_fronts import SeveralFronts, several_fronts

FIRST = linear_placement(2, 4, 1)  # of the pool that starts the service
BODY: dict[str, Any] = {"prompt": "f-say"}


@pytest.fixture
def service(model_dir: Path, tmp_path: Path) -> Iterator[SeveralFronts]:
    """Two fronts with one pool of one rank, as of a first torchrun with --pool."""
    flags = ("--pool=first", "--role=prefill", "--prefill-threshold=0")
    with several_fronts(model_dir, tmp_path / "kept", *flags, num_ranks=1) as fronts:
        leading = fronts.fronts[0]
        leading.ranks[0].begin(FIRST)
        wait_until(lambda: leading.get("/experts/history").status_code == 200, lambda: "no placement")
        fronts.script("f-say", ANSWER, num_cached_tokens=1)
        yield fronts


def join(service: SeveralFronts, run: str = "run") -> None:
    """Let two ranks of a pool attach to all fronts, as their processes do: to the leading one first."""
    for rank in (0, 1):
        given = wanted(service.fronts[0], run, rank)
        for front in service.fronts:
            how = {"num_restarts": given.num_restarts, "world_size": given.world_size}
            front.attach(given.rank, **how, loaded=HOME)
    wait_until(lambda: has_joined(service.fronts[0]), lambda: f"{status(service.fronts[0])}")


def come_back(front: FrontProcess) -> None:
    """Let the ranks of both pools return to a front that was killed."""
    for rank, world_size, home in ((0, 1, FIRST), (1, 3, HOME), (2, 3, HOME)):
        front.attach(rank, num_restarts=int(rank > 0), world_size=world_size, served=served(home))


def served(home: Placement) -> Served:
    return Served(1, home.version, home, EXPERT_BYTES, experts_of(home))


def kill(service: SeveralFronts, rank: int) -> None:
    for front in service.fronts:
        present(front, rank).kill()


def is_handed_over_by(front: FrontProcess) -> bool:
    """Ask a front, and return whether the request was handed over to the pool that joined."""
    before = handed_over(front)
    assert ask(front, "/v1/completions", BODY)["choices"][0]["text"] == ANSWER
    return handed_over(front) > before


def test_every_front_gives_requests_to_a_pool_that_joins(service: SeveralFronts) -> None:
    first, second = service.fronts
    assert not is_handed_over_by(first) and not is_handed_over_by(second)
    join(service)
    wait_until(lambda: is_handed_over_by(second), lambda: "the front does not use the pool")
    assert is_handed_over_by(first)
    assert present(second, 0).requests[-1].hands_over
    assert any(present(second, rank).requests for rank in (1, 2))
    assert pools(first) == pools(second) and status(second)["total_engines"] == 3
    assert not any(rank.wrong_replays for front in service.fronts for rank in front.ranks)


@pytest.mark.slow
def test_requests_of_every_front_leave_a_pool_that_does_not_meet_again(service: SeveralFronts) -> None:
    join(service)
    first, second = service.fronts
    wait_until(lambda: is_handed_over_by(second), lambda: "the front does not use the pool")
    gate = threading.Event()
    service.script("f-say", ANSWER, gates={3: gate}, num_cached_tokens=1)
    before = metric(first, "vllm:generation_tokens_total")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, second, "/v1/completions", BODY)
        wait_until(
            lambda: metric(first, "vllm:generation_tokens_total") >= before + 3, lambda: "no tokens come"
        )
        (rank,) = (each for each in (1, 2) if present(second, each).num_open)
        present(first, rank).on_order = lambda _order: None  # it never meets
        kill(service, 3 - rank)
        moved = present(second, 0).requests
        wait_until(lambda: bool(moved[-1].replayed_ids), lambda: f"{status(first)}")
        gate.set()
        assert asked.result(TIMEOUT_S)["choices"][0]["text"] == ANSWER
    assert not any(rank.wrong_replays for rank in second.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_front_finds_the_pool_again(service: SeveralFronts, number: int) -> None:
    join(service)
    service.kill(number)
    killed, other = service.replace(number), service.fronts[1 - number]
    come_back(killed)
    wait_until(lambda: has_joined(service.fronts[0]), lambda: f"{status(service.fronts[0])}")
    service.wait_ready()
    wait_until(lambda: is_handed_over_by(killed), lambda: "the front does not use the pool")
    assert is_handed_over_by(other)


@pytest.mark.slow
def test_a_pool_that_is_lost_leaves_the_requests_of_every_front_to_the_other_and_returns(
    service: SeveralFronts,
) -> None:
    join(service)
    first, second = service.fronts
    wait_until(lambda: is_handed_over_by(second), lambda: "the front does not use the pool")
    for rank in (1, 2):
        kill(service, rank)
    wait_until(lambda: pools(first)["decode"]["phase"] == "waiting", lambda: f"{status(first)}")
    assert not is_handed_over_by(first) and not is_handed_over_by(second)
    join(service, "again")
    wait_until(lambda: is_handed_over_by(second), lambda: "the front does not use the pool")
