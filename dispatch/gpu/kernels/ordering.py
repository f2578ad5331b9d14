# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sort a rank's own choices by slot, from the experts that a router chose, and count them, on a device.

Few choices, as in decode steps, take one launch: a program per slot reads all of them at once. So the router's result is
ordered in one more launch. Many take three: each chunk of choices is counted by slot, each slot adds its chunks up, and each
chunk is placed. The order is that of `dispatch.layout` either way: by slot, then row, then choice. No counter decides an
order, and the host reads nothing.

On one rank every expert is in one slot, so the length of a slot is the load of its expert: the same launches add it to the
counters of experts and ranks, by phase. A slot has one program, so additions to the counter of one expert are few.

Legend: T rows, K choices, S slots, E experts, P pairs (row, choice), C chunks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MOST_AT_ONCE = 4096  # choices that one launch orders
CHUNK = 256  # choices that a program counts and places if there are more
_CHUNK, _OTHERS = (
    tl.constexpr(CHUNK),
    tl.constexpr(16),
)  # choices that a program compares its own with at once


class ExpertChoices(NamedTuple):
    """Choices of experts that have one slot each, and the counters that they are added to."""

    ids_TK: Tensor  # int64, contiguous; values outside [0, E) are ignored
    slot_E: Tensor  # int64: the slot of each expert
    cache_slot_T: Tensor  # int64: -1 for a padding row, which chooses nothing
    num_decodes_1: Tensor  # int64: the first rows are decodes
    counts: (
        Tensor | None
    )  # int64 [2, E + 1]: prefill and decode; choices of each expert, then all. None counts nothing


