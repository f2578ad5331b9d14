"""The CPU kernels against plain torch over edge shapes, and the independence of their rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.cpu.linear import grouped_linear, linear, pack, silu_and_mul, unpack

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 1), (1, 1), (15, 7), (17, 64), (48, 33), (250, 128)]  # N, K
ROWS = [0, 1, 2, 5, 6, 7, 13, 97, 200]  # around the tiles of 6 and the blocks of 96
# silu() is exp() to 2 ulp, a sum, a quotient and a product: each rounds once, torch's own likewise.
SILU_RTOL = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multiply(x_TK: Tensor, packed: Tensor, n: int, *, parallel: bool = False) -> Tensor:
    """Run `linear` into a fresh output full of NaN."""
    out_TN = torch.full((len(x_TK), packed.shape[0] * 16), float("nan"))
    linear(x_TK, packed, out_TN, parallel=parallel)
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
    n: int, k: int, dtype: torch.dtype, parallel: bool
) -> None:
    weight, packed = random(n, k).to(dtype), pack(random(n, k).to(dtype))
    for rows in ROWS:
        x = random(rows, k, seed=1)
        theirs = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(
            multiply(x, packed, n, parallel=parallel), theirs, atol=2e-6 * k, rtol=1e-5
        )


def test_bfloat16_weights_give_the_bits_of_the_same_weights_in_float32() -> None:
    weight, x = random(40, 65).bfloat16(), random(9, 65, seed=1)
    assert torch.equal(multiply(x, pack(weight), 40), multiply(x, pack(weight.float()), 40))


def test_linear_reads_strided_rows_in_place() -> None:
    wide, packed = random(11, 100, seed=1), pack(random(33, 64))
    rows = wide[::2, 20:84]
    assert torch.equal(multiply(rows, packed, 33), multiply(rows.contiguous(), packed, 33))


def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(parallel: bool) -> None:
    x, packed = random(200, 65, seed=1), pack(random(50, 65))
    whole = multiply(x, packed, 50)
    for count in (1, 2, 3, 4, 5, 6, 7, 96, 97, 200):
        for start in (0, 1, 200 - count):
            rows = slice(start, start + count)
            assert torch.equal(multiply(x[rows], packed, 50, parallel=parallel), whole[rows])


def grouped(x_PK: Tensor, packed_S: Tensor, slot_offsets: Tensor, *, parallel: bool) -> Tensor:
    """`grouped_linear` of slots that lie one behind the other."""
    address_S = np.array([packed.data_ptr() for packed in packed_S], dtype=np.int64)
    return grouped_linear(x_PK, packed_S[0], address_S, slot_offsets, parallel=parallel)


COUNTS = [[0, 0, 0], [1, 0, 0], [0, 0, 7], [60, 0, 0], [3, 1, 2], [0, 100, 1], [5]]  # rows of each slot


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(32, 24), (17, 1), (96, 64)])
def test_grouped_linear_gives_every_row_its_own_slots_weight(
    n: int, k: int, counts: list[int], dtype: torch.dtype, parallel: bool
) -> None:
    weights, x = random(len(counts), n, k).to(dtype), random(sum(counts), k, seed=1)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ours = grouped(x, pack(weights), offsets, parallel=parallel)
    assert ours.shape == (len(x), -(-n // 16) * 16)
    for slot, (start, end) in enumerate(pairwise(offsets.tolist())):
        theirs = (x[start:end].double() @ weights[slot].double().T).float()
        torch.testing.assert_close(ours[start:end, :n], theirs, atol=2e-6 * k, rtol=1e-5)
        assert torch.equal(ours[start:end, :n], multiply(x[start:end], pack(weights[slot]), n)), (
            "as linear, to the bit"
        )


EXTREMES = torch.tensor(
    [
        sign * x
        for x in (0, 1e-38, 1e-4, 0.5, 1, 5, 20, 50, 86.9, 87.1, 88, 88.8, 104, 1e3, 1e4, 3e38)
        for sign in (1, -1)
    ]
)


def test_silu_and_mul_equals_torch(parallel: bool) -> None:
    for rows, dim in ((0, 16), (1, 16), (3, 48), (65, 256)):
        gate_up = random(rows, 2 * dim) * 8
        gate, up = gate_up.double().chunk(2, dim=-1)
        theirs = (torch.nn.functional.silu(gate) * up).float()
        torch.testing.assert_close(
            silu_and_mul(gate_up, parallel=parallel), theirs, atol=1e-7, rtol=SILU_RTOL
        )


def test_silu_and_mul_survives_extreme_gates() -> None:
    """From -88 down silu() is under 1e-36, where the kernel may give anything as small; never NaN."""
    ones = torch.ones_like(EXTREMES)
    ours = silu_and_mul(torch.cat((EXTREMES, ones))[None], parallel=False)[0]
    theirs = torch.nn.functional.silu(EXTREMES.double()).float()
    torch.testing.assert_close(ours, theirs, atol=2e-36, rtol=SILU_RTOL)


def test_silu_and_mul_lets_nan_through() -> None:
    gate_up = torch.cat((torch.full((16,), float("nan")), torch.ones(16)))[None]
    assert silu_and_mul(gate_up, parallel=False).isnan().all()


def test_silu_and_mul_keeps_products_of_large_factors() -> None:
    gate, up = torch.full((16,), 1e4), torch.full((16,), -1e4)
    assert torch.equal(silu_and_mul(torch.cat((gate, up))[None], parallel=False)[0], gate * up)
