"""Results and tables of low-latency calls, allocated once per shape and handed out in turn.

Two results of each kind may be held; the third call overwrites the first's. That is what makes a call free of
allocation, and it is DeepEP's rule too. Large results cost no memory until rows are written: pages come with first use.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency.shape import LowLatencyShape

RESULTS_HELD = 2


class DispatchSlot:
    """One dispatch's results. An exchange adds what it needs to bring the answers home.

    Attributes:
        x_LNH: the rows, [L, R*M, H]; rows at and beyond an expert's count are undefined.
        scales: FP8 only, [L, R*M, blocks or words], column-major.
        count_L: int32. source_token_LN: int32. layout_range_LR: int64, (begin << 32) | count.
        sent_TK: int64 [M, K], the choices of this rank's tokens.
        num_tokens: of this rank.
    """

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        self.shape = shape
        L, N, R = shape.experts_per_rank, shape.rows_per_expert, shape.world_size
        dtype = torch.float8_e4m3fn if shape.is_fp8 else shape.dtype
        self.x_LNH = torch.empty(L, N, shape.hidden, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        if shape.is_fp8:
            width = fp8.num_words(shape.hidden) if shape.is_ue8m0 else shape.num_scales
            kind = torch.int32 if shape.is_ue8m0 else torch.float32
            self.scales = torch.empty(L, width, N, dtype=kind, device=device).transpose(1, 2)
        self.count_L = torch.zeros(L, dtype=torch.int32, device=device)
        self.source_token_LN = torch.zeros(L, N, dtype=torch.int32, device=device)
        self.layout_range_LR = torch.zeros(L, R, dtype=torch.int64, device=device)
        self.sent_TK = torch.zeros(shape.max_tokens, shape.choices, dtype=torch.int64, device=device)
        self.num_tokens = 0


Slot = TypeVar("Slot", bound=DispatchSlot)


class Results(Generic[Slot]):
    """Hands out the results of every shape in turn, the oldest first.

    Args:
        make_slot: makes a slot of a shape on a device.
        device: where results lie.
    """

    def __init__(
        self, make_slot: Callable[[LowLatencyShape, torch.device], Slot], device: torch.device
    ) -> None:
        self._make_slot, self._device = make_slot, device
        self._slots: dict[LowLatencyShape, Iterator[Slot]] = {}
        self._outputs: dict[tuple[int, int, torch.dtype], Iterator[Tensor]] = {}
        self._known: dict[int, Slot] = {}  # by the address of their source tokens: handles carry it

    def next_slot(self, shape: LowLatencyShape) -> Slot:
        """Return room for a dispatch."""
        turns = self._slots.get(shape)
        if turns is None:
            slots = [self._make_slot(shape, self._device) for _ in range(RESULTS_HELD)]
            self._known.update({slot.source_token_LN.data_ptr(): slot for slot in slots})
            turns = self._slots[shape] = cycle(slots)
        return next(turns)

    def slot_of(self, source_token_LN: Tensor) -> Slot | None:
        """Return the slot that this is of, if it is one of ours."""
        return self._known.get(source_token_LN.data_ptr())

    def next_output(self, shape: LowLatencyShape, dtype: torch.dtype, num_tokens: int) -> Tensor:
        """Return room for a combine's result, for callers who bring no `out`: [num_tokens, H]."""
        key = (shape.max_tokens, shape.hidden, dtype)
        turns = self._outputs.get(key)
        if turns is None:
            rooms = [torch.empty(*key[:2], dtype=dtype, device=self._device) for _ in range(RESULTS_HELD)]
            turns = self._outputs[key] = cycle(rooms)
        return next(turns)[:num_tokens]
