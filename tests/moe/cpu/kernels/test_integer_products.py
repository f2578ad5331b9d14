"""int8 and int4 weights with eight-bit rows: results, bits, and instruction sets."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.compiled.team import Team, program_of, run_alone
from moe.cpu.kernels.panels import PackedCoding, format_of, pack_codes, pack_scales, unpack_quantised
from moe.cpu.kernels.products import QUANTISE, linear
from moe.load.quantised_weight import QuantisedWeight, int4_weight, int8_weight
from tests.moe.cpu.kernels.test_products import grouped

BLOCK = 32
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 13, 97, 200]  # around the tiles of 6 and the blocks of 96
SHAPES = [(16, 32), (48, 96), (17, 64), (250, 160)]  # N, K
FORMATS = {"int8": int8_weight, "int4": int4_weight}
# Instruction sets that numba uses instead of this machine's.
MACHINES = {"AVX2": "+avx2,+avx,+fma,+ssse3,+sse4.1,+sse4.2,+bmi,+bmi2", "none": ""}


def random(*shape: int, seed: int = 1) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(name: str, *shape: int) -> QuantisedWeight:
    """Return quantised normal numbers with some zero blocks."""
    weight = random(*shape)
    weight[..., 0, :BLOCK] = 0.0
    return FORMATS[name](weight)


def quantised(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [T, K] and scales [T, K / 32], computed in plain torch. The oracle."""
    blocks = x_TK.reshape(len(x_TK), -1, BLOCK)
    highest = blocks.abs().amax(-1)
    codes = (blocks * (127 / highest).unsqueeze(-1)).round()
    return torch.where(highest.unsqueeze(-1) > 1e-30, codes, 0).flatten(-2), torch.where(
        highest > 1e-30, highest / 127, 0
    )


