"""Routing and RMSNorm for GPUs in the interpreter, against plain torch.

The interpreter rounds bfloat16 incorrectly, so float16 represents the short types."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routing import Routing
from tests.support.ranks import RankPool

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"choices": 2, "normalise": True},
    "qwen_without_norm": {"choices": 4},
    "gpt_oss": {"choices": 4, "softmax_after": True},
    "deepseek_v3": {"choices": 3, "is_sigmoid": True, "normalise": True, "scale": 2.5, "groups": 4, "groups_chosen": 2},
    "deepseek_v2": {"choices": 3, "scale": 16.0, "groups": 4, "groups_chosen": 2, "best_of_group": True},
    "one_group": {"choices": 3, "is_sigmoid": True, "scale": 1.5},
}  # fmt: skip

HAS_BIAS = ("deepseek_v3", "one_group")


def oracle(logits: Tensor, r: Any, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Route by the definition. A stable sort gives ties to the lower expert."""
    logits = logits.float()
    scores = logits.sigmoid() if r.is_sigmoid else logits if r.softmax_after else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if r.groups > r.groups_chosen:
        grouped = choice.view(len(choice), r.groups, -1)
        scored = grouped.topk(1 if r.best_of_group else 2, dim=-1).values.sum(-1)
        best = scored.sort(descending=True, stable=True, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best[:, : r.groups_chosen], True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = choice.sort(descending=True, stable=True, dim=-1).indices[:, : r.choices]
    weights = scores.gather(1, ids)
    if r.softmax_after:
        weights = weights.softmax(-1)
    if r.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * r.scale


def route_rows(kind: str, num_experts: int, has_bias: bool, has_ties: bool) -> None:
    from moe.gpu.routing import route  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    logits = torch.randn(3, num_experts)
    if has_ties:
        logits = logits.round()
    bias = torch.rand(num_experts) if has_bias else None
    routing = Routing(**KINDS[kind])
    ids, weights = route(logits, routing, bias_E=bias)
    want_ids, want_weights = oracle(logits, routing, bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_weights_are_those_of_the_definition(interpreter: RankPool, kind: str) -> None:
    interpreter.run(route_rows, kind, 24, kind in HAS_BIAS, False)


def route_many() -> None:
    """Route more rows than a program takes, with weights in a short type. A router's own weights are rounded like this."""
    from moe.gpu import routing  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(1)
    logits, bias = torch.randn(11, 24), torch.rand(24)
    for kind, rule in KINDS.items():
        added = bias if kind in HAS_BIAS else None
        wide_ids, wide = routing.route(logits, Routing(**rule), bias_E=added)
        routing._MANY_ROWS = 8
        ids, weights = routing.route(logits, Routing(**rule), bias_E=added, dtype=torch.float16)
        routing._MANY_ROWS = 2048
        want_ids, _ = oracle(logits, Routing(**rule), added)
        assert torch.equal(ids, want_ids) and torch.equal(wide_ids, want_ids)
        assert torch.equal(weights, wide.half())


def test_rows_that_share_a_program_are_routed_as_alone(interpreter: RankPool) -> None:
    interpreter.run(route_many)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_of_equal_scores_the_lower_expert_is_chosen(interpreter: RankPool, kind: str) -> None:
    interpreter.run(route_rows, kind, 8, kind in HAS_BIAS, True)


def route_nan() -> None:
    from moe.gpu.routing import route  # noqa: PLC0415 - in the interpreter

    logits = torch.randn(4, 8)
    logits[1], logits[2, 3], logits[3] = float("nan"), float("nan"), -float("inf")
    for kind in KINDS.values():
        ids, weights = route(logits, Routing(**kind))
        assert ((ids >= 0) & (ids < 8)).all()
        assert weights[1].isnan().all() and not weights[0].isnan().any()
        if kind.get("is_sigmoid"):
            assert 3 not in ids[2]


def test_a_row_of_nan_stays_nan_and_names_only_experts_that_there_are(interpreter: RankPool) -> None:
    interpreter.run(route_nan)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute LlamaRMSNorm's forward."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from moe.gpu.norm import add_rms_norm, rms_norm  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    rows, dim = shape
    x, weight = torch.randn(rows, dim + 3).to(dtype)[:, :dim], torch.randn(dim).to(dtype)  # gaps between rows
    ours = rms_norm(x, weight, 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3  # one step of the type
    torch.testing.assert_close(ours, normed(x, weight, 1e-6), atol=tolerance, rtol=tolerance)
    assert torch.equal(rms_norm(x[-1:], weight, 1e-6), ours[-1:])
    added = torch.randn(shape).to(dtype)
    total, summed = add_rms_norm(x, added, weight, 1e-6)
    assert torch.equal(total, x + added) and torch.equal(summed, rms_norm(x + added, weight, 1e-6))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 64), torch.float32),
        ((1, 72), torch.float16),
        ((2, 2880), torch.float32),
        ((2, 2880), torch.float16),
    ],
)
def test_rows_are_normed_as_transformers_norms_them(
    interpreter: RankPool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    interpreter.run(norm_rows, shape, dtype)
