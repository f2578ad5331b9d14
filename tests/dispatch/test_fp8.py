"""FP8: DeepSeek's recipe to the letter, its error and edge cases, and FP8 rows that are equal on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dispatch import fp8
from dispatch.dispatcher import Dispatcher, Traffic
from dispatch.fp8 import dequantise_fp8, quantise_fp8
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import run_layer
from tests.dispatch.faces.deep_ep_utils.math import calc_diff
from tests.dispatch.oracle import RankCase, make_cases, simulate
from tests.fixtures import PoolOf

MODES = [(False, False), (True, False), (True, True)]  # round_scale, ue8m0


def quantise_by_the_letter(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise block by block, value by value."""
    out, scales = torch.empty(x_TH.shape, dtype=torch.float8_e4m3fn), []
    for token, row in enumerate(x_TH.float()):
        for first in range(0, x_TH.shape[1], 128):
            block = row[first : first + 128]
            largest = torch.tensor(max([1e-4, *block.abs().tolist()]))
            out[token, first : first + 128] = (block * (torch.tensor(448.0) / largest)).to(
                torch.float8_e4m3fn
            )
            scales.append(largest / torch.tensor(448.0))
    return out, torch.stack(scales).view(x_TH.shape[0], -1)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def random_rows(seed: int, tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 6, (tokens, 1), generator=generator)
    return (torch.randn(tokens, hidden, generator=generator) * scale).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(1, 5),
    hidden=st.sampled_from([1, 127, 128, 129, 512, 640]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
)
def test_values_and_scales_follow_the_recipe(seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x_TH = random_rows(seed, tokens, hidden).to(dtype).nan_to_num(0.0, 1.0, -1.0)
    got, want = fp8.quantise_fp8(x_TH), quantise_by_the_letter(x_TH)
    assert torch.equal(as_bytes(got.x_TH), as_bytes(want[0]))
    assert torch.equal(got.scales, want[1])


@pytest.mark.parametrize(("round_scale", "ue8m0"), MODES)
def test_no_value_is_off_by_more_than_half_a_step(round_scale: bool, ue8m0: bool) -> None:
    x_TH = random_rows(2, 16, 512, torch.float32)
    back = fp8.dequantise_fp8(*fp8.quantise_fp8(x_TH, round_scale=round_scale, ue8m0=ue8m0), torch.float32)
    largest = x_TH.view(16, 4, 128).abs().amax(dim=2, keepdim=True).clamp(min=1e-4)
    step = torch.maximum(
        x_TH.view(16, 4, 128).abs() / 8, largest / 448 * 2 ** (-9) * (2 if round_scale else 1)
    )
    assert ((back - x_TH).view(16, 4, 128).abs() <= step * 0.5001).all()


def test_rounded_scales_are_the_next_powers_of_two() -> None:
    x_TH = random_rows(3, 32, 256)
    exact, rounded = fp8.quantise_fp8(x_TH).scales, fp8.quantise_fp8(x_TH, round_scale=True).scales
    assert torch.equal(rounded, torch.exp2(torch.log2(exact.double()).ceil()).float())


def test_a_scale_that_is_a_power_of_two_is_not_doubled() -> None:
    x_TH = torch.full((1, 128), 448.0 * 8)
    quantised = fp8.quantise_fp8(x_TH, round_scale=True)
    assert quantised.scales.item() == 8.0
    assert torch.equal(fp8.dequantise_fp8(*quantised, torch.float32), x_TH)


def test_ue8m0_holds_the_exponents_lowest_block_first() -> None:
    x_TH = torch.cat([torch.full((1, 128), 448.0 * 2**n) for n in range(6)], dim=1)
    packed = fp8.quantise_fp8(x_TH, round_scale=True, ue8m0=True).scales
    assert packed.dtype == torch.int32
    assert packed.view(torch.uint8).tolist() == [[127, 128, 129, 130, 131, 132, 0, 0]]
    assert fp8.unpack_ue8m0(packed, 6).tolist() == [[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]]


def test_column_major_scales_keep_values_and_shape() -> None:
    scales = torch.rand(2, 12, 4)
    turned = fp8.column_major(scales)
    assert torch.equal(turned, scales)
    assert turned.stride() == (48, 1, 12)
    x_fp8 = torch.randn(2, 12, 512).to(torch.float8_e4m3fn)
    assert torch.equal(
        fp8.dequantise_fp8(x_fp8, turned, torch.float32), fp8.dequantise_fp8(x_fp8, scales, torch.float32)
    )


@pytest.mark.parametrize(("round_scale", "ue8m0"), MODES)
@pytest.mark.parametrize("shape", [(2, 300), (0, 512)])
def test_zeros_stay_zeros_and_no_tokens_give_no_rows(
    shape: tuple[int, int], round_scale: bool, ue8m0: bool
) -> None:
    quantised = fp8.quantise_fp8(torch.zeros(shape), round_scale=round_scale, ue8m0=ue8m0)
    assert quantised.x_TH.shape == shape
    assert torch.equal(fp8.dequantise_fp8(*quantised, torch.float32), torch.zeros(shape))


@pytest.mark.parametrize(("round_scale", "ue8m0"), MODES)
@pytest.mark.parametrize("lost", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_block_and_no_other(
    round_scale: bool, ue8m0: bool, lost: float
) -> None:
    x_TH = random_rows(5, 2, 384, torch.float32)
    x_TH[1, 200] = lost
    back = fp8.dequantise_fp8(*fp8.quantise_fp8(x_TH, round_scale=round_scale, ue8m0=ue8m0), torch.float32)
    assert back[1, 128:256].isnan().all()
    assert back.isnan().sum() == 128


def test_the_largest_floats_survive() -> None:
    x_TH = torch.full(
        (1, 128), 3.2e38
    )  # the last few percent before 2**128 round up to infinity with rounded scales
    for round_scale, ue8m0 in MODES:
        quantised = fp8.quantise_fp8(x_TH, round_scale=round_scale, ue8m0=ue8m0)
        assert torch.allclose(fp8.dequantise_fp8(*quantised, torch.float32), x_TH, rtol=0.07)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_only_rows_are_quantised(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x_TH is torch.float32 \[.*2-dimensional"):
        fp8.quantise_fp8(torch.zeros(shape))


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x_TH is torch.int32"):
        fp8.quantise_fp8(torch.zeros(2, 3, dtype=torch.int32))


def test_exponents_alone_need_rounded_scales() -> None:
    with pytest.raises(ValueError, match="ue8m0 is True but round_scale is False"):
        fp8.quantise_fp8(torch.zeros(2, 128), ue8m0=True)


def test_scales_that_do_not_fit_are_refused() -> None:
    x_fp8 = torch.zeros(2, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales is torch.float32 \[2, 3\]; for 256 channels .* \[2, 2\]"):
        fp8.dequantise_fp8(x_fp8, torch.ones(2, 3), torch.float32)
    with pytest.raises(ValueError, match=r"x_fp8 is torch\.float32"):
        fp8.dequantise_fp8(x_fp8.float(), torch.ones(2, 2), torch.float32)


def test_a_single_column_of_exponents_may_be_column_major() -> None:
    quantised = fp8.quantise_fp8(random_rows(6, 5, 100), round_scale=True, ue8m0=True)
    turned = fp8.column_major(quantised.scales)
    assert torch.equal(fp8.unpack_ue8m0(turned, 1), fp8.unpack_ue8m0(quantised.scales, 1))


S = 4
BOUND = 9e-4  # the limit in DeepEP's own tests of its FP8 dispatch


def run_fp8(name: str, cases: list[RankCase], mode: Mode) -> tuple[Tensor, Tensor, Traffic]:
    """Return the rows that a rank receives and combines, and its traffic."""
    wire = open_wire(name, dist.group.WORLD if dist.is_initialized() else None, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S, rows=row_format("fp8"))
    result = run_layer(dispatcher, cases[wire.rank], mode)
    dispatcher.close()
    return result.x_NH, result.combined_TH, dispatcher.traffic


def rounded(case: RankCase) -> RankCase:
    """Return the case with its rows as delivered in FP8, by the oracle."""
    return case._replace(x_TH=dequantise_fp8(*quantise_fp8(case.x_TH), case.x_TH.dtype))


@pytest.mark.crossed("hidden", "mode", "name", every=2)
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
