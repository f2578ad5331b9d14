"""Low-latency calls by Triton kernels through symmetric memory, for the service and for DeepEP's interface.

Both send the same messages with the same kernels (`kernels.low_latency`). They differ in the position of rows on the rank that
computes. The service's experts read pairs packed by slot. DeepEP's interface has a block of R*M rows for each expert,
with each token once. After the first call of a shape nothing is allocated, and on a GPU the host reads nothing, so a CUDA
graph can replay a step. See `calls` for the consequences; for example, choices out of range are ignored there.

Interpreted across processes, compiled for sm_90, and run by two ranks on one H200 (two ranks on two GPUs have not run).

Legend: as in `kernels.low_latency`; T tokens, P pairs.
"""

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from dispatch import fp8
from dispatch.dispatched import Launches, nothing
from dispatch.gpu.calls import DeviceCalls, kind_of
from dispatch.gpu.kernels import low_latency as kernels
from dispatch.gpu.kernels.casts import STORED, as_stored
from dispatch.gpu.kernels.pairs import SLOT_BITS, DeviceRoom, chunk_of, order_pairs
from dispatch.gpu.symmetric import CombineContents, DispatchContents, OpenMemory
from dispatch.low_latency.calls import (
    BlockCombine,
    BlockDispatch,
    HeldDispatch,
    LowLatencyShape,
    Posted,
    Results,
)

_TILE_GROUPS = 8  # blocks of 128 channels that a program casts or sums at once: 1,024 elements
_WARPS = 8
_TOKENS = 64  # tokens per tile of a program that reads choices
# Calls of the service, for messages and flags.
_DISPATCH, _LABELLED, _COMBINE = "dispatch of pairs", "dispatch of labelled pairs", "combine of pairs"


