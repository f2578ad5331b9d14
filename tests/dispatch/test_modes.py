"""Low-latency mode: the oracle's bits, and no operation that a captured graph forbids."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from dispatch.dispatcher import Dispatcher
from dispatch.mode import NORMAL, Mode, fitting_capacity, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import check_bits, run_layer
from tests.dispatch.oracle import RankCase, RankResult, make_cases
from tests.fixtures import PoolOf
from tests.support.gpu.graph_safe import GraphSafe

S = 4


def run_modes(name: str, layers: list[list[RankCase]], modes: list[Mode]) -> list[RankResult]:
    """Run every layer in its mode, through one dispatcher."""
    wire = open_wire(name, dist.group.WORLD if dist.is_initialized() else None, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S)
    results = []
    for cases, mode in zip(layers, modes, strict=True):
        results.append(run_layer(dispatcher, cases[wire.rank], mode))
    dispatcher.close()
    return results


def mixed_layers(R: int) -> tuple[list[list[RankCase]], list[Mode]]:
    """Return layers that alternate between both modes: growing and shrinking sizes, empty ranks, full buffers, types."""
    uneven = [(5 * rank + 3) % 9 for rank in range(R)]
    layers = [
        (make_cases(1, uneven, slots_per_rank=S), low_latency(8)),
        (make_cases(2, [0] * R, slots_per_rank=S), low_latency(8)),
        (make_cases(3, [8] * R, slots_per_rank=S, no_choice=0.0, choices=R + 3), low_latency(8)),
        (make_cases(4, [40] * R, slots_per_rank=S, hidden=128), NORMAL),
        (make_cases(5, [1] + [0] * (R - 1), slots_per_rank=S), low_latency(64)),
        (make_cases(6, [30] * R, slots_per_rank=S, hidden=256, only_slot=R * S - 1), low_latency(32)),
        (make_cases(7, uneven, slots_per_rank=S, dtype=torch.bfloat16, hidden=7), low_latency(8)),
        (make_cases(8, uneven, slots_per_rank=S, dtype=torch.float64, no_choice=1.0), low_latency(8)),
        (make_cases(9, uneven, slots_per_rank=S), NORMAL),
    ]
    return [cases for cases, _ in layers], [mode for _, mode in layers]


@pytest.mark.crossed("world_size", "name", every=2)
@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_both_modes_give_the_oracles_bits_in_any_order(pool_of: PoolOf, name: str, world_size: int) -> None:
    layers, modes = mixed_layers(world_size)
    check_bits(pool_of(world_size).run(run_modes, name, layers, modes), layers, S)


def test_one_rank_gives_the_oracles_bits_in_both_modes() -> None:
    layers, modes = mixed_layers(1)
    check_bits([run_modes("local", layers, modes)], layers, S)


def guarded_calls(name: str, dtype: torch.dtype, rows: str, mode: Mode) -> set[tuple[int, ...]]:
    """Run steps of many sizes under the guard. Return the addresses they used.

    The first call of a shape allocates. It has one token, so the allocated size must follow from the mode. gloo's own
    buffers may grow later (its exchange cannot be captured anyway), so it runs without the guard.
    """
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S, rows=row_format(rows))
    addresses = set()
    for step, tokens in enumerate((1, 8, 2, 5, 8, 3, 7)):
        sizes = [(tokens + rank) % 9 for rank in range(wire.world_size)]
        case = make_cases(step, sizes, slots_per_rank=S, dtype=dtype, hidden=32)[wire.rank]
        out_TH = torch.empty_like(case.x_TH)
        guard = GraphSafe() if step and name == "shm" else nullcontext()
        with guard:
            dispatched = dispatcher.dispatch(case.x_TH, case.slots_TK, mode)
        y_PH = dispatched.x_NH[dispatched.row_P]
        with guard:
            dispatcher.combine(y_PH, case.weights_TK, dispatched, out=out_TH)
        used = [dispatched.x_NH, dispatched.row_P, dispatched.slot_offsets]
        addresses.add(tuple(tensor.data_ptr() for tensor in used))
    dispatcher.close()
    return addresses


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "fp8")]
)
def test_low_latency_takes_no_memory_and_reads_nothing_back(
    pool_of: PoolOf, name: str, dtype: torch.dtype, rows: str
) -> None:
    for addresses in pool_of(2).run(guarded_calls, name, dtype, rows, low_latency(8)):
        assert len(addresses) == 1


def sent_in(name: str, mode: Mode, tokens: list[int]) -> list[int]:
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S)
    sent = [0]
    for count in tokens:
        dispatcher.dispatch(torch.ones(count, 16), torch.zeros(count, 2, dtype=torch.int64), mode)
        sent.append(dispatcher.traffic.dispatch_bytes)
    dispatcher.close()
    return torch.tensor(sent).diff().tolist()


@pytest.mark.parametrize("mode", [NORMAL, low_latency(8)], ids=str)
def test_messages_hold_what_there_is(pool_of: PoolOf, mode: Mode) -> None:
    """A header of 64 bytes, 3 words of 4 bytes and 64 bytes per row; words are padded to 64 bytes."""
    assert pool_of(2).run(sent_in, "shm", mode, [0, 1, 8])[1] == [64, 64 + 64 + 64, 64 + 128 + 8 * 64]


def test_capacities_are_powers_of_two_that_fit() -> None:
    assert [fitting_capacity(count) for count in (0, 1, 8, 9, 64, 65)] == [8, 8, 8, 16, 64, 128]


def test_modes_name_themselves_and_refuse_no_room() -> None:
    assert [str(NORMAL), str(low_latency(8))] == ["normal mode", "low-latency mode for 8 tokens"]
    with pytest.raises(ValueError, match="capacity is 0; low-latency mode needs room"):
        low_latency(0)
