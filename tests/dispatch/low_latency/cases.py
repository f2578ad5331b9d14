"""Low-latency calls for tests: inputs of the ranks, replacement of the experts, and expected results of one rank."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency.calls import LowLatencyShape
from tests.dispatch.low_latency import oracle
from tests.dispatch.oracle import make_cases as draw


class RankCase(NamedTuple):
    """Inputs of one rank for one layer."""

    x_TH: Tensor
    topk_TK: Tensor
    weights_TK: Tensor


class Layer(NamedTuple):
    """One dispatch and combine of all ranks."""

    cases: list[RankCase]
    max_tokens: int
    experts_per_rank: int
    is_fp8: bool = False
    round_scale: bool = False
    is_ue8m0: bool = False

    def shape(self) -> LowLatencyShape:
        case = self.cases[0]
        return LowLatencyShape(
            world_size=len(self.cases),
            experts_per_rank=self.experts_per_rank,
            max_tokens=self.max_tokens,
            hidden=case.x_TH.shape[1],
            choices=case.topk_TK.shape[1],
            dtype=case.x_TH.dtype,
            is_fp8=self.is_fp8,
            is_ue8m0=self.is_ue8m0,
        )


class RankResult(NamedTuple):
    """Results of one rank. Undefined rows are zeroed for comparison, and float8 is viewed as bytes."""

    x_LNH: Tensor
    scales: Tensor | None
    count_L: Tensor
    source_token_LN: Tensor
    layout_range_LR: Tensor
    combined_TH: Tensor


def make_cases(
    seed: int,
    tokens: Sequence[int],
    *,
    experts_per_rank: int = 2,
    only_expert: int | None = None,
    **options: Any,
) -> list[RankCase]:
    """Draw random cases as for the dispatcher, with slots as experts."""
    drawn = draw(seed, list(tokens), slots_per_rank=experts_per_rank, only_slot=only_expert, **options)
    return [RankCase(*case) for case in drawn]


def answer(x_LNH: Tensor, scales: Tensor | None, rank: int, dtype: torch.dtype) -> Tensor:
    """Compute the experts' answers: a function of (row, expert) only."""
    L = x_LNH.shape[0]
    rows = x_LNH if scales is None else fp8.dequantise_fp8(x_LNH, scales, torch.float32)
    expert_L = torch.arange(rank * L, rank * L + L).view(L, 1, 1)
    return (rows.double() * (expert_L + 1) - expert_L).to(dtype)


def zero_undefined(rows: Tensor, count_L: Tensor) -> Tensor:
    """Return a copy with zeros in each expert's rows from its count on, and float8 as bytes."""
    rows = (rows.contiguous().view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows).clone()
    for expert, count in enumerate(count_L.tolist()):
        rows[expert, count:] = 0
    return rows


def simulate(layer: Layer) -> list[RankResult]:
    """Run the oracle for all ranks."""
    shape, cases = layer.shape(), layer.cases
    xs, topks = [case.x_TH for case in cases], [case.topk_TK for case in cases]
    ranks = range(shape.world_size)
    delivered = [oracle.dispatch(shape, xs, topks, rank=r, round_scale=layer.round_scale) for r in ranks]
    answers = [answer(d.x_LNH, d.scales, r, shape.dtype) for r, d in enumerate(delivered)]
    results = []
    for rank, (case, mine) in enumerate(zip(cases, delivered, strict=True)):
        combined = oracle.combine(shape, answers, delivered, case.topk_TK, case.weights_TK, rank=rank)
        x_LNH = zero_undefined(mine.x_LNH, mine.count_L)
        results.append(RankResult(x_LNH, *mine[1:], combined))
    return results


def assert_same(ours: RankResult, want: RankResult, where: str) -> None:
    """Compare bit for bit."""
    for field, got, oracles in zip(want._fields, ours, want, strict=True):
        if oracles is None:
            assert got is None, f"{where}, {field}"
            continue
        assert got.dtype == oracles.dtype, f"{where}, {field}"
        assert torch.equal(got, oracles), f"{where}, {field}"


def edge_layers(R: int) -> list[Layer]:
    """Return layers that cover all relevant differences, with edge cases."""
    uneven = [(5 * rank + 3) % 9 for rank in range(R)]
    bf16 = torch.bfloat16
    wide = {"hidden": 256, "dtype": bf16}
    return [
        Layer(make_cases(1, uneven), 9, 2),
        Layer(make_cases(2, [0] * R), 4, 2),  # no rank has tokens
        Layer(make_cases(3, [7] + [0] * (R - 1)), 7, 2),  # one rank has all tokens, the maximum number
        Layer(make_cases(4, uneven, no_choice=1.0), 9, 2),  # no token has a choice
        Layer(
            make_cases(5, [6] * R, only_expert=2 * R - 1, no_choice=0.0), 8, 2
        ),  # all to one expert, repeated
        Layer(make_cases(6, uneven, choices=R + 3, no_choice=0.0, experts_per_rank=3), 9, 3),  # K above R
        Layer(make_cases(7, uneven, choices=1, hidden=33, experts_per_rank=1), 9, 1),
        Layer(make_cases(8, uneven, dtype=bf16, hidden=7), 9, 2),
        Layer(make_cases(9, uneven, dtype=torch.float16), 9, 2),
        Layer(make_cases(10, uneven, dtype=torch.float64), 9, 2),
        Layer(make_cases(11, uneven, **wide), 9, 2, is_fp8=True),
        Layer(make_cases(12, uneven, **wide), 9, 2, is_fp8=True, round_scale=True),
        Layer(
            make_cases(13, uneven, hidden=640, dtype=bf16), 9, 2, is_fp8=True, round_scale=True, is_ue8m0=True
        ),
        Layer(make_cases(14, uneven, hidden=200), 9, 2, is_fp8=True),  # a short last block, float32
        Layer(make_cases(15, uneven, hidden=129, dtype=torch.float16), 9, 2, is_fp8=True),
        Layer(make_cases(16, [0] * R, **wide), 9, 2, is_fp8=True),
        *[Layer(make_cases(seed, [(seed + rank) % 5 for rank in range(R)]), 9, 2) for seed in range(17, 22)],
    ]
