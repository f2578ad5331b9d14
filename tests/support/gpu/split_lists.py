# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The splits that decode kernels find on the device. Import it where Triton may be imported."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.splits import Cuts, count_splits, find_split, padded_sequences


@triton.jit
def list_splits(
    context, splits_before, found, num_sequences,
    S_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    TURNS: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, FEW_FACTOR: tl.constexpr, IS_WHOLE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write sequence, whether it has parts, begin and stop of every split to `found` [splits, 4]."""
    splits_up_to, factor = count_splits(
        context, num_sequences, splits_before, S_PAD, TILE, SPLIT, SPLITS, AT_ONCE, TURNS, MOST, FEW, FEW_FACTOR,
        IS_WHOLE, WINDOW, CHUNK,
    )  # fmt: skip
    number = tl.program_id(0)
    while number < tl.max(splits_up_to, axis=0):
        sequence, has_parts, begin, stop, _ = find_split(
            context, number, splits_up_to, factor, TILE, SPLIT, SPLITS, IS_WHOLE, WINDOW, CHUNK
        )
        tl.store(found + number * 4, sequence)
        tl.store(found + number * 4 + 1, has_parts)
        tl.store(found + number * 4 + 2, begin)
        tl.store(found + number * 4 + 3, stop)
        number += tl.num_programs(0)


@triton.jit
def count_only(
    context, splits_before, num_sequences,
    S_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    TURNS: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, FEW_FACTOR: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the number of splits of each sequence and all before it to `splits_before`."""
    count_splits(
        context, num_sequences, splits_before, S_PAD, TILE, SPLIT, SPLITS, AT_ONCE, TURNS, MOST, FEW, FEW_FACTOR,
        IS_WHOLE, 0, 0,
    )  # fmt: skip


def splits_found(
    contexts: list[int], cuts: Cuts, device: str, *, tile: int, window: int = 0, chunk: int = 0
) -> list[tuple[int, ...]]:
    """Return (sequence, whether it has parts, begin, stop) of every split that two programs find."""
    S = len(contexts)
    found = torch.full((cuts.most_parts(S), 4), -1, dtype=torch.int32, device=device)
    before = torch.zeros(S + 1, dtype=torch.int32, device=device)
    _launch(list_splits, contexts, before, found, cuts, TILE=tile, WINDOW=window, CHUNK=chunk)
    rows: list[tuple[int, ...]] = [tuple(row) for row in found.tolist() if row[0] >= 0]
    assert cuts.is_whole or int(before[-1]) == len(rows)
    return rows


def splits_counted(contexts: list[int], cuts: Cuts, device: str, *, tile: int) -> list[int]:
    """Return the number of splits of each context."""
    before = torch.zeros(len(contexts) + 1, dtype=torch.int32, device=device)
    _launch(count_only, contexts, before, cuts, TILE=tile)
    return [int(count) for count in before.diff().tolist()]


def _launch(kernel: Any, contexts: list[int], before: Tensor, *rest: Any, **constants: int) -> None:
    *others, cuts = rest
    S = len(contexts)
    kernel[(2,)](
        torch.tensor(contexts, device=before.device), before, *others, S, S_PAD=padded_sequences(S),
        **constants, **cuts.constants(),
    )  # fmt: skip
