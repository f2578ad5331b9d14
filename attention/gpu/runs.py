# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decode's splits in runs: how a large batch has few parts to merge, though a row's bits do not depend on the batch.

With --batch-invariant a context is cut by its own length (`splits`), into short splits, so that a small batch fills a GPU. Each
split is summed by itself. The sums of the splits of a run, RUN of them, are then added in order, and the sums of all runs
in order too. A program computes one split or one run: what should end sooner for all contexts. With runs it adds the
splits' sums in registers, and a context of one run has no parts at all. With splits the merge adds them. Both take the same
operations in the same order (`fold`), so no bit depends on the choice.

Legend: S sequences, H query heads, V value dim. A unit is the work of a program: a split or a run.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.pages import LOG2_E, bound
from attention.gpu.splits import START_TOKENS, Cuts, DecodeScratch, seen, splits_of

MOST_PROGRAMS = 3  # of a multiprocessor: two sums take a quarter more registers
_AHEAD = 8  # parts loaded at a time by a merge


@triton.jit
def fold(top, total, sums, part_top, part_total, part_sums, factor):
    """Add a part to sums: rows' maxima of unscaled scores, their weights [R] and values [R, V]; `factor` scales to base 2.

    Nothing is left to the compiler, which may fuse a product and a sum in one kernel and not in the other: differences are
    taken before they are scaled, and the fused operations are explicit. Adding to nothing gives the part itself.
    """
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no token yet
    shrink, share = tl.exp2((top - base) * factor), tl.exp2((part_top - base) * factor)
    total = tl.fma(total, shrink, part_total * share)
    zeros = tl.zeros_like(sums)
    return new_top, total, tl.fma(sums, zeros + shrink[:, None], part_sums * (zeros + share[:, None]))


@triton.jit
def end_split(is_end, whole_top, whole_total, whole_sums, top, total, sums, factor):
    """At the end of a split (or run), add its sums to those of the whole. The next one begins with empty sums."""
    new_top, new_total, new_sums = fold(whole_top, whole_total, whole_sums, top, total, sums, factor)
    return (
        tl.where(is_end, new_top, whole_top), tl.where(is_end, new_total, whole_total),
        tl.where(is_end, new_sums, whole_sums), tl.where(is_end, float("-inf"), top), tl.where(is_end, 0.0, total),
        tl.where(is_end, 0.0, sums),
    )  # fmt: skip


