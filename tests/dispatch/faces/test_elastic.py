"""ElasticBuffer: the assertions of DeepEP's tests/elastic/test_ep.py in our code, and further promises to callers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.faces.elastic import ElasticBuffer, find_node_size
from dispatch.faces.handles import EPHandle
from tests.dispatch.faces.elastic_oracle import (
    E,
    H,
    Inputs,
    K,
    M,
    answer,
    expect_combine,
    expect_dispatch,
    make_inputs,
    open_buffer,
)
from tests.fixtures import PoolOf

TOKENS = {1: [5], 2: [7, 12], 4: [5, 0, 12, 3]}

FP8 = torch.float8_e4m3fn


class Got(NamedTuple):
    """Results of one dispatch. One-byte types are viewed as bytes, so that they can be compared and sent."""

    x: Tensor
    scales: Tensor | None
    scale_strides: tuple[int, ...]
    topk_idx: Tensor | None
    weights: Tensor | None
    handle: EPHandle


def seen(results: tuple[Any, ...]) -> Got:
    x, idx, weights, handle, _ = results
    x, scales = x if isinstance(x, tuple) else (x, None)
    plain = x.view(torch.uint8) if x.element_size() == 1 else x
    strides = () if scales is None else scales.stride()
    return Got(plain, scales, strides, idx, weights, handle)


def rows_of(given: Inputs, is_fp8: bool) -> Any:
    return (given.x_TH.to(FP8), given.scales_TB) if is_fp8 else given.x_TH


def dispatch_all(inputs: list[Inputs], is_fp8: bool, calls: list[dict[str, Any]]) -> list[tuple[Got, Tensor]]:
    """Dispatch once per call. A call with "cached" uses the handle of the call at that index."""
    buffer = open_buffer(explicitly_destroy=True)
    given = inputs[buffer.rank_idx]
    done: list[tuple[Got, Tensor]] = []
    for call in calls:
        options = dict(call)
        stats = torch.zeros(E // buffer.num_ranks, dtype=torch.int32)
        if "cached" in options:
            options["handle"] = done[options.pop("cached")][0].handle
            if options.pop("with_weights", False):
                options["topk_weights"] = given.weights_TK
        else:
            options |= {"topk_idx": given.topk_idx_TK, "topk_weights": given.weights_TK, "num_experts": E}
            options["cumulative_local_expert_recv_stats"] = stats
        done.append((seen(buffer.dispatch(rows_of(given, is_fp8), **options)), stats))
    buffer.destroy()
    return done


def as_sent(rows: Tensor, is_fp8: bool) -> Tensor:
    return rows.to(FP8).view(torch.uint8) if is_fp8 else rows


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_choices_and_counts_are_the_oracles(pool_of: PoolOf, ranks: int, is_fp8: bool) -> None:
    inputs = make_inputs(TOKENS[ranks], experts=E, choices=K, hidden=H, no_choice=0.2)
    results = pool_of(ranks).run(
        dispatch_all, inputs, is_fp8, [{"expert_alignment": 4}, {"do_cpu_sync": False}]
    )
    for rank in range(ranks):
        want = expect_dispatch(inputs, rank, E)
        N, L = len(want.source_N), E // ranks
        counts = [int((want.local_NK == e).sum()) for e in range(L)]
        for (got, stats), alignment in zip(results[rank], (4, 1), strict=True):
            handle = got.handle
            assert torch.equal(got.x[:N], as_sent(want.x_NH, is_fp8))
            assert got.scales is None or torch.equal(got.scales[:N], want.scales_NB)
            assert got.topk_idx is not None and torch.equal(got.topk_idx[:N], want.local_NK)
            assert got.weights is not None and torch.equal(got.weights[:N], want.weights_NK)
            metadata = handle.recv_src_metadata[:N]
            assert metadata[:, 0].tolist() == [s * M + t for s, t in want.source_N]
            assert stats.tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
            padded = [-(-count // alignment) * alignment for count in counts]
            assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(padded).cumsum(0).tolist()
            assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == N
        exact, worst = results[rank][0][0], results[rank][1][0]
        assert exact.x.shape[0] == N and exact.handle.num_recv_tokens_per_expert_list == padded_to(counts, 4)
        assert worst.x.shape[0] == ranks * M and worst.handle.num_recv_tokens_per_expert_list == []
        assert not worst.x[N:].any() and bool((worst.topk_idx[N:] == -1).all())  # type: ignore[index]


def padded_to(counts: list[int], alignment: int) -> list[int]:
    return [-(-count // alignment) * alignment for count in counts]


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_expanded_rows_lie_by_expert_then_source_and_padding_is_zero(
    pool_of: PoolOf, alignment: int, is_fp8: bool
) -> None:
    inputs = make_inputs(TOKENS[4], experts=E, choices=K, hidden=H, no_choice=0.2, seed=3)
    call = {"expert_alignment": alignment, "do_expand": True, "use_tma_aligned_col_major_sf": True}
    results = pool_of(4).run(dispatch_all, inputs, is_fp8, [call, call | {"do_cpu_sync": False}])
    for rank in range(4):
        want = expect_dispatch(inputs, rank, E)
        for got, _ in results[rank]:
            handle, row = got.handle, 0
            assert got.topk_idx is None and got.x.shape[0] == handle.num_expanded_tokens
            for e, end in enumerate(handle.psum_num_recv_tokens_per_expert.tolist()):
                for n, k in (want.local_NK == e).nonzero().tolist():
                    assert torch.equal(got.x[row], as_sent(want.x_NH, is_fp8)[n])
                    assert got.weights is not None and got.weights[row] == want.weights_NK[n, k]
                    assert got.scales is None or torch.equal(got.scales[row], want.scales_NB[n])
                    assert int(handle.recv_src_metadata[n, 2 + k]) == row
                    row += 1
                assert row == end
                while row % alignment:
                    assert not got.x[row].any() and got.weights is not None and got.weights[row] == 0
                    row += 1
            assert not got.x[row:].any()
            column = -(-got.x.shape[0] // 4) * 4
            assert got.scale_strides == ((1, column) if is_fp8 else ())
        assert results[rank][0][0].handle.num_expanded_tokens == row


@pytest.mark.parametrize("do_expand", [False, True])
def test_a_cached_dispatch_goes_the_same_way(pool_of: PoolOf, do_expand: bool) -> None:
    inputs = make_inputs(TOKENS[2], experts=E, choices=K, hidden=H, no_choice=0.2, seed=5)
    first: dict[str, Any] = {"do_expand": do_expand, "expert_alignment": 4}
    again: dict[str, Any] = {"cached": 0, "do_expand": do_expand}
    calls = [first, again, again | {"with_weights": True}]
    for results in pool_of(2).run(dispatch_all, inputs, True, calls):
        (one, stats), (two, no_stats), (three, _) = results
        for got in (two, three):
            assert (
                torch.equal(got.x, one.x) and got.scales is not None and torch.equal(got.scales, one.scales)
            )
            assert (got.topk_idx is None) == do_expand
            assert do_expand or torch.equal(got.topk_idx, one.topk_idx)
        assert two.weights is None and torch.equal(three.weights, one.weights)
        assert stats.any() and not no_stats.any()


class Plan(NamedTuple):
    """Options of one combine."""

    hybrid: bool
    multiple: bool
    expand: bool
    biases: int


def combine_all(inputs: list[Inputs], plans: list[Plan], node_size: int) -> list[tuple[Tensor, Tensor]]:
    """Dispatch, answer like the oracle's experts, and combine. The answers are the same for every plan."""
    results = []
    for plan in plans:
        buffer = open_buffer(
            node_size=node_size,
            allow_hybrid_mode=plan.hybrid,
            allow_multiple_reduction=plan.multiple,
            explicitly_destroy=True,
        )
        given = inputs[buffer.rank_idx]
        x, _, weights, handle, _ = buffer.dispatch(
            given.x_TH,
            given.topk_idx_TK,
            given.weights_TK,
            num_experts=E,
            expert_alignment=4,
            do_expand=plan.expand,
        )
        assert isinstance(x, Tensor)
        y = torch.zeros_like(x)
        local_NK = expect_dispatch(inputs, buffer.rank_idx, E).local_NK
        for n, index in enumerate(handle.recv_src_metadata[:, 0].tolist()):
            here = [k for k in range(local_NK.shape[1]) if local_NK[n, k] >= 0]
            rank, token = divmod(index, M)
            answers = {k: answer(rank, token, k, H) for k in here}
            if plan.expand:
                for k in here:
                    y[handle.recv_src_metadata[n, 2 + k]] = answers[k]
            else:
                total = torch.zeros(H)
                for k in here:
                    total = total + answers[k].float()
                y[n] = total.to(y.dtype)
        bias = biases_of(given, plan.biases)
        combined, back, _ = buffer.combine(
            y,
            handle,
            weights,
            bias=None if not bias else bias[0] if len(bias) == 1 else tuple(bias),  # type: ignore[arg-type]
        )
        assert back is not None
        results.append((combined, back))
        buffer.destroy()
    return results


