"""DeepEP's low-latency interface: results, hooks, statistics, masks."""

import time

import pytest
import torch
import torch.distributed as dist

from dispatch.faces.events import EventOverlap
from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.open import open_wire
from tests.dispatch.conftest import RanksOf
from tests.dispatch.low_latency.cases import Layer, RankResult, assert_same, make_cases, simulate
from tests.dispatch.low_latency.ranks import BF16, INTERPRETED, bring, open_face, run_layer
from tests.fixtures import PoolOf
from tests.support.gpu.interpreted import needs_triton


def test_shapes_and_types_are_deepeps(face: LowLatencyFace) -> None:
    x, topk = bring()
    recv_x, count, handle, event, hook = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
    assert (recv_x.shape, recv_x.dtype) == ((2, 4, 512), BF16)
    assert (count.tolist(), count.dtype) == ([3, 3], torch.int32)
    assert (handle[0].shape, handle[0].dtype) == ((2, 4), torch.int32)
    assert (handle[1].tolist(), handle[1].dtype) == ([[3], [3]], torch.int64)
    assert handle[2:] == (4, 512, 2)
    assert hook is None and isinstance(event, EventOverlap) and event.event is None
    (rows, scales), *_ = face.low_latency_dispatch(x, topk, 4, 2)
    assert (rows.shape, rows.dtype) == ((2, 4, 512), torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype, scales.stride()) == ((2, 4, 4), torch.float32, (16, 1, 4))
    (_, scales), *_ = face.low_latency_dispatch(x, topk, 4, 2, round_scale=True, use_ue8m0=True)
    assert (scales.shape, scales.dtype, scales.stride()) == ((2, 4, 1), torch.int32, (4, 1, 4))


def test_an_event_is_returned_where_it_was_asked_for(face: LowLatencyFace) -> None:
    x, topk = bring()
    recv_x, _, handle, event, _ = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False, async_finish=True)
    event.current_stream_wait()
    out, event, _ = face.low_latency_combine(recv_x, topk, torch.full((3, 2), 0.5), handle, async_finish=True)
    event.current_stream_wait()
    assert torch.equal(out, x)


def test_two_results_may_be_held_and_answered_in_any_order(face: LowLatencyFace) -> None:
    x, topk = bring()
    first = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
    second = face.low_latency_dispatch(-x[:2], topk[:2], 4, 2, use_fp8=False)
    weights = torch.full((3, 2), 0.5)
    of_second, _, _ = face.low_latency_combine(second[0], topk[:2], weights[:2], second[2])
    of_first, _, _ = face.low_latency_combine(first[0], topk, weights, first[2])
    assert torch.equal(of_first, x)
    assert torch.equal(of_second, -x[:2])


def test_statistics_accumulate(face: LowLatencyFace) -> None:
    x, topk = bring()
    stats = torch.tensor([10, 20], dtype=torch.int32)
    for _ in range(2):
        face.low_latency_dispatch(x, topk, 4, 2, stats)
    assert stats.tolist() == [16, 26]


def test_zero_copy_reads_the_buffer_instead_of_x(face: LowLatencyFace) -> None:
    x, topk = bring()
    recv_x, _, handle, _, _ = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
    assert isinstance(recv_x, torch.Tensor)
    face.get_next_low_latency_combine_buffer(handle)[:, :, :] = recv_x
    weights = torch.full((3, 2), 0.5)
    combined, _, _ = face.low_latency_combine(torch.zeros_like(recv_x), topk, weights, handle, zero_copy=True)
    assert torch.equal(combined, x)


def test_a_choice_that_combine_leaves_out_adds_nothing(face: LowLatencyFace) -> None:
    x, topk = bring()
    recv_x, _, handle, _, _ = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
    left_out = topk.clone()
    left_out[1, 0] = -1
    combined, _, _ = face.low_latency_combine(recv_x, left_out, torch.ones(3, 2), handle, use_logfmt=True)
    assert torch.equal(combined, x * torch.tensor([[2], [1], [2]]))


def test_int32_choices_are_taken(face: LowLatencyFace) -> None:
    x, topk = bring()
    recv_x, count, handle, _, _ = face.low_latency_dispatch(x, topk.int(), 4, 2, use_fp8=False)
    assert count.tolist() == [3, 3]
    combined, _, _ = face.low_latency_combine(recv_x, topk.int(), torch.full((3, 2), 0.5), handle)
    assert torch.equal(combined, x)


def test_an_expert_named_twice_gets_a_token_once_and_counts_twice(face: LowLatencyFace) -> None:
    x, _ = bring(1)
    topk = torch.tensor([[1, 1]])
    recv_x, count, handle, _, _ = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
    assert count.tolist() == [0, 1]
    combined, _, _ = face.low_latency_combine(recv_x, topk, torch.tensor([[1.0, 2.0]]), handle)
    assert torch.equal(combined, 3 * x)


def test_the_size_hint_covers_two_calls() -> None:
    hint = LowLatencyFace.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256
    )
    assert hint % 128 == 0
    assert hint > 2 * 2 * 8 * 128 * 7168 * 2


