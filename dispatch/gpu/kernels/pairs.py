# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sort (row, choice) pairs by slot, and sum a token's pairs, on a device. The host reads no counts.

The order is that of `dispatch.layout`: by slot, then row, then choice. `ordering` sorts a rank's own choices. Here is the
kernel for those that low-latency calls receive, at most a few thousand: a program places the pairs of one slot in one chunk
of the choices. It counts the pairs before them itself, in all choices. So no program waits for another, and no
counter decides an order. The choices of a decode step (32 KB for 1,024 rows of 8) stay in the cache that programs share.
Sums are in the order of a token's choices, in float32 with one rounding. Products are rounded before they are added
(compiled without fusion), so the bits are those of `layout.sum_answers`.

Legend: T tokens, N rows, K choices, S slots, P pairs, H hidden. Memory is for N*K pairs; only the device knows their
number.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.gpu.kernels.casts import as_stored, narrow, widen
from dispatch.gpu.kernels.flags import CAME, half_at, is_sound
from dispatch.gpu.kernels.ordering import ExpertChoices, OrderMemory, num_chunks, order

_TILE = 512  # choices that a program reads at once
_PROGRAMS = 512  # approximate number that a large GPU runs at once
_SUMMED = 1024  # channels of a token that a program sums
SLOT_BITS = 16  # of a choice with a label: the label plus 1 is above them
MOST_LABEL = (1 << 31 - SLOT_BITS) - 2
_SLOT_BITS, _SLOT_MASK = tl.constexpr(SLOT_BITS), tl.constexpr((1 << SLOT_BITS) - 1)


class DeviceRoom:
    """Room for tensors of one type. Each tensor overwrites the last one.

    A CUDA graph keeps the addresses that it captured, so smaller rooms are kept when a call needs a larger one: the smaller
    graph may be replayed later. Capture begins after a call of the same shape, so no room grows inside a graph.

    Args:
        dtype, device: Type and device of the tensors.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._rooms = [torch.zeros(0, dtype=dtype, device=device)]  # the last one is the largest

    def take(self, *shape: int) -> Tensor:
        """Return the start of the room as a contiguous tensor of this shape, with the contents of the last call."""
        size = 1
        for length in shape:
            size *= length
        room = self._rooms[-1]
        if size > room.numel():
            room = torch.zeros(size, dtype=room.dtype, device=room.device)
            self._rooms.append(room)
        return room[:size].view(shape)


class PairsOnDevice(NamedTuple):
    """Pairs by slot. The next order in the same room overwrites them."""

    row_P: Tensor  # int64 [N*K]: the row of each pair; undefined after the last pair
    slot_offsets: Tensor  # int64 [S+1]: pairs of slot s are [offsets[s], offsets[s+1])
    pair_of_choice_NK: Tensor  # int32: -1 for no choice


@triton.jit
def with_label(slot, label):
    """Return int32 slots with a label from -1 to MOST_LABEL; -1 for no choice."""
    return tl.where(slot >= 0, slot | ((label + 1) << _SLOT_BITS), -1)


@triton.jit
def slot_of(labelled):
    """Return the slots of `with_label`."""
    return tl.where(labelled >= 0, labelled & _SLOT_MASK, -1)


@triton.jit
def label_of(labelled):
    """Return the labels of `with_label`; less than -1 for no choice."""
    return (labelled >> _SLOT_BITS) - 1


@triton.jit
def _chosen(choices, arrived, choice, end, sound, PER_SOURCE: tl.constexpr, HAS_LABELS: tl.constexpr):
    """Load the slots of choices below `end`; -1 for choices of a source that has not arrived."""
    is_read = choice < end
    is_read &= sound & (tl.load(arrived + choice // PER_SOURCE, mask=is_read, other=0) == CAME)
    chosen = tl.load(choices + choice, mask=is_read, other=-1)
    if HAS_LABELS:
        chosen = slot_of(chosen)
    return chosen


@triton.jit(do_not_specialize=["num_choices", "chunk"])
def order_pairs(
    choices, arrived, calls, half_bytes, row_of_pair, pair_of_choice, offsets, num_choices, chunk,
    S: tl.constexpr, K: tl.constexpr, R: tl.constexpr, PER_SOURCE: tl.constexpr, TILE: tl.constexpr,
    HAS_LABELS: tl.constexpr,
):  # fmt: skip
    """Program (slot, chunk): place the slot's pairs in a chunk of `chunk` choices. A value outside [0, S) is no choice.

    `choices`: the address of int32 [R, PER_SOURCE] in the first half, of which only choices of arrived sources count. With
    HAS_LABELS they are those of `with_label`.
    """
    slot, first = tl.program_id(0), tl.program_id(1) * chunk
    sound = is_sound(arrived, R)
    choices = (choices + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int32))
    below, before, every = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    at = 0
    while at < num_choices:  # not a range: the interpreter does not accept an argument as its end
        choice = at + tl.arange(0, TILE)
        chosen = _chosen(choices, arrived, choice, num_choices, sound, PER_SOURCE, HAS_LABELS)
        is_mine = (chosen == slot).to(tl.int32)
        below += ((chosen >= 0) & (chosen < slot)).to(tl.int32)
        before += tl.where(choice < first, is_mine, 0)
        every += is_mine
        at += TILE
    begin = tl.sum(below, axis=0)
    if first == 0:
        tl.store(offsets + slot, begin.to(tl.int64))
        if slot == S - 1:
            tl.store(offsets + S, (begin + tl.sum(every, axis=0)).to(tl.int64))
    placed = begin + tl.sum(before, axis=0)
    at, end = first, tl.minimum(first + chunk, num_choices)
    while at < end:
        choice = at + tl.arange(0, TILE)
        chosen = _chosen(choices, arrived, choice, end, sound, PER_SOURCE, HAS_LABELS)
        is_mine = (chosen == slot).to(tl.int32)
        pair = placed + tl.cumsum(is_mine, axis=0) - 1
        tl.store(row_of_pair + pair, (choice // K).to(tl.int64), mask=is_mine != 0)
        tl.store(pair_of_choice + choice, pair, mask=is_mine != 0)
        if slot == 0:
            tl.store(pair_of_choice + choice, -1, mask=(choice < end) & ((chosen < 0) | (chosen >= S)))
        placed += tl.sum(is_mine, axis=0)
        at += TILE


def chunk_of(num_choices: int, num_slots: int) -> tuple[int, int]:
    """Return the choices that a program places, and those that it reads at once. Few choices get many programs."""
    tile = min(_TILE, int(triton.next_power_of_2(max(num_choices, 1))))
    chunks = max(1, min(triton.cdiv(num_choices, tile), _PROGRAMS // num_slots))
    return max(tile, triton.cdiv(num_choices, chunks * tile) * tile), tile


class PairOrders:
    """Orders pairs of calls of any size, in memory that is kept.

    Args:
        num_slots: S.
        device: Device of the choices.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._rows, self._pairs = DeviceRoom(torch.int64, device), DeviceRoom(torch.int32, device)
        self._slots, self._counts = DeviceRoom(torch.int32, device), DeviceRoom(torch.int32, device)
        self._offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._totals = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def order(self, slots_NK: Tensor) -> PairsOnDevice:
        """Order the choices int64 [N, K], contiguous. A value outside [0, S) is no choice. Allocates only to grow."""
        return self._order(slots_NK, None)

    def order_experts(self, choices: ExpertChoices) -> PairsOnDevice:
        """Order choices of experts, and count them. Allocates only to grow."""
        return self._order(choices.ids_TK, choices)

    def _order(self, choices_NK: Tensor, experts: ExpertChoices | None) -> PairsOnDevice:
        N, K = choices_NK.shape
        chunks = num_chunks(N * K)
        memory = OrderMemory(
            self._rows.take(N * K), self._pairs.take(N, K), self._offsets, self._slots.take(N * K if chunks else 0),
            self._counts.take(chunks, self.num_slots), self._totals,
        )  # fmt: skip
        order(choices_NK, experts, memory)
        return PairsOnDevice(memory.row_P, memory.slot_offsets, memory.pair_of_choice_NK)


