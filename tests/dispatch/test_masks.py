"""Ranks that are masked, by hand or after a loss: the others continue with correct bytes and without waiting.

Choices on a masked rank add nothing. A late rank that wakes up cannot write into a group of survivors under a new
epoch."""

import os
import signal
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from dispatch.dispatcher import Dispatcher
from dispatch.errors import DispatchTimeout, PeerLost
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.wires.open import open_wire
from dispatch.wires.wire import RankTable, Wire
from tests.dispatch.exchange import catch, run_layer
from tests.dispatch.messages import message, size_of, swap
from tests.dispatch.oracle import RankCase, RankResult, make_cases, simulate
from tests.fixtures import PoolOf

SMALL, LARGE = 400, 9000  # against regions of 1 KB: many messages need several pieces
STOP_TIMEOUT_S = 2.0  # long enough that no rank times out on a busy machine before the victim stops
LONG_S = 30.0


class Survival(NamedTuple):
    """A survivor's error, or its final mask, and wrong bytes."""

    error: str
    rank: int | None
    mask: list[int]
    wrong: list[str]
    seconds: float


def open_wires(name: str, mask_lost: bool, timeout_s: float = LONG_S) -> Wire:
    return open_wire(name, dist.group.WORLD, timeout_s=timeout_s, region_bytes=1024, mask_lost=mask_lost)


def mask_by_hand(name: str, mask_lost: bool) -> list[str]:
    """Run ranks 0 to 2 without rank 3 for a while, and rank 3 alone. Then all are together again."""
    wire = open_wires(name, mask_lost)
    rank, R = dist.get_rank(), dist.get_world_size()
    wrong = []
    for round_ in range(12):
        is_split = 4 <= round_ < 8
        for peer in range(R):
            wire.mask.values[peer] = is_split and peer != rank and 3 in (peer, rank)
        largest = LARGE if round_ % 3 == 0 else SMALL
        wrong += swap(wire, round_, largest, is_known=round_ % 2 == 1)
    wire.close()
    return wrong


@pytest.mark.parametrize(("name", "mask_lost"), [("shm", False), ("shm", True), ("gloo", True)])
def test_masked_ranks_are_done_without_and_may_come_back(pool_of: PoolOf, name: str, mask_lost: bool) -> None:
    assert pool_of(4).run(mask_by_hand, name, mask_lost) == [[]] * 4


def mask_where_it_cannot_be(name: str) -> str:
    wire = open_wires(name, mask_lost=False)
    wire.mask.values[1 - dist.get_rank()] = 1
    said = catch(lambda: swap(wire, 0, SMALL, is_known=False))
    wire.close()
    return said


@pytest.mark.parametrize("name", ["gloo"])
def test_a_mask_that_cannot_be_honoured_is_an_error(pool_of: PoolOf, name: str) -> None:
    for text in pool_of(2).run(mask_where_it_cannot_be, name):
        assert text.startswith("DispatchError: a rank is masked")


def lose_the_last(name: str, mask_lost: bool, number: int, moment: str, timeout_s: float) -> Survival:
    """Send the last rank a signal in round 0 ("before" any exchange) or 2. The others continue to round 5."""
    wire = open_wires(name, mask_lost, timeout_s)
    rank, R = dist.get_rank(), dist.get_world_size()
    is_victim, wrong, begin = rank == R - 1, [], time.monotonic()
    try:
        for round_ in range(6):
            if round_ == (0 if moment == "before" else 2) and is_victim:
                die(wire, number, moment)
            begin = time.monotonic()
            wrong += swap(wire, round_, LARGE, is_known=round_ % 2 == 1)
    except (PeerLost, DispatchTimeout) as error:
        return Survival(
            type(error).__name__, error.rank, wire.mask.values.tolist(), wrong, time.monotonic() - begin
        )
    finally:
        wire.close()
    return Survival("none", None, wire.mask.values.tolist(), wrong, 0.0)


def die(wire: Wire, number: int, moment: str) -> None:
    """Die before an exchange, or half-way: all is posted, but later pieces of large messages never come."""
    if moment == "during":
        rank, R = wire.rank, wire.world_size
        sends = RankTable(R)
        for peer in range(R):
            sends.values[peer] = size_of(2, rank, peer, LARGE)
        wire.open_windows(sends)
        for peer in range(R - 1):
            wire.send_window(peer).copy_(message(2, rank, peer, int(sends.values[peer])))
        wire.begin_exchange(sends, None)
    os.kill(os.getpid(), number)


