"""DeepEP's interface over interpreted Triton kernels equals the one over the CPU exchange, bit for bit.

The interpreter is slow, so there are two ranks, and sizes are small.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer
from dispatch.faces.low_latency import LowLatencyFace
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import open_interpreted
from tests.dispatch.low_latency import test_deepep_assertions as deepep
from tests.dispatch.low_latency.cases import Layer, RankResult, answer, assert_same, make_cases, simulate
from tests.dispatch.low_latency.ranks import open_face, run_layer
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

pytestmark = needs_triton

BF16, F16 = torch.bfloat16, torch.float16


def small_layers() -> list[Layer]:
    """Return layers of all types and forms, with edge cases. Layers of one shape come twice, so that both halves are reused."""
    return [
        Layer(make_cases(1, [3, 5], hidden=200, dtype=BF16), 5, 2),
        Layer(make_cases(2, [4, 0], hidden=130, choices=5, no_choice=0.0), 6, 2),  # float32, repeated experts
        Layer(make_cases(3, [2, 3], hidden=300, dtype=BF16), 3, 2, is_fp8=True),
        Layer(make_cases(4, [2, 3], hidden=640), 3, 2, is_fp8=True, round_scale=True, is_ue8m0=True),
        Layer(make_cases(5, [3, 2], dtype=BF16, only_expert=3), 3, 2, is_fp8=True, round_scale=True),
        Layer(make_cases(6, [3, 2], hidden=17, dtype=F16), 3, 2),
        Layer(make_cases(7, [2, 2], hidden=129, dtype=F16), 3, 2, is_fp8=True),
        Layer(make_cases(8, [0, 0]), 2, 2),  # no rank has tokens
        Layer(make_cases(9, [2, 3], hidden=300, dtype=BF16), 3, 2, is_fp8=True),
        Layer(make_cases(10, [2, 2], no_choice=1.0), 2, 2),  # no token has a choice
    ]


def test_interpreted_kernels_give_the_oracles_bits_across_processes(interpreting_pair: RankPool) -> None:
    """Every other layer uses hooks, and its input is overwritten before they run."""
    layers = small_layers()
    results = interpreting_pair.run(run_alternating, layers)
    for index, layer in enumerate(layers):
        for rank, want in enumerate(simulate(layer)):
            assert_same(results[rank][index], want, f"layer {index}, rank {rank}")


def run_alternating(layers: list[Layer]) -> list[RankResult]:
    with open_face("triton") as face:
        return [
            run_layer(face, layer, with_hooks=index % 2 == 1, spoil=index % 2 == 1)
            for index, layer in enumerate(layers)
        ]


def answer_in_another_type() -> list[torch.Tensor]:
    """Dispatch in bfloat16, then answer in float32 and in float16, through both exchanges."""
    layer = Layer(make_cases(1, [3, 2], dtype=BF16), 4, 2)
    results = []
    for name in ("triton", "gloo"):
        with open_face(name) as face:
            case = layer.cases[face.exchange.rank]
            for dtype in (torch.float32, F16):
                recv_x, _, handle, _, _ = face.low_latency_dispatch(
                    case.x_TH, case.topk_TK.int(), 4, 4, use_fp8=False
                )
                y = (recv_x.float() * 1.3).to(dtype)
                left_out = case.topk_TK.clone()
                left_out[0, 0] = -1
                combined, _, _ = face.low_latency_combine(y, left_out, case.weights_TK, handle)
                results.append(combined.clone())
    return results


@pytest.mark.slow
def test_answers_may_have_another_type_and_leave_choices_out(interpreting_pair: RankPool) -> None:
    for ours32, ours16, cpu32, cpu16 in interpreting_pair.run(answer_in_another_type):
        assert torch.equal(ours32, cpu32) and ours32.dtype == torch.float32
        assert torch.equal(ours16, cpu16) and ours16.dtype == F16


def grow_and_reuse() -> list[str]:
    """Make calls that need ever more memory, and one rejected by one rank when the other would grow."""
    exchange, texts = open_interpreted(num_bytes=0), []
    face = LowLatencyFace(exchange)
    for hidden, experts in ((16, 4), (200, 4), (400, 3), (400, 4), (16, 4)):
        case = make_cases(hidden, [3, 2], hidden=hidden)[exchange.rank]
        chosen = (
            case.topk_TK if exchange.rank == 0 else torch.where(case.topk_TK >= 0, case.topk_TK % experts, -1)
        )
        if experts == 3:
            chosen = torch.full_like(chosen, 99) if exchange.rank == 1 else chosen
        layer = Layer(make_cases(hidden, [3, 2], hidden=hidden), 4, 2)
        if experts == 4:
            assert_same(run_layer(face, layer), simulate(layer)[exchange.rank], f"hidden {hidden}")
            texts.append("same")
        else:
            texts.append(
                catch(lambda x=case.x_TH, c=chosen: face.low_latency_dispatch(x, c, 4, 4, use_fp8=False))
            )
    dist.barrier()
    exchange.close()
    return texts


@pytest.mark.slow
def test_memory_grows_and_a_refusal_meets_a_rank_that_would_grow(interpreting_pair: RankPool) -> None:
    first, second = interpreting_pair.run(grow_and_reuse)
    assert first[2].startswith("PeerRefused: rank 1 refused the call: topk_idx[0, 0] is 99")
    assert second[2].startswith("ValueError: topk_idx[0, 0] is 99")
    assert [*first[:2], *first[3:], *second[:2], *second[3:]] == ["same"] * 8


def come_late(absent: int, enable_shrink: bool) -> tuple[str, list[int], Any] | None:
    """Make a layer's calls on all ranks except one."""
    layer = Layer(make_cases(6, [3, 2], hidden=16), 3, 2)
    exchange = open_interpreted(timeout_s=0.3, mask_lost=enable_shrink)
    face = LowLatencyFace(exchange, enable_shrink=enable_shrink)
    dist.barrier()  # no rank is late because of imports
    try:
        if exchange.rank == absent:
            return None
        results: list[Any] = []
        text = catch(lambda: results.append(run_layer(face, layer)))
        status = torch.zeros(2, dtype=torch.int32)
        exchange.write_mask(status)
        return text, status.tolist(), results
    finally:
        dist.barrier()
        exchange.close()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_named_error(interpreting_pair: RankPool) -> None:
    text, mask, _ = interpreting_pair.run(come_late, 1, False)[0]
    assert text.startswith("DispatchTimeout: ") and "rank 1" in text
    assert mask == [0, 0]


