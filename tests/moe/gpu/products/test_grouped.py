"""The grouped product in Triton's interpreter against float64."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.moe.gpu.grouped_cases import E4M3, F16, F32, FORMS, TOLERANCE, U8, Case, Problem, placed
from tests.support.ranks import RankPool


def multiply(case: Case, tile_name: str, **fields: int) -> None:
    """Run mapped rows and the same rows directly. Nothing is written after the last pair, and a changed scale is detected."""
    from moe.gpu.products import tiles  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415

    problem, is_plain = Problem(case), case.weights == "plain"
    tile = getattr(tiles, f"{'' if is_plain else 'QUANTISED_'}{tile_name}")._replace(**fields)
    out = torch.full((problem.num_pairs + 3, case.N), 7.0, dtype=case.dtype)
    run = partial(grouped_linear, num_pairs=problem.num_pairs + 3, rows_P=problem.rows, tile=tile, out=out)
    run(problem.x, **problem.arguments())
    ours, tolerance = out[: problem.num_pairs].clone(), TOLERANCE[case.dtype]
    torch.testing.assert_close(ours.double(), problem.want(), atol=tolerance, rtol=tolerance)
    assert (out[problem.num_pairs :] == 7.0).all()
    same = grouped_linear(
        problem.x[problem.rows], num_pairs=problem.num_pairs, tile=tile, **problem.arguments()
    )
    assert torch.equal(same, ours)
    if not is_plain:
        problem.spoil()
        run(problem.x, **problem.arguments())
        error = (out[: problem.num_pairs].double() - problem.want()).abs().max()
        assert error > 10 * tolerance, "the control did not fail"


FAST = [
    Case([3, 0, 17, 1], 80, 72, has_bias=True),
    Case([5, 0, 2], 128, 200, "silu", F16, "fp8"),
    Case([2, 1], 40, 96, "swiglu_oai", F32, "mxfp4", has_bias=True),
    Case([2, 0, 3], 40, 224, "silu", F32, "nvfp4"),
    Case([2, 3], 40, 160, "silu", F32, "int4, 64, zeros"),
]
SLOW = [
    Case([3, 0, 17, 1], 80, 72, "silu", has_bias=True),
    Case([0, 70, 0], 64, 128, "swiglu_oai", has_bias=True),
    Case([3, 1], 72, 64, "gelu"),
    Case([3, 1], 72, 64, "gelu_tanh", F16),
    Case([5, 2], 48, 64, "none", F16, has_bias=True),
    Case([4, 1], 200, 300, "none", F32, "fp8"),
    Case([4, 20], 200, 256, "none", F32, "fp8"),
    Case([3, 0, 18], 72, 64, "none", F16, "mxfp4"),
    Case([0, 0], 64, 64),
    *(Case([4, 0, 18], 72, 288, "silu", F32, form, has_bias=True) for form in FORMS),
    *(Case([3, 2], 72, 256, "none", F16, form) for form in FORMS),
]


@pytest.mark.parametrize("tile", ["DECODE_TILE"])
@pytest.mark.parametrize("case", FAST, ids=str)
def test_rows_meet_their_slots_weight(interpreter: RankPool, case: Case, tile: str) -> None:
    interpreter.run(multiply, case, tile)


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["DECODE_TILE", "PREFILL_TILE"])
@pytest.mark.parametrize("case", [*FAST, *SLOW], ids=str)
def test_rows_meet_their_slots_weight_in_every_format(interpreter: RankPool, case: Case, tile: str) -> None:
    interpreter.run(multiply, case, tile)


@pytest.mark.parametrize(
    "case",
    [
        Case([3, 0, 40, 1], 72, 80, "silu"),
        Case([3, 0, 17, 1], 80, 72, has_bias=True),
        Case([0, 35, 0], 64, 64, "swiglu_oai", F16, has_bias=True),
        Case([0, 0], 64, 64),
    ],
    ids=str,
)
def test_the_kernel_for_many_rows_gives_the_product(interpreter: RankPool, case: Case) -> None:
    """One program takes all tiles. Rows are read by a map, then by a descriptor; columns and inputs fill no whole tiles."""
    interpreter.run(partial(multiply, rows=32, columns=64), case, "FLOW_TILE")


@pytest.mark.parametrize(
    "case",
    [
        Case([2, 3], 40, 202, "silu", F32, "fp8, rows"),
        Case([2], 40, 100, "none", F16, "int4, rows"),
        Case([2], 40, 200, "none", F32, "nvfp4"),
    ],
)
def test_rows_of_no_whole_words_are_decoded_from_bytes(interpreter: RankPool, case: Case) -> None:
    interpreter.run(multiply, case, "DECODE_TILE")


def multiply_with(case: Case) -> None:
    """Use tiles with any number of rows per slot, and inner sizes that do not divide K."""
    from moe.gpu.products import tiles  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415

    problem, is_quantised = Problem(case), case.weights != "plain"
    for rows in (1, 12, 28):
        tile = tiles.choose_tile(rows, 1, is_quantised=is_quantised)
        for inner in (tile.inner, 64):
            ours = grouped_linear(
                problem.x, num_pairs=problem.num_pairs, rows_P=problem.rows, tile=tile._replace(inner=inner),
                **problem.arguments(),
            )  # fmt: skip
            torch.testing.assert_close(ours.double(), problem.want(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["plain", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_every_range_of_rows_gives_the_product(interpreter: RankPool, weights: str) -> None:
    interpreter.run(multiply_with, Case([3, 0, 40, 1], 72, 160, "silu", F32, weights))


def lift_by_scales() -> None:
    """Multiply with scales of 2^-60 to 2^17, which also lift 4-bit values; refuse larger scales and NaN."""
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415
    from moe.gpu.products.tiles import QUANTISED_DECODE_TILE  # noqa: PLC0415
    from moe.gpu.weights.formats import DeviceFormat, parts_of  # noqa: PLC0415 - in the interpreter
    from moe.load.quantised_weight import QuantisedWeight, QuantisedWeightError  # noqa: PLC0415

    form = DeviceFormat("e2m1", "e8m0", 32)
    codes = torch.randint(0, 256, (1, 64, 64), dtype=torch.uint8)
    scales = torch.randint(127 - 60, 127 + 18, (1, 64, 4), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([144, 143, 144, 67])
    weights, x = placed(form, codes, scales=scales), torch.randn(3, 128)
    offsets, places = torch.tensor([0, 3]), torch.zeros(1, dtype=torch.int32)
    tile = QUANTISED_DECODE_TILE._replace(programs=1)  # one program takes all tiles
    ours = grouped_linear(x, weights, offsets, places, num_pairs=3, tile=tile._replace(columns=16))
    wide = weights.wide(0).double()
    sizes = x.double().abs() @ wide.abs().T  # of a row's products, which may cancel
    assert ((ours.double() - x.double() @ wide.T).abs() <= 1e-6 * sizes).all()
    for power in (145, 255):
        scales[0, 5, 2] = power
        too_large = QuantisedWeight(codes=codes[0], kind="e2m1", scales=scales[0], block=32)
        with pytest.raises(QuantisedWeightError, match="above 2\\^17, or NaN"):
            parts_of(too_large, form)


def test_scales_lift_values_of_4_bits(interpreter: RankPool) -> None:
    interpreter.run(lift_by_scales)


def compare_rows(case: Case) -> None:
    """Compare a row among others, alone, and with its slot's rows in another order: real numbers, with one tile.

    Bits are not compared between tiles here: numpy multiplies differently for other shapes. On tensor cores, sums have the
    order of the instruction, which `test_grouped_compile` checks.
    """
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.tiles import DECODE_TILE  # noqa: PLC0415

    problem = Problem(case)
    multiply = partial(grouped_linear, tile=DECODE_TILE, **problem.arguments())
    whole = multiply(problem.x, num_pairs=problem.num_pairs, rows_P=problem.rows)
    assert not torch.equal(whole, whole.round()), "integers would be added exactly in any order"
    num_first = case.counts[0]
    order = torch.cat((torch.arange(num_first), num_first + torch.randperm(case.counts[1])))
    moved = multiply(problem.x, num_pairs=problem.num_pairs, rows_P=problem.rows[order])
    assert torch.equal(moved, whole[order])
    for pair in (num_first, problem.num_pairs - 1):
        alone = {**problem.arguments(), "slot_offsets": torch.tensor([0, 0, 1])}
        row = grouped_linear(
            problem.x, tile=DECODE_TILE, num_pairs=1, rows_P=problem.rows[pair : pair + 1], **alone
        )
        assert torch.equal(row[0], whole[pair])


def test_a_row_is_the_same_alone_and_in_a_crowd(interpreter: RankPool) -> None:
    interpreter.run(compare_rows, Case([2, 19], 64, 128))


def launches_everything() -> list[int]:
    """A captured launch serves any choice of experts: as many programs as even loads need. Return its grids."""
    from moe.gpu.products import grouped  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.grouped_kernel import grouped_rows  # noqa: PLC0415
    from moe.gpu.products.tiles import DECODE_TILE  # noqa: PLC0415
    from moe.gpu.weights.formats import PlacedWeights  # noqa: PLC0415

    x, weights = torch.randn(40, 64), torch.randn(3, 16, 64)
    places = torch.arange(3, dtype=torch.int32)
    grids: list[int] = []

    class Noting:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid[0])
            return grouped_rows[grid]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "grouped_rows", Noting())
        for counts in ([1, 1, 38], [40, 0, 0], [17, 17, 6], [0, 0, 2], [0, 0, 0]):
            offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
            for expected in (None, 5, 1):
                out = grouped.grouped_linear(
                    x,
                    PlacedWeights(weights),
                    offsets,
                    places,
                    num_pairs=40,
                    expected_pairs=expected,
                    tile=DECODE_TILE,
                )
                slot = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
                want = torch.einsum("pk,pnk->pn", x[: len(slot)], weights[slot])
                torch.testing.assert_close(out[: len(slot)], want, atol=1e-4, rtol=1e-4)
    return grids


def test_a_launch_has_as_many_programs_as_even_loads_take_and_serves_any_load(interpreter: RankPool) -> None:
    assert interpreter.run(launches_everything)[0] == [3 + 40 // 16, 3, 1] * 5


def refusals() -> list[str]:
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415
    from moe.gpu.products.tiles import FLOW_TILE  # noqa: PLC0415
    from moe.gpu.weights.formats import DeviceFormat, PlacedWeights  # noqa: PLC0415 - in the interpreter

    x, plain = torch.randn(2, 64), PlacedWeights(torch.randn(2, 64, 64))
    fp8 = PlacedWeights(plain.codes.to(E4M3), DeviceFormat("e4m3", "float", 64), torch.ones(2, 64, 1))
    fp4 = placed(
        DeviceFormat("e2m1", "e8m0", 32),
        torch.zeros(2, 64, 32, dtype=U8),
        scales=torch.zeros(2, 64, 2, dtype=U8),
    )
    zeros = torch.zeros(2, 1, 64, 4, dtype=U8)
    changes: list[dict[str, Any]] = [
        {"x_TK": x.double()},
        {"x_TK": x.bfloat16()},
        {"x_TK": torch.randn(2, 32)},
        {"x_TK": x.to(E4M3)},
        {"weights": plain._replace(scales=torch.ones(2, 64, 1))},
        {"weights": fp8._replace(scales=None)},
        {"weights": fp8._replace(scales=torch.ones(2, 1, 1))},
        {"weights": fp8._replace(scales=torch.ones(2, 64, 2), format=DeviceFormat("e4m3", "float", 48))},
        {"weights": fp8._replace(row_scales=torch.ones(2, 2))},
        {"weights": fp4._replace(zeros=zeros)},
        {"weights": fp4._replace(format=DeviceFormat("int4", "float", 32), zeros=zeros[..., :2])},
        {"weights": fp8, "tile": FLOW_TILE},
        {"x_TK": x[:, :9].contiguous(), "weights": PlacedWeights(torch.randn(2, 64, 9)), "tile": FLOW_TILE},
    ]
    texts = []
    for change in changes:
        arguments = {"x_TK": x, "weights": plain, **change}
        with pytest.raises(ValueError) as caught:
            grouped_linear(
                slot_offsets=torch.tensor([0, 1, 2]), places_S=torch.arange(2).int(), num_pairs=2, **arguments
            )
        texts.append(str(caught.value))
    return texts


def test_what_the_kernel_lacks_is_refused_by_name(interpreter: RankPool) -> None:
    starts = (
        "x_TK is torch.float64", "weights are torch.float32; plain ones must be torch.bfloat16", "x_TK has 32 columns",
        "x_TK is torch.float8_e4m3fn", "plain weights have scales", "e4m3 weights have no scales",
        "scales are [2, 1, 1]; e4m3 weights of 64 x 64 need [2, 64, 1]", "scales are for 48 inputs",
        "row_scales are [2, 2]", "e2m1 weights have zeros", "zeros are [2, 1, 64, 2]; int4 weights of 64 x 64 need [2, 1, 64, 4]",
        "the weights are e4m3, not plain", "the weights have 9 inputs of torch.float32",
    )  # fmt: skip
    for text, start in zip(interpreter.run(refusals)[0], starts, strict=True):
        assert text.startswith(start)
