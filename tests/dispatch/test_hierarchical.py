"""Node-limited dispatch: rows, pairs and bits of the flat dispatcher, by another route."""

import pytest
import torch
import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.hierarchical import HierarchicalDispatcher, open_hierarchical
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import check_bits, run_layer
from tests.dispatch.hierarchical_cases import S, open_here
from tests.dispatch.oracle import RankCase, RankResult, make_cases, simulate
from tests.fixtures import PoolOf

SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, node size: 1 and all ranks are flat dispatch


def run_layers(
    name: str, layers: list[list[RankCase]], node_size: int, mode: Mode = NORMAL
) -> list[RankResult]:
    """Run several layers, each with one case per rank, through one dispatcher."""
    dispatcher = open_here(name, node_size)
    results = [run_layer(dispatcher, cases[dispatcher.rank], mode) for cases in layers]
    dispatcher.close()
    return results


def edge_layers(ranks: int, dtype: torch.dtype = torch.float32) -> list[list[RankCase]]:
    """Return layers: uneven tokens, no tokens, none on most ranks, one slot for all, more choices than ranks, no choice."""
    uneven = [3 * rank % 7 for rank in range(ranks)]
    return [
        make_cases(1, uneven, slots_per_rank=S, dtype=dtype),
        make_cases(2, [0] * ranks, slots_per_rank=S, dtype=dtype),
        make_cases(3, [0] * (ranks - 1) + [5], slots_per_rank=S, dtype=dtype),
        make_cases(4, [4] * ranks, slots_per_rank=S, only_slot=ranks * S - 1, dtype=dtype),
        make_cases(5, [6] * ranks, choices=2 * ranks + 1, slots_per_rank=S, no_choice=0.0, dtype=dtype),
        make_cases(6, [2] * ranks, slots_per_rank=S, no_choice=1.0, dtype=dtype),
        make_cases(7, uneven, slots_per_rank=S, dtype=torch.float16),
        make_cases(8, uneven, slots_per_rank=S, dtype=torch.float64),
    ]


@pytest.mark.crossed("name", "ranks", "node_size", every=2)
@pytest.mark.parametrize(("ranks", "node_size"), SHAPES)
@pytest.mark.parametrize("name", ["auto", "gloo"])
def test_rows_pairs_and_sums_have_the_flat_oracles_bits(
    pool_of: PoolOf, ranks: int, node_size: int, name: str
) -> None:
    layers = edge_layers(ranks)
    check_bits(pool_of(ranks).run(run_layers, name, layers, node_size), layers, S)


def test_two_nodes_of_four_ranks_have_the_flat_oracles_bits(pool_of: PoolOf) -> None:
    layers = edge_layers(8, torch.bfloat16)
    check_bits(pool_of(8).run(run_layers, "auto", layers, 4), layers, S)


def test_low_latency_mode_has_the_flat_oracles_bits_where_ranks_hand_on_more_than_they_bring(
    pool_of: PoolOf,
) -> None:
    """At most 8 tokens per rank."""
    shapes = [([8] * 4, 2), ([8] * 4, 9), ([8, 0, 8, 8], 5), ([8] * 4, 1)]
    layers = [
        make_cases(20 + index, tokens, choices=choices, slots_per_rank=S, no_choice=0.0)
        for index, (tokens, choices) in enumerate(shapes)
    ]
    check_bits(pool_of(4).run(run_layers, "auto", layers, 2, low_latency(8)), layers, S)


def run_in_fp8(case_of_rank: list[RankCase]) -> list[RankResult]:
    """Run the same layer flat and by nodes, with rows in FP8."""
    flat = Dispatcher(open_wire("auto", dist.group.WORLD), slots_per_rank=S, rows=row_format("fp8"))
    by_node = open_here("auto", 2, rows="fp8")
    results = []
    for dispatcher in (flat, by_node):
        results.append(run_layer(dispatcher, case_of_rank[dist.get_rank()]))
        dispatcher.close()
    return results


def test_rows_in_fp8_have_the_flat_dispatchers_bits(pool_of: PoolOf) -> None:
    cases = make_cases(8, [5, 0, 3, 2], hidden=200, slots_per_rank=S, dtype=torch.bfloat16)
    for rank, (flat, by_node) in enumerate(pool_of(4).run(run_in_fp8, cases)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(by_node, flat, strict=True))
        assert not by_node[0].numel() or not torch.equal(
            by_node[0], simulate(cases, S)[rank].x_NH
        )  # they were cast


def count_crossing() -> tuple[int, int, int]:
    """Send one row of 4 floats to each rank of the other of two nodes. Return bytes across nodes, and all bytes."""
    dispatcher = open_here("auto", 2)
    there = (1 - dispatcher.node) * 2 * S
    sent = dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[there, there + S]]))
    dispatcher.combine(sent.x_NH[sent.row_P], torch.ones(1, 2), sent)
    crossing, traffic = dispatcher.crossing, dispatcher.traffic
    dispatcher.close()
    return crossing.dispatch_bytes, crossing.combine_bytes, sum(traffic) - sum(crossing)


def test_bytes_that_cross_are_counted(pool_of: PoolOf) -> None:
    """One header, an entry in 64 bytes and a row of 16 bytes go out; a header and two answers come back."""
    for dispatched, combined, inside in pool_of(4).run(count_crossing):
        assert (dispatched, combined) == (64 + 64 + 16, 64 + 2 * 16)
        assert inside > 0


def test_one_rank_needs_no_group() -> None:
    dispatcher: TokenDispatcher = open_hierarchical("auto", None, node_size=1, slots_per_rank=S)
    assert isinstance(dispatcher, HierarchicalDispatcher)
    assert (
        dispatcher.row_format == row_format("auto").name
        and dispatcher.name == "local across 1 nodes and local inside"
    )
    case = make_cases(4, [5], slots_per_rank=S)[0]
    check_bits([[run_layer(dispatcher, case)]], [[case]], S)
    with pytest.raises(ValueError, match=r"slots_TK\[0, 0\] is 3; it must be -1 or in \[0, 3\)"):
        dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[3]]))
