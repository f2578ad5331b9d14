"""Rows in FP8: within the error bound, the same on any number of ranks, and a quarter of float32's bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.dispatcher import Dispatcher, Traffic
from dispatch.fp8 import dequantise_fp8, quantise_fp8
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from tests.conftest import PoolOf
from tests.dispatch.deep_ep_utils.math import calc_diff
from tests.dispatch.exchange import run_layer
from tests.dispatch.oracle import RankCase, make_cases, simulate

S = 4
BOUND = 9e-4  # DeepEP's own tests hold its FP8 dispatch to this


def run_fp8(name: str, cases: list[RankCase], mode: Mode) -> tuple[Tensor, Tensor, Traffic]:
    """What a rank receives and combines, and what it sent."""
    wire = open_wire(name, dist.group.WORLD if dist.is_initialized() else None, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S, rows=row_format("fp8"))
    result = run_layer(dispatcher, cases[wire.rank], mode)
    dispatcher.close()
    return result.x_NH, result.combined_TH, dispatcher.traffic


def rounded(case: RankCase) -> RankCase:
    """The same case with the rows that FP8 delivers, by the oracle."""
    return case._replace(x_TH=dequantise_fp8(*quantise_fp8(case.x_TH), case.x_TH.dtype))


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("mode", [NORMAL, low_latency(16)], ids=str)
@pytest.mark.parametrize("hidden", [128, 512, 130, 7])
def test_fp8_rows_are_the_oracles_and_within_the_bound(
    pool_of: PoolOf, name: str, mode: Mode, hidden: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cases = make_cases(hidden, [9, 0, 16, 3], hidden=hidden, slots_per_rank=S, dtype=dtype)
        plain, want = simulate(cases, S), simulate([rounded(case) for case in cases], S)
        for rank, (x_NH, combined, _) in enumerate(pool_of(4).run(run_fp8, name, cases, mode)):
            assert torch.equal(x_NH, want[rank].x_NH)
            assert torch.equal(combined, want[rank].combined_TH)
            if x_NH.numel():
                assert 0 < calc_diff(x_NH, plain[rank].x_NH) < BOUND


def test_one_rank_rounds_its_own_rows_too() -> None:
    case = make_cases(1, [6], hidden=256, slots_per_rank=S, no_choice=0.0)[0]
    x_NH, combined, _ = run_fp8("local", [case], NORMAL)
    assert torch.equal(x_NH, rounded(case).x_TH)
    assert torch.equal(combined, simulate([rounded(case)], S)[0].combined_TH)


def test_fp8_sends_a_row_in_a_byte_per_channel_and_four_per_block(pool_of: PoolOf) -> None:
    """All 5 tokens of both ranks go to the other's slots: header 64, slots 64, rows of 512 + 4 * 4 bytes."""
    cases = [RankCase(torch.randn(5, 512), torch.full((5, 1), slot), torch.ones(5, 1)) for slot in (S, 0)]
    for _, _, traffic in pool_of(2).run(run_fp8, "shm", cases, NORMAL):
        assert traffic == Traffic(64 + 64 + 5 * (512 + 16), 64 + 5 * 512 * 4)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4'; it must be one of auto, fp8"):
        row_format("int4")
