"""`LowLatencyExchange` by Triton kernels through symmetric memory: between GPUs, or in the interpreter between CPU ranks.

Nothing is allocated after the first call of a shape, and on a GPU the host looks at nothing (`calls` says what
follows from that): choices out of range, and choices of a combine that were not dispatched, are no choices there instead
of errors.

Interpreted across processes, and compiled for sm_90; never run on a GPU yet.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dispatch.gpu.calls import TritonCalls
from dispatch.gpu.launches import Launches, TritonSlot
from dispatch.gpu.memory import STORED
from dispatch.gpu.symmetric import CombineContents, DispatchContents, OpenMemory
from dispatch.low_latency.exchange import Posted
from dispatch.low_latency.ring import DispatchSlot, Results
from dispatch.low_latency.shape import LowLatencyShape


class TritonExchange(TritonCalls):
    """See `LowLatencyExchange` and `TritonCalls`. Opening is collective.

    Args:
        open_memory, world_size, options: of `TritonCalls`.
        lanes: programs per expert that copy rows.
    """

    dtypes: tuple[torch.dtype, ...] | None = tuple(STORED)

    def __init__(self, open_memory: OpenMemory, world_size: int, *, lanes: int = 16, **options: Any) -> None:
        super().__init__(open_memory, world_size, **options)
        self._results = Results(TritonSlot, self.device)
        self._launches = Launches(self, lanes=lanes)

    def slot_of(self, source_token_LN: Tensor) -> TritonSlot | None:
        """See `LowLatencyExchange`."""
        return self._results.slot_of(source_token_LN)

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """See `LowLatencyExchange`."""
        return self._find((topk_TK < -1) | (topk_TK >= num_experts)) if self.is_blocking else -1

    def find_other_choice(self, topk_TK: Tensor, slot: DispatchSlot) -> int:
        """See `LowLatencyExchange`."""
        if not self.is_blocking:
            return -1
        return self._find((topk_TK != -1) & (topk_TK != slot.sent_TK[: topk_TK.shape[0]]))

    def post_dispatch(
        self,
        shape: LowLatencyShape,
        x_TH: Tensor,
        topk_TK: Tensor,
        *,
        round_scale: bool,
        may_wait: bool,
        stats_L: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[TritonSlot, Posted]:
        """See `LowLatencyExchange`."""
        self._begin(DispatchContents(shape=shape, has_remote=self.has_remote).num_bytes)
        slot = self._results.next_slot(shape)
        slot.num_tokens = x_TH.shape[0]
        self._launches.send_rows(shape, slot.tables, x_TH, topk_TK, round_scale=round_scale)
        deliver = partial(self._launches.deliver_rows, slot, stats_L)
        return slot, self._post("dispatch", shape, deliver, waited_R)

    def post_combine(
        self,
        slot: DispatchSlot,
        y_LNH: Tensor,
        topk_TK: Tensor,
        weights_TK: Tensor,
        *,
        may_wait: bool,
        out_TH: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[Tensor, Posted]:
        """See `LowLatencyExchange`."""
        assert isinstance(slot, TritonSlot), "slots come from this exchange"
        shape, tables = slot.shape, slot.tables
        self._begin(CombineContents(shape=shape, dtype=y_LNH.dtype, has_remote=self.has_remote).num_bytes)
        if out_TH is None:
            out_TH = self._results.next_output(shape, y_LNH.dtype, topk_TK.shape[0])
        self._launches.send_answers(shape, tables, y_LNH)
        add_up = partial(self._launches.sum_answers, shape, tables, topk_TK, weights_TK, out_TH)
        return out_TH, self._post(f"combine of {y_LNH.dtype}", shape, add_up, waited_R)

    @staticmethod
    def _find(is_bad_TK: Tensor) -> int:
        bad = is_bad_TK.flatten().nonzero()
        return int(bad[0]) if bad.numel() else -1
