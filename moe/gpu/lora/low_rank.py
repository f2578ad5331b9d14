# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels for LoRA adapters on GPUs: `y += (x @ A) @ B` for each row, with its own adapter's A and B, in float32.

Rows are sorted by group on the device, so nothing is read back: a group is an adapter or, for experts, an adapter and a slot. A tile
has rows of one group. *Shrink* multiplies with A, each program for some of the inputs: their number depends on the model only, so
that few rows still use many multiprocessors. *Expand* adds these parts in order, multiplies with B and adds to the output. Every sum
has a fixed order, so a row's bits depend on the row and its adapter alone.

Bound: bytes of A and B of the groups that have rows, read once for every tile.

Idea: Punica's SGMV (arXiv 2310.18547). Rejected: a kernel in bfloat16 for the tensor cores, which would round A and B.

Legend: T rows, M members (rows, or pairs of row and choice) sorted by group, G groups, X tiles, K input features, N output features,
R rank (W: rounded up to a multiple of RANKS).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.cpu.adapted_latents import ENTRY_WORDS
from kvcache.gpu.step import DeviceStep
from moe.lora.tables import Factors, FactorTable

ROWS, RANKS, COLUMNS, INNER = 16, 16, 64, 64  # of a tile
CHUNK = 1024  # inputs of one program of `shrink_rows`
_WORDS = tl.constexpr(ENTRY_WORDS)


