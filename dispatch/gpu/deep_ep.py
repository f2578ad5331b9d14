"""The installed DeepEP as the service's transport between GPUs: `--all2all-backend deep_ep`.

A thin adapter over `deep_ep.Buffer` (DeepEP 1.x to 2.1; 2.5 has no `Buffer` any more). Its limits apply: bfloat16, its
list of hidden sizes and rank counts, and the same number of slots on every rank.
Decode steps use its low-latency calls. Their combine sums in the order of the choices, as WideEP does. Its normal combine
sums per rank before it sends, which changes with the placement. So every (token, choice) is sent as a separate token,
comes back unsummed and is summed here. This gives the same bits as all other transports, but dispatch copies a token per
choice instead of per rank. An expert's rows are in order of arrival; no row's result depends on it.
DeepEP cannot report bad arguments to peers: they wait until its own timeout. The bytes that it sends are not counted here.

Tested with `dispatch.Buffer`, which has the same interface, in its place; never run with DeepEP itself.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, R ranks, L slots per rank, M most tokens of a rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch import fp8
from dispatch.dispatched import Check, Launches, no_errors, nothing
from dispatch.errors import DispatchError, WireUnavailable
from dispatch.faces.config import NVL_PEERS
from dispatch.faces.installed import load_package
from dispatch.gpu.dispatcher import DeviceDispatcher
from dispatch.gpu.kernels.pairs import PairOrders, combine_pairs
from dispatch.row_formats import describe_rows

NO_LABELS = "DeepEP carries no labels, so the start refuses adapters with it"


def open_deep_ep(
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    slots_per_rank: int,
    rows: str = "auto",
    module: Any = None,
) -> DeviceDispatcher:
    """Open a dispatcher over DeepEP. The first dispatch, which is collective, opens its memory.

    Args:
        group: A group in which DeepEP can connect.
        device: Device of the tokens.
        slots_per_rank: Equal on all ranks.
        rows: A name of `row_formats`.
        module: Stand-in for the package (default: import it).

    Raises:
        WireUnavailable: DeepEP is not installed, or is a version without `Buffer`.
    """
    module = module or load_package()
    if not hasattr(module, "Buffer"):
        version = getattr(module, "__version__", "an unknown version")
        raise WireUnavailable(
            f"deep_ep is installed as {version}, which has no Buffer; install DeepEP 1.x to 2.1, or use auto or nccl"
        )
    buffers = _Buffers(module, group, slots_per_rank, is_fp8=rows == "fp8")
    return DeviceDispatcher(
        _Normal(buffers, device),
        _LowLatency(buffers),
        world_size=dist.get_world_size(group),
        device=device,
        row_format=describe_rows(rows),
        name="deep_ep",
        reason="it was requested",
    )


class _Received(NamedTuple):
    """`ReceivedPairs` of DeepEP."""

    x_NH: Tensor
    row_P: Tensor
    slot_offsets: Tensor
    num_pairs: int
    label_N: Tensor | None = None


class _Buffers:
    """DeepEP's buffer, reopened if a call needs more memory. All ranks see the same sizes, so all reopen it together."""

    def __init__(self, module: Any, group: dist.ProcessGroup, slots_per_rank: int, *, is_fp8: bool) -> None:
        self._module, self._group = module, group
        self.world_size, self.slots_per_rank, self.is_fp8 = dist.get_world_size(group), slots_per_rank, is_fp8
        self.num_slots = self.world_size * slots_per_rank
        self._buffer: Any = None
        self._room = (0, 0)  # most tokens of low-latency mode, hidden
        self._is_clean = True

    def normal(self, hidden: int) -> Any:
        """Return the buffer for a normal-mode call. Low-latency mode must clean its memory afterwards."""
        buffer = self._open(0, hidden)
        self._is_clean = False
        return buffer

    def low_latency(self, max_tokens: int, hidden: int) -> Any:
        """Return the buffer for a low-latency call."""
        buffer = self._open(max_tokens, hidden)
        if not self._is_clean:
            buffer.clean_low_latency_buffer(max_tokens, hidden, self.num_slots)
            self._is_clean = True
        return buffer

    def close(self) -> None:
        """Release the buffer. May be called twice."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None

    def _open(self, max_tokens: int, hidden: int) -> Any:
        room = max(self._room[0], max_tokens), max(self._room[1], hidden)
        if self._buffer is None or room != self._room:
            self.close()
            self._room, self._is_clean = room, True
            self._buffer = self._module.Buffer(
                self._group, *self._sizes(*room), low_latency_mode=True, num_qps_per_rank=self.slots_per_rank,
                explicitly_destroy=True,
            )  # fmt: skip
        return self._buffer

    def _sizes(self, max_tokens: int, hidden: int) -> tuple[int, int]:
        """Return the bytes that DeepEP needs for peers over NVLink and over the network."""
        kind, R, row_bytes = self._module.Buffer, self.world_size, 2 * hidden
        configs = (kind.get_dispatch_config(R), kind.get_combine_config(R))
        near = max(config.get_nvl_buffer_size_hint(row_bytes, R) for config in configs)
        far = max(config.get_rdma_buffer_size_hint(row_bytes, R) for config in configs)
        if max_tokens:
            far = max(far, kind.get_low_latency_rdma_size_hint(max_tokens, hidden, R, self.num_slots))
        return near, far


class _DeepEpPairs:
    """Common part of both exchanges."""

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers
        # Across hosts, normal mode uses memory that low-latency mode must clean; a replay would not clean it.
        self.is_replayable = buffers.world_size <= NVL_PEERS

    @property
    def waited_ns(self) -> tuple[int, int]:
        """Zero: the times are unknown."""
        return 0, 0

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return zeros: the sizes are unknown."""
        return [0] * self._buffers.world_size, [0] * self._buffers.world_size

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """Do nothing: DeepEP cannot report it to peers."""

    def interrupt(self, error: DispatchError) -> None:
        """Do nothing: DeepEP has no such call, and waits end at its own timeout."""

    def begin_check(self) -> Check:
        """DeepEP ends the process on errors."""
        return no_errors

    def close(self) -> None:
        self._buffers.close()


