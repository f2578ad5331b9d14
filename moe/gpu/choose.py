# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""From logical experts to physical slots on a GPU, and the counting of choices, in one launch.

What `moe.replicas` and `moe.load_counts` are to the CPU. A table on the device says where each expert is; a switch of
placement rewrites it in place, so that captured graphs follow. Where experts have copies, the same grid as
`expert_placement.choose` lays is computed first (by torch: that takes some launches more).
Counters are integers, so the order of atomic additions shows nowhere.

Legend: T rows, K choices, E experts, R ranks, C copies of one expert at most, Q = T x K choices.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.replicas import Route

_TILE = 128


@triton.jit(do_not_specialize=["num_pairs"])
def choose_and_count(
    ids, slot_of, cache_slots, num_decodes, slots, counts, num_pairs,
    E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, SLOTS_PER_RANK: tl.constexpr, HAS_COUNTS: tl.constexpr,
    IS_BY_PAIR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile of choices). `slot_of` is by expert, or by choice where a choice has been made already."""
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_in = pair < num_pairs
    row = pair // K
    is_real = tl.load(cache_slots + row, mask=is_in, other=-1) >= 0
    expert = tl.load(ids + pair, mask=is_in & is_real, other=-1)
    is_choice = (expert >= 0) & (expert < E)
    slot = tl.load(slot_of + (pair if IS_BY_PAIR else expert), mask=is_choice, other=-1)
    tl.store(slots + pair, slot, mask=is_in)
    if HAS_COUNTS:
        table = counts + (row < tl.load(num_decodes)).to(tl.int64) * (E + R)
        one = tl.full([TILE], 1, tl.int64)
        tl.atomic_add(table + expert, one, mask=slot >= 0)
        tl.atomic_add(table + E + slot // SLOTS_PER_RANK, one, mask=slot >= 0)


class DeviceRoute:
    """One layer's way to the slots of all ranks, for tokens on a device."""

    def __init__(self, route: Route, *, slots_per_rank: int, num_ranks: int, device: torch.device) -> None:
        """Copy a route's tables to the device."""
        self._slots_per_rank, self._num_ranks = slots_per_rank, num_ranks
        self._num_experts = len(route.choice.phase_E)
        # As many copies as there may ever be, so that a later placement's tables fit where these are.
        self._has_copies = slots_per_rank * num_ranks > self._num_experts
        width = num_ranks if self._has_copies else 1
        self._slot_EC = torch.zeros(self._num_experts, width, dtype=torch.int64, device=device)
        self._until_EC = torch.zeros(self._num_experts, width, dtype=torch.float64, device=device)
        self._last_E = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        self._phase_E = torch.from_numpy(route.choice.phase_E).to(device)
        self.follow(route)

    def follow(self, route: Route) -> None:
        """Take another placement's tables; in place, for launches from now on."""
        first, slot, until = route.choice.table(route.layer)
        copies = np.diff(first)
        slot_EC = np.zeros(tuple(self._slot_EC.shape), np.int64)
        until_EC = np.full(slot_EC.shape, np.inf)
        for expert, count in enumerate(copies.tolist()):
            own = slice(first[expert], first[expert] + count)
            slot_EC[expert, :count], until_EC[expert, :count] = slot[own], until[own]
        self._slot_EC.copy_(torch.from_numpy(slot_EC))
        self._until_EC.copy_(torch.from_numpy(until_EC))
        self._last_E.copy_(torch.from_numpy(copies - 1))

    def slots(
        self, ids_TK: Tensor, cache_slot_T: Tensor, num_decodes_1: Tensor, counts: Tensor | None
    ) -> Tensor:
        """Return the slot of each choice.

        Args:
            ids_TK: int64 experts, -1 for no choice.
            cache_slot_T: -1 for a padded row, whose choices are none.
            num_decodes_1: of the first rows; the others are prompts.
            counts: [2, E + R] int64 as `LoadCounts.table` has it, added to; None: nothing is counted.

        Returns:
            int64 [T, K], new; -1 for no choice.
        """
        ids_TK = ids_TK.contiguous()
        slots_TK = torch.empty_like(ids_TK)
        num_pairs, choices = ids_TK.numel(), ids_TK.shape[1]
        if not num_pairs:
            return slots_TK
        slot_of = self._slot_EC
        if self._has_copies:
            slot_of = self._copies_of(torch.where(cache_slot_T[:, None] >= 0, ids_TK, -1).flatten())
        choose_and_count[(triton.cdiv(num_pairs, _TILE),)](
            ids_TK, slot_of, cache_slot_T, num_decodes_1, slots_TK, counts, num_pairs, E=self._num_experts,
            R=self._num_ranks, K=choices, SLOTS_PER_RANK=self._slots_per_rank, HAS_COUNTS=counts is not None,
            IS_BY_PAIR=self._has_copies, TILE=_TILE, num_warps=4,
        )  # fmt: skip
        return slots_TK

    def _copies_of(self, ids_Q: Tensor) -> Tensor:
        """Choose among copies as `expert_placement.choose` does: the n-th of N choices by (n + phase) / N."""
        E = self._num_experts
        key_Q = torch.where(ids_Q >= 0, ids_Q, E)
        order_Q = torch.sort(key_Q, stable=True).indices
        count_E = torch.zeros(E + 1, dtype=torch.int64, device=key_Q.device)
        count_E.scatter_add_(0, key_Q, torch.ones_like(key_Q))
        start_E = count_E.cumsum(0) - count_E
        nth_Q = torch.empty_like(key_Q)
        nth_Q[order_Q] = torch.arange(len(key_Q), device=key_Q.device) - start_E[key_Q[order_Q]]
        expert_Q = ids_Q.clamp(min=0)
        point_Q = (nth_Q + self._phase_E[expert_Q]) / count_E[expert_Q]
        copy_Q = (point_Q[:, None] >= self._until_EC[expert_Q]).sum(1)
        copy_Q = torch.minimum(copy_Q, self._last_E[expert_Q])
        return self._slot_EC[expert_Q, copy_Q]
