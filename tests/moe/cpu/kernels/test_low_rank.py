"""The kernels of adapters against plain torch, and the bits of rows in other batches."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.compiled.team import Team, program_of, run_alone
from moe.cpu.kernels.low_rank import SPLIT, Groups, adapt, adapt_pairs_row
from moe.lora.tables import FactorTable, factors_of

K, N = 37, 50


def table_of(*ranks: int, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[FactorTable, list[Tensor]]:
    """Return a table with a place for each rank, and the dense weights [n, K]. Rank 0: an empty place."""
    generator = torch.Generator().manual_seed(len(ranks))
    table, dense = FactorTable(len(ranks)), []
    for place, rank in enumerate(ranks):
        a, b = torch.randn(rank, K, generator=generator), torch.randn(n, rank, generator=generator)
        if rank:
            table.put(place, factors_of(a, b, 0.7, dtype))
        dense.append(0.7 * b.to(dtype).float() @ a.to(dtype).float())
    return table, dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [5, N, 130])
@pytest.mark.parametrize("ranks", [(1, 0, 3), (16, 17, 40)])
def test_every_row_gets_its_adapter_s_product(
    ranks: tuple[int, ...], n: int, dtype: torch.dtype, two_threads: Team
) -> None:
    table, dense = table_of(*ranks, n=n, dtype=dtype)
    x, before = torch.randn(9, K), torch.randn(9, n)
    places = torch.tensor([-1, 0, 1, 2, 2, -1, 0, 1, -1])
    out = before.clone()
    adapt(x, places, table, out, two_threads)
    for row, place in enumerate(places.tolist()):
        if place < 0:
            assert torch.equal(out[row], before[row])
        else:
            assert torch.allclose(out[row], before[row] + dense[place] @ x[row], atol=1e-4)


@pytest.mark.parametrize("num_rows", [12, 100, 170])
@pytest.mark.parametrize("n", [N, 130])
def test_a_row_s_bits_do_not_depend_on_its_neighbours(n: int, num_rows: int) -> None:
    """A tile of many rows computes those with the same adapter together."""
    table, dense = table_of(5, 16, 33, n=n)
    generator = torch.Generator().manual_seed(num_rows)
    x, places = torch.randn(num_rows, K), torch.randint(-1, 3, (num_rows,), generator=generator)
    together = torch.zeros(num_rows, n)
    adapt(x, places, table, together, None)
    for row, place in enumerate(places.tolist()):
        alone = torch.zeros(1, n)
        adapt(x[row : row + 1], places[row : row + 1].clone(), table, alone, None)
        assert torch.equal(alone[0], together[row])
        wanted = torch.zeros(n) if place < 0 else dense[place] @ x[row]
        assert torch.allclose(alone[0], wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_pairs_get_the_bits_of_single_ones(dtype: torch.dtype) -> None:
    num_slots, num_places = 3, 2
    table, dense = table_of(3, 0, 8, 2, 16, 20, n=130, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 14, (num_slots * (num_places + 1),), generator=generator)
    offsets = np.concatenate([[0], np.cumsum(sizes.numpy())])
    x, row_of = torch.randn(20, K), torch.randint(0, 20, (int(offsets[-1]),), generator=generator).numpy()

    def compute(offsets: np.ndarray, row_of: np.ndarray) -> Tensor:
        out, count = torch.zeros(len(row_of), 130), np.array([len(row_of)])
        groups = Groups(offsets.ctypes.data, num_slots, num_places + 1, count.ctypes.data)
        row = adapt_pairs_row(
            x.data_ptr(), K * 4, row_of.ctypes.data, K, groups, table, out.data_ptr(), 130 * 4, 130
        )  # fmt: skip
        run_alone(program_of([row]))
        return out

    together = compute(offsets, row_of)
    assert len(row_of) >= 48, "tiles have several pairs"
    for pair, row in enumerate(row_of):
        group = int(np.searchsorted(offsets, pair, side="right")) - 1
        alone = compute((np.arange(len(offsets)) > group).astype(np.int64), row_of[pair : pair + 1].copy())
        assert torch.equal(alone[0], together[pair]), pair
        slot, copy = divmod(group, num_places + 1)
        wanted = torch.zeros(130) if copy == 0 else dense[(copy - 1) * num_slots + slot] @ x[row]
        assert torch.allclose(together[pair], wanted, atol=1e-3), pair


def test_rows_of_wider_matrices_are_strided() -> None:
    table, dense = table_of(4)
    wide_x, wide_out = torch.randn(3, K + 5), torch.zeros(3, N + 7)
    adapt(wide_x[:, :K], torch.tensor([0, -1, 0]), table, wide_out[:, 2 : 2 + N], None)
    assert torch.allclose(wide_out[0, 2 : 2 + N], dense[0] @ wide_x[0, :K], atol=1e-4)
    assert not wide_out[1].any() and not wide_out[:, :2].any() and not wide_out[:, 2 + N :].any()


@pytest.mark.parametrize("gathers", [False, True])
def test_pairs_get_the_product_of_their_slot_and_adapter(gathers: bool) -> None:
    table, dense = table_of(3, 0, 8, 2)  # two places, two slots: entry place * 2 + slot
    offsets = np.array([0, 2, 4, 5, 5, 6, 9])  # groups of slot 0: without, places 0 and 1; then of slot 1
    groups = [None, None, 0, 0, 2, 1, 3, 3, 3]
    x = torch.randn(6 if gathers else 9, K)
    row_of = np.array([0, 1, 5, 2, 3, 3, 0, 4, 1])
    out, count = torch.zeros(9, N), np.array([9])
    sorted_pairs = Groups(offsets.ctypes.data, 2, 3, count.ctypes.data)
    row = adapt_pairs_row(
        x.data_ptr(), K * 4, row_of.ctypes.data if gathers else 0, K, sorted_pairs, table, out.data_ptr(), N * 4, N
    )  # fmt: skip
    run_alone(program_of([row]))
    for pair, entry in enumerate(groups):
        given = x[row_of[pair] if gathers else pair]
        wanted = torch.zeros(N) if entry is None else dense[entry] @ given
        assert torch.allclose(out[pair], wanted, atol=1e-4), pair
    count[0], before = 0, out.clone()
    run_alone(program_of([row]))
    assert torch.equal(out, before), "no pair has an adapter"


def test_offsets_by_slot_choose_the_fused_product_only_without_adapters() -> None:
    every, fused, plain = (np.full(3, -1) for _ in range(3))
    for offsets, is_fused in (([0, 2, 2, 5, 5], True), ([0, 2, 3, 5, 5], False)):
        groups = np.array(offsets)
        run_alone(
            program_of(
                [SPLIT.row(groups.ctypes.data, 2, 2, every.ctypes.data, fused.ctypes.data, plain.ctypes.data)]
            )
        )
        assert every.tolist() == offsets[::2]
        assert (fused if is_fused else plain).tolist() == offsets[::2]
        assert not (plain if is_fused else fused).any()
