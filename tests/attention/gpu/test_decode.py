"""Paged decode for GPUs against the plain oracle: in Triton's interpreter, and on a GPU if there is one.

The interpreter multiplies and rounds bfloat16 incorrectly, so float16 represents the short types.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.codes import E4M3, INT8
from tests.fixtures import OnDevice
from tests.support.gpu.attention import (
    SCALE,
    Heads,
    Paged,
    check_close,
    dtypes_on,
    make_paged,
    oracle,
    some_fast,
)

SPLIT = 64  # two of the kernel's tiles
EDGES = [1, 15, 16, 17, 63, 64, 65, 150]  # in tokens: edges of blocks, tiles and splits
FEW = [1, 33, 100]
SMALL, SMALLEST = Heads(4, 2, 32, 32), Heads(2, 1, 32, 32)


def decode(
    paged: Paged,
    query_SHD: Tensor,
    rows: slice | int,
    *,
    most_splits: int = 8,
    seats: int = 3,
    is_invariant: bool = True,
    **options: Any,
) -> Tensor:
    """Run the kernel on some sequences. The scratch and the result start as NaN: their contents must not matter."""
    from attention.gpu.decode import DecodeScratch, paged_decode  # noqa: PLC0415 - in the interpreter

    context_S, table_SM = paged.of(rows)
    scratch = DecodeScratch(
        max_sequences=len(context_S), heads=query_SHD.shape[1], value_dim=paged.values_NGBV.shape[3],
        max_tokens=1024, device=query_SHD.device, split_tokens=SPLIT, max_splits=most_splits,
        is_invariant=is_invariant,
    )  # fmt: skip
    scratch.multiprocessors = seats
    for part in (scratch.sums, scratch.tops, scratch.totals):
        part.fill_(float("nan"))
    out = torch.full_like(query_SHD[..., :1], float("nan")).repeat(1, 1, paged.values_NGBV.shape[3])
    return paged_decode(
        query_SHD,
        paged.keys_NGBD,
        paged.values_NGBV,
        context_S,
        table_SM,
        scratch,
        scale=SCALE,
        scales=paged.scales,  # type: ignore[arg-type]
        out=out,
        **options,
    )


def compare(
    device: str,
    contexts: list[int],
    heads: Heads,
    short: torch.dtype,
    options: dict[str, Any],
    codes: torch.dtype | None = None,
) -> None:
    """Compare all sequences and a padded row."""
    if "sinks_H" in options:
        options = {**options, "sinks_H": torch.linspace(-1, 2, heads.heads, device=device)}
    for dtype in dtypes_on(device, short):
        paged = make_paged([(context - 1, 1) for context in contexts], heads, dtype, codes).to(device)
        query = torch.randn(len(contexts) + 1, heads.heads, heads.key_dim).to(device, dtype)
        ours = decode(paged, query, len(contexts) + 1, **options)
        assert not ours[-1].any()
        check_close(ours[:-1], oracle(query[:-1], paged, **options))


CASES: dict[str, tuple[list[int], Heads, torch.dtype, dict[str, Any]]] = {
    "padded rows, two KV heads": ([1, 16, 65], SMALL, torch.float32, {}),
    "edges of blocks, tiles and splits": (EDGES, SMALL, torch.float32, {}),
    "one head on each KV head, odd dims": (FEW, Heads(3, 3, 24, 16), torch.float32, {}),
    "group of 4, D 64": (FEW, Heads(8, 2, 64, 64), torch.float32, {}),
    "group of 8, D 128": (FEW, Heads(8, 1, 128, 128), torch.float32, {}),
    "group of 12, D 96": (FEW, Heads(12, 1, 96, 96), torch.float32, {}),
    "group of 20": (FEW, Heads(20, 1, 16, 16), torch.float32, {}),
    "D 192, V 128": (FEW, Heads(2, 1, 192, 128), torch.float32, {}),
    "D 256, soft cap": (FEW, Heads(2, 1, 256, 256), torch.float32, {"soft_cap": 3.0}),
    "D 512, group of 8": ([16, 33, 70], Heads(8, 1, 512, 512), torch.float32, {}),
    "window within a tile": (EDGES, SMALL, torch.float32, {"window": 5}),
    "window over splits": (EDGES, SMALL, torch.float32, {"window": 80}),
    "chunks within a tile": (EDGES, SMALL, torch.float32, {"chunk": 5}),
    "chunks over splits": (EDGES, SMALL, torch.float32, {"chunk": 80}),
    "window, cap and sinks": (FEW, SMALLEST, torch.float32, {"window": 40, "soft_cap": 3.0, "sinks_H": True}),
    "sinks": (FEW, SMALL, torch.float32, {"sinks_H": True}),
    "float16": ([1, 65], SMALLEST, torch.float16, {"sinks_H": True}),
}


@pytest.mark.parametrize(
    "case", some_fast(CASES, "padded rows, two KV heads", "window, cap and sinks", "float16")
)
def test_decode_equals_the_oracle(
    on_device: OnDevice, case: tuple[list[int], Heads, torch.dtype, dict[str, Any]]
) -> None:
    on_device(compare, *case)


CODED: dict[str, tuple[Any, ...]] = {
    "int8": ([1, 16, 65], SMALL, torch.float32, {}, INT8),
    "fp8": ([1, 16, 65], SMALL, torch.float32, {}, E4M3),
    "int8, group of 8, D 128": (FEW, Heads(8, 1, 128, 128), torch.float32, {}, INT8),
    "fp8, odd dims": (FEW, Heads(3, 3, 24, 16), torch.float32, {}, E4M3),
    "int8, window, cap and sinks": (
        FEW,
        SMALLEST,
        torch.float32,
        {"window": 40, "soft_cap": 3.0, "sinks_H": True},
        INT8,
    ),
    "fp8, float16": ([1, 65], SMALLEST, torch.float16, {}, E4M3),
}


@pytest.mark.parametrize("case", some_fast(CODED, "int8", "fp8"))
def test_decode_of_codes_equals_the_oracle(on_device: OnDevice, case: tuple[Any, ...]) -> None:
    on_device(compare, *case)


def refuse_codes_without_scales(device: str) -> None:
    paged = make_paged([(19, 1)], SMALL, codes=INT8).to(device)
    with pytest.raises(ValueError, match=r"pages are torch.int8; codes of eight bits need scales"):
        decode(paged._replace(scales=None), torch.randn(1, 4, 32).to(device), 1)


def test_codes_without_scales_are_refused(on_device: OnDevice) -> None:
    on_device(refuse_codes_without_scales)


def see_a_permuted_table(device: str) -> None:
    paged = make_paged([(99, 1)], SMALLEST).to(device)
    query = torch.randn(1, 2, 32).to(device)
    want = oracle(query, paged).to(device)
    table = paged.step.block_table_SM
    table[0, :2] = table[0, :2].flip(0)
    assert torch.allclose(
        decode(paged, query, 1), want, atol=1e-5
    )  # two whole blocks: a sum in another order
    table[0, :7] = table[0, :7].roll(1)  # the last one, partly filled with NaN, is now the first
    assert not torch.allclose(decode(paged, query, 1), want, atol=1e-2)


def test_a_wrong_block_table_is_seen(on_device: OnDevice) -> None:
    on_device(see_a_permuted_table)


def vary_what_must_not_matter(device: str) -> None:
    paged = make_paged([(context - 1, 1) for context in (130, 1, 64)], SMALLEST).to(device)
    query = torch.randn(4, 2, 32).to(device)
    whole = decode(paged, query, 4)
    for row in range(3):
        only = slice(row, row + 1)
        assert torch.equal(decode(paged, query[only], only)[0], whole[row])
    for seats in (1, 7):
        assert torch.equal(decode(paged, query, 4, seats=seats), whole)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_programs(
    on_device: OnDevice,
) -> None:
    on_device(vary_what_must_not_matter)


def adapt_to_the_batch(device: str) -> None:
    """Split finely alone, and coarsely with many other tokens: 300 tokens are 5 splits of 64 tokens, or fewer."""
    from attention.gpu.decode import DecodeTile  # noqa: PLC0415 - in the interpreter

    contexts = [300, 1, 64, 65, 200]
    paged = make_paged([(context - 1, 1) for context in contexts], SMALLEST).to(device)
    query = torch.randn(6, 2, 32).to(device)
    want = oracle(query[:5], paged)
    for turns in (1, 5, 9):
        tile = DecodeTile(tokens=32, programs=1, turns=turns)
        options: dict[str, Any] = {"is_invariant": False, "seats": 1, "tile": tile}
        ours = decode(paged, query, 6, **options)
        check_close(ours[:5], want)
        assert not ours[5].any()
        assert torch.equal(decode(paged, query, 6, **options), ours)
        check_close(decode(paged, query[:1], 1, **options), want[:1])


def test_splits_that_adapt_to_the_batch_give_the_oracles_results(on_device: OnDevice) -> None:
    on_device(adapt_to_the_batch)


def replay(device: str) -> None:
    """Refill one set of tensors in place, as a captured graph sees it."""
    paged = make_paged([(70, 1), (20, 1), (40, 1)], SMALLEST).to(device)
    query = torch.randn(3, 2, 32).to(device)
    whole = decode(paged, query, 3)
    paged.step.context_S[1:3] = 0
    again = decode(paged, query, 3)
    assert torch.equal(again[0], whole[0])
    assert not again[1:].any()
    paged.step.context_S[0] = 0
    assert not decode(paged, query, 3).any()


def test_a_replay_with_fewer_sequences_skips_padded_rows(on_device: OnDevice) -> None:
    on_device(replay)


def stretch_splits(device: str) -> None:
    """Contexts that would exceed the number of splits get longer splits."""
    paged = make_paged([(149, 1), (299, 1)], SMALLEST).to(device)
    query = torch.randn(2, 2, 32).to(device)
    check_close(decode(paged, query, 2, most_splits=2), oracle(query, paged))
    check_close(decode(paged, query, 2, most_splits=1), oracle(query, paged))


def test_contexts_beyond_the_scratch_have_longer_splits(on_device: OnDevice) -> None:
    on_device(stretch_splits)


def refuse(device: str) -> None:
    from attention.gpu.decode import DecodeScratch, DecodeTile, paged_decode  # noqa: PLC0415

    paged = make_paged([(19, 1)], SMALL).to(device)
    about = (paged.keys_NGBD, paged.values_NGBV, *paged.of(1))
    query = torch.randn(1, 4, 32).to(device)
    small = DecodeScratch(max_sequences=1, heads=2, value_dim=32, max_tokens=64, device=query.device)
    with pytest.raises(ValueError, match="1 sequences of 4 heads with values of 32 do not fit"):
        paged_decode(query, *about, small, scale=1.0)
    scratch = DecodeScratch(max_sequences=1, heads=4, value_dim=32, max_tokens=64, device=query.device)
    with pytest.raises(ValueError, match="split_tokens is 64; the kernel needs multiples of its tile, 48"):
        paged_decode(query, *about, scratch, scale=1.0, tile=DecodeTile(tokens=48))
    with pytest.raises(ValueError, match="a tile has 40 tokens; the kernels need multiples of a block's 16"):
        paged_decode(query, *about, scratch, scale=1.0, tile=DecodeTile(tokens=40))
    with pytest.raises(ValueError, match=r"attention in torch\.float64 has no GPU kernel"):
        paged_decode(query.double(), *about, scratch, scale=1.0)


def test_what_does_not_fit_is_refused(on_device: OnDevice) -> None:
    on_device(refuse)


LONG = [550, 256, 240, 257, 35]  # with runs of 8 splits of 32 tokens: up to 3 runs, and edges of one


def decode_in_units(
    paged: Paged, query_SHD: Tensor, rows: slice, seats: int, **options: Any
) -> tuple[Tensor, int]:
    """Return the result, and how many splits a program took at a time."""
    from attention.gpu.decode import DecodeScratch, paged_decode  # noqa: PLC0415 - in the interpreter

    context_S, table_SM = paged.of(rows)
    scratch = DecodeScratch(
        max_sequences=8, heads=query_SHD.shape[1], value_dim=paged.values_NGBV.shape[3], max_tokens=640,
        device=query_SHD.device, split_tokens=32, max_splits=64, is_invariant=True,
    )  # fmt: skip
    scratch.multiprocessors = seats
    for part in (scratch.sums, scratch.tops, scratch.totals):
        part.fill_(float("nan"))
    out = torch.full_like(query_SHD, float("nan"))
    pages = paged.keys_NGBD, paged.values_NGBV
    paged_decode(query_SHD, *pages, context_S, table_SM, scratch, scale=SCALE, out=out, **options)
    return out, int(scratch.run_1)


def take_runs_or_splits(device: str, options: dict[str, Any]) -> None:
    """Many programs take splits one by one, few take runs: the bits are the same, and those of rows alone."""
    heads = Heads(2, 1, 16, 16)
    if "sinks_H" in options:
        options = {**options, "sinks_H": torch.linspace(-1, 2, heads.heads, device=device)}
    for dtype in dtypes_on(device, torch.float32):
        paged = make_paged([(context - 1, 1) for context in LONG], heads, dtype).to(device)
        query = torch.randn(len(LONG) + 1, 2, 16).to(device, dtype)
        by_splits, one = decode_in_units(paged, query, slice(6), 50, **options)
        by_runs, many = decode_in_units(paged, query, slice(6), 1, **options)
        assert (one, many) == (1, 8)
        assert torch.equal(by_runs, by_splits) and not by_runs[-1].any()
        check_close(by_runs[:-1], oracle(query[:-1], paged, **options))
        for row in (0, 3):
            alone, run = decode_in_units(paged, query[row : row + 1], slice(row, row + 1), 50, **options)
            assert run == 1 and torch.equal(alone[0], by_runs[row])


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"window": 300, "sinks_H": True, "soft_cap": 3.0}, marks=pytest.mark.slow)]
)
def test_a_program_may_take_runs_of_splits_without_changing_a_bit(
    on_device: OnDevice, options: dict[str, Any]
) -> None:
    on_device(take_runs_or_splits, options)