class _Normal(_DeepEpPairs):
    """Normal mode. Every choice travels as a separate token."""

    def __init__(self, buffers: _Buffers, device: torch.device) -> None:
        super().__init__(buffers)
        self._orders = PairOrders(buffers.slots_per_rank, device)

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> "_Received":
        """This call waits for the device."""
        assert label_T is None, NO_LABELS
        meanwhile()
        buffers, (T, K) = self._buffers, slots_TK.shape
        self._buffer = buffers.normal(x_TH.shape[1])
        self._slots_TK, choice = slots_TK, slots_TK.view(T * K, 1)
        per_rank, per_node, per_slot, is_in_rank, _ = self._buffer.get_dispatch_layout(
            choice, buffers.num_slots
        )
        x = x_TH.repeat_interleave(K, dim=0)
        weights = torch.ones(T * K, 1, dtype=torch.float32, device=x.device)  # choices need weights
        received, local, _, _, self._handle, event = self._buffer.dispatch(
            tuple(fp8.quantise_fp8(x)) if buffers.is_fp8 else x, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_slot,
            topk_idx=choice, topk_weights=weights, async_finish=True,
        )  # fmt: skip
        event.current_stream_wait()
        x_NH = fp8.dequantise_fp8(received[0], received[1], x_TH.dtype) if buffers.is_fp8 else received
        self._order = self._orders.order(local.long().contiguous())
        return _Received(x_NH, self._order.row_P, self._order.slot_offsets, x_NH.shape[0])

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        y_NH = y_PH[self._order.pair_of_choice_NK.view(-1).long()]
        answers, _, event = self._buffer.combine(y_NH, self._handle, async_finish=True)
        event.current_stream_wait()
        at = torch.arange(answers.shape[0], device=answers.device).view(self._slots_TK.shape)
        combine_pairs(answers, torch.where(self._slots_TK >= 0, at, -1), weights_TK, out_TH, added_TH)


class _LowLatency(_DeepEpPairs):
    """DeepEP's low-latency calls. Torch operators that do not block the host convert its blocks to pairs and back."""

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> "_Received":
        assert label_T is None, NO_LABELS
        buffers, L, K = self._buffers, self._buffers.slots_per_rank, slots_TK.shape[1]
        self._buffer, self._slots_TK = buffers.low_latency(capacity, x_TH.shape[1]), slots_TK
        received, count_L, self._handle, _, receive = self._buffer.low_latency_dispatch(
            x_TH, slots_TK, capacity, buffers.num_slots, use_fp8=buffers.is_fp8, return_recv_hook=True
        )
        meanwhile()
        receive()
        x_LNH = fp8.dequantise_fp8(received[0], received[1], x_TH.dtype) if buffers.is_fp8 else received
        N, num_pairs = x_LNH.shape[1], x_LNH.shape[1] * min(K, L)
        offsets = torch.zeros(L + 1, dtype=torch.int64, device=x_TH.device)
        torch.cumsum(count_L, 0, out=offsets[1:])
        pair = torch.arange(num_pairs, device=x_TH.device)
        slot_P = torch.searchsorted(offsets[1:], pair, right=True).clamp(max=L - 1)
        is_pair = pair < offsets[-1]
        at_P = slot_P * N + pair - offsets[slot_P]
        self._shape, self._target_P = x_LNH.shape, torch.where(is_pair, at_P, L * N)
        return _Received(x_LNH.view(L * N, -1), torch.where(is_pair, at_P, 0), offsets, num_pairs)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        L, N, H = self._shape
        y = y_PH.new_empty(L * N + 1, H)  # the last row takes rows that are not answers
        y.index_copy_(0, self._target_P, y_PH)
        _, _, receive = self._buffer.low_latency_combine(
            y[:-1].view(L, N, H),
            self._slots_TK,
            weights_TK.float(),
            self._handle,
            out=out_TH,
            return_recv_hook=True,
        )
        receive()
        if added_TH is not None:
            out_TH.add_(added_TH)
