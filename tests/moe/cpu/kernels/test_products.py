"""The CPU kernels against plain torch over edge shapes, and the independence of their rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.compiled.team import Team, program_of, run, run_alone
from moe.cpu.kernels.panels import PackedCoding, format_of, pack, unpack
from moe.cpu.kernels.products import GATHER, QUANTISE, grouped_row, linear, linear_row

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 1), (1, 1), (15, 7), (17, 64), (48, 33), (250, 128)]  # N, K
ROWS = [0, 1, 2, 5, 6, 7, 13, 97, 200]  # around the tiles of 6 and the blocks of 96
# silu() is exp() to 2 ulp, a sum, a quotient and a product. Each rounds once, in torch too.
SILU_RTOL = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multiply(x_TK: Tensor, packed: Tensor, n: int, team: Team | None = None) -> Tensor:
    """Run `linear` into a fresh output full of NaN."""
    out_TN = torch.full((len(x_TK), packed.shape[0] * 16), float("nan"))
    linear(x_TK, packed, None, format_of(packed), out_TN, team)
    return out_TN[:, :n]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_undoes_pack(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(3, n, k).to(dtype)
    packed = pack(weight)
    assert packed.shape == (3, -(-n // 16), k, 16)
    assert packed.is_contiguous() and packed.dtype == dtype
    assert torch.equal(unpack(packed, n), weight)
    strided = random(3, k, n).to(dtype).transpose(1, 2)
    assert torch.equal(unpack(pack(strided), n), strided)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_equals_torch_for_any_number_of_rows(
    n: int, k: int, dtype: torch.dtype, team: Team | None
) -> None:
    weight, packed = random(n, k).to(dtype), pack(random(n, k).to(dtype))
    for rows in ROWS:
        x = random(rows, k, seed=1)
        theirs = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(multiply(x, packed, n, team), theirs, atol=2e-6 * k, rtol=1e-5)


def test_bfloat16_weights_give_the_bits_of_the_same_weights_in_float32() -> None:
    weight, x = random(40, 65).bfloat16(), random(9, 65, seed=1)
    assert torch.equal(multiply(x, pack(weight), 40), multiply(x, pack(weight.float()), 40))


def test_linear_reads_strided_rows_in_place() -> None:
    wide, packed = random(11, 100, seed=1), pack(random(33, 64))
    rows = wide[::2, 20:84]
    assert torch.equal(multiply(rows, packed, 33), multiply(rows.contiguous(), packed, 33))


def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(team: Team | None) -> None:
    x, packed = random(200, 65, seed=1), pack(random(50, 65))
    whole = multiply(x, packed, 50)
    for count in (1, 2, 3, 4, 5, 6, 7, 96, 97, 200):
        for start in (0, 1, 200 - count):
            rows = slice(start, start + count)
            assert torch.equal(multiply(x[rows], packed, 50, team), whole[rows])


def grouped(
    x_PK: Tensor,
    panels_S: Tensor,
    slot_offsets: Tensor,
    team: Team | None = None,
    *,
    scales_S: Tensor | None = None,
    quantised: PackedCoding | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Run the product of consecutive slots into a fresh output full of NaN."""
    scales = None if scales_S is None else scales_S[0]
    kind = format_of(panels_S[0], scales, quantised)
    address_S, scale_address_S = (
        np.array([] if parts is None else [part.data_ptr() for part in parts], dtype=np.int64)
        for parts in (panels_S, scales_S)
    )
    out_PN = torch.full((len(x_PK), kind.panels * (8 if is_gated else 16)), float("nan"))
    rows, x = np.array([len(x_PK)]), x_PK.data_ptr()
    taken, before = np.empty((len(x_PK), kind.row_bytes), np.uint8), []
    if kind.takes_integers:
        before = [QUANTISE.row(x, kind.k * 4, kind.k, taken.ctypes.data, rows.ctypes.data)]
        x = taken.ctypes.data
    row = grouped_row(
        x, kind, address_S.ctypes.data, scale_address_S.ctypes.data, slot_offsets.data_ptr(),
        len(panels_S), out_PN.data_ptr(), is_gated=is_gated,
    )  # fmt: skip
    run(program_of([*before, row]), team, 0)
    return out_PN


