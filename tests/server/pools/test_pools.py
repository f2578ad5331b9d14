"""Several pools behind one front: real engines, real signals. Answers are those of one expert group, with and without faults."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dispatch.ports import free_port
from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from expert_placement.placement import Placement
from tests.server.faults.test_faults import PIECES, bodies, kill, supervisor_of
from tests.support.placement.placements import held, random_placement
from tests.support.requests.timed_streams import TimedStream, stream_all
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import has_ended, wait_until
from tests.support.service.torchruns import Torchrun

pytestmark = pytest.mark.slow

END_S = 60.0
Said = list[tuple[object, ...]]


@contextlib.contextmanager
def running(model: Path, log: Path, *flags: str) -> Iterator[RealService]:
    with RealService.serve(model, log, "--max-rank-restarts=20", *flags) as service:
        yield service.wait_ready()


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The answers of one expert group of two ranks."""
    with running(model, tmp_path_factory.mktemp("one") / "output.txt", "-dp=2") as service:
        return said(stream_all(service.url, bodies()))


@pytest.fixture(scope="module")
def replicas(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """Two pools of one rank. Each test leaves both serving."""
    with running(
        model, tmp_path_factory.mktemp("replicas") / "output.txt", "--pools=both:1,both:1"
    ) as service:
        yield service


@pytest.fixture(scope="module")
def pairs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """Two pools of two ranks. Each test leaves both serving."""
    with running(model, tmp_path_factory.mktemp("pairs") / "output.txt", "--pools=both:2,both:2") as service:
        yield service


def said(streams: list[TimedStream]) -> Said:
    return [stream.said for stream in streams]


def pool_of(service: RealService, name: str) -> dict[str, Any]:
    """Return a pool's state. It is empty while the front is away."""
    try:
        pools = service.status()["pools"]
    except httpx.TransportError:
        return {}
    return next(dict(each) for each in pools if each["pool"] == name)


def is_whole(service: RealService, name: str) -> bool:
    pool = pool_of(service, name)
    return bool(pool) and (pool["phase"], pool["members"]) == ("serving", pool["ranks"])


def wait_until_whole(service: RealService) -> None:
    for name in ("both-0", "both-1"):
        wait_until(
            lambda: is_whole(service, name),  # noqa: B023
            lambda: f"{service.status()}\n{service.output()}",
            within_s=START_S,
        )


def tokens_of_ranks(service: RealService) -> dict[int, float]:
    name = "vllm:generation_tokens_total{"
    lines = [line for line in service.get("/metrics").text.splitlines() if line.startswith(name)]
    return {int(line.partition('engine="')[2].partition('"')[0]): float(line.split()[-1]) for line in lines}


def test_replicas_of_one_rank_answer_as_one_group(replicas: RealService, expected: Said) -> None:
    assert said(stream_all(replicas.url, bodies())) == expected
    assert all(tokens > 0 for tokens in tokens_of_ranks(replicas).values()), "both pools serve requests"
    assert [each["members"] for each in replicas.status()["pools"]] == [[0], [1]]
    server = replicas.get("/server_info").json()
    assert (server["dp_size"], server["ep_size"]) == (2, 1)
    one = replicas.get("/server_info").json()["internal_states"]
    assert server["max_total_num_tokens"] == sum(each["max_total_num_tokens"] for each in one)
    assert "serving" in replicas.output() and "2 ranks (both-0 1, both-1 1)" in replicas.output()


def test_a_lost_pool_s_streams_continue_on_the_other_and_it_returns(
    replicas: RealService, expected: Said
) -> None:
    for rank in (1, 0):
        wait_until_whole(replicas)
        before = pool_of(replicas, f"both-{1 - rank}")["epoch"]
        streams = stream_all(replicas.url, bodies(), pieces=PIECES, then=lambda: kill(replicas, rank))  # noqa: B023
        assert said(streams) == expected
        wait_until_whole(replicas)
        assert pool_of(replicas, f"both-{1 - rank}")["epoch"] == before, "the other pool notices nothing"
        assert said(stream_all(replicas.url, bodies())) == expected
    assert "of pool both-1 is lost" in str(replicas.status()["events"])


def test_a_killed_front_finds_both_pools_again(replicas: RealService, expected: Said) -> None:
    wait_until_whole(replicas)
    engines, front = replicas.engines(), replicas.find("front")
    os.kill(front, signal.SIGKILL)
    assert has_ended(front, END_S)
    wait_until_whole(replicas)
    assert said(stream_all(replicas.url, bodies())) == expected
    assert replicas.engines() == engines


def test_a_pool_that_dies_with_the_front_returns_while_the_other_serves(
    replicas: RealService, expected: Said
) -> None:
    """Nothing remains of the first pool: no engine has its placement, and no front."""
    wait_until_whole(replicas)
    first = replicas.engines()
    os.kill(supervisor_of(first[0]), signal.SIGKILL)  # runs the front as well
    assert has_ended(first[0], END_S)
    wait_until(lambda: is_whole(replicas, "both-1"), replicas.output, within_s=START_S)
    assert said(stream_all(replicas.url, bodies())) == expected
    wait_until_whole(replicas)
    assert said(stream_all(replicas.url, bodies())) == expected
    assert replicas.engines()[1] == first[1], "the other engine is the same"
    assert all(tokens > 0 for tokens in tokens_of_ranks(replicas).values())


def test_pairs_answer_as_one_group_and_only_the_pool_of_a_lost_rank_regroups(
    pairs: RealService, expected: Said
) -> None:
    assert said(stream_all(pairs.url, bodies())) == expected
    before = {name: pool_of(pairs, name)["epoch"] for name in ("both-0", "both-1")}
    streams = stream_all(pairs.url, bodies(), pieces=PIECES, then=lambda: kill(pairs, 3))
    assert said(streams) == expected
    wait_until(  # on a busy machine, streams may end before the loss is noticed
        lambda: pool_of(pairs, "both-1").get("epoch", 0) >= before["both-1"] + 2,
        pairs.output,
        within_s=START_S,
    )
    wait_until_whole(pairs)
    assert pool_of(pairs, "both-0")["epoch"] == before["both-0"], "the other pool notices nothing"
    assert said(stream_all(pairs.url, bodies())) == expected


def test_a_whole_pool_of_pairs_dies_and_returns(pairs: RealService, expected: Said) -> None:
    wait_until_whole(pairs)
    streams = stream_all(pairs.url, bodies(), pieces=PIECES, then=lambda: kill(pairs, 0, 1))
    assert said(streams) == expected
    wait_until_whole(pairs)
    assert said(stream_all(pairs.url, bodies())) == expected


def serving(service: RealService, pool: str) -> Placement:
    answer = httpx.get(f"{service.url}/experts/history", params={"pool": pool}, timeout=60)
    answer.raise_for_status()
    return from_json(answer.json()["serving"])


def test_placements_of_pools_change_independently(pairs: RealService, expected: Said) -> None:
    wait_until_whole(pairs)
    before = serving(pairs, "both-0")
    now = serving(pairs, "both-1")
    sizes = now.num_layers, now.num_experts, now.num_ranks, now.slots_per_rank
    target = align(random_placement(*sizes, seed=5), now)
    told: list[httpx.Response] = []

    def change() -> None:
        url = f"{pairs.url}/experts/apply"
        told.append(
            httpx.post(url, params={"pool": "both-1"}, json={"placement": to_json(target)}, timeout=180)
        )

    assert said(stream_all(pairs.url, bodies(), pieces=PIECES, then=change)) == expected
    entry = told[0].json()
    assert told[0].status_code == 200 and entry["failed"] is None and entry["moves"] > 0, told[0].text
    assert held(serving(pairs, "both-1")) == held(target)
    assert serving(pairs, "both-0").digest() == before.digest()
    assert said(stream_all(pairs.url, bodies())) == expected
    first = httpx.post(f"{pairs.url}/experts/rollback", timeout=180)
    assert first.status_code == 400 and "no earlier placement" in first.text, "the first pool has not changed"
    back = httpx.post(f"{pairs.url}/experts/rollback", params={"pool": "both-1"}, timeout=180)
    assert back.status_code == 200, back.text
    assert held(serving(pairs, "both-1")) == held(now)


def test_pools_with_roles_share_host_memory_by_default(model: Path, expected: Said, tmp_path: Path) -> None:
    with running(model, tmp_path / "output.txt", "--pools=prefill:1,decode:1") as service:
        assert said(stream_all(service.url, bodies())) == expected
        (node,) = service.status()["tiers"]
        assert node["ranks"] == [0, 1] and node["host_capacity_bytes"] > 0
        assert "10% of this machine's by default (--kv-offloading-size)" in service.output()


def test_a_pool_whose_rank_cannot_hold_all_experts_is_refused_with_numbers(
    model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "output.txt"
    with RealService.serve(model, log, "--pools=both:1,both:2", "--kv-cache-memory=100000G") as service:
        assert service.wait_ended() != [0]
        assert "3 ranks on this node would need about" in service.output()
        assert "The largest rank, of the smallest pool, holds" in service.output()


def test_pools_on_two_nodes_need_the_same_flag_and_serve_together(
    model: Path, expected: Said, tmp_path: Path
) -> None:
    """Each node is a pool: its rank meets no other one, although both share the job's store."""

    def start(log: Path, *pools: str) -> RealService:
        port, meeting = free_port(), free_port()
        commands = [
            Torchrun(
                [
                    *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
                    f"--rdzv-endpoint=127.0.0.1:{meeting}",
                ],
                ["worker", str(model), f"--port={port}", "--kv-cache-memory=16M", f"--pools={each}"],
            )
            for each in pools
        ]
        return RealService(port, commands, log)

    with start(tmp_path / "output.txt", "both:1,both:1", "both:1,both:1") as service:
        service.wait_ready()
        assert said(stream_all(service.url, bodies())) == expected
        assert [each["members"] for each in service.status()["pools"]] == [[0], [1]]
        kill(service, 1)
        wait_until(lambda: not is_whole(service, "both-1"), service.output)
        wait_until_whole(service)
        assert said(stream_all(service.url, bodies())) == expected
    with start(tmp_path / "refused.txt", "both:1,both:1", "both:2") as service:
        service.wait_ended()
        assert "the nodes have different --pools" in service.output()
