"""A front to which torchruns add pools of scripted ranks: the pools serve once whole, and clients see no difference."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expert_placement.placement import linear_placement
from server.front.members.nodes import JoinedPools
from server.link.messages import Claim, Claimed, PoolClaim
from server.link.rank_link import LinkError, claim
from server.options.pools import Pool, Role
from tests.server.front.adapters.test_adapters import write
from tests.server.front.test_front_recovery import BODIES, ask, metric, present, status
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

ANSWER = "one two three four"
HOME = linear_placement(2, 4, 2)  # of the pool that joins
DECODE = Pool("decode", Role.DECODE, 1, 2)


@pytest.fixture
def front(model_dir: Path) -> Iterator[FrontProcess]:
    """A front with one pool of one rank, as of a first torchrun with --pool."""
    flags = ("--pool=first", "--role=prefill", "--prefill-threshold=0")
    process = FrontProcess(model_dir, "--served-model-name=m", *flags, num_ranks=1)
    process.attach_all()
    process.ranks[0].begin(linear_placement(2, 4, 1))
    wait_until(lambda: process.get("/experts/history").status_code == 200, lambda: "no placement")
    process.script("f-say", ANSWER, num_cached_tokens=1)
    yield process
    assert process.close()[0] == 0


def wanted(front: FrontProcess, run: str, rank: int, role: Role = Role.DECODE) -> Claimed:
    """Claim a rank, as a worker of a torchrun with two workers on one node does."""
    asked = Claim(run, rank, 2, PoolClaim("decode", role, run, rank, 2))
    return claim(front.ranks_address, front.token, asked, TIMEOUT_S)


def attach(front: FrontProcess, given: Claimed) -> None:
    front.attach(given.rank, num_restarts=given.num_restarts, world_size=given.world_size, loaded=HOME)


def pools(front: FrontProcess) -> dict[str, dict[str, Any]]:
    return {each["pool"]: each for each in status(front)["pools"]}


def has_joined(front: FrontProcess) -> bool:
    decode = pools(front).get("decode", {})
    return bool(decode) and (decode["phase"], decode["members"]) == ("serving", [1, 2])


def join(front: FrontProcess, run: str = "run") -> None:
    for rank in (0, 1):
        attach(front, wanted(front, run, rank))
    wait_until(lambda: has_joined(front), lambda: f"{status(front)}")


def handed_over(front: FrontProcess) -> float:
    text = front.get("/metrics").text
    found = re.search(r'^wideep:request_moves_total{cause="hand_over".*} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def test_a_pool_serves_once_all_of_its_ranks_have_joined(front: FrontProcess) -> None:
    path, body = BODIES["a stream of choices"]
    expected = ask(front, path, body)
    given = [wanted(front, "run", rank) for rank in (1, 0)]
    assert given == [Claimed(rank, 3, 1, pool=DECODE) for rank in (2, 1)]
    assert list(pools(front)) == ["first"], "a claim alone adds nothing"
    attach(front, given[0])
    decode = pools(front)["decode"]
    assert (decode["phase"], decode["members"], decode["ranks"]) == ("waiting", [], [1, 2])
    now = status(front)
    assert (now["phase"], now["members"], now["total_engines"]) == ("serving", [0], 3)
    assert [(each["rank"], each["reason"]) for each in now["missing"]] == [(1, "it has not joined yet")]
    assert front.get("/health").status_code == 200
    assert ask(front, path, body) == expected and handed_over(front) == 0
    attach(front, given[1])
    wait_until(lambda: has_joined(front), lambda: f"{status(front)}")
    assert [present(front, rank).orders[-1].members for rank in (1, 2)] == [(1, 2)] * 2
    assert not present(front, 0).orders, "the first pool notices nothing"
    assert ask(front, path, body) == expected
    assert handed_over(front) == 2
    assert present(front, 0).requests[-1].hands_over
    assert not any(rank.wrong_replays for rank in front.ranks)
    lines = front.get("/metrics").text.splitlines()
    assert 'wideep:members{model_name="m",pool="first"} 1.0' in lines
    assert 'wideep:members{model_name="m",pool="decode"} 2.0' in lines
    assert metric(front, "vllm:engine_healthy") == 3
    assert any(line.startswith('vllm:num_requests_running{engine="2"') for line in lines)
    assert front.get("/experts/load", params={"pool": "decode"}).status_code == 200
    assert front.get("/server_info").json()["dp_size"] == 3
    assert "pool decode (decode, ranks 1 to 2) joins the service" in str(status(front)["events"])


def test_adapters_get_places_while_a_rank_waits_for_the_others_of_its_pool(
    model_dir: Path, tmp_path: Path
) -> None:
    flags = ("--pool=first", "--enable-lora", "--max-loras=1")
    front = FrontProcess(model_dir, "--served-model-name=m", *flags, num_ranks=1)
    front.attach_all()
    front.ranks[0].begin(linear_placement(2, 4, 1))
    for name in ("a", "b"):
        adapter = {"lora_name": name, "lora_path": write(tmp_path / name, alpha=ord(name))}
        assert front.post("/v1/load_lora_adapter", json=adapter).status_code == 200
    attach(front, wanted(front, "run", 0))
    present(front, 1).delays_adapters = True
    for name in ("a", "b"):
        assert front.post(
            "/v1/completions", json={"model": name, "prompt": "f-say", "max_tokens": 2}
        ).is_success
    assert front.close()[0] == 0


@pytest.mark.slow
def test_a_pool_that_dies_before_it_is_whole_disturbs_nothing_and_may_try_again(front: FrontProcess) -> None:
    attach(front, wanted(front, "run", 0))
    present(front, 1).kill()
    wait_until(lambda: len(status(front)["missing"]) == 2, lambda: f"{status(front)}")
    assert front.get("/health").status_code == 200
    assert "pool_lost" not in str(status(front)["events"])
    join(front, "again")


def test_a_pool_that_is_lost_leaves_its_requests_to_the_other_and_returns_under_its_name(
    front: FrontProcess,
) -> None:
    join(front)
    body = {"model": "m", "prompt": "f-say", "max_tokens": 40, "seed": 3}
    expected = front.post("/v1/completions", json=body).json()["choices"]
    gate = threading.Event()
    front.script("f-say", ANSWER, gates={3: gate}, num_cached_tokens=1)
    with ThreadPoolExecutor(1) as threads:
        before = metric(front, "vllm:generation_tokens_total")
        asked = threads.submit(front.post, "/v1/completions", json=body)
        wait_until(
            lambda: metric(front, "vllm:generation_tokens_total") >= before + 3, lambda: "no tokens come"
        )
        for rank in (1, 2):
            present(front, rank).kill()
        wait_until(lambda: pools(front)["decode"]["phase"] == "waiting", lambda: f"{status(front)}")
        gate.set()
        assert asked.result(TIMEOUT_S).json()["choices"] == expected
    assert status(front)["replays"] > 0
    refused = wanted(front, "other", 0, Role.BOTH)
    assert "pool decode has the role decode, not both" in refused.refusal and not refused.may_come
    join(front, "again")
    assert pools(front)["decode"]["epoch"] > 1
    assert front.post("/v1/completions", json=body).json()["choices"] == expected


@pytest.mark.slow
def test_a_second_pool_of_a_serving_pool_s_name_is_refused(front: FrontProcess) -> None:
    join(front)
    refused = wanted(front, "other", 0)
    assert "the service has a pool decode (decode, ranks 1 to 2)" in refused.refusal
    asked = Claim("other", 0, 1, PoolClaim("first", Role.PREFILL, "other", 0, 1))
    refused = claim(front.ranks_address, front.token, asked, TIMEOUT_S)
    assert "the service has a pool first (prefill, rank 0)" in refused.refusal
    assert has_joined(front)


@pytest.mark.slow
def test_a_rank_of_no_pool_is_refused(front: FrontProcess) -> None:
    with pytest.raises(LinkError, match="rank 1 of 2 does not belong to this service of 1 ranks"):
        front.attach(1, num_restarts=1, world_size=2, loaded=HOME)
    assert list(pools(front)) == ["first"]


def test_pools_that_have_joined_outlive_the_front(tmp_path: Path) -> None:
    path = tmp_path / "pools"
    joined = JoinedPools(path, is_again=False)
    assert joined.pools == []
    more = Pool("more-1", Role.BOTH, 3, 4)
    joined.add(DECODE)
    joined.add(more)
    assert JoinedPools(path, is_again=True).pools == [DECODE, more]
    assert JoinedPools(path, is_again=False).pools == [], "the service itself was started again"
