"""DeepEP's low-latency interface: what it returns, what it refuses and on whom, hooks, statistics, masks."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.faces.events import EventOverlap
from dispatch.low_latency.cpu_exchange import CpuExchange
from dispatch.low_latency.face import LowLatencyFace
from dispatch.transports.choose import open_transport
from dispatch.transports.local import LocalTransport
from tests.conftest import PoolOf
from tests.dispatch.low_latency.cases import Layer, assert_same, make_cases, simulate
from tests.dispatch.low_latency.ranks import catch, one_rank_wrong, open_face, run_layer

BF16 = torch.bfloat16


@pytest.fixture
def face() -> LowLatencyFace:
    return LowLatencyFace(CpuExchange(LocalTransport()))


def bring(tokens: int = 3, hidden: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, hidden).to(BF16), torch.tensor([[0, 1]] * tokens)


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


X, TOPK = bring()
GOOD = {"x": X, "topk_idx": TOPK, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1]}, "x is list; it must be a tensor"),
        ({"x": X[0]}, r"x is torch.bfloat16 \[512\].*two dimensions"),
        ({"x": X.int()}, "x is torch.int32.*floating type"),
        ({"x": X.to("meta")}, "x is on meta"),
        ({"x": X.T.contiguous().T}, r"x has strides \[1, 3\]; .* needs it contiguous"),
        ({"topk_idx": TOPK.float()}, "topk_idx is torch.float32"),
        ({"topk_idx": TOPK[:2]}, "topk_idx has 2 tokens and x 3"),
        (
            {"topk_idx": torch.tensor([[0, 1], [0, 2], [0, 1]])},
            r"topk_idx\[1, 1\] is 2; it must be -1 or in \[0, 2\)",
        ),
        ({"topk_idx": torch.tensor([[0, 1], [-2, 0], [0, 1]])}, r"topk_idx\[1, 0\] is -2"),
        (
            {"num_max_dispatch_tokens_per_rank": 2},
            "x has 3 tokens where num_max_dispatch_tokens_per_rank is 2",
        ),
        ({"num_experts": 0}, "num_experts is 0; it must be a positive multiple of the 1 ranks"),
        ({"use_fp8": False, "round_scale": True, "use_ue8m0": True}, "use_ue8m0 is True with use_fp8=False"),
        ({"use_ue8m0": True}, "round_scale=False; it needs both"),
        ({"async_finish": True, "return_recv_hook": True}, "async_finish and return_recv_hook are both True"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(2)},
            r"cumulative_local_expert_recv_stats is torch.float32 \[2\].* torch.int32 \[2\]",
        ),
        (
            {"dispatch_wait_recv_cost_stats": torch.zeros(2, dtype=torch.int64)},
            r"dispatch_wait_recv_cost_stats is .*\[1\] or \[1, 1\]",
        ),
    ],
)
def test_dispatch_refuses_bad_input_by_name(
    face: LowLatencyFace, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        face.low_latency_dispatch(**{**GOOD, **change})
    face.low_latency_dispatch(**GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 512, dtype=BF16)}, r"x is torch.bfloat16 \[2, 3, 512\].*\[2, 4, 512\]"),
        ({"topk_idx": TOPK[:2]}, r"topk_idx is .*\[2, 2\].*; the dispatch of this handle had \[3, 2\]"),
        ({"topk_idx": TOPK.flip(1)}, r"topk_idx\[0, 0\] is 1 where the dispatch of this handle had 0"),
        ({"topk_weights": torch.ones(3, 2, dtype=BF16)}, "topk_weights is torch.bfloat16.*float32"),
        ({"handle": (1, 2)}, "handle is tuple; it must be what low_latency_dispatch returned"),
        (
            {"handle": (torch.zeros(1), torch.zeros(1), 4, 512, 2)},
            "handle is of none of this buffer's dispatches",
        ),
        (
            {"out": torch.zeros(3, 512)},
            r"out is torch.float32 \[3, 512\].*; it must be torch.bfloat16 \[3, 512\]",
        ),
        ({"x": torch.zeros(2, 4, 512), "zero_copy": True}, "x is torch.float32 and zero_copy True"),
    ],
)
def test_combine_refuses_bad_input_by_name(
    face: LowLatencyFace, change: dict[str, Any], message: str
) -> None:
    recv_x, _, handle, _, _ = face.low_latency_dispatch(**GOOD, use_fp8=False)
    good = {"x": recv_x, "topk_idx": TOPK, "topk_weights": torch.ones(3, 2), "handle": handle}
    with pytest.raises(ValueError, match=message):
        face.low_latency_combine(**{**good, **change})
    assert torch.equal(face.low_latency_combine(**good)[0], 2 * X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 512, dtype=BF16)}, r"hidden size 512; DeepEP has kernels for"),
        ({"x": torch.zeros(3, 2048)}, "x is torch.float32; DeepEP takes bfloat16"),
        (
            {"topk_idx": torch.zeros(3, 12, dtype=torch.int64)},
            "topk_idx has 12 choices; DeepEP takes at most 11",
        ),
        ({"num_max_dispatch_tokens_per_rank": 512}, "is 512; DeepEP takes at most 511"),
        ({"num_max_dispatch_tokens_per_rank": 5}, "is 5 on 1 ranks; .* a multiple of 4"),
    ],
)
def test_strict_mode_has_deepeps_limits(change: dict[str, Any], message: str) -> None:
    face = LowLatencyFace(CpuExchange(LocalTransport()), strict=True)
    good = {**GOOD, "x": torch.zeros(3, 2048, dtype=BF16)}
    with pytest.raises(ValueError, match=message):
        face.low_latency_dispatch(**{**good, **change})
    face.low_latency_dispatch(**good)


@pytest.mark.parametrize(("name", "world_size"), [("gloo", 2), ("shm", 4)])
@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        ("dispatch", {"topk_idx": torch.full((3, 3), 99)}, "topk_idx[0, 0] is 99"),
        ("dispatch", {"num_max_dispatch_tokens_per_rank": 2}, "x has 3 tokens"),
        ("combine", {"topk_weights": torch.ones(1)}, "topk_weights is torch.float32 [1]"),
    ],
)
def test_a_refusal_reaches_every_rank_and_the_next_call_works(
    pool_of: PoolOf, name: str, world_size: int, call: str, change: dict[str, Any], message: str
) -> None:
    wrong = world_size - 1
    results = pool_of(world_size).run(one_rank_wrong, name, wrong, call, change)
    wants = simulate(Layer(make_cases(1, [3] * world_size, dtype=BF16), 4, 2))
    for rank, (text, result) in enumerate(results):
        who = (
            f"ValueError: {message}"
            if rank == wrong
            else f"PeerRefused: rank {wrong} refused the call: {message}"
        )
        assert text.startswith(who)
        assert_same(result, wants[rank], f"rank {rank}")


def disagree(name: str, wrong: str) -> str:
    with open_face(name) as face:
        rank = face.exchange.rank
        x = torch.zeros(2, 8 + 8 * rank * (wrong == "hidden"), dtype=torch.float32)
        topk = torch.zeros(2, 2 + rank * (wrong == "choices"), dtype=torch.int64)
        max_tokens, experts = 4 + rank * (wrong == "tokens"), 4 + 2 * rank * (wrong == "experts")
        return catch(lambda: face.low_latency_dispatch(x, topk, max_tokens, experts, use_fp8=False))


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("wrong", ["hidden", "choices", "tokens", "experts"])
def test_ranks_that_disagree_get_a_named_error(pool_of: PoolOf, name: str, wrong: str) -> None:
    for text in pool_of(2).run(disagree, name, wrong):
        assert text.startswith("RanksDisagree: rank ")


def overlap_two(name: str, layers: list[Layer]) -> list[torch.Tensor]:
    """Send two dispatches, then receive both; the same with the combines, in the other order."""
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


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_two_calls_may_be_under_way(pool_of: PoolOf, name: str) -> None:
    layers = [Layer(make_cases(seed, [3, 5], dtype=BF16), 9, 2) for seed in (1, 2)]
    results = pool_of(2).run(overlap_two, name, layers)
    for index, layer in enumerate(layers):
        topks = [case.topk_TK for case in layer.cases]
        for rank, case in enumerate(layer.cases):
            chosen = (topks[rank] >= 0) * case.weights_TK
            want = torch.zeros_like(case.x_TH, dtype=torch.float32)
            for k in range(3):
                want += chosen[:, k : k + 1] * case.x_TH.float()
            assert torch.equal(results[rank][index], want.to(BF16))


def send_before_the_peer(name: str) -> float:
    """Rank 0 posts while rank 1 has not come yet, and does something else: seconds until the post returned."""
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
        hook()  # once more does no harm
        return elapsed


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_posting_does_not_wait_for_peers(pool_of: PoolOf, name: str) -> None:
    """If it did, this would never end: rank 1 posts only after rank 0 has returned from posting."""
    assert all(elapsed < 10 for elapsed in pool_of(2).run(send_before_the_peer, name))


def refused_while_hook_waits(name: str) -> tuple[str, str]:
    """Rank 1 refuses what rank 0 has posted with a hook; both make another call before rank 0's hook runs."""
    layer = Layer(make_cases(1, [3, 3]), 4, 2)
    with open_face(name) as face:
        case = layer.cases[face.exchange.rank]
        topk = case.topk_TK if face.exchange.rank == 0 else torch.full_like(case.topk_TK, 77)
        kept: list[Any] = []
        text = catch(
            lambda: kept.append(
                face.low_latency_dispatch(case.x_TH, topk, 4, 4, use_fp8=False, return_recv_hook=True)[4]
            )
        )
        result = run_layer(face, layer)
        assert_same(result, simulate(layer)[face.exchange.rank], name)
        return text, catch(kept[0]) if kept else ""


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_refusal_is_raised_by_the_hook_it_belongs_to(pool_of: PoolOf, name: str) -> None:
    (posted, hooked), (refused, _) = pool_of(2).run(refused_while_hook_waits, name)
    assert posted == "no error"
    assert hooked.startswith("PeerRefused: rank 1 refused the call: topk_idx[0, 0] is 77")
    assert refused.startswith("ValueError: topk_idx[0, 0] is 77")