def expected(x_TK: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return exact sums of integers times both scales, block by block, in double precision. The oracle."""
    codes, scales = quantised(x_TK)
    values = weight.dequantised().double().unflatten(-1, (-1, BLOCK))
    rows = (codes.double().unflatten(-1, (-1, BLOCK)) * scales.double().unsqueeze(-1)).flatten(-2)
    made: Tensor = (rows @ values.flatten(-2).T).float()
    return made


def multiply(x_TK: Tensor, weight: QuantisedWeight, team: Team | None = None) -> Tensor:
    """Run the kernel into a fresh output full of NaN. The result is [T, N]."""
    codes, scales = pack_codes(weight), pack_scales(weight)
    out_TN = torch.full((len(x_TK), codes.shape[0] * 16), float("nan"))
    linear(x_TK, codes, scales, format_of(codes, scales, PackedCoding.of(weight)), out_TN, team)
    return out_TN[:, : weight.shape[0]]


def check_other_instructions(script: str) -> None:
    """Check that a script prints the same bits here and on other machines: numba compiles for one machine per process."""
    said = []
    for features in (None, *MACHINES.values()):
        machine = {} if features is None else {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
        ran = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **machine}, timeout=400,
            check=True,
        )  # fmt: skip
        said.append(ran.stdout)
    assert said[1:] == said[:1] * len(MACHINES) and len(said[0]) > 1000


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_quantised_rows(n: int, k: int, name: str, team: Team | None) -> None:
    weight, x = weight_of(name, n, k), random(max(ROWS), k, seed=2)
    x[3, :BLOCK] = 0.0
    whole = multiply(x, weight, team)
    torch.testing.assert_close(whole, expected(x, weight), rtol=1e-5, atol=1e-5)
    exact = x @ weight.dequantised().T
    assert not torch.equal(whole, exact) and (whole - exact).norm() < 0.02 * exact.norm()
    for rows in ROWS:
        for first in (0, 200 - rows):
            here = slice(first, first + rows)
            assert torch.equal(multiply(x[here], weight, team), whole[here]), "bits depend on other rows"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 0], [3, 1, 12], [0, 100, 1], [5]], ids=str)
def test_grouped_gives_every_row_its_own_slots_weight(
    counts: list[int], name: str, team: Team | None
) -> None:
    weight = weight_of(name, len(counts), 40, 64)
    codes, scales, x = pack_codes(weight), pack_scales(weight), random(sum(counts), 64)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ours = grouped(x, codes, offsets, team, scales_S=scales, quantised=PackedCoding.of(weight))
    for slot, (start, end) in enumerate(pairwise(offsets.tolist())):
        assert torch.equal(ours[start:end, :40], multiply(x[start:end], weight[slot])), (
            "the bits differ from those of linear"
        )


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_undoes_packing(name: str) -> None:
    weight = weight_of(name, 3, 50, 96)
    again = unpack_quantised(pack_codes(weight), pack_scales(weight), 50, PackedCoding.of(weight))
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)


def quantise(x_TK: Tensor) -> Tensor:
    """Run the kernel that quantises: [T, K / 32, 40] bytes."""
    rows = np.array([len(x_TK)])
    out = torch.full((len(x_TK), x_TK.shape[1] // BLOCK, BLOCK + 8), 99, dtype=torch.uint8)
    run_alone(
        program_of(
            [
                QUANTISE.row(
                    x_TK.data_ptr(), x_TK.shape[1] * 4, x_TK.shape[1], out.data_ptr(), rows.ctypes.data
                )
            ]
        )
    )
    return out


def test_rows_are_quantised_to_the_nearest() -> None:
    x = random(50, 160) * torch.logspace(-44, 30, 50)[:, None]
    made = quantise(x)
    codes, scales = quantised(x)
    found = made[..., :BLOCK].view(torch.int8).flatten(1)
    assert torch.equal(found.float(), codes)
    assert torch.equal(made[..., BLOCK : BLOCK + 4].contiguous().view(torch.float32)[..., 0], scales)
    sums = made[..., BLOCK + 4 :].contiguous().view(torch.int32)[..., 0]
    assert torch.equal(sums, codes.unflatten(-1, (-1, BLOCK)).sum(-1).int())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(value: float) -> None:
    x, weight = random(2, 64), weight_of("int8", 16, 64)
    x[1, 40] = value
    found = multiply(x, weight)
    assert found[1].isnan().all() and found[0].isfinite().all()


@pytest.mark.slow
def test_other_instructions_give_the_same_bits() -> None:
    """Plain weights too."""
    check_other_instructions(
        "import torch; from tests.moe.cpu.kernels.test_integer_products import *\n"
        "from tests.moe.cpu.kernels.test_products import multiply as plain; from moe.cpu.kernels.panels import pack\n"
        "found = [multiply(random(13, 160, seed=2), weight_of(name, 48, 160)) for name in FORMATS]\n"
        "for rows in (1, 2, 5, 45):\n"
        "    for dtype in (torch.float32, torch.bfloat16):\n"
        "        found.append(plain(random(rows, 160, seed=2), pack(random(48, 160).to(dtype)), 48))\n"
        "print(torch.cat(found).double().numpy().tobytes().hex())"
    )


@pytest.mark.parametrize(("made", "step"), [(int8_weight, 1 / 127), (int4_weight, 2 / 8)])
def test_integers_are_as_near_as_their_scale_allows(
    made: Callable[[Tensor], QuantisedWeight], step: float
) -> None:
    """Half a step of a block's largest weight, for int4 a whole step at one end, plus the rounding of scales."""
    weight = random(48, 96) * torch.logspace(-6, 3, 48)[:, None]
    made_weight = made(weight)
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=-1)
    assert made_weight.shape == (48, 96)
    assert ((made_weight.dequantised() - weight).abs() <= largest * (step * 0.51 + 2**-8)).all()
    assert torch.equal(made(torch.zeros(16, 32)).dequantised(), torch.zeros(16, 32))
