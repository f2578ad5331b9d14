"""Decoded values of a quantised weight, number by number, and rejected weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.load.quantised_weight import QuantisedWeight, QuantisedWeightError, check_scales

E4M3, FLOAT8 = "e4m3", torch.float8_e4m3fn


def tensor(*rows: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows as a matrix of a type."""
    return torch.tensor(rows).to(dtype)


def nvfp4() -> QuantisedWeight:
    """Return two rows of 32 inputs, with a scale per 16 inputs and a second scale per row."""
    codes = torch.tensor([[0x10, 0x7A] * 8, [0xFF, 0x00] * 8], dtype=torch.uint8)
    scales = tensor([1.0, 0.5], [448.0, 2.0], dtype=FLOAT8)
    return QuantisedWeight(
        codes=codes, kind="e2m1", scales=scales, block=16, row_scales=torch.tensor([0.1, 0.3])
    )


def int4(zeros: Tensor | None = None) -> QuantisedWeight:
    """Return two rows of 4 inputs, with a scale per two inputs."""
    codes = torch.tensor([[0x80, 0xF1], [0x12, 0x34]], dtype=torch.uint8)
    scales = tensor([2.0, 0.5], [1.0, 3.0], dtype=torch.float16)
    return QuantisedWeight(codes=codes, kind="int4", scales=scales, block=2, zeros=zeros)


def test_fp8_with_one_scale_per_row_is_value_times_scale() -> None:
    codes = tensor([1.0, -448.0, 0.5], [2.0, 0.0, -1.5], dtype=FLOAT8)
    weight = QuantisedWeight(
        codes=codes, kind=E4M3, scales=tensor([0.5], [3.0], dtype=torch.bfloat16), block=3
    )
    assert weight.shape == (2, 3)
    assert weight.dequantised().tolist() == [[0.5, -224.0, 0.25], [6.0, 0.0, -4.5]]


def test_the_last_block_of_a_row_may_be_short() -> None:
    codes = tensor([1, -2, 3], dtype=torch.int8)
    weight = QuantisedWeight(codes=codes, kind="int8", scales=tensor([2.0, 4.0]), block=2)
    assert weight.dequantised().tolist() == [[2.0, -4.0, 12.0]]


def test_a_second_scale_is_multiplied_into_the_first_before_the_value() -> None:
    found = nvfp4().dequantised()
    one, three = torch.tensor(0.1), torch.tensor(0.3)
    assert found[0, :4].tolist() == [0.0, 0.5 * one, -1.0 * one, 6.0 * one]
    assert found[0, 16:20].tolist() == [0.0, 0.5 * (0.5 * one), -0.5 * one, 6 * (0.5 * one)]
    assert found[1, 0] == -6 * (448 * three) and found[1, 0] != (-6 * 448) * three.double()


def test_int4_codes_are_around_8_or_around_their_blocks_zero() -> None:
    assert int4().dequantised().tolist() == [[-16.0, 0.0, -3.5, 3.5], [-6.0, -7.0, -12.0, -15.0]]
    zeros = torch.tensor([[0, 15], [8, 3]], dtype=torch.uint8)
    assert int4(zeros).dequantised().tolist() == [[0.0, 16.0, -7.0, 0.0], [-6.0, -7.0, 3.0, 0.0]]


def test_mxfp8_scales_are_powers_of_two() -> None:
    codes = tensor([1.0, -448.0], dtype=FLOAT8)
    scales = torch.tensor([[125, 0]], dtype=torch.uint8)
    weight = QuantisedWeight(codes=codes, kind=E4M3, scales=scales, block=1)
    assert weight.dequantised().tolist() == [[0.25, -448 * 2.0**-127]]


def test_one_of_several_weights_has_all_that_belongs_to_it() -> None:
    one, zeros = nvfp4(), torch.tensor([[0, 15], [8, 3]], dtype=torch.uint8)
    parts = {name: torch.stack((part, part)) for name, part in one.tensors().items()}
    several = QuantisedWeight(
        codes=parts["codes"], kind="e2m1", scales=parts["scales"], block=16, row_scales=parts["row_scales"]
    )
    assert several.shape == (2, 2, 32) and several[1].shape == (2, 32)
    assert torch.equal(several[1].dequantised(), one.dequantised())
    assert torch.equal(several.dequantised()[0], one.dequantised())
    assert [*int4(zeros).tensors()] == ["codes", "scales", "zeros"]


ZEROS = torch.zeros(2, 2, dtype=torch.uint8)
BAD = {
    "a zero above 15": (int4(ZEROS + 16), "a zero of 16"),
    "zeros of another shape": (int4(ZEROS[:1]), r"zeros \[1, 2\]; it needs \[2, 2\]"),
    "scales of another shape": (replace(int4(), block=4), r"scales \[2, 2\]; it needs \[2, 1\]"),
    "second scales of another shape": (
        replace(nvfp4(), row_scales=torch.ones(1)), r"second scales \[1\]; it needs \[2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_computed_with_is_refused(name: str) -> None:
    for good in (nvfp4(), int4(), int4(ZEROS + 15)):
        good.check("w")
    weight, message = BAD[name]
    with pytest.raises(QuantisedWeightError, match=f"w has (a )?{message}"):
        weight.check("w")


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (torch.float32, [255.9, -255.9, 0.0], [256.0, -256.0, INF, NAN]),
        (torch.bfloat16, [255.0, -255.0, 1e-30], [256.0, -INF, NAN]),
        (torch.float16, [255.875, 6e-8], [256.0, INF, NAN]),
        (FLOAT8, [240.0, -240.0, 2.0**-9], [256.0, -256.0, 448.0, NAN]),
        (torch.float8_e8m0fnu, [128.0, 2.0**-127], [256.0, 2.0**127, NAN]),
    ],
    ids=str,
)
def test_scales_are_numbers_below_256_in_every_type(
    dtype: torch.dtype, good: list[float], bad: list[float]
) -> None:
    """At any position among good ones. e8m0 scales come as bytes."""

    def stored(*rows: list[float]) -> Tensor:
        made = tensor(*rows, dtype=dtype)
        return made.view(torch.uint8) if dtype == torch.float8_e8m0fnu else made

    check_scales(stored(good, good[::-1]), "w")
    for value in bad:
        for place in range(2 * len(good)):
            both = [*good, *good]
            both[place] = value
            with pytest.raises(QuantisedWeightError) as caught:
                check_scales(stored(both[: len(good)], both[len(good) :]), "w")
            wanted = f"w has a scale of {abs(value)}; scales must be numbers below 256: "
            assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([0.0, 1.0], "v gives a second scale of 0.0; it must be a finite number, not 0"),
        ([1.0, INF], "v gives a second scale of inf"),
        ([NAN, 1.0], "v gives a second scale of nan"),
        ([1.0, 1.0], "w has a scale of 448.0 once multiplied with v; scales must be numbers below 256"),
        ([1.0, -0.6], "w has a scale of 268.8.* once multiplied with v"),
    ],
    ids=str,
)
def test_a_second_scale_is_a_number_that_is_not_0_and_counts_for_the_first(
    second: list[float], message: str
) -> None:
    """For the second row, with a largest scale of 448, 0.5 is valid."""
    check_scales(nvfp4().scales, "w", torch.tensor([100.0, 0.5]), "v")
    with pytest.raises(QuantisedWeightError, match=message):
        check_scales(nvfp4().scales, "w", torch.tensor(second), "v")