def overlap_two(name: str, layers: list[Layer]) -> list[torch.Tensor]:
    """Send two dispatches, then receive both. Do the same with the combines, in reverse order."""
    with open_face(name) as face:
        mine = [layer.cases[face.exchange.rank] for layer in layers]
        experts = layers[0].experts_per_rank * len(layers[0].cases)
        sent = [
            face.low_latency_dispatch(c.x_TH, c.topk_TK, 9, experts, use_fp8=False, return_recv_hook=True)
            for c in mine
        ]
        for *_, hook in reversed(sent):
            hook()
        combined = [
            face.low_latency_combine(recv_x, c.topk_TK, c.weights_TK, handle, return_recv_hook=True)
            for c, (recv_x, _, handle, _, _) in zip(mine, sent, strict=True)
        ]
        for _, _, hook in combined:
            hook()
        return [x_TH.clone() for x_TH, _, _ in combined]


@pytest.mark.parametrize("name", ["shm", "gloo", pytest.param("triton", marks=needs_triton)])
def test_two_calls_may_be_under_way(ranks_of: RanksOf, name: str) -> None:
    layers = [Layer(make_cases(seed, [3, 5], dtype=BF16), 9, 2) for seed in (1, 2)]
    results = ranks_of(name, 2).run(overlap_two, name, layers)
    for index, layer in enumerate(layers):
        topks = [case.topk_TK for case in layer.cases]
        for rank, case in enumerate(layer.cases):
            chosen = (topks[rank] >= 0) * case.weights_TK
            want = torch.zeros_like(case.x_TH, dtype=torch.float32)
            for k in range(3):
                want += chosen[:, k : k + 1] * case.x_TH.float()
            assert torch.equal(results[rank][index], want.to(BF16))


def send_before_the_peer(name: str) -> float:
    """Post on rank 0 before rank 1 arrives. Return the seconds until the post returned."""
    with open_face(name) as face:
        x, topk = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
        for _ in range(2):  # the first calls compile and connect
            face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False)
        if face.exchange.rank == 1:
            dist.recv(torch.zeros(1), 0)  # until rank 0 has posted
        begin = time.monotonic()
        *_, hook = face.low_latency_dispatch(x, topk, 4, 2, use_fp8=False, return_recv_hook=True)
        elapsed = time.monotonic() - begin
        if face.exchange.rank == 0:
            dist.send(torch.zeros(1), 1)
        assert hook is not None
        hook()
        hook()  # a second call is harmless
        return elapsed


@pytest.mark.parametrize("name", ["shm", "gloo", pytest.param("triton", marks=needs_triton)])
def test_posting_does_not_wait_for_peers(ranks_of: RanksOf, name: str) -> None:
    """If it waited, this would never end: rank 1 posts only after rank 0 has returned from posting."""
    assert all(elapsed < 30 for elapsed in ranks_of(name, 2).run(send_before_the_peer, name))


def count_waits(name: str) -> tuple[list[int], list[list[int]]]:
    with open_face(name) as face:
        rank = face.exchange.rank
        x, topk = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
        waits, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
        recv_x, _, handle, _, _ = face.low_latency_dispatch(x, topk, 4, 2, None, waits, use_fp8=False)
        face.low_latency_combine(recv_x, topk, torch.ones(2, 1), handle, combine_wait_recv_cost_stats=table)
        assert waits[rank] == 0 and table[1 - rank].sum() == 0
        return waits.tolist(), table.tolist()


@pytest.mark.parametrize("name", ["shm", pytest.param("triton", marks=INTERPRETED)])
def test_waits_are_noted_for_peers(ranks_of: RanksOf, name: str) -> None:
    for rank, (waits, table) in enumerate(ranks_of(name, 2).run(count_waits, name)):
        assert 0 < waits[1 - rank] < 20e9
        assert 0 < table[rank][1 - rank] < 20e9


def mask_one(name: str, layer: Layer, masked: int) -> RankResult | None:
    """Mask one rank on all others. The masked rank takes no part."""
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    face = LowLatencyFace(CpuExchange(wire), enable_shrink=True)
    try:
        if wire.rank == masked:
            return None
        face.low_latency_update_mask_buffer(masked, mask=True)
        status = torch.zeros(wire.world_size, dtype=torch.int32)
        face.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank == masked) for rank in range(wire.world_size)]
        face.clean_low_latency_buffer(9, 16, 6)
        result = run_layer(face, layer)
        face.low_latency_clean_mask_buffer()
        face.low_latency_query_mask_buffer(status)
        assert status.sum() == 0
        return result
    finally:
        wire.close()


@pytest.mark.parametrize("name", ["shm"])
def test_a_masked_rank_brings_and_answers_nothing(pool_of: PoolOf, name: str) -> None:
    layer = Layer(make_cases(4, [3, 5, 4, 2], dtype=BF16), 9, 2)
    masked = 2
    results = pool_of(4).run(mask_one, name, layer, masked)
    silent = layer.cases[masked]._replace(topk_TK=torch.full_like(layer.cases[masked].topk_TK, -1))
    cases = [
        case._replace(topk_TK=torch.where(case.topk_TK // 2 == masked, -1, case.topk_TK))
        for case in layer.cases
    ]
    cases[masked] = silent
    for rank, want in enumerate(simulate(layer._replace(cases=cases))):
        if rank != masked:
            assert_same(results[rank], want, f"rank {rank}")
