"""Bad calls of DeepEP's low-latency interface: the errors, the ranks that raise them, and that the next call works."""

from typing import Any

import pytest
import torch

from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.local import LocalWire
from tests.dispatch.conftest import RanksOf
from tests.dispatch.exchange import catch
from tests.dispatch.low_latency.cases import Layer, assert_same, make_cases, simulate
from tests.dispatch.low_latency.ranks import BF16, INTERPRETED, bring, one_rank_wrong, open_face, run_layer

X, TOPK = bring()

GOOD = {"x": X, "topk_idx": TOPK, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1]}, "x is list; it must be a tensor"),
        ({"x": X[0]}, r"x is torch.bfloat16 \[512\].*it must be \[num_tokens, hidden\]"),
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
            "x has 3 tokens but num_max_dispatch_tokens_per_rank is 2",
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
        (
            {"topk_idx": TOPK[:2]},
            r"topk_idx is .*\[2, 2\].*; as in the dispatch of this handle it must be .* \[3, 2\]",
        ),
        (
            {"topk_idx": TOPK.flip(1)},
            r"topk_idx\[0, 0\] is 1; it must be -1, or 0 as in the dispatch of this handle",
        ),
        ({"topk_weights": torch.ones(3, 2, dtype=BF16)}, "topk_weights is torch.bfloat16.*float32"),
        ({"handle": (1, 2)}, "handle is tuple; it must be what low_latency_dispatch returned"),
        (
            {"handle": (torch.zeros(1), torch.zeros(1), 4, 512, 2)},
            "handle is not from any of this buffer's dispatches",
        ),
        (
            {"out": torch.zeros(3, 512)},
            r"out is torch.float32 \[3, 512\].*; it must be torch.bfloat16 \[3, 512\]",
        ),
        ({"x": torch.zeros(2, 4, 512), "zero_copy": True}, "x is torch.float32 but zero_copy is True"),
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
        ({"x": torch.zeros(3, 2048)}, "x is torch.float32; DeepEP supports bfloat16"),
        (
            {"topk_idx": torch.zeros(3, 12, dtype=torch.int64)},
            "topk_idx has 12 choices; DeepEP supports at most 11",
        ),
        ({"num_max_dispatch_tokens_per_rank": 512}, "is 512; DeepEP supports at most 511"),
        ({"num_max_dispatch_tokens_per_rank": 5}, "is 5 on 1 ranks; .* a multiple of 4"),
    ],
)
def test_strict_mode_has_deepeps_limits(change: dict[str, Any], message: str) -> None:
    face = LowLatencyFace(CpuExchange(LocalWire()), strict=True)
    good = {**GOOD, "x": torch.zeros(3, 2048, dtype=BF16)}
    with pytest.raises(ValueError, match=message):
        face.low_latency_dispatch(**{**good, **change})
    face.low_latency_dispatch(**good)


@pytest.mark.parametrize(
    ("name", "world_size"), [("gloo", 2), ("shm", 4), pytest.param("triton", 2, marks=INTERPRETED)]
)
@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        ("dispatch", {"topk_idx": torch.full((3, 3), 99)}, "topk_idx[0, 0] is 99"),
        ("dispatch", {"num_max_dispatch_tokens_per_rank": 2}, "x has 3 tokens"),
        ("combine", {"topk_weights": torch.ones(1)}, "topk_weights is torch.float32 [1]"),
    ],
)
def test_a_refusal_reaches_every_rank_and_the_next_call_works(
    ranks_of: RanksOf, name: str, world_size: int, call: str, change: dict[str, Any], message: str
) -> None:
    wrong = world_size - 1
    results = ranks_of(name, world_size).run(one_rank_wrong, name, wrong, call, change)
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


@pytest.mark.parametrize("name", ["shm", "gloo", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("wrong", ["hidden", "choices", "tokens", "experts"])
def test_ranks_that_disagree_get_a_named_error(ranks_of: RanksOf, name: str, wrong: str) -> None:
    for text in ranks_of(name, 2).run(disagree, name, wrong):
        assert text.startswith("RanksDisagree: rank ")


def refused_while_hook_waits(name: str) -> tuple[str, str]:
    """Reject on rank 1 a call that rank 0 has posted with a hook. Both make another call before rank 0's hook runs."""
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


@pytest.mark.parametrize("name", ["shm", "gloo", pytest.param("triton", marks=INTERPRETED)])
def test_a_refusal_is_raised_by_the_hook_it_belongs_to(ranks_of: RanksOf, name: str) -> None:
    (posted, hooked), (refused, _) = ranks_of(name, 2).run(refused_while_hook_waits, name)
    assert posted == "no error"
    assert hooked.startswith("PeerRefused: rank 1 refused the call: topk_idx[0, 0] is 77")
    assert refused.startswith("ValueError: topk_idx[0, 0] is 77")


def test_masks_need_enable_shrink(face: LowLatencyFace) -> None:
    for action in (
        lambda: face.low_latency_update_mask_buffer(0, True),
        lambda: face.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
        face.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(ValueError, match="enable_shrink is False"):
            action()


def test_mask_arguments_are_checked() -> None:
    face = LowLatencyFace(CpuExchange(LocalWire()), enable_shrink=True)
    with pytest.raises(ValueError, match=r"rank_to_mask is 1; it must be in \[0, 1\)"):
        face.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ValueError, match=r"mask_status is torch.int64 \[1\]"):
        face.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask_status is None"):
        face.low_latency_query_mask_buffer(None)  # type: ignore[arg-type]