@triton.jit
def divided(top, total, sums, sink, factor):
    """Return the result of rows. `sink` [R]: logits in base 2 that carry no value, -inf for none."""
    sink_top = sink / factor
    new_top = tl.maximum(top, sink_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: a padded row
    share = tl.exp2((top - base) * factor)
    total = tl.fma(total, share, tl.exp2((sink_top - base) * factor))
    return sums * share[:, None] / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def count_units(
    context, num_sequences, units_before, run_1,
    S_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, RUN: tl.constexpr,
    AT_ONCE: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return [S_PAD], the units of each sequence and all before it, and the splits of a unit: 1 or RUN.

    Units are runs if those should end first, by turns of the programs times the longest unit and what it costs in addition, or
    if there are more than MOST splits. The first program leaves the units in `units_before` [1 + sequences] and their splits
    in `run_1`, for the merge.
    """
    sequence = tl.arange(0, S_PAD)
    is_one = sequence < num_sequences
    end = tl.load(context + sequence, mask=is_one, other=0).to(tl.int32)
    _, tokens = seen(end, TILE, WINDOW, CHUNK)
    splits = splits_of(tokens, 1, SPLIT, SPLITS)
    runs, longest, num_splits = tl.cdiv(splits, RUN), tl.max(tokens, axis=0), tl.sum(splits, axis=0)
    of_splits = tl.cdiv(num_splits, AT_ONCE) * (tl.minimum(longest, SPLIT) + START_TOKENS)
    of_runs = tl.cdiv(tl.sum(runs, axis=0), AT_ONCE) * (tl.minimum(longest, SPLIT * RUN) + START_TOKENS)
    run = tl.where((of_runs < of_splits) | (num_splits > MOST), RUN, 1)
    units_up_to = tl.cumsum(tl.where(run == 1, splits, runs), axis=0)
    if tl.program_id(0) == 0:
        tl.store(units_before + 1 + sequence, units_up_to, mask=is_one)
        tl.store(run_1, run)
    return units_up_to, run


@triton.jit
def find_unit(
    context, number, units_up_to, run,
    TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return unit `number`: its sequence, whether that has other units, the first token and the one past the end of the unit,
    the end of the context, its first split, and of the sequence the first token, its tiles and its splits."""
    is_before = units_up_to <= number
    sequence = tl.sum(is_before.to(tl.int32), axis=0)
    unit = number - tl.max(tl.where(is_before, units_up_to, 0), axis=0)
    end = tl.load(context + sequence).to(tl.int32)
    first, tokens = seen(end, TILE, WINDOW, CHUNK)
    tiles, count = tl.cdiv(tokens, TILE), splits_of(tokens, 1, SPLIT, SPLITS)
    split = unit * run
    begin = split_end(split - 1, first, tiles, count, TILE)
    stop = tl.minimum(split_end(tl.minimum(split + run, count) - 1, first, tiles, count, TILE), end)
    return sequence, count > run, begin, stop, end, split, first, tiles, count


@triton.jit
def split_end(split, first, tiles, count, TILE: tl.constexpr):
    """Return the token past the end of a sequence's split, a multiple of TILE. They are equally long up to a tile."""
    return first + (split + 1) * tiles // count * TILE


@triton.jit
def merge_units(
    sums, tops, totals, units_before, run_1, sinks, out, factor,
    V: tl.constexpr, V_PAD: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, head): add the units' sums as `fold` does in runs, and divide. A padded row becomes zero.

    AHEAD parts are loaded before the first of them is added.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    heads, dim, row = tl.num_programs(1), tl.arange(0, V_PAD), tl.arange(0, 1)
    run, begin = tl.load(run_1), tl.load(units_before + sequence)
    count = tl.load(units_before + sequence + 1) - begin
    if count == 1:  # its program wrote the result
        return
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    sum_RV = tl.zeros([1, V_PAD], tl.float32)
    whole_top, whole_total, whole_RV = top, total, sum_RV
    for step in range(bound(tl.cdiv(count, AHEAD))):
        part_tops, part_totals, part_sums = (), (), ()
        for i in tl.static_range(AHEAD):
            is_part = row + step * AHEAD + i < count
            at = (begin + step * AHEAD + i).to(tl.int64) * heads + head + row
            part_tops += (tl.load(tops + at, mask=is_part, other=float("-inf")),)  # type: ignore[assignment] # Triton's tuple
            part_totals += (tl.load(totals + at, mask=is_part, other=0.0),)  # type: ignore[assignment] # Triton's tuple
            is_value = is_part[:, None] & (dim[None, :] < V)
            part_sums += (tl.load(sums + at[:, None] * V + dim[None, :], mask=is_value, other=0.0),)  # type: ignore[assignment] # Triton's tuple
        for i in tl.static_range(AHEAD):
            number = step * AHEAD + i + 1
            top, total, sum_RV = fold(top, total, sum_RV, part_tops[i], part_totals[i], part_sums[i], factor)
            is_end = (run > 1) | (number % RUN == 0) | (number == count)
            whole_top, whole_total, whole_RV, top, total, sum_RV = end_split(
                is_end, whole_top, whole_total, whole_RV, top, total, sum_RV, factor
            )
    sink = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head + row).to(tl.float32) * LOG2_E
    result = divided(whole_top, whole_total, whole_RV, sink, factor).to(out.dtype.element_ty)
    place = (sequence * heads + head).to(tl.int64) * V + row[:, None] + dim[None, :]
    tl.store(out + place, result, mask=(row[:, None] == 0) & (dim[None, :] < V))


def launch_merge(
    scratch: DecodeScratch, cuts: Cuts, sinks_H: Tensor | None, out_SHV: Tensor, factor: float
) -> None:
    """Write the rows of `out_SHV` that the preceding launch has left in parts of units, and padded ones.

    `factor` scales the maxima of parts to base 2, as in that launch.
    """
    S, H, V = out_SHV.shape
    padded = triton.next_power_of_2(V)
    merge_units[(S, H)](
        scratch.sums, scratch.tops, scratch.totals, scratch.splits_before, scratch.run_1, sinks_H, out_SHV, factor, V=V,
        V_PAD=padded, RUN=cuts.run, AHEAD=_AHEAD, HAS_SINKS=sinks_H is not None, num_warps=max(1, padded // 128),
    )  # fmt: skip