@triton.jit
def _slots_of(
    choices, slot_of, cache_slots, pair, num_pairs, S: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Return the slot of each pair, int32; -1 for no choice, a padding row or no pair."""
    is_in = pair < num_pairs
    chosen = tl.load(choices + pair, mask=is_in, other=-1)
    if HAS_EXPERTS:
        is_real = tl.load(cache_slots + pair // K, mask=is_in, other=-1) >= 0
        is_choice = is_real & (chosen >= 0) & (chosen < E)
        chosen = tl.load(slot_of + chosen, mask=is_choice, other=-1)
    return tl.where((chosen >= 0) & (chosen < S), chosen, -1).to(tl.int32)


@triton.jit
def _add_counts(counts, slot_of, slot, num_all, num_decode, E: tl.constexpr, E_PAD: tl.constexpr):
    """Add a slot's choices to the counters of its expert and of the rank."""
    expert = tl.arange(0, E_PAD)
    is_own = tl.load(slot_of + expert, mask=expert < E, other=-1) == slot
    own = tl.max(tl.where(is_own, expert, -1), axis=0)
    decodes, prompts = num_decode.to(tl.int64), (num_all - num_decode).to(tl.int64)
    tl.atomic_add(counts + own, prompts, mask=(own >= 0) & (prompts > 0), sem="relaxed")
    tl.atomic_add(counts + E, prompts, mask=(own >= 0) & (prompts > 0), sem="relaxed")
    tl.atomic_add(counts + (E + 1) + own, decodes, mask=(own >= 0) & (decodes > 0), sem="relaxed")
    tl.atomic_add(counts + (E + 1) + E, decodes, mask=(own >= 0) & (decodes > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs"])
def order_few(
    choices, slot_of, cache_slots, num_decodes, counts, row_of_pair, pair_of_choice, offsets, num_pairs,
    S: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    HAS_EXPERTS: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """Program (slot): place its pairs. TILE is at least the number of pairs."""
    slot, pair = tl.program_id(0), tl.arange(0, TILE)
    chosen = _slots_of(choices, slot_of, cache_slots, pair, num_pairs, S, E, K, HAS_EXPERTS)
    is_mine = chosen == slot
    begin = tl.sum(((chosen >= 0) & (chosen < slot)).to(tl.int32), axis=0)
    place = begin + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
    tl.store(row_of_pair + place, (pair // K).to(tl.int64), mask=is_mine)
    tl.store(pair_of_choice + pair, place, mask=is_mine)
    tl.store(offsets + slot, begin.to(tl.int64))
    if slot == 0:
        tl.store(pair_of_choice + pair, tl.full([TILE], -1, tl.int32), mask=(pair < num_pairs) & (chosen < 0))
    num_mine = tl.sum(is_mine.to(tl.int32), axis=0)
    if slot == S - 1:
        tl.store(offsets + S, (begin + num_mine).to(tl.int64))
    if HAS_COUNTS:
        is_decode = pair < tl.load(num_decodes) * K
        num_decode = tl.sum((is_mine & is_decode).to(tl.int32), axis=0)
        _add_counts(counts, slot_of, slot, num_mine, num_decode, E, E_PAD)


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunks(
    choices, slot_of, cache_slots, slots, counts_CS, num_pairs,
    S: tl.constexpr, BINS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program (chunk): write the slot of each pair, int32, and the number of the chunk's pairs in each slot."""
    chunk = tl.program_id(0)
    pair = chunk * _CHUNK + tl.arange(0, _CHUNK)
    slot = _slots_of(choices, slot_of, cache_slots, pair, num_pairs, S, E, K, HAS_EXPERTS)
    tl.store(slots + pair, slot, mask=pair < num_pairs)
    bins = tl.arange(0, BINS)  # more than S: the last one is for missing choices
    tl.store(
        counts_CS + chunk * S + bins, tl.histogram(tl.where(slot < 0, BINS - 1, slot), BINS), mask=bins < S
    )


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def add_chunks(
    slots, slot_of, num_decodes, counts, counts_CS, total_S, num_pairs, num_chunks,
    S: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, C_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """Program (slot): replace each chunk's count by the slot's pairs in earlier chunks, and write the slot's total."""
    slot, chunk = tl.program_id(0), tl.arange(0, C_PAD)
    places = counts_CS + chunk * S + slot
    count = tl.load(places, mask=chunk < num_chunks, other=0)
    tl.store(places, tl.cumsum(count, axis=0) - count, mask=chunk < num_chunks)
    total = tl.sum(count, axis=0)
    tl.store(total_S + slot, total)
    if HAS_COUNTS:
        end = tl.load(num_decodes) * K  # of the pairs of decodes
        whole = (end // _CHUNK).to(tl.int32)
        pair = whole * _CHUNK + tl.arange(0, _CHUNK)
        is_decode = tl.load(slots + pair, mask=(pair < num_pairs) & (pair < end), other=-1) == slot
        num_decode = tl.sum(tl.where(chunk < whole, count, 0), axis=0) + tl.sum(
            is_decode.to(tl.int32), axis=0
        )
        _add_counts(counts, slot_of, slot, total, num_decode, E, E_PAD)


@triton.jit(do_not_specialize=["num_pairs"])
def place_chunks(
    slots, counts_CS, total_S, row_of_pair, pair_of_choice, offsets, num_pairs,
    S: tl.constexpr, S_PAD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program (chunk): place the chunk's pairs: after lower slots, earlier chunks, and earlier pairs of the chunk."""
    chunk, slot = tl.program_id(0), tl.arange(0, S_PAD)
    total = tl.load(total_S + slot, mask=slot < S, other=0)
    begin = tl.cumsum(total, axis=0) - total
    if chunk == 0:
        tl.store(offsets + slot, begin.to(tl.int64), mask=slot < S)
        tl.store(offsets + S, tl.sum(total, axis=0).to(tl.int64))
    own = tl.arange(0, _CHUNK)
    pair = chunk * _CHUNK + own
    chosen = tl.load(slots + pair, mask=pair < num_pairs, other=-1)
    is_pair = chosen >= 0
    before = tl.zeros([_CHUNK, _OTHERS], tl.int32)
    for first in range(0, _CHUNK, _OTHERS):
        other = first + tl.arange(0, _OTHERS)
        at = chunk * _CHUNK + other
        same = tl.load(slots + at, mask=at < num_pairs, other=-1)[None, :] == chosen[:, None]
        before += (same & (other[None, :] < own[:, None])).to(tl.int32)
    earlier = tl.load(counts_CS + chunk * S + chosen, mask=is_pair, other=0)
    place = tl.gather(begin, tl.where(is_pair, chosen, 0), 0) + earlier + tl.sum(before, axis=1)
    tl.store(row_of_pair + place, (pair // K).to(tl.int64), mask=is_pair)
    tl.store(pair_of_choice + pair, tl.where(is_pair, place, -1), mask=pair < num_pairs)


class OrderMemory(NamedTuple):
    """Output of an order, and memory for its launches."""

    row_P: Tensor  # int64
    pair_of_choice_NK: Tensor  # int32
    slot_offsets: Tensor  # int64 [S + 1]
    slots_P: Tensor  # int32; for more than MOST_AT_ONCE pairs, like the following
    counts_CS: Tensor  # int32
    total_S: Tensor  # int32


def num_chunks(num_pairs: int) -> int:
    """Return the number of chunks that `OrderMemory` needs room for."""
    return 0 if num_pairs <= MOST_AT_ONCE else int(triton.cdiv(num_pairs, CHUNK))


def order(choices_NK: Tensor, experts: ExpertChoices | None, memory: OrderMemory) -> None:
    """Order choices int64 [N, K], contiguous: slots, or experts' ids if `experts` is given. Allocates nothing."""
    P, K, S = choices_NK.numel(), choices_NK.shape[1], len(memory.total_S)
    slot_of, rows, decodes, counts = experts[1:] if experts else (None, None, None, None)
    E = 0 if slot_of is None else len(slot_of)
    sizes = {"S": S, "E": E, "K": K}
    written = (memory.row_P, memory.pair_of_choice_NK, memory.slot_offsets)
    E_PAD, has_counts = triton.next_power_of_2(max(E, 1)), counts is not None
    if P <= MOST_AT_ONCE:
        tile = max(16, triton.next_power_of_2(P))
        order_few[(S,)](
            choices_NK, slot_of, rows, decodes, counts, *written, P, **sizes, E_PAD=E_PAD, TILE=tile,
            HAS_EXPERTS=experts is not None, HAS_COUNTS=has_counts, num_warps=min(16, max(1, tile // 256)),
        )  # fmt: skip
        return
    chunks, S_PAD = num_chunks(P), triton.next_power_of_2(S)
    count_chunks[(chunks,)](
        choices_NK, slot_of, rows, memory.slots_P, memory.counts_CS, P, **sizes, BINS=max(32, triton.next_power_of_2(S + 1)),
        HAS_EXPERTS=experts is not None, num_warps=4,
    )  # fmt: skip
    add_chunks[(S,)](
        memory.slots_P, slot_of, decodes, counts, memory.counts_CS, memory.total_S, P, chunks, **sizes, E_PAD=E_PAD,
        C_PAD=triton.next_power_of_2(chunks), HAS_COUNTS=has_counts, num_warps=4,
    )  # fmt: skip
    place_chunks[(chunks,)](
        memory.slots_P, memory.counts_CS, memory.total_S, *written, P, S=S, S_PAD=S_PAD, K=K, num_warps=8,
    )  # fmt: skip
