# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sort (token, choice) pairs by slot on a device, without the host looking at a count.

The order is that of `dispatch.layout`: by slot, then token, then choice. One program per slot reads all choices twice:
to count those before it, and to place its own. No atomics and no scratch, so the order cannot vary; the choices of a
step (64 KB for 1,024 tokens of 8) stay in the cache that all programs share.
Rejected: a histogram per tile of choices, a scan and a scatter: three launches, where a decode step pays by the launch.

Legend: T tokens, K choices, S slots, P pairs. Memory is for T*K pairs, how many there are is known to the device only.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.gpu.memory import DeviceRoom

_TILE = 1024  # choices that a program looks at at once


class PairOrder(NamedTuple):
    """Pairs by slot; overwritten by the next order of the same `PairOrders`."""

    row_P: Tensor  # int64 [T*K]: the token of each pair; 0 behind the last pair
    slot_offsets: Tensor  # int64 [S+1]: pairs of slot s are [offsets[s], offsets[s+1])
    pair_of_choice_TK: Tensor  # int32: -1 for no choice


@triton.jit(do_not_specialize=["num_choices"])
def order_pairs(
    slots, row_of_pair, pair_of_choice, offsets, num_choices, S: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Program (slot): place its pairs. Program S is for choices that are none, and what they leave free comes last."""
    slot = tl.program_id(0)
    before, first = tl.zeros([TILE], tl.int32), 0
    while first < num_choices:  # not a range: the interpreter cannot count to an argument
        choice = first + tl.arange(0, TILE)
        chosen = tl.load(slots + choice, mask=choice < num_choices, other=-1)
        before += ((chosen >= 0) & (chosen < slot)).to(tl.int32)
        first += TILE
    placed, first = tl.sum(before, axis=0), 0
    tl.store(offsets + slot, placed.to(tl.int64))
    while first < num_choices:
        choice = first + tl.arange(0, TILE)
        is_read = choice < num_choices
        chosen = tl.load(slots + choice, mask=is_read, other=-1)
        is_none = (chosen < 0) | (chosen >= S)
        is_mine = (is_read & tl.where(slot == S, is_none, chosen == slot)).to(tl.int32)
        pair = placed + tl.cumsum(is_mine, axis=0) - 1
        tl.store(row_of_pair + pair, tl.where(slot == S, 0, choice // K).to(tl.int64), mask=is_mine != 0)
        tl.store(pair_of_choice + choice, tl.where(slot == S, -1, pair), mask=is_mine != 0)
        placed += tl.sum(is_mine, axis=0)
        first += TILE


class PairOrders:
    """Orders pairs of calls of any size, in memory that is kept.

    Args:
        num_slots: S.
        device: of the choices.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._rows, self._pairs = DeviceRoom(torch.int64, device), DeviceRoom(torch.int32, device)
        self._offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def order(self, slots_TK: Tensor) -> PairOrder:
        """Order the choices int64 [T, K], contiguous; what is not in [0, S) is no choice. Allocates where it grows."""
        (T, K), S = slots_TK.shape, self.num_slots
        order = PairOrder(self._rows.take(T * K), self._offsets, self._pairs.take(T, K))
        order_pairs[(S + 1,)](
            slots_TK, order.row_P, order.pair_of_choice_TK, order.slot_offsets, T * K, S=S, K=K,
            TILE=min(_TILE, triton.next_power_of_2(max(T * K, 1))), num_warps=4,
        )  # fmt: skip
        return order
