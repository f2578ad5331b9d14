"""Results and tables of low-latency calls, allocated once per shape and handed out in turn.

Two results of each kind may be held; the third call overwrites the first's. That is what makes a call free of
allocation, and it is DeepEP's rule too. Large results cost no memory until rows are written: pages come with first use.
"""

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.transport import RankTable

RESULTS_HELD = 2


class DispatchSlot:
    """One dispatch's results, and what its combine needs to know of it.

    Attributes:
        x_LNH: the rows, [L, R*M, H]; rows at and beyond an expert's count are undefined.
        scales: FP8 only, [L, R*M, blocks or words], column-major.
        count_L: int32. source_token_LN: int32. layout_range_LR: int64, (begin << 32) | count.
        sent_TK: int64 [M, K], the choices of this rank's tokens; `answer_TK`: int32, which answer each gets.
        expected, owed: answers that come from and go to each rank.
    """

    def __init__(self, shape: LowLatencyShape) -> None:
        self.shape = shape
        L, N, R = shape.experts_per_rank, shape.rows_per_expert, shape.world_size
        dtype = torch.float8_e4m3fn if shape.is_fp8 else shape.dtype
        self.x_LNH = torch.empty(L, N, shape.hidden, dtype=dtype)
        self.scales: Tensor | None = None
        if shape.is_fp8:
            width = fp8.num_words(shape.hidden) if shape.is_ue8m0 else shape.num_scales
            kind = torch.int32 if shape.is_ue8m0 else torch.float32
            self.scales = torch.empty(L, width, N, dtype=kind).transpose(1, 2)
        self.count_L = torch.zeros(L, dtype=torch.int32)
        self.source_token_LN = torch.zeros(L, N, dtype=torch.int32)
        self.layout_range_LR = torch.zeros(L, R, dtype=torch.int64)
        self.sent_TK = torch.zeros(shape.max_tokens, shape.choices, dtype=torch.int64)
        self.answer_TK = torch.zeros(shape.max_tokens, shape.choices, dtype=torch.int32)
        self.expected, self.owed = RankTable(R), RankTable(R)
        self.num_tokens = 0


class Ring:
    """Hands out the slots of one shape in turn."""

    def __init__(self, shape: LowLatencyShape) -> None:
        self.slots = tuple(DispatchSlot(shape) for _ in range(RESULTS_HELD))
        self._turns: Iterator[DispatchSlot] = cycle(self.slots)

    def next_slot(self) -> DispatchSlot:
        """Return the slot whose results are the oldest."""
        return next(self._turns)


class OutputRing:
    """Results of combines of one shape and dtype, in turn, for callers who bring no `out`."""

    def __init__(self, max_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        outputs = [torch.empty(max_tokens, hidden, dtype=dtype) for _ in range(RESULTS_HELD)]
        self._turns: Iterator[Tensor] = cycle(outputs)

    def next_output(self, num_tokens: int) -> Tensor:
        """Return the first rows of the oldest."""
        return next(self._turns)[:num_tokens]
