"""Kernels over quantised weights return the bits of the float32 kernels over the dequantised weight."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dispatch.compiled.team import Team
from moe.cpu.kernels.panels import PackedCoding, format_of, pack, pack_codes, pack_scales, unpack_quantised
from moe.cpu.kernels.products import linear
from moe.load.quantised_weight import (
    QuantisedWeight,
    QuantisedWeightError,
    e2m1_values,
    e8m0_values,
)
from tests.moe.cpu.kernels.test_integer_products import (
    ROWS,
    SHAPES,
    check_other_instructions,
    multiply,
    random,
)
from tests.moe.cpu.kernels.test_products import grouped


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fp8(*shape: int, block: int = 64) -> QuantisedWeight:
    """Return all codes that are numbers, shuffled, with scales of both signs that change every 16 rows."""
    *lead, n, k = shape
    codes = torch.randint(0, 256, (*lead, n, k), generator=generator(), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = random(*lead, -(-n // 16), -(-k // block)).repeat_interleave(16, dim=-2)[..., :n, :]
    return QuantisedWeight(codes=codes.view(torch.float8_e4m3fn), kind="e4m3", scales=scales, block=block)


def e8m0(*shape: int) -> Tensor:
    """Return scales that differ by row, including the smallest."""
    scales = torch.randint(110, 134, shape, generator=generator(3), dtype=torch.uint8)
    scales[..., 0, 0] = 0
    return scales


def pairs(*shape: int) -> Tensor:
    """Return random four-bit codes, two per byte."""
    *lead, n, k = shape
    return torch.randint(0, 256, (*lead, n, k // 2), generator=generator(), dtype=torch.uint8)


def mxfp4(*shape: int) -> QuantisedWeight:
    """Return random codes with scales that differ by row."""
    *lead, n, k = shape
    return QuantisedWeight(codes=pairs(*shape), kind="e2m1", scales=e8m0(*lead, n, -(-k // 32)), block=32)


def mxfp8(*shape: int) -> QuantisedWeight:
    """Return random eight-bit codes with scales that differ by row."""
    *lead, n, k = shape
    return replace(fp8(*shape), scales=e8m0(*lead, n, -(-k // 32)), block=32)


def fp8_rows(*shape: int, dtype: torch.dtype = torch.float32) -> QuantisedWeight:
    """Return a weight with one scale per row."""
    return replace(fp8(*shape), scales=random(*shape[:-1], 1).to(dtype), block=shape[-1])


def int8_rows(*shape: int) -> QuantisedWeight:
    """Return all codes, with one bfloat16 scale per row."""
    codes = torch.randint(-128, 128, shape, generator=generator(), dtype=torch.int8)
    scales = random(*shape[:-1], 1).bfloat16()
    return QuantisedWeight(codes=codes, kind="int8", scales=scales, block=shape[-1])


def nvfp4(*shape: int) -> QuantisedWeight:
    """Return all e4m3 scales that are numbers, including subnormals and 0, with a second scale per row."""
    *lead, n, k = shape
    scales = torch.randint(0, 127, (*lead, n, -(-k // 16)), generator=generator(3), dtype=torch.uint8)
    row_scales = random(*lead, n).abs() / 16
    return QuantisedWeight(
        codes=pairs(*shape),
        kind="e2m1",
        scales=scales.view(torch.float8_e4m3fn),
        block=16,
        row_scales=row_scales,
    )


def int4(*shape: int, block: int = 32, dtype: torch.dtype = torch.bfloat16) -> QuantisedWeight:
    """Return random codes around 8."""
    *lead, n, k = shape
    scales = (random(*lead, n, -(-k // block)) / 4).to(dtype)
    return QuantisedWeight(codes=pairs(*shape), kind="int4", scales=scales, block=block)


def int4_zeros(*shape: int, block: int = 128) -> QuantisedWeight:
    """Return random codes around random zeros, with float16 scales, the first one subnormal."""
    weight = int4(*shape, block=block, dtype=torch.float16)
    weight.scales[..., 0, 0] = 3e-7
    zeros = torch.randint(0, 16, weight.scales.shape, generator=generator(4), dtype=torch.uint8)
    return replace(weight, zeros=zeros)


FORMATS: dict[str, Callable[..., QuantisedWeight]] = {
    "fp8": fp8,
    "fp8, a scale per row": fp8_rows,
    "fp8, a bfloat16 scale per row": partial(fp8_rows, dtype=torch.bfloat16),
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "int8, a scale per row": int8_rows,
    "int4": int4,
    "int4, a scale per 128": partial(int4, block=128),
    "int4 with zeros": int4_zeros,
}


def expected(x_TK: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return the result of the float32 kernel for the dequantised weight."""
    packed = pack(weight.dequantised())
    out_TN = torch.empty(len(x_TK), packed.shape[0] * 16)
    linear(x_TK, packed, None, format_of(packed), out_TN, None)
    return out_TN[:, : weight.shape[0]]


@pytest.mark.crossed("team", "n", "k", "name", every=2)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_row_has_the_bits_of_the_dequantised_weight(
    n: int, k: int, name: str, team: Team | None
) -> None:
    weight = FORMATS[name](n, k)
    for rows in ROWS:
        x = random(rows, k)
        assert torch.equal(multiply(x, weight, team), expected(x, weight)), rows


