"""If a peer is killed, stopped or gone, every survivor raises a named error, and nothing leaks."""

import gc
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from dispatch.dispatcher import Dispatcher
from dispatch.errors import DispatchTimeout, PeerLost
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf

VICTIM = 2
STOP_TIMEOUT_S = 3.0  # long enough that no rank times out on a busy machine before the victim stops
ENOUGH_S = 15.0  # below the 30 s timeout, and ample for a busy machine: an idle one needs 0.1 s


class Outcome(NamedTuple):
    """Observations of a survivor."""

    error: str
    rank: int | None
    seconds: float
    mapped: int  # shared mappings and descriptors of the wire while it was open
    left: int  # and after it was closed


def shared_memory() -> Counter[int]:
    """Count this process's mappings and descriptors of the anonymous files that wires and caches share, by inode."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = Counter(int(fields[4]) for fields in maps if "memfd:wideep" in fields[-1])
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and "memfd:wideep" in os.readlink(path):
            found[path.stat().st_ino] += 1
    return found


def lose_a_rank(name: str, number: int, moment: str, timeout_s: float) -> Outcome:
    """Run two layers. The victim then gets the signal before its dispatch or before its combine."""
    before = shared_memory()
    dispatcher = Dispatcher(open_wire(name, dist.group.WORLD, timeout_s=timeout_s), slots_per_rank=2)
    x_TH, slots_TK, weights_TK = torch.ones(4, 64), torch.arange(24).view(4, 6) % 6, torch.ones(4, 6)
    begin, mapped = time.monotonic(), shared_memory() - before
    seen: tuple[str, int | None, float] = ("none", -1, 0.0)
    try:
        for layer in range(3):
            if (layer, moment, dist.get_rank()) == (2, "dispatch", VICTIM):
                os.kill(os.getpid(), number)
            begin = time.monotonic()
            dispatched = dispatcher.dispatch(x_TH, slots_TK)
            if (layer, moment, dist.get_rank()) == (2, "combine", VICTIM):
                os.kill(os.getpid(), number)
            dispatcher.combine(dispatched.x_NH[dispatched.row_P], weights_TK, dispatched)
    except (PeerLost, DispatchTimeout) as error:
        seen = (type(error).__name__, error.rank, time.monotonic() - begin)
        error.__traceback__ = None  # it holds views of the memory
    dispatcher.close()
    return Outcome(*seen, mapped.total(), (shared_memory() - before).total())


@pytest.mark.parametrize(("name", "moment"), [("shm", "dispatch"), ("shm", "combine"), ("gloo", "combine")])
def test_a_killed_peer_is_lost_to_every_survivor_long_before_the_timeout(
    pool_of: PoolOf, name: str, moment: str
) -> None:
    pool = pool_of(3)
    pool.start(lose_a_rank, name, signal.SIGKILL, moment, 30.0)
    for outcome in pool.collect(may_die=[VICTIM])[:VICTIM]:
        assert (outcome.error, outcome.rank) == ("PeerLost", VICTIM)
        assert outcome.seconds < ENOUGH_S
        assert (outcome.mapped > 0) == (name == "shm") and outcome.left == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moment"), [("shm", "combine"), ("gloo", "dispatch")])
def test_a_stopped_peer_times_out_on_every_survivor(pool_of: PoolOf, name: str, moment: str) -> None:
    pool = pool_of(3)
    pool.start(lose_a_rank, name, signal.SIGSTOP, moment, STOP_TIMEOUT_S)
    outcomes = pool.collect(ranks=[0, 1])
    pool.close()  # the stopped rank cannot be used again
    for outcome in outcomes:
        assert outcome.error == "DispatchTimeout"
        assert outcome.rank == (VICTIM if name == "shm" else None)  # gloo's all-to-all does not name the rank
        assert outcome.seconds < STOP_TIMEOUT_S + ENOUGH_S


def leave_early() -> str:
    """Close the wire on rank 1 while rank 0 waits for it."""
    dispatcher = Dispatcher(open_wire("shm", dist.group.WORLD, timeout_s=30), slots_per_rank=2)
    if dist.get_rank() == 1:
        dispatcher.close()
        return "closed"
    said = catch(lambda: dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[3]])))
    dispatcher.close()
    return said


def test_a_peer_that_closes_is_lost_at_once(pool_of: PoolOf) -> None:
    assert pool_of(2).run(leave_early) == ["PeerLost: rank 1 is lost: it has closed its wire", "closed"]


def wait_until_interrupted() -> tuple[str, list[tuple[int, ...]], float]:
    """Let rank 0 wait for rank 1, which does nothing, until another thread interrupts it."""
    dispatcher = Dispatcher(open_wire("shm", dist.group.WORLD, timeout_s=60), slots_per_rank=2)
    seen, said = [tuple(dispatcher.exchanges)], "no error"
    if dist.get_rank() == 0:

        def interrupt() -> None:
            while dispatcher.exchanges.begun == 0:
                time.sleep(0.001)
            seen.append(tuple(dispatcher.exchanges))
            dispatcher.interrupt(PeerLost(1, "its heart stopped"))

        thread = threading.Thread(target=interrupt)
        thread.start()
        said = catch(lambda: dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[3]])))
        thread.join()
    begin = time.monotonic()
    dist.barrier()
    dispatcher.close()
    return said, seen, time.monotonic() - begin


def test_a_wait_is_interrupted_and_seen_from_another_thread(pool_of: PoolOf) -> None:
    (said, seen, _), (_, idle, waited_s) = pool_of(2).run(wait_until_interrupted)
    assert said == "PeerLost: rank 1 is lost: its heart stopped"
    assert seen == [(0, 0), (1, 0)] and idle == [(0, 0)]
    assert waited_s < ENOUGH_S


def wait_over_gloo() -> tuple[str, float]:
    """Let rank 0 wait for rank 1, which does nothing, until another thread interrupts it. Both then leave the group."""
    group = dist.new_group([0, 1])
    dispatcher = Dispatcher(open_wire("gloo", group, timeout_s=60), slots_per_rank=2)
    said, begin = "no error", time.monotonic()
    if dist.get_rank() == 0:
        interrupting = threading.Timer(0.2, dispatcher.interrupt, [PeerLost(1, "its steps broke off")])
        interrupting.start()
        said = catch(lambda: dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[3]])))
        interrupting.join()
    dist.barrier()
    dispatcher.close()
    dist.destroy_process_group(group)
    return said, time.monotonic() - begin


def test_a_wait_over_gloo_ends_at_an_interruption_before_any_connection_breaks(pool_of: PoolOf) -> None:
    (said, waited_s), _ = pool_of(2).run(wait_over_gloo)
    assert said == "PeerLost: rank 1 is lost: its steps broke off"
    assert waited_s < ENOUGH_S


def use_after_close(name: str) -> tuple[str, str]:
    dispatcher = Dispatcher(open_wire(name, dist.group.WORLD), slots_per_rank=2)
    dispatcher.close()
    x_TH, slots_TK = torch.ones(1, 4), torch.tensor([[3]])
    return catch(lambda: dispatcher.dispatch(x_TH, slots_TK)), catch(lambda: dispatcher.wire.refuse("late"))


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_closed_wire_says_so(pool_of: PoolOf, name: str) -> None:
    assert pool_of(2).run(use_after_close, name) == [("DispatchError: the wire is closed",) * 2] * 2


def count_mappings_after_use() -> tuple[int, int, int]:
    """Return (shared memory while open, once closed, descriptors gained). That of earlier tests in this process does not count."""
    gc.collect()  # their engines have descriptors
    descriptors, before = len(os.listdir("/proc/self/fd")), shared_memory()
    wire = open_wire("shm", dist.group.WORLD)
    during = shared_memory() - before
    dist.barrier()
    wire.close()
    after = shared_memory() - before
    return during.total(), after.total(), len(os.listdir("/proc/self/fd")) - descriptors


def test_closing_returns_memory_and_descriptors(pool_of: PoolOf) -> None:
    pool_of(2).run(count_mappings_after_use)  # the first use may open what stays (sockets of the group)
    assert pool_of(2).run(count_mappings_after_use) == [(2, 0, 0)] * 2  # a mapping, and its descriptor


def run_many_small_exchanges(name: str, count: int) -> int:
    """Stress the flags: ranks drift apart at random, so that waits both spin and sleep."""
    dispatcher = Dispatcher(open_wire(name, dist.group.WORLD, timeout_s=20), slots_per_rank=1)
    R, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    wrong = 0
    for index in range(count):
        T = int(torch.randint(0, 3, (1,), generator=generator))
        x_TH = torch.full((T, 2), float(index * R + rank))
        dispatched = dispatcher.dispatch(x_TH, torch.arange(R).expand(T, R))
        expected = set(range(index * R, index * R + R))
        wrong += not set(dispatched.x_NH.flatten().int().tolist()) <= expected
        combined = dispatcher.combine(dispatched.x_NH[dispatched.row_P], torch.ones(T, R), dispatched)
        wrong += not torch.equal(combined, x_TH * R)
    dispatcher.close()
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_small_exchanges_never_mix_up(pool_of: PoolOf, world_size: int) -> None:
    assert pool_of(world_size).run(run_many_small_exchanges, "shm", 400) == [0] * world_size
