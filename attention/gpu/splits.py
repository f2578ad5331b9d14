# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""How decode cuts contexts into splits that run in parallel, and merges their parts.

As many programs as the GPU runs at once take turns at all splits of all sequences, and find them from the contexts on the
device. Any program may compute any split without changing a bit. One long context among short ones is thus spread over
the whole GPU, no program starts past the end of a sequence, and a CUDA graph can replay the launches for any contexts.

A context has as many splits as it takes for none to be longer than `split_tokens` or a multiple, at most `num_splits`. They
are equally long up to one tile: of 8,192 tokens, 7,968 and 224 would leave half of the programs with short splits only. With
`is_invariant` that is all, so the cuts of a context depend on its own length and on the shape of the heads, and its bits
are the same in any batch (large batches still have few parts, see `runs`). Otherwise `shortest` chooses the multiple from all
contexts, and the last bits of a row depend on the other lengths. Large batches then have few parts to write, read and merge,
and the scratch memory is small.

Parts are numbered over all sequences. A part is V + 2 float32 for each head, written and read once: with 8 heads on a KV
head and 256 tokens that is 6 % of the split's keys and values. A sequence of one split needs no part. Its program writes
the result. If every sequence is one split (a short window), nothing is merged and the second launch is omitted.
Rejected: a grid over sequences and the longest context allowed, in which most programs find nothing to do.

Ideas: FlashDecoding (Dao et al., 2023); one persistent program per seat, as in FlashMLA and FlashInfer.

Legend: S sequences, H query heads, V value dim.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.limits import num_parts, run_of, split_sizes
from attention.gpu.pages import LOG2_E, bound, first_seen

_LEAST_SEQUENCES = 16  # smallest number for which kernels are compiled: fewer make no difference
# Parts of a row merged at a time: all those of a small batch, as far as their values fit registers.
_MERGED_PARTS, _MERGED_WIDE_PARTS = 32, 16
_WHOLE_TOKENS = 256  # windows up to this size are one split
# Splits of a small batch: this long before a multiprocessor has more than this many of them.
_FEW_TOKENS, _FEW_PROGRAMS = 256, 2
START_TOKENS = tl.constexpr(64)  # what starting, ending and merging a split costs, in tokens
_INTERPRETED_MULTIPROCESSORS = 3  # fewer than parts, so that programs take turns in the interpreter too


