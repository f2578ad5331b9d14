"""`dispatch.Buffer` in normal mode equals loops in one process, bit for bit, over backends, ranks and nodes. Its events
and configs keep DeepEP's contract."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer, Config, EventHandle, EventOverlap
from dispatch.errors import DispatchError
from dispatch.faces.events import finished
from tests.dispatch.faces.buffer_cases import (
    BufferCase,
    expect_combined,
    expect_dispatch,
    make_cases,
    portable,
)
from tests.fixtures import PoolOf

L = 2  # experts per rank
BACKENDS = [  # wire, ranks, whether they are on two nodes: nodes in a handle do not depend on the wire
    ("auto", 1, False),
    ("shm", 2, True),
    ("gloo", 2, False),
    ("shm", 4, False),
    ("gloo", 4, True),
]


def edge_layers(R: int) -> list[list[BufferCase]]:
    uneven, E = [(5 * rank + 3) % 7 for rank in range(R)], R * L
    return [
        make_cases(1, uneven, experts=E),
        make_cases(2, [0] * R, experts=E),  # no rank has tokens
        make_cases(3, [6] + [0] * (R - 1), experts=E),  # one rank has all tokens
        make_cases(4, uneven, experts=E, no_choice=1.1),  # no token goes anywhere
        make_cases(5, uneven, experts=E, only_expert=E - 1, no_choice=0.0),  # all to one expert, repeated
        make_cases(6, uneven, experts=E, choices=E, no_choice=0.0),  # more choices than ranks
        make_cases(7, uneven, experts=E, hidden=7, dtype=torch.float32),
        make_cases(8, uneven, experts=E, dtype=torch.float16),
        make_cases(9, uneven, experts=E, dtype=torch.float64),
        make_cases(10, uneven, experts=E, scale_columns=2),
        make_cases(11, [30] * R, experts=E, hidden=64),
    ]


def answer(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Compute a rank's answers in place of its experts."""
    return x * (rank + 1.5) if x.dtype != torch.float8_e4m3fn else x.float() * (rank + 1.5)


def biases_of(case: BufferCase, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.x.shape[0])
    draw = torch.randn(2, case.x.shape[0], hidden, generator=generator).to(dtype)
    return draw[0], draw[1]


def run_layers(
    name: str, node_size: int, layers: list[list[BufferCase]] | None = None
) -> list[dict[str, Any]]:
    """Dispatch, dispatch again by the handle and into a worst-case size, and combine. Return every result by name."""
    buffer = Buffer(
        dist.group.WORLD, explicitly_destroy=True, backend=name, timeout_s=20.0, node_size=node_size
    )
    results = []
    for cases in layers or edge_layers(buffer.group_size):
        case = cases[buffer.rank]
        E = L * buffer.group_size
        x = case.x if case.scales is None else (case.x, case.scales.T.contiguous().T)
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(case.topk_idx, E)
        layout = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "is_token_in_rank": mask,
            "num_tokens_per_expert": per_expert,
            "topk_idx": case.topk_idx,
            "topk_weights": case.topk_weights,
        }
        got = buffer.dispatch(x, **layout, expert_alignment=4)
        recv_x = got[0][0] if isinstance(got[0], tuple) else got[0]
        assert recv_x.dtype == case.x.dtype
        worst = sum(c.x.shape[0] for c in cases) + 1
        padded = buffer.dispatch(x, **layout, num_worst_tokens=worst)
        cached = buffer.dispatch(x, handle=got[4])
        plain = buffer.dispatch(x, **(layout | {"topk_idx": None, "topk_weights": None}))
        y = answer(recv_x, buffer.rank)
        bias = biases_of(case, y.shape[1], y.dtype)
        padded_y = torch.cat([y, y.new_full((worst - y.shape[0], y.shape[1]), torch.nan)])
        results.append(
            {
                "layout": (per_rank, per_node, per_expert, mask),
                "got": portable(got[:5]),
                "padded": portable(padded[:5]),
                "cached": portable(cached[:5]),
                "plain": portable(plain[:4]),
                "combined": buffer.combine(y, got[4], got[2])[:2],
                "biased": buffer.combine(y, got[4], bias=bias)[0],
                "once_biased": buffer.combine(y, got[4], bias=bias[0])[0],
                "unpadded": buffer.combine(padded_y, padded[4])[0],
            }
        )
    buffer.destroy()
    return results


def same(ours: torch.Tensor, oracle: torch.Tensor) -> bool:
    is_alike = ours.dtype == oracle.dtype and ours.shape == oracle.shape and ours.is_contiguous()
    return is_alike and torch.equal(
        ours.view(-1).view(torch.uint8), oracle.contiguous().view(-1).view(torch.uint8)
    )


def check_dispatched(got: Any, want: Any, topk: bool = True) -> None:
    x, scales = got[0] if isinstance(got[0], tuple) else (got[0], None)
    assert same(x, want.x)
    assert (scales is None) == (want.scales is None)
    assert want.scales is None or same(scales, want.scales)
    assert not topk or (same(got[1], want.topk_idx) and same(got[2], want.topk_weights))


