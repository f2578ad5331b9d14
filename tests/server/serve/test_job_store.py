"""Ranks find the job's store when it has moved to another node."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from dispatch.ports import free_port
from server.serve.child_messages import joined_announcement
from server.serve.node_fronts import map_of, returning_fronts
from server.serve.store import job_store
from server.serve.store.claim import find_service
from server.serve.store.job_store import FRONT_KEY, JobStore, NodeFrontsError, NoStandbyError
from server.serve.store.meeting import Endpoint
from server.serve.store.moving_store import MovingStore, StoreAddress
from server.serve.store.rendezvous import Place
from tests.support.ranks import rank_context

WAIT_S = 60.0
KEY = b"k" * 32
FRONT = {"http": "http://0.0.0.0:8000", "ranks_address": "10.0.0.1:5", "token": "secret"}
BOUND = {"http": "http://0.0.0.0:8000", "ranks_address": "10.0.0.2:6", "token": "unused"}


def hosted() -> tuple[TCPStore, Endpoint]:
    """Host a store in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, Endpoint("127.0.0.1", store.port)


def host(port: int, test: Connection) -> None:
    """Host a store until the test is over."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    test.send(store.port)
    with contextlib.suppress(EOFError):
        test.recv()


@pytest.fixture
def first() -> Iterator[tuple[Endpoint, BaseProcess]]:
    """Host a store in a process that may be killed. It is forked like ranks, which saves the import of torch."""
    port, context = free_port(), rank_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=host, args=(port, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        assert ours.recv() == port
        yield Endpoint("127.0.0.1", port), process
        process.kill()
        process.join()


def place(endpoint: Endpoint, rank: int = 0) -> Place:
    return Place(
        rank=rank, world_size=2, local_rank=0, local_world_size=1, master_addr=endpoint.host, master_port=endpoint.port
    )  # fmt: skip


def test_waiting_and_writing_ranks_meet_in_the_store_to_which_they_move(
    first: tuple[Endpoint, BaseProcess],
) -> None:
    endpoint, process = first
    second, there = hosted()
    address = StoreAddress(endpoint)
    stores = [PrefixStore("epoch", MovingStore(address, recovery_s=WAIT_S)) for _ in range(2)]
    stores[1].set("before", "1")
    assert stores[0].get("before") == b"1" and stores[1].check(["before"])
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(stores[0].wait, ["bell"], timedelta(seconds=WAIT_S))
        process.kill()
        process.join()
        address.move(there)
        stores[1].set("bell", "1")
        waits.result(WAIT_S)
    assert second.get("epoch/bell") == b"1"
    assert stores[0].compare_set("fate", "", "meets") == b"meets"
    assert stores[1].compare_set("fate", "", "is over") == b"meets"
    assert stores[0].add("n", 2) == 2 and stores[1].delete_key("n")


def test_a_write_to_a_broken_connection_is_repeated(first: tuple[Endpoint, BaseProcess]) -> None:
    """TCPStore's own `set` raises nothing then, so the others would wait for the value."""
    endpoint, process = first
    address = StoreAddress(endpoint)
    store = MovingStore(address, recovery_s=WAIT_S)
    store.set("a", "1")
    process.kill()
    process.join()
    second, there = hosted()
    timer = threading.Timer(0.3, address.move, [there])  # while the operation looks for a store
    timer.start()
    store.set("b", "2")
    timer.join()
    assert second.get("b") == b"2"


def test_without_a_store_an_operation_fails_in_time(
    first: tuple[Endpoint, BaseProcess],
) -> None:
    endpoint, process = first
    store = MovingStore(StoreAddress(endpoint), recovery_s=0.2)
    store.set("a", "1")
    process.kill()
    process.join()
    with pytest.raises(dist.DistNetworkError, match=f"no store answers at {endpoint}"):
        store.check(["a"])


def test_a_timeout_is_passed_on() -> None:
    _, there = hosted()
    with pytest.raises(dist.DistStoreError):
        MovingStore(StoreAddress(there), recovery_s=WAIT_S).wait(["a"], timedelta(seconds=0.05))


@pytest.mark.crossed("key", every=2)
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a cluster key"])
def test_all_ranks_find_both_fronts_and_a_node_that_joins_finds_the_standbys(key: bytes | None) -> None:
    (_first, endpoint), (_second, there) = hosted(), hosted()
    jobs = [
        JobStore(place(endpoint, rank), {}, key, standby=str(there), recovery_s=WAIT_S) for rank in (0, 1)
    ]
    jobs[0].publish(FRONT, jobs[0].open())
    assert jobs[1].publish_standby(BOUND, jobs[1].open()) == FRONT
    expected = {**BOUND, "token": "secret"}
    assert [each.find_standby(each.open(), is_start=True) for each in jobs] == [expected] * 2
    assert find_service(str(endpoint), key)["front"] == FRONT
    assert find_service(str(there), key)["front"] == expected
    jobs[0].move()
    assert json.loads(jobs[0].open().get(FRONT_KEY)) == expected
    assert jobs[0].find_standby(jobs[0].open(), is_start=False) is None, "it has taken over"