def count_waits(name: str) -> tuple[list[int], list[list[int]]]:
    with open_face(name) as face:
        rank = face.exchange.rank
        x, topk = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
        waits, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
        recv_x, _, handle, _, _ = face.low_latency_dispatch(x, topk, 4, 2, None, waits, use_fp8=False)
        face.low_latency_combine(recv_x, topk, torch.ones(2, 1), handle, combine_wait_recv_cost_stats=table)
        assert waits[rank] == 0 and table[1 - rank].sum() == 0
        return waits.tolist(), table.tolist()


def test_waits_are_noted_for_peers(pool_of: PoolOf) -> None:
    for rank, (waits, table) in enumerate(pool_of(2).run(count_waits, "shm")):
        assert 0 < waits[1 - rank] < 20e9
        assert 0 < table[rank][1 - rank] < 20e9


def mask_one(name: str, layer: Layer, masked: int) -> torch.Tensor | None:
    """All but one rank mask that one; it takes no part."""
    transport = open_transport(name, dist.group.WORLD, timeout_s=20.0)
    face = LowLatencyFace(CpuExchange(transport), enable_shrink=True)
    try:
        if transport.rank == masked:
            return None
        face.low_latency_update_mask_buffer(masked, mask=True)
        status = torch.zeros(transport.world_size, dtype=torch.int32)
        face.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank == masked) for rank in range(transport.world_size)]
        face.clean_low_latency_buffer(9, 16, 6)
        result = run_layer(face, layer)
        face.low_latency_clean_mask_buffer()
        face.low_latency_query_mask_buffer(status)
        assert status.sum() == 0
        return result
    finally:
        transport.close()


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


def test_masks_need_enable_shrink(face: LowLatencyFace) -> None:
    for action in (
        lambda: face.low_latency_update_mask_buffer(0, True),
        lambda: face.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
        face.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(ValueError, match="enable_shrink is False"):
            action()


def test_mask_arguments_are_checked() -> None:
    face = LowLatencyFace(CpuExchange(LocalTransport()), enable_shrink=True)
    with pytest.raises(ValueError, match=r"rank_to_mask is 1; it must be in \[0, 1\)"):
        face.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ValueError, match=r"mask_status is torch.int64 \[1\]"):
        face.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask_status is None"):
        face.low_latency_query_mask_buffer(None)  # type: ignore[arg-type]