class DeviceExchange(DeviceCalls):
    """Sends rows and answers; see `DeviceCalls`. Calls are collective, in the same order on all ranks.

    Attributes:
        sent_bytes, answer_bytes: int64 [R] on the device, bytes sent to each other rank so far.
    """

    def __init__(self, open_memory: OpenMemory, world_size: int, **options: Any) -> None:
        super().__init__(open_memory, world_size, **options)
        self.sent_bytes = torch.zeros(world_size, dtype=torch.int64, device=self.device)
        self.answer_bytes = torch.zeros_like(self.sent_bytes)

    @property
    def _contents(self) -> int:
        """Address of a call's contents in the first half of this rank's memory."""
        return self.memory.base + self.layout.contents_at

    @property
    def _half(self) -> tuple[Tensor, int]:
        """Arguments that select a call's half in kernels: its number, and the bytes of a half."""
        return self.calls, self.layout.half_bytes

    def _send_rows(
        self,
        doing: str,
        shape: LowLatencyShape,
        x_TH: Tensor,
        topk_TK: Tensor,
        sent_TK: Tensor,
        *,
        label_T: Tensor | None = None,
        round_scale: bool = False,
    ) -> None:
        """Begin a dispatch, and write this rank's rows to its peers. `doing` is the one of `_post`."""
        contents = DispatchContents(shape=shape, has_remote=self.has_remote)
        begins = self._begin(contents.num_bytes, shape.max_tokens)
        at = self.layout.contents_at
        kernels.send_rows[(shape.max_tokens,)](
            as_stored(x_TH), topk_TK, label_T, sent_TK, self.sent_bytes, self.memory.peers, self.mask, self.calls, self.ended,
            x_TH.shape[0], self.rank, self.layout.half_bytes, at, at + contents.rows_at, at + contents.staging_at,
            kind_of(doing, shape),
            R=shape.world_size, L=shape.experts_per_rank, M=shape.max_tokens, K=shape.choices, K_PAD=_padded(shape),
            H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at, GROUPS=_groups(shape),
            IS_FP8=shape.is_fp8, ROUND_SCALE=round_scale, IS_BFLOAT16=shape.dtype == torch.bfloat16,
            BEGINS=begins, **self.memory.reach, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _send_answers(self, doing: str, shape: LowLatencyShape, y: Tensor, at_NK: Tensor) -> None:
        """Begin a combine and write this rank's answers to its peers: for each choice, row at_NK[n, k] of `y`.

        `doing` is the one of `_post`.
        """
        contents = CombineContents(shape=shape, dtype=y.dtype, has_remote=self.has_remote)
        begins = self._begin(contents.num_bytes, shape.rows_per_expert * shape.choices)
        at = self.layout.contents_at
        kernels.send_answers[(shape.rows_per_expert, shape.choices)](
            as_stored(y), at_NK, self.answer_bytes, self.memory.peers, self.mask, self.calls, self.ended, self.rank,
            self.layout.half_bytes, at, at + contents.staging_at, kind_of(doing, shape), R=shape.world_size,
            M=shape.max_tokens, K=shape.choices, H=shape.hidden, ANSWER_BYTES=contents.answer_bytes, BEGINS=begins,
            **self.memory.reach, num_warps=_WARPS,
        )  # fmt: skip

    def _sum_answers(
        self,
        shape: LowLatencyShape,
        topk_TK: Tensor,
        sent_TK: Tensor,
        weights_TK: Tensor,
        out_TH: Tensor,
        added_TH: Tensor | None = None,
    ) -> None:
        """Write the sums of the received answers to out_TH, plus `added_TH` after their rounding."""
        T, tile = out_TH.shape[0], _groups(shape) * fp8.BLOCK
        if T == 0:
            return
        kernels.sum_answers[(T, triton.cdiv(shape.hidden, tile))](
            self._contents, self.arrived, *self._half, topk_TK, sent_TK, as_stored(weights_TK),
            None if added_TH is None else as_stored(added_TH), as_stored(out_TH), R=shape.world_size, L=shape.experts_per_rank, K=shape.choices, H=shape.hidden,
            ANSWER_BYTES=CombineContents(shape=shape, dtype=out_TH.dtype).answer_bytes, TILE=tile,
            IS_BFLOAT16=out_TH.dtype == torch.bfloat16, HAS_BFLOAT16_WEIGHTS=weights_TK.dtype == torch.bfloat16,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


class PairResult:
    """Result of a dispatch of the service. The next dispatch overwrites it.

    Attributes:
        shape: Shape of the call.
        num_pairs: Room for pairs: R * M * K.
        x_NH: [R*M, H], a row for each token of each rank; rows without a choice on this rank are undefined.
        row_P: int64 [num_pairs], undefined after the last pair. slot_offsets: int64 [L+1].
        at_NK: int32, the pair of each choice. sent_TK: int64 [M, K], the choices of this rank's tokens.
        label_N: int64, the labels of the rows; undefined for rows without a choice. None if there are no labels.
    """

    def __init__(
        self, shape: LowLatencyShape, x_NH: Tensor, row_P: Tensor, label_N: Tensor | None = None
    ) -> None:
        self.label_N = label_N
        self.shape, self.x_NH, self.row_P, self.num_pairs = shape, x_NH, row_P, row_P.shape[0]
        L, N, M, K = shape.experts_per_rank, shape.rows_per_expert, shape.max_tokens, shape.choices
        self.slot_offsets = torch.zeros(L + 1, dtype=torch.int64, device=row_P.device)
        self.at_NK = torch.zeros(N, K, dtype=torch.int32, device=row_P.device)
        self.sent_TK = torch.zeros(M, K, dtype=torch.int64, device=row_P.device)


class LowLatencyPairs(DeviceExchange):
    """The service's low-latency mode: a `PairExchange` with calls that a CUDA graph may replay.

    Args:
        open_memory, world_size, options: Arguments of `DeviceCalls`.
        slots_per_rank: L.
        is_fp8: Whether rows travel in FP8.
    """

    is_replayable = True

    def __init__(
        self,
        open_memory: OpenMemory,
        world_size: int,
        *,
        slots_per_rank: int,
        is_fp8: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(open_memory, world_size, **options)
        self._slots_per_rank, self._is_fp8 = slots_per_rank, is_fp8
        self._results: dict[tuple[LowLatencyShape, bool], PairResult] = {}  # by whether there are labels
        self._rows = {dtype: DeviceRoom(dtype, self.device) for dtype in STORED}  # shared by all shapes
        self._pairs, self._labels = (DeviceRoom(torch.int64, self.device) for _ in range(2))

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        return self.sent_bytes.tolist(), self.answer_bytes.tolist()

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> PairResult:
        """If the host does not wait, `begin_check` raises the errors."""
        shape = LowLatencyShape(
            world_size=self.world_size, experts_per_rank=self._slots_per_rank, max_tokens=capacity, hidden=x_TH.shape[1],
            choices=slots_TK.shape[1], dtype=x_TH.dtype, is_fp8=self._is_fp8,
        )  # fmt: skip
        key = shape, label_T is not None
        if key not in self._results:
            N = shape.rows_per_expert
            x_NH, row_P = self._rows[shape.dtype].take(N, shape.hidden), self._pairs.take(N * shape.choices)
            self._results[key] = PairResult(
                shape, x_NH, row_P, None if label_T is None else self._labels.take(N)
            )
        result, doing = self._results[key], _DISPATCH if label_T is None else _LABELLED
        self._result = result
        assert label_T is None or self._slots_per_rank < 1 << SLOT_BITS, (
            "more slots than a choice with a label has bits for"
        )
        self._send_rows(doing, shape, x_TH, slots_TK, result.sent_TK, label_T=label_T)
        receive = self._post(doing, shape, partial(self._deliver, result), self.dispatch_ns)
        meanwhile()
        receive()
        return result

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        shape, sent_TK = self._result.shape, self._result.sent_TK
        self._send_answers(_COMBINE, shape, y_PH, self._result.at_NK)
        add_up = partial(self._sum_answers, shape, sent_TK, sent_TK, weights_TK, out_TH, added_TH)
        self._post(_COMBINE, shape, add_up, self.combine_ns)()

    def _deliver(self, result: PairResult) -> None:
        """Order the pairs of the received tokens and copy their rows."""
        shape, contents = result.shape, DispatchContents(shape=result.shape)
        N, L, K = shape.rows_per_expert, shape.experts_per_rank, shape.choices
        chunk, tile = chunk_of(N * K, L)
        order_pairs[(L, triton.cdiv(N * K, chunk))](
            self._contents, self.arrived, *self._half, result.row_P, result.at_NK, result.slot_offsets, N * K, chunk,
            S=L, K=K, R=shape.world_size, PER_SOURCE=shape.max_tokens * K, TILE=tile, HAS_LABELS=result.label_N is not None,
            num_warps=4,
        )  # fmt: skip
        kernels.deliver_rows[(N,)](
            self._contents + contents.rows_at, self._contents, result.at_NK, *self._half, as_stored(result.x_NH), result.label_N, K=K,
            K_PAD=_padded(shape), H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at,
            GROUPS=_groups(shape), IS_FP8=shape.is_fp8, IS_BFLOAT16=shape.dtype == torch.bfloat16, num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


class HeldBlocks(HeldDispatch):
    """Results of a dispatch, with `at_NK`, int32: the row of each choice among all blocks' rows, for the answers."""

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.at_NK = torch.zeros(shape.rows_per_expert, shape.choices, dtype=torch.int32, device=device)


class LowLatencyBlocks(DeviceExchange):
    """DeepEP's low-latency calls (`LowLatencyExchange`). See `DeviceCalls` for the arguments."""

    dtypes: tuple[torch.dtype, ...] | None = tuple(STORED)

    def __init__(self, open_memory: OpenMemory, world_size: int, **options: Any) -> None:
        super().__init__(open_memory, world_size, **options)
        self._results = Results(HeldBlocks, self.device)

    def held_of(self, source_token_LN: Tensor) -> HeldBlocks | None:
        return self._results.held_of(source_token_LN)

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        return self._find((topk_TK < -1) | (topk_TK >= num_experts)) if self.is_blocking else -1

    def find_other_choice(self, topk_TK: Tensor, held: HeldDispatch) -> int:
        if not self.is_blocking:
            return -1
        return self._find((topk_TK != -1) & (topk_TK != held.sent_TK[: topk_TK.shape[0]]))

    def post_dispatch(self, call: BlockDispatch) -> tuple[HeldBlocks, Posted]:
        self.settle()
        shape, held = call.shape, self._results.next_held(call.shape)
        held.num_tokens = call.x_TH.shape[0]
        self._send_rows(
            "dispatch", shape, call.x_TH, call.topk_TK, held.sent_TK, round_scale=call.round_scale
        )
        deliver = partial(self._deliver, held, call.stats_L)
        return held, self._post("dispatch", shape, deliver, call.waited_R)

    def post_combine(self, call: BlockCombine) -> tuple[Tensor, Posted]:
        held, out_TH = call.held, call.out_TH
        assert isinstance(held, HeldBlocks), "it comes from this exchange"
        shape, doing = held.shape, f"combine of {call.y_LNH.dtype}"
        self._send_answers(doing, shape, call.y_LNH, held.at_NK)
        if out_TH is None:
            out_TH = self._results.next_output(shape, call.y_LNH.dtype, call.topk_TK.shape[0])
        add_up = partial(self._sum_answers, shape, call.topk_TK, held.sent_TK, call.weights_TK, out_TH)
        return out_TH, self._post(doing, shape, add_up, call.waited_R)

    def _deliver(self, held: HeldBlocks, stats_L: Tensor | None) -> None:
        shape, contents = held.shape, DispatchContents(shape=held.shape)
        R, L, M, K = shape.world_size, shape.experts_per_rank, shape.max_tokens, shape.choices
        N = shape.rows_per_expert
        kernels.order_blocks[(L, R)](
            self._contents, self.arrived, *self._half, held.at_NK, held.count_L, held.layout_range_LR,
            held.source_token_LN, stats_L, R=R, L=L, M=M, K=K, K_PAD=_padded(shape),
            TILE=min(_TOKENS, triton.next_power_of_2(M)), HAS_STATS=stats_L is not None, num_warps=4,
        )  # fmt: skip
        scales = held.scales
        if scales is not None:
            scales = scales.transpose(1, 2).view(torch.uint8 if shape.is_ue8m0 else torch.int32)
        kernels.deliver_blocks[(N, K)](
            self._contents + contents.rows_at, held.at_NK, *self._half,
            held.x_LNH.view(torch.uint8 if shape.is_fp8 else STORED[shape.dtype]), scales, N=N, K=K, K_PAD=_padded(shape),
            H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at, SCALES=shape.num_scales,
            SCALES_PAD=triton.next_power_of_2(4 * fp8.num_words(shape.hidden)), IS_FP8=shape.is_fp8,
            IS_UE8M0=shape.is_ue8m0, num_warps=_WARPS,
        )  # fmt: skip

    @staticmethod
    def _find(is_bad_TK: Tensor) -> int:
        bad = is_bad_TK.flatten().nonzero()
        return int(bad[0]) if bad.numel() else -1


def _padded(shape: LowLatencyShape) -> int:
    """Return the smallest power of two that is at least K."""
    return int(triton.next_power_of_2(shape.choices))


def _groups(shape: LowLatencyShape) -> int:
    """Return the number of blocks of 128 channels that a program handles at once."""
    return min(_TILE_GROUPS, int(triton.next_power_of_2(fp8.num_blocks(shape.hidden))))