@triton.jit
def seen(end, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return where contexts' first splits begin (a multiple of TILE), and the number of tokens from there."""
    first = first_seen(tl.maximum(end - 1, 0), WINDOW, CHUNK) // TILE * TILE
    return first, end - first


@triton.jit
def splits_of(tokens, factor, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of splits of contexts. None has more than SPLIT tokens times `factor`, or times more if there would
    be more than SPLITS."""
    return tl.cdiv(tokens, SPLIT * tl.maximum(tl.cdiv(tokens, SPLIT * SPLITS), factor))


@triton.jit
def shortest(
    tokens, num_sequences,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, TURNS: tl.constexpr, MOST: tl.constexpr,
    FEW: tl.constexpr, FEW_FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the factor on SPLIT for contexts of `tokens` [S_PAD].

    Small batches are cut into FEW splits, but into none longer than FEW_FACTOR just for that: merging more parts takes longer
    than computing further tiles. One context of 8,192 tokens takes 13.0 us in splits of 256 tokens and 16.8 in those of 64;
    one of 2,048 tokens, 11.8 and 9.4 (H200, 32 heads on 4, like the next figures).

    Others are cut for one turn of the programs, for each number of turns up to TURNS, and for one turn even if each sequence
    has a split that is not full. The cut that should end first is taken: turns times the longest split and what a split
    costs in addition. For equal contexts these are few long splits (256 of 2,048 tokens: one split each takes 262 us, two
    287, four 295), and for uneven ones several short splits, among which programs have even work. Quotients are approximate.

    AT_ONCE: splits that all programs compute at once. There are at most MOST splits, and fewer than one more per sequence.
    """
    units = tl.cdiv(tokens, SPLIT)
    total = tl.sum(units, axis=0)
    least = tl.maximum(tl.minimum(tl.cdiv(total, FEW), FEW_FACTOR), 1)
    chosen = least
    if total > least * AT_ONCE:
        most_units, best = tl.cdiv(tokens, SPLIT * SPLITS), float("inf")
        for turns in tl.static_range(TURNS + 1):
            wanted = tl.maximum(AT_ONCE - num_sequences, 1)
            if turns > 0:
                wanted = min(AT_ONCE * turns, MOST)
            factor = tl.maximum(tl.cdiv(total, wanted), least)
            counts = tl.ceil(units.to(tl.float32) / tl.maximum(most_units, factor).to(tl.float32))
            longest = tl.max(tokens.to(tl.float32) / tl.maximum(counts, 1.0), axis=0)
            cost = tl.ceil(tl.sum(counts, axis=0) / AT_ONCE) * (longest + START_TOKENS)
            chosen = tl.where(cost < best, factor, chosen)
            best = tl.minimum(cost, best)
    return chosen


@triton.jit
def count_splits(
    context, num_sequences, splits_before,
    S_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    TURNS: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, FEW_FACTOR: tl.constexpr,
    IS_WHOLE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return [S_PAD], the number of splits of each sequence and all before it, and the factor on SPLIT.

    The first program leaves the former in `splits_before` [1 + sequences] for the merge.
    AT_ONCE and those after it: of `shortest`; AT_ONCE is 0 for a factor of 1.
    """
    sequence = tl.arange(0, S_PAD)
    is_one = sequence < num_sequences
    count, factor = is_one.to(tl.int32), 1
    if not IS_WHOLE:
        end = tl.load(context + sequence, mask=is_one, other=0).to(tl.int32)
        _, tokens = seen(end, TILE, WINDOW, CHUNK)
        if AT_ONCE > 0:
            factor = shortest(tokens, num_sequences, SPLIT, SPLITS, AT_ONCE, TURNS, MOST, FEW, FEW_FACTOR)
        count = splits_of(tokens, factor, SPLIT, SPLITS)
    splits_up_to = tl.cumsum(count, axis=0)
    if not IS_WHOLE:
        tl.store(splits_before + 1 + sequence, splits_up_to, mask=is_one & (tl.program_id(0) == 0))
    return splits_up_to, factor


@triton.jit
def find_split(
    context, number, splits_up_to, factor,
    TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, IS_WHOLE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return for split `number`: its sequence, whether that has other splits, its first token, the one past its end, and
    the end of the context. `splits_up_to` [S_PAD]: the splits of each sequence and all before it."""
    is_before = splits_up_to <= number
    sequence = tl.sum(is_before.to(tl.int32), axis=0)
    split = number - tl.max(tl.where(is_before, splits_up_to, 0), axis=0)
    end = tl.load(context + sequence).to(tl.int32)
    begin, tokens = seen(end, TILE, WINDOW, CHUNK)
    stop, has_parts = end, False
    if not IS_WHOLE:
        first, tiles, count = begin, tl.cdiv(tokens, TILE), splits_of(tokens, factor, SPLIT, SPLITS)
        begin = first + split * tiles // count * TILE
        stop = tl.minimum(first + (split + 1) * tiles // count * TILE, end)
        has_parts = count > 1
    return sequence, has_parts, begin, stop, end


@triton.jit
def with_sink(sums, top, total, sink):
    """Return the result of a row that is one split, from its sums, maximum (base 2) and sum of weights. `sink` is in base 2."""
    new_top = tl.maximum(top, sink)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: a padded row
    share = tl.exp2(top - shift)
    total = total * share + tl.exp2(sink - shift)
    return sums * share[:, None] / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def merge_parts(
    sums, tops, totals, splits_before, sinks, out,
    V: tl.constexpr, V_PAD: tl.constexpr, MERGED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, head): add the parts in order, the sink first, and divide. A padded row becomes zero."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    heads, dim = tl.num_programs(1), tl.arange(0, V_PAD)
    first = tl.load(splits_before + sequence)
    count = tl.load(splits_before + sequence + 1) - first
    if count == 1:  # its program wrote the result
        return
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top, total = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E, total + 1.0
    sum_V = tl.zeros([V_PAD], tl.float32)
    for step in range(bound(tl.cdiv(count, MERGED))):
        split = step * MERGED + tl.arange(0, MERGED)
        at = (first + split).to(tl.int64) * heads + head
        part_top = tl.load(tops + at, mask=split < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        shrink, share = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        part_total = tl.load(totals + at, mask=split < count, other=0.0)
        total = total * shrink + tl.sum(part_total * share, axis=0)
        part_CV = tl.load(
            sums + at[:, None] * V + dim[None, :],
            mask=(split[:, None] < count) & (dim[None, :] < V), other=0.0,
        )  # fmt: skip
        sum_V = sum_V * shrink + tl.sum(part_CV * share[:, None], axis=0)
        top = new_top
    result = sum_V / tl.where(total > 0, total, 1.0)
    place = out + (sequence * heads + head).to(tl.int64) * V + dim
    tl.store(place, result.to(out.dtype.element_ty), mask=dim < V)


class Cuts(NamedTuple):
    """How a launch cuts contexts: constants of its kernels."""

    tokens: int  # of a shortest split
    splits: int  # most of a sequence
    is_whole: bool  # whether every sequence is one split
    # The arguments of `shortest`; zeros if contexts are cut regardless of each other.
    at_once: int = 0
    turns: int = 0
    most: int = 0
    few: int = 0
    few_factor: int = 0
    run: int = 0  # splits that a program may take at a time (`runs`); 0: each by itself

    def most_parts(self, sequences: int) -> int:
        """Return the largest number of splits of all sequences."""
        if self.run:
            return min(sequences * self.splits, max(self.most, sequences * -(-self.splits // self.run)))
        most = sequences if self.is_whole else sequences * self.splits
        return min(most, self.most + sequences) if self.most else most

    def constants(self) -> dict[str, int]:
        """Return the constants of `count_splits`."""
        return {
            "SPLIT": self.tokens, "SPLITS": self.splits, "IS_WHOLE": self.is_whole, "AT_ONCE": self.at_once,
            "TURNS": self.turns, "MOST": self.most, "FEW": self.few, "FEW_FACTOR": self.few_factor,
        }  # fmt: skip


class DecodeScratch:
    """Memory for the parts of splits, and the way contexts are split. One scratch serves all layers of a shape; launches do
    not read what earlier ones left."""

    def __init__(
        self,
        *,
        max_sequences: int,
        heads: int,
        value_dim: int,
        max_tokens: int,
        device: torch.device,
        is_invariant: bool = False,
        split_tokens: int | None = None,
        max_splits: int | None = None,
    ) -> None:
        """Allocate for contexts of up to `max_tokens`. Longer ones are computed as well, in longer splits.

        Args:
            is_invariant: A row's bits must not depend on the batch. This needs more memory.
            split_tokens: Tokens of the shortest splits. max_splits: largest number of splits of a context. Both default to
                values for the shape of the heads. A row's bits depend on both.
        """
        self.split_tokens, self.num_splits = split_sizes(value_dim, max_tokens, is_invariant=is_invariant)
        if split_tokens is not None or max_splits is not None:
            self.split_tokens = split_tokens or self.split_tokens
            self.num_splits = max(1, min(max_splits or 64, -(-max_tokens // self.split_tokens)))
        self.heads, self.multiprocessors = heads, _INTERPRETED_MULTIPROCESSORS
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = num_parts(max_sequences, heads, value_dim, self.num_splits, is_invariant=is_invariant)
        self.is_invariant = is_invariant
        self.run = run_of(value_dim) if is_invariant else 0
        self.run_1 = torch.zeros(1, dtype=torch.int32, device=device)  # splits of a unit, see `runs`
        self.spare_parts = parts - max_sequences  # in addition to one of each sequence
        self.sums = torch.empty(parts * heads * value_dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(parts * heads, dtype=torch.float32, device=device)
        self.totals = torch.empty_like(self.tops)
        self.splits_before = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)  # [0] stays 0

    def cuts(
        self,
        tile_tokens: int,
        programs: int,
        turns: int,
        of_split: int,
        window: int = 0,
        chunk: int = 0,
        *,
        has_runs: bool = False,
    ) -> Cuts:
        """Return how a launch cuts contexts.

        Args:
            tile_tokens: Tokens of the kernel's tile. programs: programs of a multiprocessor.
            turns: Most splits of a large batch for each program. Ignored with `is_invariant`.
            of_split: Number of programs that compute a split. window, chunk: of the layer.
            has_runs: Whether the kernel can take runs of splits.

        Raises:
            ValueError: Splits would not consist of whole tiles.
        """
        if self.split_tokens % tile_tokens:
            raise ValueError(
                f"split_tokens is {self.split_tokens}; the kernel needs multiples of its tile, {tile_tokens}"
            )
        tokens = self.split_tokens
        most_seen = -(-((window or chunk) + tile_tokens - 1) // tile_tokens) * tile_tokens
        if (window or chunk) and not self.is_invariant and most_seen <= _WHOLE_TOKENS:
            tokens = max(tokens, most_seen)
        is_whole = self.num_splits == 1 or (bool(window or chunk) and most_seen <= tokens)
        if has_runs and self.run and not is_whole:
            at_once = max(1, self.multiprocessors * programs // of_split)
            return Cuts(
                tokens, self.num_splits, is_whole, at_once, most=self.tops.numel() // self.heads, run=self.run
            )
        if self.is_invariant or is_whole:
            return Cuts(tokens, self.num_splits, is_whole)
        at_once = max(1, min(self.multiprocessors * programs // of_split, self.spare_parts))
        return Cuts(
            tokens, self.num_splits, is_whole, at_once, turns, most=max(1, min(at_once * turns, self.spare_parts)),
            few=max(1, self.multiprocessors * _FEW_PROGRAMS // of_split), few_factor=max(1, _FEW_TOKENS // tokens),
        )  # fmt: skip

    def check(self, sequences: int, heads: int, value_dim: int, cuts: Cuts) -> None:
        """Raise ValueError if a launch does not fit."""
        rows, most_sequences = cuts.most_parts(sequences) * heads, self.splits_before.numel() - 1
        if sequences > most_sequences or rows > self.tops.numel() or rows * value_dim > self.sums.numel():
            raise ValueError(
                f"{sequences} sequences of {heads} heads with values of {value_dim} do not fit this DecodeScratch, "
                f"which has room for {most_sequences} sequences, {self.tops.numel()} rows and {self.sums.numel()} values; "
                "allocate it for the largest batch and layer"
            )


def padded_sequences(sequences: int) -> int:
    """Return the padded number of sequences for which kernels are compiled."""
    return max(_LEAST_SEQUENCES, int(triton.next_power_of_2(sequences)))


def launch_merge(scratch: DecodeScratch, cuts: Cuts, sinks_H: Tensor | None, out_SHV: Tensor) -> None:
    """Write the rows of `out_SHV` that the preceding launch has left in parts, and padded ones."""
    if cuts.is_whole:
        return
    S, H, V = out_SHV.shape
    merge_parts[(S, H)](
        scratch.sums, scratch.tops, scratch.totals, scratch.splits_before, sinks_H, out_SHV, V=V,
        V_PAD=triton.next_power_of_2(V), MERGED=_MERGED_PARTS if V <= 128 else _MERGED_WIDE_PARTS,
        HAS_SINKS=sinks_H is not None, num_warps=4,
    )  # fmt: skip
