"""Rows get their own adapter's product: the sum of torch, with bits that no other row and no other adapter changes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import RankPool

IN_DIM, OUT_DIM, ROWS = 1100, 72, 70  # inputs of two programs; an output tile that is not full
RANKS = (4, 17, 40)  # the second and third take more than one tile of ranks


class Drawn(NamedTuple):
    x: Tensor
    out: Tensor
    places: Tensor
    factors: list[tuple[Tensor, Tensor]]  # A [R, K], B [N, R]


def draw(rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Drawn:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    factors = [(normal(rank, IN_DIM) * 0.1, normal(OUT_DIM, rank) * 0.1) for rank in RANKS]
    places = torch.randint(-1, len(RANKS), (rows,), generator=generator)
    x, out = (normal(rows, width).to(device, dtype) for width in (IN_DIM, OUT_DIM))
    return Drawn(x, out, places.to(device), [(a.to(device), b.to(device)) for a, b in factors])


def wanted(drawn: Drawn) -> Tensor:
    out = drawn.out.double()
    for row, place in enumerate(drawn.places.tolist()):
        if place >= 0:
            a, b = (each.double() for each in drawn.factors[place])
            out[row] += b @ (a @ drawn.x[row].double())
    return out


def table_of(factors: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Any:
    from moe.gpu.lora.low_rank import DeviceFactorTable  # noqa: PLC0415 - in the interpreter
    from moe.lora.tables import factors_of  # noqa: PLC0415

    table = DeviceFactorTable(len(factors), device)
    for entry, (a, b) in enumerate(factors):
        table.put(entry, factors_of(a, b, 1.0))
    return table


def add(drawn: Drawn, rows: Sequence[int], places: Tensor | None = None) -> Tensor:
    """Return some rows' outputs, computed together."""
    from moe.gpu.lora.low_rank import add_low_rank, group_rows  # noqa: PLC0415

    chosen = torch.tensor(rows, dtype=torch.int64, device=drawn.x.device)
    out = drawn.out[chosen].clone()
    places = drawn.places[chosen] if places is None else places
    add_low_rank(
        drawn.x[chosen], out, group_rows(places, len(RANKS)), table_of(drawn.factors, drawn.x.device)
    )
    return out


def check_sums(rows: int, dtype: torch.dtype, device: str = "cpu") -> float:
    drawn = draw(rows, dtype, device)
    found = add(drawn, range(rows))
    is_plain = drawn.places < 0
    assert torch.equal(found[is_plain], drawn.out[is_plain]), "rows without an adapter are not touched"
    return float((found.double() - wanted(drawn)).abs().max()) if rows else 0.0


@pytest.mark.parametrize("rows", [0, 1, 16, ROWS])
def test_every_row_gets_the_sum_of_its_adapter(interpreter: RankPool, rows: int) -> None:
    [difference] = interpreter.run(check_sums, rows, torch.float32)
    assert difference < 1e-4


def check_bits(dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    drawn = draw(ROWS, dtype, device)
    together = add(drawn, range(ROWS))
    for row in (0, 33, ROWS - 1):
        assert torch.equal(add(drawn, [row])[0], together[row])
    others = drawn.places.roll(1)
    others[33] = drawn.places[33]
    assert torch.equal(add(drawn, range(ROWS), others)[33], together[33]), "neighbours' adapters change a row"
    few = list(range(30, 60))
    assert torch.equal(add(drawn, few), together[few])
    control = (others != drawn.places).nonzero()[0, 0]
    assert not torch.equal(add(drawn, range(ROWS), others)[control], together[control])


def test_a_row_has_the_same_bits_among_any_rows(interpreter: RankPool) -> None:
    interpreter.run(check_bits)


def check_maps() -> None:
    """Members read other rows than they write, as pairs of experts do."""
    from moe.gpu.lora.low_rank import add_low_rank, group_rows  # noqa: PLC0415

    drawn = draw(ROWS)
    row_M = torch.randint(0, 5, (ROWS,), generator=torch.Generator().manual_seed(1))
    found = drawn.out.clone()
    groups = group_rows(drawn.places, len(RANKS))
    add_low_rank(drawn.x[:5], found, groups, table_of(drawn.factors, drawn.x.device), row_M=row_M)
    same = wanted(drawn._replace(x=drawn.x[:5][row_M]))
    assert float((found.double() - same).abs().max()) < 1e-4


def test_members_may_read_any_row(interpreter: RankPool) -> None:
    interpreter.run(check_maps)


def check_changes() -> None:
    """Entries may be emptied, changed, and filled with what is not a number, for an adapter that was lost."""
    from moe.gpu.lora.low_rank import add_low_rank, group_rows  # noqa: PLC0415
    from moe.lora.tables import Factors, factors_of  # noqa: PLC0415

    drawn = draw(ROWS)
    table, groups = table_of(drawn.factors, drawn.x.device), group_rows(drawn.places, len(RANKS))
    table.put(0, None)
    table.put(1, Factors(torch.full((IN_DIM, 16), torch.nan), torch.zeros(1, OUT_DIM)))
    out = drawn.out.clone()
    add_low_rank(drawn.x, out, groups, table)
    assert torch.equal(out[drawn.places == 0], drawn.out[drawn.places == 0])
    assert out[drawn.places == 1].isnan().all() and out[drawn.places != 1].isfinite().all()
    for entry, (a, b) in enumerate(drawn.factors):
        table.put(entry, factors_of(a, b, 1.0))
    out = drawn.out.clone()
    add_low_rank(drawn.x, out, groups, table)
    assert torch.equal(out, add(drawn, range(ROWS)))
    for entry in range(len(RANKS)):
        table.put(entry, None)
    add_low_rank(drawn.x, out, groups, table)
    assert table.is_empty and torch.equal(out, add(drawn, range(ROWS)))


def test_entries_may_change_between_steps(interpreter: RankPool) -> None:
    interpreter.run(check_changes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same_sums_with_bits_that_no_other_row_changes(dtype: torch.dtype) -> None:
    assert check_sums(ROWS, dtype, "cuda") < (1e-4 if dtype == torch.float32 else 2**-5)
    check_bits(dtype, "cuda")
