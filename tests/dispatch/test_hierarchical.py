"""Node-limited dispatch: the flat dispatcher's rows, pairs and bits, by another way."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import layout
from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.errors import RanksDisagree
from dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from dispatch.hierarchical.groups import open_hierarchical
from dispatch.hierarchical.messages import Message, swap
from dispatch.hierarchical.plan import node_choices, plan_arrival, plan_spread
from dispatch.row_formats import row_format
from dispatch.wires.choose import open_wire
from dispatch.wires.wire import RankTable
from tests.conftest import PoolOf
from tests.dispatch.hierarchical_cases import S, open_here
from tests.dispatch.oracle import RankCase, RankResult, compute_pairs, make_cases, simulate

SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, node size: 1 and all are flat dispatch


def run_one(dispatcher: HierarchicalDispatcher, case: RankCase) -> RankResult:
    """Dispatch, compute, combine. Work beside changes nothing."""
    worked: list[int] = []
    sent = dispatcher.dispatch(case.x_TH, case.slots_TK, meanwhile=lambda: worked.append(1))
    y_PH = compute_pairs(sent.x_NH, sent.row_P, sent.slot_offsets, dispatcher.rank)
    combined = dispatcher.combine(y_PH, case.weights_TK, sent, meanwhile=lambda: worked.append(2))
    assert worked == [1, 2], "each is called once"
    return RankResult(*sent[:3], combined)


def run_layers(
    name: str, layers: list[list[RankCase]], node_size: int, reduce_in_node: bool = False
) -> list[RankResult]:
    """Run several layers, each with one case per rank, through one dispatcher."""
    dispatcher = open_here(name, node_size, reduce_in_node=reduce_in_node)
    results = [run_one(dispatcher, cases[dispatcher.rank]) for cases in layers]
    dispatcher.close()
    return results


def edge_layers(ranks: int, dtype: torch.dtype = torch.float32) -> list[list[RankCase]]:
    """Uneven tokens, none at all, none on most ranks, one slot for everything, more choices than ranks, no choice."""
    uneven = [3 * rank % 7 for rank in range(ranks)]
    return [
        make_cases(1, uneven, slots_per_rank=S, dtype=dtype),
        make_cases(2, [0] * ranks, slots_per_rank=S, dtype=dtype),
        make_cases(3, [0] * (ranks - 1) + [5], slots_per_rank=S, dtype=dtype),
        make_cases(4, [4] * ranks, slots_per_rank=S, only_slot=ranks * S - 1, dtype=dtype),
        make_cases(5, [6] * ranks, choices=2 * ranks + 1, slots_per_rank=S, no_choice=0.0, dtype=dtype),
        make_cases(6, [2] * ranks, slots_per_rank=S, no_choice=1.0, dtype=dtype),
    ]


@pytest.mark.parametrize(("ranks", "node_size"), SHAPES)
@pytest.mark.parametrize("name", ["auto", "gloo"])
def test_rows_pairs_and_sums_have_the_flat_oracles_bits(
    pool_of: PoolOf, ranks: int, node_size: int, name: str
) -> None:
    layers = edge_layers(ranks)
    results = pool_of(ranks).run(run_layers, name, layers, node_size)
    for index, cases in enumerate(layers):
        for rank, want in enumerate(simulate(cases, S)):
            for got, oracle in zip(results[rank][index], want, strict=True):
                assert got.dtype == oracle.dtype and torch.equal(got, oracle)


def test_two_nodes_of_four_ranks_have_the_flat_oracles_bits(pool_of: PoolOf) -> None:
    layers = edge_layers(8, torch.bfloat16)
    results = pool_of(8).run(run_layers, "auto", layers, 4)
    for index, cases in enumerate(layers):
        for rank, want in enumerate(simulate(cases, S)):
            assert all(
                torch.equal(got, oracle) for got, oracle in zip(results[rank][index], want, strict=True)
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_type_travels(pool_of: PoolOf, dtype: torch.dtype) -> None:
    cases = make_cases(7, [5, 0, 3, 2], slots_per_rank=S, dtype=dtype)
    results = pool_of(4).run(run_layers, "auto", [cases], 2)
    for rank, want in enumerate(simulate(cases, S)):
        assert all(torch.equal(got, oracle) for got, oracle in zip(results[rank][0], want, strict=True))


def run_in_fp8(case_of_rank: list[RankCase]) -> list[list[torch.Tensor]]:
    """The same layer flat and by nodes, with rows in FP8."""
    flat = Dispatcher(open_wire("auto", dist.group.WORLD), slots_per_rank=S, rows=row_format("fp8"))
    by_node = open_here("auto", 2, rows="fp8")
    results = []
    for dispatcher in (flat, by_node):
        case = case_of_rank[dist.get_rank()]
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK)
        y_PH = compute_pairs(sent.x_NH, sent.row_P, sent.slot_offsets, dist.get_rank())
        parts = [part.clone() for part in sent[:3]]
        results.append([*parts, dispatcher.combine(y_PH, case.weights_TK, sent)])
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
    """One row of 4 floats to each rank of the other node: bytes that cross with 2 x 2 ranks, and all that is sent."""
    dispatcher = open_here("auto", 2)
    there = (1 - dispatcher.node) * 2 * S
    sent = dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[there, there + S]]))
    dispatcher.combine(sent.x_NH[sent.row_P], torch.ones(1, 2), sent)
    crossing, traffic = dispatcher.crossing, dispatcher.traffic
    dispatcher.close()
    return crossing.dispatch_bytes, crossing.combine_bytes, sum(traffic) - sum(crossing)


def test_bytes_that_cross_are_counted(pool_of: PoolOf) -> None:
    """A header of 128 bytes, slots and row of 64 each once; back a header and two answers in one part."""
    for dispatched, combined, inside in pool_of(4).run(count_crossing):
        assert (dispatched, combined) == (128 + 64 + 64, 128 + 64)
        assert inside > 0


def send_nothing() -> str:
    """Rank 1 takes part in an exchange without saying what it is."""
    wire = open_wire("auto", dist.group.WORLD, timeout_s=20.0)
    nothing = RankTable(2)
    try:
        if wire.rank == 1:
            wire.open_windows(nothing)
            wire.exchange(nothing, None)
        else:
            swap(wire, [Message((1,), ())] * 2)
    except RanksDisagree as error:
        return str(error)
    finally:
        dist.barrier()
        wire.close()
    return "no error"


def test_what_is_no_message_is_named(pool_of: PoolOf) -> None:
    assert pool_of(2).run(send_nothing) == [
        "rank 1 sent 0 bytes, which is no message of this call",
        "no error",
    ]


def sum_by_node(cases: list[RankCase], rank: int, slots_per_node: int) -> torch.Tensor:
    """Say in plain loops what reduce_in_node computes: each node's choices in order, rounded, then node by node."""
    x_TH, slots_TK, weights_TK = cases[rank]
    total_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    nodes = len(cases) * S // slots_per_node
    for t, slots in enumerate(slots_TK.tolist()):
        for node in range(nodes):
            part_H = torch.zeros(x_TH.shape[1])
            for k, slot in enumerate(slots):
                if slot != -1 and slot // slots_per_node == node:
                    offsets = torch.zeros(S + 1, dtype=torch.int64)
                    offsets[slot % S + 1 :] = 1
                    answer = compute_pairs(x_TH[t : t + 1], torch.tensor([0]), offsets, slot // S)[0]
                    part_H += weights_TK[t, k] * answer.float()
            total_TH[t] += part_H.to(x_TH.dtype).float()
    return total_TH.to(x_TH.dtype)


@pytest.mark.parametrize(("ranks", "node_size"), [(2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reducing_in_the_node_sums_each_node_first(
    pool_of: PoolOf, ranks: int, node_size: int, dtype: torch.dtype
) -> None:
    layers = edge_layers(ranks, dtype)
    results = pool_of(ranks).run(run_layers, "auto", layers, node_size, True)
    for index, cases in enumerate(layers):
        for rank in range(ranks):
            want = sum_by_node(cases, rank, node_size * S)
            assert torch.equal(results[rank][index].combined_TH, want)


def test_reducing_in_the_node_changes_bits_so_it_is_not_the_default(pool_of: PoolOf) -> None:
    cases = make_cases(9, [16] * 4, choices=6, slots_per_rank=S, dtype=torch.bfloat16)
    reduced = pool_of(4).run(run_layers, "auto", [cases], 2, True)
    flat = simulate(cases, S)
    assert any(not torch.equal(reduced[r][0].combined_TH, flat[r].combined_TH) for r in range(4))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    no_choice=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_the_plan_orders_arrivals_by_source_rank_then_token(
    seed: int, tokens: list[int], no_choice: float
) -> None:
    """One forwarding rank per node of one rank: what it hands on to itself is what it got, in source order."""
    cases = make_cases(seed, tokens, slots_per_rank=S, no_choice=no_choice)
    routes = [layout.route(case.slots_TK, S, len(tokens)) for case in cases]
    parts = [route.local_slots_NK.split(route.row_counts_R.tolist())[0] for route in routes]
    slots_NK = torch.cat(parts)
    spread = plan_spread(slots_NK, [part.shape[0] for part in parts], S, 1)
    arrival = plan_arrival(slots_NK, spread.source_counts, S)
    assert torch.equal(arrival.row_N, torch.arange(slots_NK.shape[0]))
    assert spread.node_pairs == [int((part >= 0).sum()) for part in parts]
    assert torch.equal(arrival.pairs.pair_of_answer, arrival.pair_of_answer_P)


def test_a_token_crosses_to_a_node_once() -> None:
    slots_TK = torch.tensor([[0, 1, 5, -1], [11, 6, 7, 8], [-1, -1, -1, -1]])
    assert node_choices(slots_TK, 6, 2).tolist() == [[0, -1], [-1, 1], [-1, -1]]
    assert layout.route(slots_TK, 6, 2).row_counts_R.tolist() == [1, 1]


def test_one_rank_needs_no_group() -> None:
    dispatcher: TokenDispatcher = open_hierarchical("auto", None, node_size=1, slots_per_rank=S)
    assert isinstance(dispatcher, HierarchicalDispatcher)
    assert (
        dispatcher.row_format == row_format("auto").name
        and dispatcher.name == "local across 1 nodes and local inside"
    )
    case = make_cases(4, [5], slots_per_rank=S)[0]
    for got, want in zip(run_one(dispatcher, case), simulate([case], S)[0], strict=True):
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match=r"slots_TK\[0, 0\] is 3; it must be -1 or in \[0, 3\)"):
        dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[3]]))
