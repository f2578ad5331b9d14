"""The service's low-latency exchange: Triton kernels through symmetric memory, with pairs packed by slot.

The way of messages is `TritonExchange`'s; what differs is where rows and answers lie (`packed_kernels`). After the first
call of a shape nothing is allocated and the host looks at nothing (on a GPU: see `calls`), so that a CUDA graph
can replay a step. Memory that calls of all shapes can share is shared.

Legend: T tokens, K choices, H hidden, M most tokens of a rank, R ranks, L slots per rank, P pairs.
"""

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from dispatch.gpu import packed_kernels as kernels
from dispatch.gpu.calls import TritonCalls
from dispatch.gpu.launches import WARPS, Launches, Tables, groups_of, padded_choices
from dispatch.gpu.memory import STORED, DeviceRoom, as_stored
from dispatch.gpu.symmetric import CombineContents, DispatchContents, OpenMemory
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.meanwhile import Meanwhile, nothing

_TILE = 64  # tokens or pairs that a program looks at at once


class PackedSlot:
    """What a dispatch delivers; overwritten by the next one.

    Attributes:
        shape: of the call.
        tables: what brings the answers home.
        num_pairs: room for pairs: R * M * min(K, L), as a repeated slot of a token is one pair.
        x_NH: [R*M, H], a row for each token of each rank; those that did not come are undefined.
        row_P: int64 [num_pairs], 0 behind the last pair. slot_offsets: int64 [L+1].
    """

    def __init__(
        self, shape: LowLatencyShape, device: torch.device, x_room: DeviceRoom, row_room: DeviceRoom
    ) -> None:
        self.shape = shape
        L, N, M, K = shape.experts_per_rank, shape.rows_per_expert, shape.max_tokens, shape.choices
        self.num_pairs = N * min(K, L)
        self.x_NH = x_room.take(N, shape.hidden)
        self.row_P = row_room.take(self.num_pairs)
        self.slot_offsets = torch.zeros(L + 1, dtype=torch.int64, device=device)
        self.tables = Tables(
            sent_TK=torch.zeros(M, K, dtype=torch.int64, device=device),
            count_L=torch.zeros(L, dtype=torch.int32, device=device),
            layout_range_LR=torch.zeros(L, shape.world_size, dtype=torch.int64, device=device),
            source_token_LN=torch.zeros(L, N, dtype=torch.int32, device=device),
            place_LN=torch.zeros(L, N, dtype=torch.int32, device=device),
            choice_LN=torch.zeros(L, N, dtype=torch.int32, device=device),
        )


class PackedExchange(TritonCalls):
    """One rank's end; see `TritonCalls`. Calls are collective, in the same order on all ranks.

    Args:
        open_memory, world_size, options: of `TritonCalls`.
        lanes: programs per slot that copy answers.

    Attributes:
        sent_bytes, answer_bytes: int64 [R] on the device, what went to each rank so far.
        dispatch_ns, combine_ns: likewise, nanoseconds waited for each rank.
    """

    def __init__(self, open_memory: OpenMemory, world_size: int, *, lanes: int = 16, **options: Any) -> None:
        super().__init__(open_memory, world_size, **options)
        self._launches = Launches(self, lanes=lanes)
        self._slots: dict[LowLatencyShape, PackedSlot] = {}
        self._rows = {dtype: DeviceRoom(dtype, self.device) for dtype in STORED}
        self._pairs = DeviceRoom(torch.int64, self.device)
        counters = [torch.zeros(world_size, dtype=torch.int64, device=self.device) for _ in range(4)]
        self.sent_bytes, self.answer_bytes, self.dispatch_ns, self.combine_ns = counters

    def dispatch(
        self, shape: LowLatencyShape, x_TH: Tensor, slots_TK: Tensor, meanwhile: Meanwhile = nothing
    ) -> PackedSlot:
        """Send each token once to every rank that holds one of its choices.

        Args:
            shape: equal on all ranks.
            x_TH: [T <= M, H], contiguous, of the shape's dtype. slots_TK: int64 [T, K], contiguous; what is not in
                [0, R*L) is no choice.
            meanwhile: launched behind what sends and before what waits.

        Raises:
            PeerRefused, RanksDisagree, DispatchTimeout: where the host waits; else `check` does.
        """
        self._begin(DispatchContents(shape=shape, has_remote=self.has_remote).num_bytes)
        if shape not in self._slots:
            self._slots[shape] = PackedSlot(shape, self.device, self._rows[shape.dtype], self._pairs)
        slot = self._slots[shape]
        self._launches.send_rows(shape, slot.tables, x_TH, slots_TK, round_scale=False)
        posted = self._post("packed dispatch", shape, partial(self._deliver, slot), self.dispatch_ns)
        meanwhile()
        posted()
        return slot

    def combine(
        self,
        slot: PackedSlot,
        y_PH: Tensor,
        weights_TK: Tensor,
        out_TH: Tensor,
        meanwhile: Meanwhile = nothing,
    ) -> None:
        """Bring the answers home and sum them in the order of the choices, in float32 with one rounding.

        Args:
            slot: of the last dispatch.
            y_PH: [num_pairs, H], contiguous; what is behind the last pair is not read.
            weights_TK: float32 [T, K], contiguous. out_TH: [T, H], contiguous, which is written to.
            meanwhile: as in `dispatch`.

        Raises:
            as `dispatch`.
        """
        shape, tables = slot.shape, slot.tables
        self._begin(CombineContents(shape=shape, dtype=y_PH.dtype, has_remote=self.has_remote).num_bytes)
        self._launches.send_answers(shape, tables, y_PH, slot.slot_offsets)
        add_up = partial(self._launches.sum_answers, shape, tables, tables.sent_TK, weights_TK, out_TH)
        posted = self._post("packed combine", shape, add_up, self.combine_ns)
        meanwhile()
        posted()

    def _deliver(self, slot: PackedSlot) -> None:
        """Order the pairs of what has arrived, and copy its rows."""
        shape, tables, contents = slot.shape, slot.tables, DispatchContents(shape=slot.shape)
        R, L, M, K = shape.world_size, shape.experts_per_rank, shape.max_tokens, shape.choices
        k_pad = padded_choices(shape)
        self._launches.place_rows(shape, tables, None)
        kernels.pack_pairs[(L + 1 + R,)](
            tables.count_L, tables.place_LN, tables.layout_range_LR, tables.sent_TK, slot.slot_offsets, slot.row_P,
            self.sent_bytes, self.answer_bytes, self.rank, slot.num_pairs, R=R, L=L,
            L_PAD=triton.next_power_of_2(L), M=M, K=K, K_PAD=k_pad, TILE=min(_TILE, triton.next_power_of_2(M)),
            ROW_BYTES=contents.row_bytes, ANSWER_BYTES=shape.answer_bytes, num_warps=4,
        )  # fmt: skip
        kernels.deliver_places[(R * M,)](
            self._launches.contents, self._launches.contents + contents.rows_at, self.arrived, *self._launches.half,
            as_stored(slot.x_NH), R=R, M=M, K=K, K_PAD=k_pad, H=shape.hidden, ROW_BYTES=contents.row_bytes,
            SCALES_AT=shape.scales_at, GROUPS=groups_of(shape), IS_FP8=shape.is_fp8,
            IS_BFLOAT16=shape.dtype == torch.bfloat16, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