@pytest.mark.crossed("name", "moment", every=2)
@pytest.mark.parametrize("moment", ["before", "between", "during"])
@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_killed_rank_is_masked_and_the_others_keep_their_bytes(
    pool_of: PoolOf, name: str, moment: str
) -> None:
    pool = pool_of(4)
    pool.start(lose_the_last, name, True, signal.SIGKILL, moment, LONG_S)
    for survival in pool.collect(may_die=[3])[:3]:
        assert survival == Survival("none", None, [0, 0, 0, 1], [], 0.0)


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_rank_killed_amid_an_exchange_is_a_named_error(pool_of: PoolOf, name: str) -> None:
    """Over gloo a survivor may also time out: only a rank that is connected to the victim sees that it died."""
    timeout_s, errors = LONG_S, ["PeerLost"]
    if name == "gloo":
        timeout_s, errors = STOP_TIMEOUT_S, [*errors, "DispatchTimeout"]
    pool = pool_of(3)
    pool.start(lose_the_last, name, False, signal.SIGKILL, "during", timeout_s)
    for survival in pool.collect(may_die=[2])[:2]:
        assert survival.error in errors
        assert survival.rank in ((2,) if survival.error == "PeerLost" else (2, None))
        assert survival.wrong == []
        assert survival.seconds < (LONG_S / 2 if name == "shm" else STOP_TIMEOUT_S + LONG_S / 2)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between", "during"])
def test_a_stopped_rank_is_masked_after_the_timeout(pool_of: PoolOf, moment: str) -> None:
    pool = pool_of(4)
    pool.start(lose_the_last, "shm", True, signal.SIGSTOP, moment, STOP_TIMEOUT_S)
    outcomes = pool.collect(ranks=[0, 1, 2])
    pool.close()  # the stopped rank cannot be used again
    for survival in outcomes:
        assert survival == Survival("none", None, [0, 0, 0, 1], [], 0.0)


def test_gloo_cannot_mask_a_stopped_rank_and_says_who(pool_of: PoolOf) -> None:
    """After a timeout, gloo closes the connections of the waiting rank. Its neighbours may see that first."""
    pool = pool_of(3)
    pool.start(lose_the_last, "gloo", True, signal.SIGSTOP, "between", STOP_TIMEOUT_S)
    outcomes = pool.collect(ranks=[0, 1])
    pool.close()
    assert ("DispatchTimeout", 2) in [(survival.error, survival.rank) for survival in outcomes]
    for survival in outcomes:
        assert survival.error in ("DispatchTimeout", "none")
        assert survival.wrong == []
        assert survival.seconds < STOP_TIMEOUT_S + LONG_S / 2