@triton.jit(do_not_specialize=["M"])
def shrink_rows(
    x, x_rows, table, entries, firsts, ends, low, M, x_stride, K, a_stride, WIDTH,
    ROWS: tl.constexpr, RANKS: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr, IS_SWAPPED: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of members, tile of ranks, chunk of inputs). Writes [chunks, M, WIDTH] float32. See `FactorView`."""
    tile, ranks, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = tl.load(entries + tile)
    if entry >= 0:
        rank = tl.load(table + entry * _WORDS + 2)
        if ranks * RANKS < rank:
            a = tl.load(table + entry * _WORDS).to(tl.pointer_type(tl.float32))
            width = (rank + RANKS - 1) // RANKS * RANKS
            member = tl.load(firsts + tile) + tl.arange(0, ROWS)
            is_member = member < tl.load(ends + tile)
            row = tl.load(x_rows + member, mask=is_member, other=0)
            r = ranks * RANKS + tl.arange(0, RANKS)
            total = tl.zeros([RANKS, ROWS], tl.float32)
            for begin in range(0, CHUNK, INNER):
                k = chunk * CHUNK + begin + tl.arange(0, INNER)
                is_k = k < K
                x_KT = tl.load(
                    x + row[None, :] * x_stride + k[:, None],
                    mask=is_k[:, None] & is_member[None, :],
                    other=0.0,
                )
                if IS_SWAPPED:
                    a_at = r[:, None] * a_stride + k[None, :]
                    is_a = is_k[None, :] & (r < rank)[:, None]
                else:
                    a_at = k[None, :] * width + r[:, None]
                    is_a = is_k[None, :]
                a_RK = tl.load(a + a_at, mask=is_a, other=0.0)
                total = tl.dot(a_RK, x_KT.to(tl.float32), total, input_precision="ieee")
            place = low + (chunk * M + member)[None, :] * WIDTH + r[:, None]
            tl.store(place, total, mask=is_member[None, :])


@triton.jit(do_not_specialize=["M"])
def expand_rows(
    low, out, out_rows, table, entries, firsts, ends, M, out_stride, N, b_stride, first_column, WIDTH,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, IS_SWAPPED: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of members, tile of columns). Adds to `out`. See `FactorView`."""
    tile = tl.program_id(0)
    entry = tl.load(entries + tile)
    if entry >= 0:
        rank = tl.load(table + entry * _WORDS + 2).to(tl.int32)
        if rank > 0:
            b = tl.load(table + entry * _WORDS + 1).to(tl.pointer_type(tl.float32))
            member = tl.load(firsts + tile) + tl.arange(0, ROWS)
            is_member = member < tl.load(ends + tile)
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            is_column = column < N
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            begin = 0
            while begin < rank:  # not a range: the interpreter does not support a dynamic end
                r = begin + tl.arange(0, RANKS)
                low_RM = tl.zeros([RANKS, ROWS], tl.float32)
                for chunk in range(CHUNKS):
                    part = low + (chunk * M + member)[None, :] * WIDTH + r[:, None]
                    low_RM += tl.load(part, mask=is_member[None, :], other=0.0)
                is_b = is_column[:, None] & (r < rank)[None, :]
                if IS_SWAPPED:
                    b_at = column[:, None] * ((rank + RANKS - 1) // RANKS * RANKS) + r[None, :]
                else:
                    b_at = r[None, :] * b_stride + first_column + column[:, None]
                b_NR = tl.load(b + b_at, mask=is_b, other=0.0)
                total = tl.dot(b_NR, low_RM, total, input_precision="ieee")
                begin += RANKS
            row = tl.load(out_rows + member, mask=is_member, other=0)
            place = out + row[None, :] * out_stride + column[:, None]
            is_out = is_column[:, None] & is_member[None, :]
            total += tl.load(place, mask=is_out, other=0.0).to(tl.float32)
            tl.store(place, total.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def look_up_rows(ids, places, members, table, low, WIDTH, WIDTH_PAD: tl.constexpr):
    """Run as program (member). Writes the row of A for the member's id to [M, WIDTH] float32. `places` are of the rows."""
    member = tl.program_id(0).to(tl.int64)
    row = tl.load(members + member)
    place = tl.load(places + row)
    if place >= 0:
        rank = tl.load(table + place * _WORDS + 2)
        a = tl.load(table + place * _WORDS).to(tl.pointer_type(tl.float32))
        r, width = tl.arange(0, WIDTH_PAD), (rank + 15) // 16 * 16
        values = tl.load(a + tl.load(ids + row) * width + r, mask=r < width, other=0.0)
        tl.store(low + member * WIDTH + r, values, mask=r < WIDTH)


class FactorView(NamedTuple):
    """How the matrices of a table's entries lie in memory: A as [K, W] and B as [R, stride], or the other way round.

    Attributes:
        stride: Columns of the larger matrix that the one of rank rows is part of; 0: it is whole.
        first_column: Column of B that makes the first output.
        is_swapped: A lies as [R, stride] and B as [N, W].
    """

    stride: int = 0
    first_column: int = 0
    is_swapped: bool = False


WHOLE = FactorView()


class RowGroups(NamedTuple):
    """Members sorted by group, and their tiles; int64 on the device. Members without a group come last and are in no tile."""

    member_M: Tensor  # numbers of the members before they were sorted
    entry_X: Tensor  # group of a tile, the table's entry; -1 for a tile without members
    first_X: Tensor  # first sorted member of a tile
    end_X: Tensor  # end of its group's members


def group_rows(group_M: Tensor, num_groups: int) -> RowGroups:
    """Sort members by group, without waiting for the device. `group_M`: int64, -1 for members without a group."""
    M, device = len(group_M), group_M.device
    sorted_M, member_M = torch.sort(torch.where(group_M < 0, num_groups, group_M), stable=True)
    start_G = torch.searchsorted(sorted_M, torch.arange(num_groups + 1, device=device))
    tiles_G = (start_G[1:] - start_G[:-1] + ROWS - 1) // ROWS
    last_G = tiles_G.cumsum(0)
    # Every group with members has at most one partial tile.
    tile_X = torch.arange(M // ROWS + min(M, num_groups), device=device)
    entry_X = torch.searchsorted(last_G, tile_X, right=True)
    group_X = entry_X.clamp(max=num_groups - 1)
    first_X = start_G[group_X] + (tile_X - (last_G - tiles_G)[group_X]) * ROWS
    return RowGroups(member_M, torch.where(entry_X < num_groups, entry_X, -1), first_X, start_G[group_X + 1])


class DeviceFactorTable(FactorTable):
    """A table with its factors and entries on a device.

    Attributes:
        most_rank: Of its entries.
        has_rows: Whether a product with rows of a step was seen.
    """

    def __init__(
        self, num_entries: int, device: torch.device, step: DeviceStep | None = None, *, parts: int = 1
    ) -> None:
        """Allocate empty entries.

        Args:
            step: The step of the products, for steps that are captured. None: none is.
            parts: Matrices that an entry may join, each with the rank of an adapter.
        """
        super().__init__(num_entries)
        self._device, self._is_new, self._step, self._parts = device, False, step, parts
        self._words_on_device = torch.zeros(num_entries, ENTRY_WORDS, dtype=torch.int64, device=device)
        self.most_rank, self.has_rows = 0, False

    def put(self, entry: int, factors: Factors | None) -> None:
        if factors is not None:
            scaled = factors.scaled()
            factors = Factors(scaled.a_KW.to(self._device), scaled.b_RN.to(self._device))
        super().put(entry, factors)
        self._note_change()

    def put_words(self, entries: slice, words: np.ndarray) -> None:
        """Set entries to parts of factors that another table keeps. While no step runs."""
        self.words[entries] = words
        self._note_change()

    def _note_change(self) -> None:
        self._is_new, self.most_rank = True, int(self.words[:, 2].max())
        if self._step is not None:
            self._step.changed_tables.add(self._copy)

    @property
    def is_recorded(self) -> bool:
        """Whether a graph is captured that serves any adapters."""
        return self._step is not None and self._step.records_adapters

    @property
    def is_idle(self) -> bool:
        """Whether a product need not look at its entries."""
        return self.is_empty and not self.is_recorded

    @property
    def width(self) -> int:
        """Ranks for which products are launched: those of the entries, or of any adapters in a captured step."""
        rank = self.most_rank
        if self._step is not None and self.is_recorded:
            rank = self._step.max_adapter_rank * self._parts
        return int(triton.cdiv(rank, RANKS)) * RANKS

    @property
    def words_on_device(self) -> Tensor:
        """Entries as kernels read them, always at one address: int64 [entries, 4]. Copied after changes."""
        self._copy()
        return self._words_on_device

    def _copy(self) -> None:
        if self._is_new:
            self._words_on_device.copy_(torch.from_numpy(self.words))
            self._is_new = False


def add_looked_up(
    ids_T: Tensor, place_T: Tensor, out: Tensor, groups: RowGroups, table: DeviceFactorTable
) -> None:
    """Add a row of A for each id, times B, to the rows of `out` [T, N], in place. A has a row for each id.

    Args:
        ids_T: int64. place_T: The table's entry of each row, or -1. groups: The same, sorted.
    """
    M, width = len(ids_T), table.width
    if not (M and width):
        return
    low = torch.empty(1, M, width, dtype=torch.float32, device=out.device)
    look_up_rows[(M,)](
        ids_T, place_T, groups.member_M, table.words_on_device, low, width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1
    )  # fmt: skip
    expand(low, out, groups, table)


def add_low_rank(
    x: Tensor,
    out: Tensor,
    groups: RowGroups,
    table: DeviceFactorTable,
    *,
    row_M: Tensor | None = None,
    layout: FactorView = WHOLE,
) -> None:
    """Add every member's low-rank product to its row of `out`, in place.

    Args:
        x: [T, K] of a floating-point type, with contiguous columns.
        out: [M, N] of a floating-point type, with contiguous columns; the rows of members.
        groups: Members by entry of the table.
        row_M: Member's rows of x, int64. None: the member's own number.
        layout: Of the table's matrices.
    """
    rows_M = groups.member_M if row_M is None else row_M[groups.member_M]
    M, K, chunks = len(rows_M), x.shape[1], triton.cdiv(x.shape[1], CHUNK)
    width = table.width
    tiles = len(groups.entry_X)
    if not (tiles and width):
        return
    low = torch.empty(chunks, M, width, dtype=torch.float32, device=x.device)
    shrink_rows[(tiles, width // RANKS, chunks)](
        x, rows_M, table.words_on_device, groups.entry_X, groups.first_X, groups.end_X, low, M, x.stride(0), K,
        layout.stride or K, width, ROWS=ROWS, RANKS=RANKS, INNER=INNER, CHUNK=CHUNK, IS_SWAPPED=layout.is_swapped, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    expand(low, out, groups, table, layout)


def expand(
    low: Tensor, out: Tensor, groups: RowGroups, table: DeviceFactorTable, layout: FactorView = WHOLE
) -> None:
    """Add the sum of `low` [parts, M, W] float32, times B, to the members' rows of `out` [M, N]. Members of `low` are sorted."""
    parts, M, width = low.shape
    N = out.shape[1]
    if not (len(groups.entry_X) and width):
        return
    expand_rows[(len(groups.entry_X), triton.cdiv(N, COLUMNS))](
        low, out, groups.member_M, table.words_on_device, groups.entry_X, groups.first_X, groups.end_X, M, out.stride(0), N,
        layout.stride or N, layout.first_column, width, CHUNKS=parts, ROWS=ROWS, RANKS=RANKS, COLUMNS=COLUMNS,
        IS_SWAPPED=layout.is_swapped, num_warps=4, num_stages=2,
    )  # fmt: skip


def launch_without_rows(
    sizes: Collection[tuple[int, int, FactorView]], dtype: torch.dtype, device: torch.device
) -> None:
    """Launch the kernels once, so that they are compiled before a step needs them.

    Args:
        sizes: Numbers of inputs and outputs of the matrices, and how they lie in memory.
        dtype: Type of rows. Some products have rows or outputs in float32.
    """
    one = torch.zeros(1, dtype=torch.int64, device=device)
    groups, table = RowGroups(one, one - 1, one, one), DeviceFactorTable(1, device)
    table.most_rank = RANKS
    for K, N, layout in sizes:
        for own, made in ((dtype, dtype), (dtype, torch.float32), (torch.float32, torch.float32)):
            x = torch.zeros(1, K, dtype=own, device=device)
            add_low_rank(x, torch.zeros(1, N, dtype=made, device=device), groups, table, layout=layout)
