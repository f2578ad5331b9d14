"""Dispatch and combine: tokens go to the ranks that hold their slots, answers come home and are summed.

The service's one way to move tokens, under every face. It ties the layout's compiled passes to a transport's windows
and keeps the memory: buffers grow and are never given back, so a call allocates nothing but what it returns.
It knows slots, not experts or placements, and keeps no process group: a new membership epoch gets a new Dispatcher.

Idea: DeepEP (one copy of a token per rank; low-latency combine sums in top-k order at the source); see `layout`.

Legend: T tokens of this rank, K choices, H hidden, N rows received, P pairs, R ranks, S slots per rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dispatch import cpu_kernels as kernels
from dispatch import layout
from dispatch.buffers import GrowingBuffer
from dispatch.errors import RanksDisagree
from dispatch.native import compile_all
from dispatch.transport import RankTable, Transport

_SUMS = {torch.float32: kernels.sum_answers_float32, torch.bfloat16: kernels.sum_answers_bfloat16}


class Handle(NamedTuple):
    """What combine needs of its dispatch. Valid until the next dispatch of the same Dispatcher."""

    call: int
    num_tokens: int
    num_choices: int
    hidden: int
    dtype: torch.dtype
    num_pairs: int


class Dispatched(NamedTuple):
    """What a rank received. Every tensor is overwritten by the next dispatch; none may be written to."""

    x_NH: Tensor  # received rows, contiguous, one per (token, this rank), ordered by source rank, then source token
    row_P: Tensor  # int64: the row of each pair, pairs ordered by local slot, then source rank, token, choice
    slot_offsets: Tensor  # int64 [S+1]: the pairs of local slot s are [offsets[s], offsets[s+1])
    handle: Handle


class Dispatcher:
    """One rank's end of the exchange. Calls are collective, in the same order on all ranks.

    Args:
        transport: taken over; `close` closes it.
        slots_per_rank: S; physical slot p is local slot p % S of rank p // S.
    """

    def __init__(self, transport: Transport, *, slots_per_rank: int) -> None:
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank is {slots_per_rank}; it must be at least 1")
        self.transport = transport
        self.slots_per_rank = slots_per_rank
        R = transport.world_size
        self._shape = (slots_per_rank, R, transport.rank)
        self._counts = torch.zeros(kernels.NUM_TABLES, R, dtype=torch.int64)
        self._tables = self._counts.data_ptr()
        self._send_bytes, self._answer_send, self._answer_recv = RankTable(R), RankTable(R), RankTable(R)
        self._send_at, self._recv_at = transport.send_addresses.address, transport.recv_addresses.address
        self._slot_offsets = torch.zeros(slots_per_rank + 1, dtype=torch.int64)
        self._offsets_at = self._slot_offsets.data_ptr()
        self._rows, self._scratch = GrowingBuffer(torch.uint8), GrowingBuffer(torch.uint8)
        self._row_of_pair, self._pair_of_answer = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        self._choices, self._own_slots = GrowingBuffer(torch.int32), GrowingBuffer(torch.int32)
        self._own_tokens = GrowingBuffer(torch.int64)
        self._call = 0
        compile_all(*kernels.KERNELS)

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor) -> Dispatched:
        """Send each token once to every rank that holds one of its choices. Collective.

        Args:
            x_TH: any floating dtype, CPU; T may be 0 and may differ between ranks, H, K and dtype may not.
            slots_TK: int64, physical slots in [0, R*S), -1 for no choice; a slot may repeat within a token.

        Returns:
            Views of this object's buffers (for one rank whose tokens all have a choice, x_NH is `x_TH`).

        Raises:
            ValueError: a bad argument, before anything is sent.
            PeerLost, DispatchTimeout, RanksDisagree: the transport is of no more use.
        """
        self._check_dispatch(x_TH, slots_TK)
        x_TH, slots_TK = x_TH.contiguous(), slots_TK.contiguous()
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        S, R, rank = self._shape
        row_bytes = H * x_TH.element_size()
        x, slots = x_TH.data_ptr(), slots_TK.data_ptr()
        choices, own_tokens = self._choices.reserve(2 * T * K), self._own_tokens.reserve(T)
        bad = kernels.plan(
            slots, T, K, S, R, rank, row_bytes, self._tables, self._send_bytes.address, choices
        )
        if bad >= 0:
            self._refuse_slot(slots_TK, bad)
        self._call += 2
        own_slots = self._own_slots.reserve(T * K)
        self.transport.open_windows(self._send_bytes)
        kernels.pack(
            x,
            row_bytes,
            slots,
            T,
            K,
            S,
            R,
            rank,
            self._tables,
            self._send_at,
            own_tokens,
            own_slots,
            self._call,
        )
        self.transport.exchange(self._send_bytes, None)
        N, P, stranger = kernels.read_headers(
            row_bytes, K, S, R, rank, self._tables, self._recv_at, self._call
        )
        if stranger >= 0:
            self._refuse_peer(stranger, "dispatch", f"H={H}, K={K}, {x_TH.dtype}, slots per rank {S}")
        row_of_pair, pair_of_answer = self._row_of_pair.reserve(P), self._pair_of_answer.reserve(P)
        kernels.order_pairs(
            K,
            S,
            R,
            rank,
            self._tables,
            self._recv_at,
            own_slots,
            row_of_pair,
            P,
            self._offsets_at,
            pair_of_answer,
        )
        if R == 1 and N == T:
            x_NH = x_TH
        else:
            rows = self._rows.reserve(N * row_bytes)
            kernels.unpack(x, row_bytes, K, R, rank, self._tables, self._recv_at, own_tokens, rows)
            x_NH = self._rows.view(N * row_bytes).view(x_TH.dtype).view(N, H)
        handle = Handle(self._call, T, K, H, x_TH.dtype, P)
        return Dispatched(x_NH, self._row_of_pair.view(P), self._slot_offsets, handle)

    def combine(self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the answers home and sum them. Collective.

        Args:
            y_PH: one unweighted row per pair, in pair order, in the dtype of x.
            weights_TK: this rank's weights, any floating dtype; what stands beside a -1 choice is not read.
            dispatched: what the last `dispatch` returned.

        Returns:
            A new [T, H] in the dtype of x: the sum over k = 0..K-1 of weight times row, multiplied, then added, in
            float32 (float64 for float64) in that order, rounded once. Zeros for a token without any choice.

        Raises:
            as `dispatch`.
        """
        handle = dispatched.handle
        self._check_combine(y_PH, weights_TK, handle)
        y_PH, T, K, H = y_PH.contiguous(), handle.num_tokens, handle.num_choices, handle.hidden
        _, R, rank = self._shape
        row_bytes, y = H * y_PH.element_size(), y_PH.data_ptr()
        kernels.size_answers(
            row_bytes, R, rank, self._tables, self._answer_send.address, self._answer_recv.address
        )
        self.transport.open_windows(self._answer_send)
        answers, call = self._pair_of_answer.address, handle.call + 1
        kernels.pack_answers(y, row_bytes, R, rank, self._tables, self._send_at, answers, call)
        self.transport.exchange(self._answer_send, self._answer_recv)
        stranger = kernels.check_answers(row_bytes, R, rank, self._recv_at, call)
        if stranger >= 0:
            self._refuse_peer(stranger, "combine", f"H={H}, {y_PH.dtype}")
        out_TH = torch.empty(T, H, dtype=handle.dtype)
        if handle.dtype not in _SUMS:
            return self._sum_any(y_PH, weights_TK, handle)
        if weights_TK.dtype != torch.float32:
            weights_TK = weights_TK.float()
        weights_TK = weights_TK.contiguous()
        _SUMS[handle.dtype](
            y, weights_TK.data_ptr(), self._choices.address, T, K, H, R, rank, self._tables,
            self._recv_at, answers, self._scratch.reserve(8 * H), out_TH.data_ptr(),
        )  # fmt: skip
        return out_TH

    def close(self) -> None:
        """Close the transport; peers that wait for this rank get PeerLost. Local; may be called twice."""
        self.transport.close()

    def _sum_any(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle) -> Tensor:
        """Sum with the oracle, for types without a compiled sum."""
        _, R, rank = self._shape
        T, K, H = handle.num_tokens, handle.num_choices, handle.hidden
        row_bytes = H * y_PH.element_size()
        gathered = self._scratch.reserve(T * K * row_bytes)
        kernels.gather_answers(
            y_PH.data_ptr(), row_bytes, self._choices.address, T, K, R, rank, self._tables,
            self._recv_at, self._pair_of_answer.address, gathered,
        )  # fmt: skip
        answer_QH = self._scratch.view(T * K * row_bytes).view(y_PH.dtype).view(T * K, H)
        has_choice_TK = self._choices.view(2 * T * K).view(T, K, 2)[:, :, 0] >= 0
        position_TK = torch.where(has_choice_TK, torch.arange(T * K).view(T, K), layout.NO_CHOICE)
        return layout.sum_answers(answer_QH, position_TK, weights_TK, handle.dtype)

    def _check_dispatch(self, x_TH: Tensor, slots_TK: Tensor) -> None:
        if x_TH.dim() != 2 or not x_TH.is_floating_point() or x_TH.device.type != "cpu":
            raise ValueError(
                f"x_TH is {_describe(x_TH)}; it must be a 2-dimensional floating tensor on the CPU"
            )
        if slots_TK.dim() != 2 or slots_TK.dtype != torch.int64 or slots_TK.device.type != "cpu":
            raise ValueError(
                f"slots_TK is {_describe(slots_TK)}; it must be a 2-dimensional int64 tensor on the CPU"
            )
        if slots_TK.shape[0] != x_TH.shape[0]:
            raise ValueError(
                f"slots_TK has {slots_TK.shape[0]} tokens and x_TH {x_TH.shape[0]}; they must be equal"
            )
        if x_TH.shape[1] < 1 or slots_TK.shape[1] < 1:
            raise ValueError(f"H is {x_TH.shape[1]} and K {slots_TK.shape[1]}; both must be at least 1")

    def _check_combine(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle) -> None:
        if handle.call != self._call:
            raise ValueError("dispatched is not of the last dispatch; its buffers are overwritten")
        if (
            y_PH.shape != (handle.num_pairs, handle.hidden)
            or y_PH.dtype != handle.dtype
            or y_PH.device.type != "cpu"
        ):
            wanted = f"{handle.dtype} [{handle.num_pairs}, {handle.hidden}] on the CPU"
            raise ValueError(f"y_PH is {_describe(y_PH)}; it must be {wanted}")
        if weights_TK.shape != (handle.num_tokens, handle.num_choices) or not weights_TK.is_floating_point():
            wanted = f"a floating tensor [{handle.num_tokens}, {handle.num_choices}]"
            raise ValueError(f"weights_TK is {_describe(weights_TK)}; it must be {wanted}")

    def _refuse_slot(self, slots_TK: Tensor, index: int) -> None:
        token, choice = divmod(index, slots_TK.shape[1])
        S, R, _ = self._shape
        raise ValueError(
            f"slots_TK[{token}, {choice}] is {int(slots_TK[token, choice])}; it must be -1 or in [0, {R * S}), "
            f"{R} ranks of {S} slots"
        )

    def _refuse_peer(self, peer: int, doing: str, ours: str) -> None:
        raise RanksDisagree(
            f"rank {peer} made another call than rank {self.transport.rank}'s {doing} with {ours}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