def biases_of(given: Inputs, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(given.x_TH.shape, generator=generator).to(torch.bfloat16) for _ in range(count)]


PLANS = [
    Plan(hybrid, multiple, expand, (hybrid + multiple + 2 * expand) % 3)
    for hybrid in (False, True)
    for multiple in (False, True)
    for expand in (False, True)
]


@pytest.mark.crossed("ranks", "node_size", every=2)
@pytest.mark.parametrize(("ranks", "node_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_combine_sums_in_the_documented_order_bit_for_bit(
    pool_of: PoolOf, ranks: int, node_size: int
) -> None:
    inputs = make_inputs(TOKENS[ranks], experts=E, choices=K + 2, hidden=H, no_choice=0.1, seed=7)
    per_rank = E // ranks
    results = pool_of(ranks).run(combine_all, inputs, PLANS, node_size)
    for rank, given in enumerate(inputs):
        for plan, (combined, weights) in zip(PLANS, results[rank], strict=True):
            levels = [per_rank] if plan.multiple or not plan.expand else []
            if plan.hybrid and plan.multiple and ranks > node_size:
                levels.append(per_rank * node_size)
            want = expect_combine(given, rank, H, levels, biases_of(given, plan.biases))
            assert torch.equal(combined, want), plan
            assert torch.equal(weights, given.weights_TK)


def test_groupings_differ_in_bits_so_the_oracle_can_tell_them_apart() -> None:
    given = make_inputs([40], experts=E, choices=6, hidden=H, seed=9)[0]
    ways = [expect_combine(given, 0, H, levels, []) for levels in ([], [2], [2, 4])]
    assert not torch.equal(ways[0], ways[1]) and not torch.equal(ways[1], ways[2])


def use_the_rest(node_size: int | None) -> dict[str, Any]:
    """Call everything except dispatch and combine."""
    buffer = open_buffer(node_size=node_size)
    x, idx = torch.ones(2, 8), torch.tensor([[0, 7], [3, -1]])
    *_, handle, event = buffer.dispatch(
        x, idx, num_experts=E, async_with_compute_stream=True, previous_event=buffer.capture(),
        allocate_on_comm_stream=True, do_handle_copy=False,
    )  # fmt: skip
    event.current_stream_wait()
    buffer.barrier(with_cpu_sync=True)
    texts = []
    for call in (
        buffer.destroy,
        buffer.get_comm_stream,
        buffer.engram_write,
        buffer.pp_send,
        buffer.all_gather,
    ):
        try:
            call()
        except (ValueError, DispatchError, NotImplementedError) as error:
            texts.append(str(error))
    return {
        "domains": (buffer.get_physical_domain_size(), buffer.get_logical_domain_size()),
        "place": (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx),
        "copied": handle.topk_idx.data_ptr() != idx.data_ptr(),
        "slots": handle.dst_buffer_slot_idx.tolist(),
        "by_scaleup": handle.psum_num_recv_tokens_per_scaleup_rank.tolist(),
        "texts": texts,
        "qps": buffer.get_theoretical_num_qps(buffer.get_theoretical_num_sms(E, 2)),
        "hint": ElasticBuffer.get_buffer_size_hint(buffer.group, 128, 7168),
    }


def test_domains_events_sizes_and_refusals(pool_of: PoolOf) -> None:
    results = pool_of(4).run(use_the_rest, 2)
    for rank, got in enumerate(results):
        assert got["domains"] == ((2, 2), (2, 2)) and got["place"] == divmod(rank, 2)
        assert not got["copied"]
        assert got["slots"] == [[rank, rank], [rank, -1]]  # every source sends one row to every rank
        assert len(got["by_scaleup"]) == 2 and len(got["texts"]) == 5
        for text, part in zip(
            got["texts"],
            ("explicitly_destroy", "no streams", "engram", "pipeline", "all-gather"),
            strict=True,
        ):
            assert part in text
        assert got["qps"] == 65 and got["hint"] % (2 << 20) == 0 and got["hint"] > 4 * 128 * 2 * 7168
    assert pool_of(2).run(use_the_rest, None)[0]["domains"] == ((1, 2), (1, 2))


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("aabbb", 5), ("abab", 4), ("aabbaa", 6), ("a", 1)],
)
def test_a_node_is_a_host_where_hosts_hold_equal_blocks(hosts: str, size: int) -> None:
    assert find_node_size(hosts) == size