def test_nodes_with_different_numbers_of_fronts_are_refused() -> None:
    (_first, endpoint), (_second, there) = hosted(), hosted()
    jobs = JobStore(place(endpoint), {}, None, standby=str(there), recovery_s=WAIT_S)
    jobs.publish(FRONT, jobs.open())
    with pytest.raises(
        NoStandbyError, match="--api-server-count is 2 on this node, which is the standby, and 1 on"
    ):
        jobs.publish_standby({**BOUND, "others": "b:2"}, jobs.open())


def test_the_fronts_of_all_nodes_are_announced_together_those_of_the_leading_one_first() -> None:
    _store, endpoint = hosted()
    jobs = [JobStore(place(endpoint, rank), {}, None) for rank in range(3)]
    bound = [{**BOUND, "ranks_address": f"n{node}:1", "others": f"n{node}:2"} for node in range(3)]
    nodes = {jobs[each].publish_further(bound[each], jobs[each].open()): each for each in (2, 1)}
    announced = jobs[0].gather_fronts(bound[0], jobs[0].open(), 3)
    assert sorted(nodes) == [1, 2] and announced["token"] == bound[0]["token"]
    expected = [f"n{each}:{port}" for each in (0, nodes[1], nodes[2]) for port in (1, 2)]
    found = map_of(announced, 2)
    assert (list(found.addresses), found.num_per_node, list(found.near)) == (expected, 2, [4, 5])


def test_a_node_without_fronts_or_with_another_number_ends_the_start_with_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_store, "FRONTS_TIMEOUT_S", 0.05)
    _store, endpoint = hosted()
    jobs = JobStore(place(endpoint), {}, None)
    with pytest.raises(NodeFrontsError, match="1 of 2 nodes started no front within"):
        jobs.gather_fronts(FRONT, jobs.open(), 2)
    jobs.publish_further({**BOUND, "others": "b:2"}, jobs.open())
    with pytest.raises(NodeFrontsError, match="--api-server-count differs: the nodes have 1, 2 fronts"):
        jobs.gather_fronts(FRONT, jobs.open(), 2)


def test_a_node_that_returns_has_the_lost_fronts_of_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as running:
        alive = f"127.0.0.1:{running.getsockname()[1]}"
        lost = f"127.0.0.1:{free_port()}"
        announced = joined_announcement(
            [FRONT, {**BOUND, "ranks_address": alive}, {**BOUND, "ranks_address": lost}]
        )
        found = returning_fronts(announced, "127.0.0.1")
        assert found is not None and found.node == 2 and found.addresses[found.near.start] == lost
        assert returning_fronts(announced, "127.0.0.2") is None
        assert returning_fronts(FRONT, "10.0.0.1") is None, "all fronts are on one node"


@pytest.mark.slow
def test_an_engine_that_starts_later_uses_the_store_that_has_a_front() -> None:
    (first, endpoint), (_second, there) = hosted(), hosted()
    jobs = [JobStore(place(endpoint), {}, None, standby=str(there), recovery_s=WAIT_S) for _ in range(2)]
    jobs[0].publish(FRONT, jobs[0].open())
    jobs[0].publish_standby(BOUND, jobs[0].open())
    jobs[0].move_if_lost()
    assert json.loads(jobs[0].open().get(FRONT_KEY)) == FRONT
    first.delete_key("wideep/0/0/front")  # as on a node that was started again
    jobs[1].move_if_lost()
    assert json.loads(jobs[1].open().get(FRONT_KEY))["ranks_address"] == BOUND["ranks_address"]


def test_an_address_of_no_node_ends_the_start_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "FRONTS_TIMEOUT_S", 0.05)
    _first, endpoint = hosted()
    jobs = JobStore(place(endpoint), {}, None, standby="10.0.0.9:29401", recovery_s=WAIT_S)
    with pytest.raises(NoStandbyError, match=r"--standby is 10\.0\.0\.9:29401, but no node of the service"):
        jobs.find_standby(jobs.open(), is_start=True)


@pytest.mark.slow
def test_a_ring_in_a_lost_store_has_no_effect_and_one_in_the_next_store_wakes_a_rank(
    first: tuple[Endpoint, BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "_RING_S", 0.2)
    endpoint, process = first
    _second, there = hosted()
    jobs = JobStore(place(endpoint), {}, None, standby=str(there), recovery_s=WAIT_S)
    bell = jobs.open_doorbell("bell")
    bell.ring(1)
    bell.wait(1)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(bell.wait, 2)
        process.kill()
        process.join()
        bell.ring(2)
        assert not waits.done()
        jobs.move()
        bell.ring(2)
        waits.result(WAIT_S)


def test_without_the_flag_there_is_one_store() -> None:
    _first, endpoint = hosted()
    jobs = JobStore(place(endpoint), {}, None)
    jobs.move_if_lost()
    assert jobs.find_standby(jobs.open(), is_start=True) is None
    jobs.open().set("a", "1")
    assert jobs.open().get("a") == b"1"