@pytest.mark.parametrize(
    ("made", "k"),
    [
        *((partial(fp8, block=block), k) for block in (16, 128) for k in (1, 31, 65, 129, 300)),
        *((FORMATS[name], k) for name in ("fp8, a scale per row", "int8, a scale per row") for k in (1, 127, 129, 300)),
        *((FORMATS[name], k) for name, k in (("nvfp4", 40), ("int4", 130), ("int4 with zeros", 258), ("mxfp4", 34))),
    ],
)  # fmt: skip
def test_the_last_block_may_be_short_and_a_row_of_any_length(
    made: Callable[..., QuantisedWeight], k: int
) -> None:
    weight = made(33, k)
    for rows in (1, 3, 9):
        x = random(rows, k)
        assert torch.equal(multiply(x, weight), expected(x, weight))


def test_every_fp8_code_means_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    weight = QuantisedWeight(
        kind="e4m3",
        codes=codes.view(torch.float8_e4m3fn)[None].expand(16, -1).contiguous(),
        scales=torch.full((16, 2), 3.5e-5),
        block=128,
    )
    ours = multiply(torch.eye(254), weight)[:, 0]
    assert torch.equal(ours, codes.view(torch.float8_e4m3fn).float() * 3.5e-5)
    assert ours.abs().min() == 0 and ours.abs().max() == 448 * torch.tensor(3.5e-5)


def test_every_mxfp4_code_and_scale_means_what_the_format_says() -> None:
    """Two inputs per byte, all bytes; 2^(byte - 127) for every scale below 2^8."""
    assert e2m1_values(torch.tensor([0x10, 0x7A], dtype=torch.uint8)).tolist() == [0.0, 0.5, -1.0, 6.0]
    assert e8m0_values(torch.tensor([0, 127, 134], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 128.0]
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(32, 16)
    for scale in (0, 1, 2, 100, 127, 134):
        scales = torch.full((32, 1), scale, dtype=torch.uint8)
        weight = QuantisedWeight(codes=codes, kind="e2m1", scales=scales, block=32)
        assert torch.equal(multiply(torch.eye(32), weight).T, weight.dequantised())


COUNTS = [[0, 0, 0], [1, 0, 0], [3, 1, 12], [0, 100, 1], [5]]  # rows of each slot


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_gives_every_row_its_own_slots_weight(
    counts: list[int], name: str, team: Team | None
) -> None:
    weight = FORMATS[name](len(counts), 40, 64)
    codes, scales, x = pack_codes(weight), pack_scales(weight), random(sum(counts), 64)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ours = grouped(x, codes, offsets, team, scales_S=scales, quantised=PackedCoding.of(weight))
    assert torch.equal(ours, grouped(x, pack(weight.dequantised()), offsets))
    for slot, (start, end) in enumerate(pairwise(offsets.tolist())):
        own = weight[slot]
        assert torch.equal(ours[start:end, : own.shape[0]], multiply(x[start:end], own)), (
            "bits differ from linear"
        )


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_undoes_packing(name: str) -> None:
    weight = FORMATS[name](3, 50, 96)
    again = unpack_quantised(pack_codes(weight), pack_scales(weight), 50, PackedCoding.of(weight))
    assert (again.kind, again.block) == (weight.kind, weight.block)
    assert [*again.tensors()] == [*weight.tensors()]
    for part, seen in again.tensors().items():
        assert torch.equal(seen.view(torch.uint8), weight.tensors()[part].view(torch.uint8)), part


def test_scales_that_change_within_a_panel_are_refused() -> None:
    weight = fp8(64, 64, block=32)
    scales = weight.scales.clone()
    scales[20] *= 2
    broken = replace(weight, scales=scales)
    with pytest.raises(QuantisedWeightError, match="different scales within 16 rows"):
        pack_scales(broken)
    assert weight.block_scales(16).shape == (4, 2)


@pytest.mark.slow
def test_other_instructions_give_the_same_bits() -> None:
    """Rows also have the dequantised weight's bits."""
    check_other_instructions(
        "from tests.moe.cpu.kernels.test_quantised_products import *\n"
        "for made in FORMATS.values():\n"
        "    weight, x = made(48, 160), random(13, 160)\n"
        "    found = [multiply(x[:rows], weight) for rows in (1, 2, 5, 13)]\n"
        "    assert all(torch.equal(each, expected(x[: len(each)], weight)) for each in found)\n"
        "    print(found[-1].double().numpy().tobytes().hex())"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_another_scale_gives_other_bits(name: str) -> None:
    """Control: the tests above depend on the scale of every block."""
    weight, x = FORMATS[name](16, 256), random(9, 256)
    scales = weight.scales.clone()
    if weight.scales.dtype in (torch.uint8, torch.float8_e4m3fn):
        scales.view(torch.uint8)[:, -1] ^= 8
    else:
        scales[:, -1] *= 2
    for rows in (1, 9):
        assert not torch.equal(multiply(x[:rows], replace(weight, scales=scales)), expected(x[:rows], weight))


def test_fp8_codes_that_are_not_a_number_are_refused() -> None:
    weight = fp8(16, 64)
    weight.codes.view(torch.uint8)[2, 5] = 0xFF
    with pytest.raises(QuantisedWeightError, match="not a number"):
        weight.check("w")