COUNTS = [[0, 0, 0], [1, 0, 0], [0, 0, 7], [60, 0, 0], [3, 1, 2], [0, 100, 1], [5]]  # rows of each slot


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(32, 24), (17, 1), (96, 64)])
def test_grouped_gives_every_row_its_own_slots_weight(
    n: int, k: int, counts: list[int], dtype: torch.dtype, team: Team | None
) -> None:
    weights, x = random(len(counts), n, k).to(dtype), random(sum(counts), k, seed=1)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ours = grouped(x, pack(weights), offsets, team)
    assert ours.shape == (len(x), -(-n // 16) * 16)
    for slot, (start, end) in enumerate(pairwise(offsets.tolist())):
        theirs = (x[start:end].double() @ weights[slot].double().T).float()
        torch.testing.assert_close(ours[start:end, :n], theirs, atol=2e-6 * k, rtol=1e-5)
        assert torch.equal(ours[start:end, :n], multiply(x[start:end], pack(weights[slot]), n)), (
            "the bits differ from those of linear"
        )


EXTREMES = torch.tensor(
    [
        sign * x
        for x in (0, 1e-38, 1e-4, 0.5, 1, 5, 20, 50, 86.9, 87.1, 88, 88.8, 104, 1e3, 1e4, 3e38)
        for sign in (1, -1)
    ]
)


def gated(gate_up_PN: Tensor, team: Team | None = None) -> Tensor:
    """Compute silu(gate) * up with the product kernel, with a weight that leaves rows unchanged."""
    rows, columns = gate_up_PN.shape
    same = pack(torch.eye(columns))[None]
    return grouped(gate_up_PN.contiguous(), same, torch.tensor([0, rows]), team, is_gated=True)


def test_a_gate_equals_torch(team: Team | None) -> None:
    for rows, dim in ((0, 16), (1, 16), (3, 48), (105, 256)):
        gate_up = random(rows, 2 * dim) * 8
        gate, up = gate_up.double().chunk(2, dim=-1)
        theirs = (torch.nn.functional.silu(gate) * up).float()
        torch.testing.assert_close(gated(gate_up, team), theirs, atol=1e-7, rtol=SILU_RTOL)


def test_a_gate_of_slots_is_that_of_their_products(team: Team | None) -> None:
    weights, x, offsets = random(3, 64, 24), random(120, 24, seed=1), torch.tensor([0, 3, 3, 120])
    both = grouped(x, pack(weights), offsets)
    assert torch.equal(grouped(x, pack(weights), offsets, team, is_gated=True), gated(both))


def test_gates_survive_extremes() -> None:
    """Below -88, silu() is less than 1e-36, and the kernel may return any value that small, but never NaN."""
    gates = torch.diag(EXTREMES)  # one per row: a product adds only zeros
    ones = torch.ones(len(EXTREMES), len(EXTREMES))
    ours = gated(torch.cat((gates, ones), dim=1)).diagonal()
    theirs = torch.nn.functional.silu(EXTREMES.double()).float()
    torch.testing.assert_close(ours, theirs, atol=2e-36, rtol=SILU_RTOL)


def test_gates_let_nan_through_and_keep_products_of_large_factors() -> None:
    assert gated(torch.full((1, 32), float("nan"))).isnan().all()
    gate, up = torch.full((16,), 1e4), torch.full((16,), -1e4)
    assert torch.equal(gated(torch.cat((gate, up))[None])[0], gate * up)


def test_rows_are_gathered(team: Team | None) -> None:
    x, row_P = random(40, 24), torch.randint(0, 40, (5000,), generator=torch.Generator().manual_seed(1))
    out, count = torch.full((5001, 24), float("nan")), torch.tensor([5000])
    row = GATHER.row(x.data_ptr(), 24 * 4, row_P.data_ptr(), count.data_ptr(), out.data_ptr())
    run(program_of([row]), team, 0)
    assert torch.equal(out[:5000], x[row_P]) and out[5000].isnan().all()


def test_a_bias_is_added_to_every_row() -> None:
    x, weight, bias = random(100, 24, seed=1), random(33, 24), random(48, seed=2)
    packed, out, rows = pack(weight), torch.full((100, 48), float("nan")), torch.tensor([100])
    row = linear_row(
        x.data_ptr(), 96, packed.data_ptr(), 0, format_of(packed), out.data_ptr(), 192, rows.data_ptr(),
        bias.data_ptr(),
    )  # fmt: skip
    run_alone(program_of([row]))
    assert torch.equal(out[:, :33], multiply(x, packed, 33) + bias[:33])