@pytest.mark.crossed("name", "world_size", every=2)
@pytest.mark.parametrize(("name", "world_size", "is_internode"), BACKENDS)
def test_normal_mode_has_the_oracles_bits(
    pool_of: PoolOf, name: str, world_size: int, is_internode: bool
) -> None:
    layers, R = edge_layers(world_size), world_size
    results = pool_of(R).run(run_layers, name, R // 2 if is_internode else 8)
    for index, cases in enumerate(layers):
        E = R * L
        dtype = torch.float32 if cases[0].scales is not None else cases[0].x.dtype
        rows = [expect_dispatch(cases, rank, E, 4) for rank in range(R)]
        answers = [answer(want.x, rank) for rank, want in enumerate(rows)]
        weights = [want.topk_weights for want in rows]
        for rank, whole in enumerate(rows):
            want, seen, T = portable(whole), results[rank][index], cases[rank].x.shape[0]
            check_dispatched(seen["got"], want)
            assert seen["got"][3] == want.per_expert
            check_dispatched(seen["cached"], want, topk=False)
            assert seen["cached"][1:] == (None, None, None, None)
            check_dispatched(seen["plain"], want, topk=False)
            assert seen["plain"][1:3] == (None, None)
            assert seen["plain"][3] == expect_dispatch(cases, rank, E).per_expert
            check_padded(seen["padded"], want, sum(case.x.shape[0] for case in cases) + 1)
            bias = biases_of(cases[rank], answers[rank].shape[1], dtype)
            combined, combined_weights = seen["combined"]
            assert same(combined, expect_combined(rows, answers, rank, T))
            assert same(combined_weights, expect_combined(rows, weights, rank, T))
            assert same(seen["biased"], expect_combined(rows, answers, rank, T, bias))
            assert same(seen["once_biased"], expect_combined(rows, answers, rank, T, bias[:1]))
            assert same(seen["unpadded"], combined)
            check_handle(seen["got"][4], want, rank, rows, R // 2 if is_internode else None)


def check_padded(padded: Any, want: Any, worst: int) -> None:
    """Check that the first rows equal the normal result, and that the others are zeros without a choice."""
    x, scales = padded[0] if isinstance(padded[0], tuple) else (padded[0], None)
    N = want.x.shape[0]
    assert x.shape[0] == padded[1].shape[0] == padded[2].shape[0] == worst
    assert padded[3] == []
    cut = (x[:N], scales[:N]) if scales is not None else x[:N]
    check_dispatched((cut, padded[1][:N], padded[2][:N]), want)
    assert (x[N:].float() == 0).all() and (padded[1][N:] == -1).all() and (padded[2][N:] == 0).all()


def check_handle(handle: Any, want: Any, rank: int, rows: list[Any], node_size: int | None) -> None:
    """Check the positions that callers index."""
    R = len(rows)
    ends = torch.tensor([int((want.source_rank <= source).sum()) for source in range(R)])
    if node_size is None:
        assert len(handle) == 6
        assert handle[0].dtype == torch.int32 and torch.equal(handle[0][:, rank].long(), ends)
        for other in range(R):
            assert int(handle[0][-1, other]) == rows[other].x.shape[0]
        assert torch.equal(handle[3], want.source_token)
        assert handle[5].dtype == torch.int32 and torch.equal(handle[5] >= 0, handle[4])
    else:
        assert len(handle) == 10
        assert handle[-4].dtype == torch.int32 and torch.equal(handle[-4].long(), ends)
        meta = handle[-3].view(torch.int32)
        assert torch.equal(meta[:, 0].long(), want.source_rank) and torch.equal(meta[:, 1], want.source_token)


@pytest.mark.parametrize("is_internode", [False, True])
def test_the_layout_counts_tokens_once_per_rank_and_node(pool_of: PoolOf, is_internode: bool) -> None:
    cases = make_cases(21, [9, 4, 0, 7], experts=8, choices=5)
    results = pool_of(4).run(run_layers, "shm", 2 if is_internode else 8, [cases])
    for case, result in zip(cases, results, strict=True):
        per_rank, per_node, per_expert, mask = result[0]["layout"]
        chosen = [[e for e in row if e >= 0] for row in case.topk_idx.tolist()]
        ranks = [{e // L for e in row} for row in chosen]
        assert mask.tolist() == [[rank in row for rank in range(4)] for row in ranks]
        assert per_rank.tolist() == [sum(rank in row for row in ranks) for rank in range(4)]
        assert per_expert.tolist() == [sum(row.count(e) for row in chosen) for e in range(8)]
        assert per_rank.dtype == per_expert.dtype == torch.int32
        if is_internode:
            assert per_node.tolist() == [
                sum(any(r // 2 == n for r in row) for row in ranks) for n in range(2)
            ]
        else:
            assert per_node is None


def results_are_the_callers_own() -> bool:
    """Check that a call does not overwrite earlier results, and that a handle stays valid."""
    buffer = Buffer(dist.group.WORLD, backend="shm", timeout_s=20.0)
    topk_idx = torch.arange(4).view(4, 1) % (L * 2)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, L * 2)
    layout = (None, per_rank, None, mask, per_expert)
    first, _, _, _, handle, _ = buffer.dispatch(torch.ones(4, 8), *layout)
    kept = first.clone()
    for value in range(3):
        buffer.dispatch(torch.full((4, 8), float(value)), *layout)
    combined, _, _ = buffer.combine(first, handle)
    return torch.equal(first, kept) and torch.equal(combined, torch.ones(4, 8))


def test_results_outlive_later_calls(pool_of: PoolOf) -> None:
    assert pool_of(2).run(results_are_the_callers_own) == [True, True]


def look_at_attributes() -> list[Any]:
    buffer = Buffer(dist.group.WORLD, 1 << 20, 256, explicitly_destroy=True, backend="shm", timeout_s=20.0)
    seen: list[Any] = [
        (buffer.rank, buffer.group_size, buffer.group is dist.group.WORLD, buffer.num_nvl_bytes),
        (buffer.num_rdma_bytes, buffer.low_latency_mode, buffer.explicitly_destroy, buffer.enable_shrink),
        (buffer.runtime.is_available(), buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()),
        (buffer.is_sm90_compiled(), type(buffer.capture()).__name__),
        buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().shape,
        buffer.get_local_buffer_tensor(torch.float32, torch.Size([3, 4]), offset=8).shape,
    ]
    for call in (
        lambda: buffer.get_comm_stream(),
        lambda: buffer.get_local_buffer_tensor(torch.float32, torch.Size([65]), use_rdma_buffer=True),
    ):
        try:
            call()
        except (DispatchError, ValueError) as error:
            seen.append(str(error))
    buffer.destroy()
    seen.append(buffer.runtime)
    try:
        buffer.combine(torch.ones(1, 1), ())
    except DispatchError as error:
        seen.append(str(error))
    return seen


def test_what_callers_read_is_there(pool_of: PoolOf) -> None:
    for rank, seen in enumerate(pool_of(2).run(look_at_attributes)):
        assert seen[0] == (rank, 2, True, 1 << 20)
        assert seen[1] == (256, False, True, False)
        assert seen[2] == (True, 1, 0)
        assert seen[3] == (True, "EventOverlap")
        assert seen[4] == (256,) and seen[5] == (3, 4)
        assert "backend shm has no streams" in seen[6]
        assert "num_rdma_bytes is 256, which holds 64 elements of torch.float32" in seen[7]
        assert seen[8] is None and seen[9] == "combine: the buffer is destroyed"


def test_the_number_of_sms_is_a_class_attribute() -> None:
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(24)
        assert Buffer.num_sms == 24
        assert Buffer.get_dispatch_config(6).num_sms == Buffer.get_combine_config(160).num_sms == 24
        assert isinstance(Buffer.get_dispatch_config(2), Config)
        with pytest.raises(ValueError, match="new_num_sms is 23; it must be an even number"):
            Buffer.set_num_sms(23)
        with pytest.raises(ValueError, match="num_ranks is 0"):
            Buffer.get_dispatch_config(0)
    finally:
        Buffer.num_sms = before


def test_a_hook_runs_once_after_the_wait() -> None:
    calls: list[int] = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(ValueError, match="only one is allowed"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1]


def test_leaving_a_with_block_waits_and_may_release() -> None:
    calls: list[int] = []
    event = EventOverlap(EventHandle(), (1, 2))
    event.register_hook_after_wait(lambda: calls.append(1))
    with event:
        assert calls == []
    assert calls == [1] and event.event is not None and event.extra_tensors == (1, 2)
    with event(release_handle=True):
        pass
    assert event.event is None
    with event:  # waiting without an event must not be an error
        pass


def test_only_an_asynchronous_call_has_an_event() -> None:
    assert finished(True).event is not None
    assert finished(False).event is None


def test_configs_take_deep_eps_names_and_order() -> None:
    config = Config(24, 8, 512, 16, 130)
    assert config == Config(
        num_sms=24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=512,
        num_max_rdma_chunked_send_tokens=16,
        num_max_rdma_chunked_recv_tokens=144,
    )
    assert config.num_max_rdma_chunked_recv_tokens == 144  # a multiple of the send size


def test_hints_count_every_byte_of_every_channel() -> None:
    """Computed by hand: 12 channels; a token has 4096 bytes, 8 of metadata, 128 choices and weights, 128 scales."""
    config, token = Config(24, 8, 256, 16, 128), 4096 + 8 + 128 * 12 + 128 * 4
    nvl = 12 * 4 * (5 * 4 + 256 * token)
    assert config.get_nvl_buffer_size_hint(4096, 4) == -(-nvl // 128) * 128
    assert config.get_rdma_buffer_size_hint(4096, 8) == 0
    rdma = 12 * 2 * 2 * (18 * 4 + 128 * (token + 16))
    assert config.get_rdma_buffer_size_hint(4096, 16) == -(-rdma // 128) * 128
    assert config.get_nvl_buffer_size_hint(4096, 16) == -(-(12 * 8 * (7 * 4 + 256 * token)) // 128) * 128
