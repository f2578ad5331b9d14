"""The wire over collectives of device tensors, here CPU tensors over gloo: the same bits as every other."""

import pytest
import torch
import torch.distributed as dist

from dispatch.dispatcher import Dispatcher
from dispatch.errors import DispatchTimeout, PeerLost, RanksDisagree
from dispatch.wires.nccl import NcclWire
from dispatch.wires.open import open_wire
from dispatch.wires.wire import RankTable, Wire
from tests.conftest import PoolOf
from tests.dispatch.exchange import run_layer
from tests.dispatch.messages import swap
from tests.dispatch.oracle import RankCase, RankResult, make_cases, simulate

S = 4


def open_collective(epoch: int = 0) -> Wire:
    return NcclWire(
        dist.group.WORLD, device=torch.device("cpu"), timeout_s=20.0, epoch=epoch, reason="of a test"
    )


def run_both(layers: list[list[RankCase]]) -> list[tuple[RankResult, RankResult]]:
    """Every layer through the collectives and through gloo's own wire."""
    wires = [open_collective(), open_wire("gloo", dist.group.WORLD, timeout_s=20.0)]
    dispatchers = [Dispatcher(wire, slots_per_rank=S) for wire in wires]
    torch.manual_seed(0)
    results = []
    for cases in layers:
        case = cases[dist.get_rank()]
        ours, theirs = (run_layer(dispatcher, case) for dispatcher in dispatchers)
        results.append((ours, theirs))
    for dispatcher in dispatchers:
        dispatcher.close()
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_give_the_bits_of_gloo_and_of_the_oracle(pool_of: PoolOf, world_size: int) -> None:
    uneven = [(5 * rank + 3) % 9 for rank in range(world_size)]
    layers = [
        make_cases(1, uneven),
        make_cases(2, [0] * world_size),
        make_cases(3, [7] + [0] * (world_size - 1)),
        make_cases(4, [6] * world_size, only_slot=0, no_choice=0.0),
        make_cases(5, uneven, dtype=torch.bfloat16, hidden=7, choices=world_size + 3),
        make_cases(6, [40] * world_size, hidden=256),
    ]
    results = pool_of(world_size).run(run_both, layers)
    for index, cases in enumerate(layers):
        for rank, want in enumerate(simulate(cases, S)):
            for found in results[rank][index]:
                for field, ours, oracle in zip(want._fields, found, want, strict=True):
                    assert torch.equal(ours, oracle), f"layer {index}, rank {rank}, {field}"


def swap_rounds(is_known: bool) -> list[str]:
    wire = open_collective()
    wrong = []
    for round_ in range(6):
        wrong += swap(wire, round_, 3000, is_known=is_known)
    wire.close()
    return wrong


@pytest.mark.parametrize("is_known", [False, True])
def test_messages_arrive_whether_sizes_are_known_or_not(pool_of: PoolOf, is_known: bool) -> None:
    assert pool_of(3).run(swap_rounds, is_known) == [[]] * 3


def expect_too_much() -> str:
    wire = open_collective()
    sends, receives = RankTable(2), RankTable(2)
    receives.values[:] = 64
    try:
        wire.open_windows(sends)
        wire.exchange(sends, receives)
    except RanksDisagree as error:
        return str(error)
    finally:
        wire.close()
    return "no error"


def test_unexpected_sizes_are_a_named_error(pool_of: PoolOf) -> None:
    first, second = pool_of(2).run(expect_too_much)
    assert first == "rank 1 sent 0 bytes where rank 0 expects 64"
    assert second == "rank 0 sent 0 bytes where rank 1 expects 64"


def meet_in_two_epochs() -> str:
    wire = open_collective(epoch=dist.get_rank())
    try:
        swap(wire, 0, 100, is_known=False)
    except RanksDisagree as error:
        return str(error)
    finally:
        wire.close()
    return "no error"


def test_ranks_of_two_epochs_do_not_mix(pool_of: PoolOf) -> None:
    first, second = pool_of(2).run(meet_in_two_epochs)
    assert first == "rank 1 is at exchange 1 of epoch 1, rank 0 at 1 of 0"
    assert second == "rank 0 is at exchange 1 of epoch 0, rank 1 at 1 of 1"


def lose_rank_one() -> tuple[str, int | None]:
    wire = open_collective()
    swap(wire, 0, 100, is_known=False)
    if dist.get_rank() == 1:
        raise SystemExit
    try:
        swap(wire, 1, 100, is_known=False)
    except (PeerLost, DispatchTimeout) as error:
        return type(error).__name__, error.rank
    finally:
        wire.close()
    return "no error", None


def test_a_peer_that_ends_is_lost(pool_of: PoolOf) -> None:
    pool = pool_of(2)
    pool.start(lose_rank_one)
    first, _ = pool.collect(may_die=[1])
    assert first == ("PeerLost", 1)
