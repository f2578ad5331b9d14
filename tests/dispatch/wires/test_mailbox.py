"""The mailbox: every rank collects all ranks' values of the same round, or raises a named error."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from dispatch.errors import DispatchError, PeerLost
from dispatch.wires.mailbox import MAX_WIDTH, LocalMailbox, open_mailbox
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf


def run_rounds(name: str, count: int, width: int) -> list[list[list[int]]]:
    mailbox = open_mailbox(name, dist.group.WORLD, width=width)
    rounds = []
    for index in range(count):
        mailbox.post([index * 100 + dist.get_rank()] * (width - 1) + [-index])
        rounds.append(mailbox.collect(10.0))
    mailbox.close()
    return rounds


@pytest.mark.parametrize(("name", "world_size"), [("shm", 2), ("shm", 4), ("gloo", 2), ("gloo", 4)])
def test_every_rank_collects_the_same_round(pool_of: PoolOf, name: str, world_size: int) -> None:
    width = MAX_WIDTH if world_size == 2 else 6
    want = [
        [[index * 100 + rank] * (width - 1) + [-index] for rank in range(world_size)] for index in range(50)
    ]
    assert pool_of(world_size).run(run_rounds, name, 50, width) == [want] * world_size


def post_does_not_wait(name: str) -> list[list[int]]:
    """Post on rank 0. Rank 1 posts only after a signal through the store."""
    store = dist.distributed_c10d._get_default_store()
    mailbox = open_mailbox(name, dist.group.WORLD, width=1)
    if dist.get_rank() == 1:
        store.wait([f"posted-{name}"])
    mailbox.post([dist.get_rank()])
    store.set(f"posted-{name}", "yes")
    collected = mailbox.collect(10.0)
    mailbox.close()
    return collected


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_posting_does_not_wait_for_anybody(pool_of: PoolOf, name: str) -> None:
    assert pool_of(2).run(post_does_not_wait, name) == [[[0], [1]]] * 2


def lose_rank_one(name: str, number: int, timeout_s: float) -> str:
    mailbox = open_mailbox(name, dist.group.WORLD, width=2)
    mailbox.post([1, 2])
    mailbox.collect(10.0)
    # Rank 1 may have collected while its threads still send to rank 0.
    store, key = dist.distributed_c10d._get_default_store(), f"collected-{name}-{number}"
    if dist.get_rank() == 1:
        store.wait([key])
        os.kill(os.getpid(), number)
    store.set(key, "yes")
    mailbox.post([3, 4])
    said = catch(lambda: mailbox.collect(timeout_s))
    mailbox.close()
    return said


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_killed_peer_is_lost(pool_of: PoolOf, name: str) -> None:
    pool = pool_of(2)
    pool.start(lose_rank_one, name, signal.SIGKILL, 30.0)
    assert pool.collect(may_die=[1], timeout_s=25.0)[0].startswith("PeerLost: rank 1 is lost")


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_stopped_peer_times_out(pool_of: PoolOf, name: str) -> None:
    pool = pool_of(2)
    pool.start(lose_rank_one, name, signal.SIGSTOP, 0.5)
    (said,) = pool.collect(ranks=[0])
    assert said.startswith("DispatchTimeout: rank 1 sent nothing")
    pool.close()


def interrupt_a_wait(name: str) -> tuple[str, list[list[int]]]:
    """Post on rank 1 only after rank 0 was interrupted. Both then meet in another mailbox."""
    store = dist.distributed_c10d._get_default_store()
    mailbox = open_mailbox(name, group := dist.new_group([0, 1]), width=1)
    said = ""
    if dist.get_rank() == 0:
        mailbox.post([1])
        given_up = threading.Timer(0.3, mailbox.interrupt, [PeerLost(1, "the front has given it up")])
        given_up.start()
        try:
            mailbox.collect(60.0)
        except PeerLost as error:
            said = str(error)
        given_up.join()
        store.set(f"interrupted-{name}", "yes")
    else:
        store.wait([f"interrupted-{name}"])
    mailbox.close()
    mailbox = open_mailbox(name, dist.new_group([0, 1]), width=1)
    mailbox.post([dist.get_rank()])
    collected = mailbox.collect(10.0)
    mailbox.close()
    dist.destroy_process_group(group)
    return said, collected


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_wait_is_interrupted_from_another_thread(pool_of: PoolOf, name: str) -> None:
    (said, first), (_, second) = pool_of(2).run(interrupt_a_wait, name)
    assert said == "rank 1 is lost: the front has given it up"
    assert first == second == [[0], [1]]


def test_one_rank_collects_what_it_posted() -> None:
    mailbox = open_mailbox("auto", None, width=2)
    mailbox.post([1, -5])
    assert mailbox.collect(0.0) == [[1, -5]]


def test_post_and_collect_alternate() -> None:
    mailbox = LocalMailbox(1)
    with pytest.raises(DispatchError, match="collect called without a post"):
        mailbox.collect(0.0)
    mailbox.post([1])
    with pytest.raises(DispatchError, match="before the last round was collected"):
        mailbox.post([2])


def test_bad_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="width is 0; it must be 1 to 15"):
        open_mailbox("auto", None, width=0)
    with pytest.raises(ValueError, match="values has 1 entries; this mailbox was opened for 2"):
        LocalMailbox(2).post([1])
    with pytest.raises(ValueError, match="mailbox is 'mpi'"):
        open_mailbox("mpi", None, width=1)