def stop_and_regroup(name: str, key: str) -> list[str]:
    """Stop rank 2. The others time out, regroup under epoch 1, wake it, and continue until it has failed."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    wire = open_wires(name, mask_lost=False, timeout_s=STOP_TIMEOUT_S)
    wrong = swap(wire, 0, SMALL, is_known=False)
    if rank == 2:
        store.set(f"{key}-pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        errors = [error_of(wire, round_) for round_ in (1, 2, 3)]
        store.set(f"{key}-gave-up", "yes")
        return [*wrong, *errors]
    lost = error_of(wire, 1)
    wire.close()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"{key}-1", store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LONG_S),
    )
    survivors = open_wire(name, dist.group.WORLD, timeout_s=LONG_S, epoch=1, region_bytes=1024)
    wrong += swap(survivors, 0, LARGE, is_known=False)
    if rank == 0:
        os.kill(int(store.get(f"{key}-pid")), signal.SIGCONT)
    wrong += swap_until(store, f"{key}-gave-up", survivors)
    survivors.close()
    return [*wrong, lost]


def stop_and_stay(key: str) -> tuple[list[str], list[int]]:
    """Stop rank 2. The others mask it, wake it, and continue in the same epoch until it has masked them."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    wire = open_wires("shm", mask_lost=True, timeout_s=STOP_TIMEOUT_S)
    wrong = swap(wire, 0, SMALL, is_known=False)
    if rank == 2:
        store.set(f"{key}-pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        for round_ in (1, 2, 3):
            wrong += swap(wire, round_, SMALL, is_known=round_ % 2 == 1)
        store.set(f"{key}-gave-up", "yes")
    else:
        wrong += swap(wire, 1, SMALL, is_known=True)
        store.set(f"{key}-masked-{rank}", "yes")
        if rank == 0:
            store.wait([f"{key}-masked-{peer}" for peer in (0, 1)])  # a waiting rank would hear from it
            os.kill(int(store.get(f"{key}-pid")), signal.SIGCONT)
        wrong += swap_until(store, f"{key}-gave-up", wire)
    wire.close()
    return wrong, wire.mask.values.tolist()


@pytest.mark.slow
def test_a_masked_rank_that_wakes_up_cannot_reach_the_others(pool_of: PoolOf) -> None:
    """No rank reads its writes, and its regions are its own."""
    pool = pool_of(3)
    pool.start(stop_and_stay, f"stay-{time.monotonic_ns()}")
    assert pool.collect() == [([], [0, 0, 1]), ([], [0, 0, 1]), ([], [1, 1, 0])]


def error_of(wire: Wire, round_: int) -> str:
    wrong: list[str] = []
    said = catch(lambda: wrong.extend(swap(wire, round_, SMALL, is_known=True)))
    return said if said != "no error" else f"no error {wrong}"


def swap_until(store: Store, key: str, wire: Wire) -> list[str]:
    """Exchange until the key exists, for at most LONG_S. Rank 0 signals the end by the size of its message."""
    wrong, R, is_over = [], wire.world_size, RankTable(wire.world_size)
    deadline = time.monotonic() + LONG_S
    for round_ in range(1, 1_000_000):
        wrong += swap(wire, round_, LARGE if round_ % 7 == 0 else SMALL, is_known=round_ % 2 == 1)
        late = time.monotonic() > deadline
        is_over.values[:] = 8 * (wire.rank == 0 and (late or store.check([key])))
        wire.open_windows(is_over)
        wire.exchange(is_over, None)
        if is_over.values[0] or (wire.rank and wire.received(0).numel()):
            return [*wrong, "rank 2 never stopped waiting"] if late else wrong
    raise AssertionError(f"{R} ranks never end")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_late_rank_of_an_old_epoch_cannot_reach_the_survivors(pool_of: PoolOf, name: str) -> None:
    """On shm it still maps the old epoch's memory, on gloo it holds the old connections. No other rank does."""
    pool = pool_of(3)
    pool.start(stop_and_regroup, name, f"{name}-{time.monotonic_ns()}")
    first, second, late = pool.collect()
    pool.close()  # the survivors' default group is one of two
    assert [first[:-1], second[:-1]] == [[], []], "a survivor has wrong bytes"
    for lost in (first[-1], second[-1]):
        assert lost.startswith(("DispatchTimeout: ", "PeerLost: "))
    assert len(late) == 3
    assert any(error.startswith(("PeerLost: ", "DispatchTimeout: ")) for error in late)
    assert all(error == "no error []" or error.startswith(("PeerL", "DispatchT")) for error in late)
    assert not late[-1].startswith("no error")


S, LOST = 4, 2


def run_without(name: str, cases: list[RankCase], mode: Mode) -> tuple[RankResult, RankResult] | None:
    """Run one layer on all ranks, then one without rank LOST, which makes no further call."""
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0, mask_lost=True)
    dispatcher, case = Dispatcher(wire, slots_per_rank=S), cases[wire.rank]
    whole = run_layer(dispatcher, case)
    rest = None
    if wire.rank != LOST:
        wire.mask.values[LOST] = 1
        rest = run_layer(dispatcher, case, mode)
    dist.barrier()
    dispatcher.close()
    return None if rest is None else (whole, rest)


def without(case: RankCase, rank: int) -> RankCase:
    """Return the case without tokens of LOST and without choices of its slots."""
    is_there = torch.div(case.slots_TK, S, rounding_mode="floor") == LOST
    slots_TK = case.slots_TK.masked_fill(is_there, -1)
    return RankCase(*(part[:0] for part in case)) if rank == LOST else case._replace(slots_TK=slots_TK)


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("mode", [NORMAL, low_latency(8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_was_chosen_on_a_masked_rank_adds_nothing(
    pool_of: PoolOf, name: str, mode: Mode, dtype: torch.dtype
) -> None:
    cases = make_cases(4, [5, 8, 6], slots_per_rank=S, no_choice=0.0, dtype=dtype)
    whole, rest = simulate(cases, S), simulate([without(case, rank) for rank, case in enumerate(cases)], S)
    answers = pool_of(3).run(run_without, name, cases, mode)
    assert answers[LOST] is None
    for rank in (0, 1):
        for ours, oracle in zip(answers[rank], (whole[rank], rest[rank]), strict=True):
            for field, mine, theirs in zip(oracle._fields, ours, oracle, strict=True):
                assert torch.equal(mine, theirs), field