@triton.jit
def sum_pairs(
    y, pair_of_choice, weights, added, out,
    K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_BFLOAT16_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program (token, tile). Masks replace branches: a -1 choice adds +0, which does not change a sum's bits.

    The loop is unrolled, so that the rows of all choices are loaded at once. `added` has a row for each token, added to the
    rounded sum, or is None.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = at < H
    total = tl.zeros([TILE], tl.float32)
    for k in tl.static_range(K):
        pair = tl.load(pair_of_choice + token * K + k).to(tl.int64)
        weight = widen(tl.load(weights + token * K + k, mask=pair >= 0, other=0), HAS_BFLOAT16_WEIGHTS)
        answer = tl.load(y + pair * H + at, mask=is_channel & (pair >= 0), other=0)
        total += weight * widen(answer, IS_BFLOAT16)
    result = narrow(total, out.dtype.element_ty, IS_BFLOAT16)
    if added is not None:
        other = widen(tl.load(added + token * H + at, mask=is_channel, other=0), IS_BFLOAT16)
        result = narrow(widen(result, IS_BFLOAT16) + other, out.dtype.element_ty, IS_BFLOAT16)
    tl.store(out + token * H + at, result, mask=is_channel)


def combine_pairs(
    y_PH: Tensor,
    pair_of_choice_TK: Tensor,
    weights_TK: Tensor,
    out_TH: Tensor,
    added_TH: Tensor | None = None,
) -> Tensor:
    """Sum every token's answers with their weights.

    Args:
        y_PH: bfloat16, float16 or float32, contiguous.
        pair_of_choice_TK: int32 or int64, contiguous: the row of y_PH that answers each choice; -1 for no choice.
        weights_TK: bfloat16, float16 or float32, contiguous; the weight of a -1 choice is not read.
        out_TH: Output in the type of y_PH, contiguous.
        added_TH: Added to the rounded sums, with one more rounding, as torch would; contiguous, in the type of y_PH.

    Returns:
        out_TH.
    """
    T, K = pair_of_choice_TK.shape
    H = y_PH.shape[1]
    if T == 0:
        return out_TH
    tile = min(_SUMMED, triton.next_power_of_2(H))
    sum_pairs[(T, triton.cdiv(H, tile))](
        as_stored(y_PH), pair_of_choice_TK, as_stored(weights_TK), None if added_TH is None else as_stored(added_TH),
        as_stored(out_TH), K=K, H=H, TILE=tile,
        IS_BFLOAT16=y_PH.dtype == torch.bfloat16, HAS_BFLOAT16_WEIGHTS=weights_TK.dtype == torch.bfloat16, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out_TH