def test_a_rank_that_does_not_come_is_masked_and_adds_nothing(interpreting_pair: RankPool) -> None:
    text, mask, results = interpreting_pair.run(come_late, 1, True)[0]
    present, absent = make_cases(6, [3, 2], hidden=16)
    cases = [
        present._replace(topk_TK=torch.where(present.topk_TK // 2 == 1, -1, present.topk_TK)),
        absent._replace(topk_TK=torch.full_like(absent.topk_TK, -1)),
    ]
    assert (text, mask) == ("no error", [0, 1])
    assert_same(results[0], simulate(Layer(cases, 3, 2))[0], "rank 0")


def call_without_looking() -> tuple[list[str], list[torch.Tensor]]:
    """Read nothing on the host until the barrier, as on a GPU. Rank 1 rejects the second call."""
    exchange = open_interpreted(timeout_s=20.0, is_blocking=False)
    face = LowLatencyFace(exchange)
    layer = Layer(make_cases(1, [3, 3], dtype=BF16), 4, 2)
    case, rank = layer.cases[exchange.rank], exchange.rank
    assert_same(run_layer(face, layer), simulate(layer)[rank], "before")
    texts, seen = [], []

    def dispatch(**change: Any) -> None:
        arguments = {
            "x": case.x_TH,
            "topk_idx": case.topk_TK,
            "num_max_dispatch_tokens_per_rank": 4,
            **change,
        }
        seen.append(face.low_latency_dispatch(num_experts=4, use_fp8=False, **arguments)[1].clone())

    texts.append(catch(lambda: dispatch(**({"topk_idx": case.topk_TK.float()} if rank == 1 else {}))))
    texts.append(catch(lambda: dispatch(topk_idx=torch.full_like(case.topk_TK, 99))))  # not valid choices
    texts.append(catch(lambda: face.clean_low_latency_buffer(4, 16, 4)))
    texts.append(catch(lambda: face.clean_low_latency_buffer(4, 16, 4)))
    assert_same(run_layer(face, layer), simulate(layer)[rank], "after")
    dist.barrier()
    exchange.close()
    return texts, seen


@pytest.mark.slow
def test_where_the_host_does_not_look_nothing_is_delivered_and_the_barrier_says_why(
    interpreting_pair: RankPool,
) -> None:
    (first, counts), (second, _) = interpreting_pair.run(call_without_looking)
    refused = "PeerRefused: rank 1 refused the call: topk_idx is torch.float32"
    assert [text[: len(refused)] for text in first] == ["no error", "no error", refused, "no error"]
    assert second[0].startswith("ValueError: topk_idx is torch.float32")
    assert second[1:] == ["no error"] * 3
    assert [count.tolist() for count in counts] == [[0, 0], [0, 0]]


@pytest.mark.slow
def test_what_deepep_asserts_holds(interpreting_pair: RankPool) -> None:
    """Each form runs once: the interpreter is slow with hidden size 512."""
    combinations = [(form, index % 2 == 0, index < 3) for index, form in enumerate(deepep.FORMS)]
    assert interpreting_pair.run(deepep.check_all, "triton", combinations, timeout_s=300.0) == [4, 4]


def use_a_buffer() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Make low-latency calls of `Buffer` through interpreted kernels, between two calls of normal mode."""
    layer = Layer(make_cases(1, [3, 3], dtype=BF16), 4, 2)
    case = layer.cases[dist.get_rank()]
    results = []
    for kernels in ("triton", "auto"):
        buffer = Buffer(dist.group.WORLD, num_rdma_bytes=1 << 17, low_latency_mode=True, kernels=kernels)
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(case.topk_TK, 4)
        layout = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": mask,
            "num_tokens_per_expert": per_expert,
        }
        buffer.dispatch(case.x_TH, **layout)
        (rows, scales), _, handle, _, hook = buffer.low_latency_dispatch(
            case.x_TH, case.topk_TK, 4, 4, return_recv_hook=True
        )
        hook()
        y = answer(rows, scales, dist.get_rank(), BF16)
        zero_copy = buffer.get_next_low_latency_combine_buffer(handle)
        zero_copy.copy_(y)
        combined, _, _ = buffer.low_latency_combine(y, case.topk_TK, case.weights_TK, handle, zero_copy=True)
        results.append(combined.clone())
        buffer.dispatch(case.x_TH, **layout)
        text = catch(lambda b=buffer: b.low_latency_dispatch(case.x_TH, case.topk_TK, 4, 4, use_nvfp4=True))
        buffer.clean_low_latency_buffer(4, 16, 4)
    return results[0], results[1], text


@pytest.mark.slow
def test_a_buffer_takes_the_kernels_when_asked_to(interpreting_pair: RankPool) -> None:
    for ours, cpu, text in interpreting_pair.run(use_a_buffer):
        assert torch.equal(ours, cpu)
        assert text.startswith("TypeError: low_latency_dispatch got use_nvfp4")
