# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Map logical experts to physical slots on a GPU and count the choices, in one launch.

On one rank this is part of the launch that orders pairs (`dispatch.gpu.kernels.ordering`), which takes `DeviceSlotChoice.experts`.

The GPU's `moe.slot_choice` and `moe.load_counts`. A table on the device holds each expert's slots. A change of
placement rewrites it in place, so captured graphs use it. If experts have copies, the n-th of an expert's N choices
goes to the copy that `expert_placement.choose` gives, which needs n and N: a program compares its own choices with all
others of its chunk. For a step of more than one chunk, which only prompts have, a first launch counts each chunk.
Counters are integers, so the order of atomic additions has no effect. They order no other memory. A program adds its choices
of a rank up first, since all choices of a step go to few ranks.

Legend: T rows, K choices, E experts, R ranks, C most copies of one expert, P pairs (row, choice).
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.gpu.kernels.ordering import ExpertChoices
from moe.load_counts import NUM_PHASES, LayerCounts, LoadCounts
from moe.slot_choice import SlotChoice

_TILE = 64
CHUNK = 2048  # pairs that a program compares its own with: 256 rows of 8 choices, most decode steps
_TILES, _CHUNK = tl.constexpr(CHUNK // _TILE), tl.constexpr(CHUNK)
_OTHERS = tl.constexpr(32)  # pairs compared at once; with more, registers spill


@triton.jit
def _experts_of(ids, cache_slots, pair, num_pairs, E: tl.constexpr, K: tl.constexpr):
    """Return the expert of each pair; -1 for no choice or a padding row."""
    is_in = pair < num_pairs
    is_real = tl.load(cache_slots + pair // K, mask=is_in, other=-1) >= 0
    expert = tl.load(ids + pair, mask=is_in & is_real, other=-1)
    return tl.where(expert < E, expert, -1)


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunks(
    ids, cache_slots, chunk_counts, num_pairs, E: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Program (tile of pairs). Adds to [chunks, E] the number of choices of each expert in each chunk."""
    tile = tl.program_id(0)
    expert = _experts_of(ids, cache_slots, tile * TILE + tl.arange(0, TILE), num_pairs, E, K)
    tl.atomic_add(chunk_counts + (tile // _TILES) * E + expert, 1, mask=expert >= 0, sem="relaxed")


@triton.jit
def _nth_of_all(
    ids, cache_slots, chunk_counts, pair, expert, num_pairs, num_chunks, E: tl.constexpr, K: tl.constexpr,
    TILE: tl.constexpr, HAS_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return, for each pair's expert, the number of its choices before the pair, and of all its choices."""
    before, total = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    chunk = tl.program_id(0) // _TILES
    first, end = chunk * _CHUNK, tl.minimum((chunk + 1) * _CHUNK, num_pairs)
    while first < end:  # not a range: the interpreter does not support a dynamic end
        other = first + tl.arange(0, _OTHERS)
        same = _experts_of(ids, cache_slots, other, num_pairs, E, K)[None, :] == expert[:, None]
        total += tl.sum(same.to(tl.int32), axis=1)
        before += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), axis=1)
        first += _OTHERS
    if HAS_CHUNKS:
        each = 0
        while each < num_chunks:
            count = tl.load(chunk_counts + each * E + expert, mask=(expert >= 0) & (each != chunk), other=0)
            total += count
            before += tl.where(each < chunk, count, 0)
            each += 1
    return before, total


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def choose_and_count(
    ids, slot_of, until, last, phase, chunk_counts, cache_slots, num_decodes, slots, counts, num_pairs, num_chunks,
    E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    SLOTS_PER_RANK: tl.constexpr, HAS_COUNTS: tl.constexpr, TILE: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Program (tile of pairs). `slot_of` and `until` are [E, C]; `last` is the index of an expert's last copy."""
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_in = pair < num_pairs
    expert = _experts_of(ids, cache_slots, pair, num_pairs, E, K)
    is_choice = expert >= 0
    copy = tl.zeros([TILE], tl.int64)
    if C > 1:
        before, total = _nth_of_all(
            ids, cache_slots, chunk_counts, pair, expert, num_pairs, num_chunks, E, K, TILE, HAS_CHUNKS
        )
        begin = tl.load(phase + expert, mask=is_choice, other=0.0)
        point = (before.to(tl.float64) + begin) / tl.maximum(total, 1).to(tl.float64)
        column = tl.arange(0, C_PAD)
        is_copy = is_choice[:, None] & (column[None, :] < C)
        ends = tl.load(until + expert[:, None] * C + column[None, :], mask=is_copy, other=float("inf"))
        copy = tl.sum((point[:, None] >= ends).to(tl.int64), axis=1)
        copy = tl.minimum(copy, tl.load(last + expert, mask=is_choice, other=0))
    slot = tl.load(slot_of + expert * C + copy, mask=is_choice, other=-1)
    tl.store(slots + pair, slot, mask=is_in)
    if HAS_COUNTS:
        phase_of_row = (pair // K < tl.load(num_decodes)).to(tl.int64)
        one = tl.full([TILE], 1, tl.int64)
        tl.atomic_add(counts + phase_of_row * (E + R) + expert, one, mask=slot >= 0, sem="relaxed")
        of_rank = tl.where(slot >= 0, phase_of_row * R + slot // SLOTS_PER_RANK, BINS - 1)
        bins = tl.arange(0, BINS)  # more than 2 * R: the last one is for missing choices
        count = tl.histogram(of_rank.to(tl.int32), BINS)
        places = counts + (bins // R) * (E + R) + E + bins % R
        tl.atomic_add(places, count.to(tl.int64), mask=(bins < 2 * R) & (count > 0), sem="relaxed")


class DeviceSlotChoice:
    """One layer's choice of slots of all ranks, for tokens on a device."""

    def __init__(
        self, choice: SlotChoice, *, slots_per_rank: int, num_ranks: int, device: torch.device
    ) -> None:
        """Copy a choice's tables to the device."""
        self._slots_per_rank, self._num_ranks = slots_per_rank, num_ranks
        self._num_experts = len(choice.replicas.phase_E)
        # Room for the most copies that are ever possible, so that a later placement's tables fit in this memory.
        width = num_ranks if slots_per_rank * num_ranks > self._num_experts else 1
        self._slot_EC = torch.zeros(self._num_experts, width, dtype=torch.int64, device=device)
        self._until_EC = torch.zeros(self._num_experts, width, dtype=torch.float64, device=device)
        self._last_E = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        self._phase_E = torch.from_numpy(choice.replicas.phase_E).to(device)
        self.follow(choice)

    def follow(self, choice: SlotChoice) -> None:
        """Switch to another placement's tables, in place, for later launches."""
        first, slot, until = choice.replicas.table(choice.layer)
        copies = np.diff(first)
        slot_EC = np.zeros(tuple(self._slot_EC.shape), np.int64)
        until_EC = np.full(slot_EC.shape, np.inf)
        for expert, count in enumerate(copies.tolist()):
            own = slice(first[expert], first[expert] + count)
            slot_EC[expert, :count], until_EC[expert, :count] = slot[own], until[own]
        self._slot_EC.copy_(torch.from_numpy(slot_EC))
        self._until_EC.copy_(torch.from_numpy(until_EC))
        self._last_E.copy_(torch.from_numpy(copies - 1))

    def experts(
        self, ids_TK: Tensor, cache_slot_T: Tensor, num_decodes_1: Tensor, counts: Tensor | None
    ) -> ExpertChoices:
        """Return the choices for a dispatch on one rank, which maps and counts them itself. Arguments as of `slots`."""
        assert self._slot_EC.shape[1] == 1, "an expert with copies has several slots"
        return ExpertChoices(ids_TK.contiguous(), self._slot_EC.view(-1), cache_slot_T, num_decodes_1, counts)

    def slots(
        self, ids_TK: Tensor, cache_slot_T: Tensor, num_decodes_1: Tensor, counts: Tensor | None
    ) -> Tensor:
        """Return the slot of each choice.

        Args:
            ids_TK: int64 experts, -1 for no choice.
            cache_slot_T: -1 for a padding row, which has no choices.
            num_decodes_1: Number of decodes, which are the first rows; the others are prompts.
            counts: [2, E + R] int64 like `LoadCounts.table`, added to. None disables counting.

        Returns:
            int64 [T, K], new; -1 for no choice.
        """
        ids_TK = ids_TK.contiguous()
        slots_TK = torch.empty_like(ids_TK)
        num_pairs, choices, copies = ids_TK.numel(), ids_TK.shape[1], self._slot_EC.shape[1]
        if not num_pairs:
            return slots_TK
        E, grid = self._num_experts, (triton.cdiv(num_pairs, _TILE),)
        num_chunks, chunk_counts = triton.cdiv(num_pairs, CHUNK), None
        if copies > 1 and num_chunks > 1:
            chunk_counts = torch.zeros(num_chunks, E, dtype=torch.int32, device=ids_TK.device)
            count_chunks[grid](ids_TK, cache_slot_T, chunk_counts, num_pairs, E=E, K=choices, TILE=_TILE)
        choose_and_count[grid](
            ids_TK, self._slot_EC, self._until_EC, self._last_E, self._phase_E, chunk_counts, cache_slot_T,
            num_decodes_1, slots_TK, counts, num_pairs, num_chunks, E=E, R=self._num_ranks, K=choices, C=copies,
            C_PAD=triton.next_power_of_2(copies), SLOTS_PER_RANK=self._slots_per_rank,
            HAS_COUNTS=counts is not None, TILE=_TILE, HAS_CHUNKS=chunk_counts is not None,
            BINS=max(32, triton.next_power_of_2(2 * self._num_ranks + 1)), num_warps=4,
        )  # fmt: skip
        return slots_TK


class DeviceLayerCounts(LayerCounts):
    """One layer's counters, on the device of the choices. Reads copy them to the host.

    Attributes:
        device_table: [2, E + R] int64, incremented by `DeviceSlotChoice`.
        experts_ns: Always 0: the host does not wait for the device to measure it.
    """

    def __init__(
        self, table: np.ndarray, num_experts: int, slots_per_rank: int, device_table: Tensor
    ) -> None:
        super().__init__(table, num_experts, slots_per_rank)
        self.device_table = device_table

    @property
    def expert_E(self) -> np.ndarray:
        """Tokens of each expert so far, both phases: [E] int64. Waits for the device."""
        result: np.ndarray = self.device_table.cpu().numpy()[:, : self._num_experts].sum(axis=0)
        return result


class DeviceLoadCounts(LoadCounts):
    """One rank's counters of all MoE layers."""

    def __init__(
        self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int, device: torch.device
    ) -> None:
        shape = (num_layers, NUM_PHASES, num_experts + num_ranks)
        self._device_table = torch.zeros(shape, dtype=torch.int64, device=device)
        on_host = np.zeros(shape, dtype=np.int64)
        self.layers = [
            DeviceLayerCounts(host, num_experts, slots_per_rank, own)
            for host, own in zip(on_host, self._device_table, strict=True)
        ]

    @property
    def table(self) -> np.ndarray:  # type: ignore[override]
        """[L, 2, E + R] int64, a copy. Waits for the device."""
        result: np.ndarray = self._device_table.cpu().numpy()
        return result

    def clear(self) -> None:
        self._device_table.zero_()
