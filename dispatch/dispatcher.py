"""Dispatch and combine: tokens go to the ranks that hold their slots, answers come home and are summed.

The service's one way to move tokens, under every face. It ties the layout's compiled passes to a wire's windows
and keeps the memory: buffers grow and are never given back, so a call allocates nothing but what it returns, and in
low-latency mode with `out=` nothing at all (see `mode`).
It knows slots, not experts or placements, and keeps no process group: a new membership epoch gets a new Dispatcher.

A bad argument is refused on every rank before anything is sent, and the next call works (`Wire.refuse`). A rank
that the wire masks as lost takes part in nothing: what was chosen there adds nothing.

Idea: DeepEP (one copy of a token per rank; low-latency combine sums in top-k order at the source); see `layout`.

Legend: T tokens of this rank, K choices, H hidden, N rows received, P pairs, R ranks, S slots per rank.
"""

from time import perf_counter_ns
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dispatch import cpu_kernels as kernels
from dispatch import layout
from dispatch.arguments import combine_problem, dispatch_problem, slot_problem
from dispatch.buffers import Workspace
from dispatch.cpu_kernels import message
from dispatch.dispatched import Dispatched, Handle, TokenDispatcher, Traffic, Waits
from dispatch.errors import RanksDisagree
from dispatch.exchange_clock import ExchangeClock
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode
from dispatch.native import compile_all
from dispatch.row_formats import PlainRows, RowFormat
from dispatch.wires.wire import RankTable, Wire

__all__ = ["Dispatched", "Dispatcher", "Handle", "TokenDispatcher", "Traffic"]

_SUMS = {torch.float32: kernels.sum_answers_float32, torch.bfloat16: kernels.sum_answers_bfloat16}
_FIELDS = {
    message.HEADER_ROW_BYTES: "bytes per row",
    message.HEADER_CHOICES: "K",
    message.HEADER_CALL: "call number",
    message.HEADER_SLOTS: "slots per rank",
    message.HEADER_CAPACITY: "capacity of low-latency mode (0: normal)",
    message.HEADER_FORMAT: "code of dtype and row format",
}


class _Call(NamedTuple):
    """One dispatch's arguments, looked at once."""

    x_TH: Tensor
    rows: int  # address of the rows as they travel
    num_tokens: int
    num_choices: int
    hidden: int
    dtype: torch.dtype
    capacity: int


class Dispatcher:
    """One rank's end of the exchange. Calls are collective, in the same order on all ranks.

    Args:
        wire: taken over; `close` closes it.
        slots_per_rank: S; physical slot p is local slot p % S of rank p // S.
        rows: how rows travel (default: as they are); equal on all ranks. Answers always travel as they are.
    """

    is_replayable = False

    def __init__(self, wire: Wire, *, slots_per_rank: int, rows: RowFormat | None = None) -> None:
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank is {slots_per_rank}; it must be at least 1")
        self.wire = wire
        self.slots_per_rank = slots_per_rank
        self._rows = rows or PlainRows()
        self.world_size, self.name, self.reason = wire.world_size, wire.name, wire.reason
        self._shape = (slots_per_rank, wire.world_size, wire.rank)
        self._space = Workspace(slots_per_rank, wire.world_size)
        self._call = 0
        self._dispatch_clock, self._combine_clock = ExchangeClock(), ExchangeClock()
        compile_all(*kernels.KERNELS)

    @property
    def row_format(self) -> str:
        """How rows travel, in words."""
        return self._rows.name

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far."""
        return Traffic(*self._space.sent_bytes())

    @property
    def waits(self) -> Waits:
        """Time in exchanges so far."""
        dispatch, combine = self._dispatch_clock, self._combine_clock
        return Waits(dispatch.total_ns, combine.total_ns, dispatch.wire_ns + combine.wire_ns)

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Bytes that this rank has sent to each rank so far, by dispatches and by combines."""
        return self._space.sent_to_ranks()

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL, *, meanwhile: Meanwhile = nothing
    ) -> Dispatched:
        """Send each token once to every rank that holds one of its choices. Collective.

        Args:
            x_TH: any floating dtype, CPU; T may be 0 and may differ between ranks, H, K and dtype may not.
            slots_TK: int64, physical slots in [0, R*S), -1 for no choice; a slot may repeat within a token.
            mode: equal on all ranks; `low_latency(M)` takes at most M tokens, contiguous.
            meanwhile: called while the rows travel; see there.

        Returns:
            Views of this object's buffers (for one rank whose tokens all have a choice, x_NH is `x_TH`).

        Raises:
            ValueError: a bad argument; all other ranks get PeerRefused. Nothing is sent, the next call works.
            RanksDisagree: H, K, dtype, S or mode differ between ranks; on all ranks, and the next call works.
            PeerLost, DispatchTimeout: the wire is of no more use.
        """
        self._call += 2  # of a refused call too, as on all ranks
        problem = dispatch_problem(x_TH, slots_TK, mode)
        if problem:
            self._refuse(problem)
        x_TH, slots_TK = x_TH.contiguous(), slots_TK.contiguous()
        call = self._send(x_TH, slots_TK, mode.capacity)
        self._travel(self._dispatch_clock, self._space.send_bytes, None, meanwhile)
        x_NH, num_pairs = self._receive(call)
        _, _, T, K, H, dtype, _ = call
        handle = Handle(self._call, T, K, H, dtype, num_pairs)
        return Dispatched(x_NH, self._space.row_of_pair.view(num_pairs), self._space.slot_offsets, handle)

    def combine(
        self,
        y_PH: Tensor,
        weights_TK: Tensor,
        dispatched: Dispatched,
        *,
        out: Tensor | None = None,
        meanwhile: Meanwhile = nothing,
    ) -> Tensor:
        """Bring the answers home and sum them. Collective.

        Args:
            y_PH: one unweighted row per pair, in pair order, in the dtype of x.
            weights_TK: this rank's weights, any floating dtype; what stands beside a -1 choice is not read.
            dispatched: what the last `dispatch` returned.
            out: contiguous [T, H] in the dtype of x to write into; None: a new one.
            meanwhile: called while the answers travel; see there.

        Returns:
            `out`: the sum over k = 0..K-1 of weight times row, multiplied, then added, in float32 (float64 for
            float64) in that order, rounded once. Zeros for a token without any choice.

        Raises:
            as `dispatch`.
        """
        handle = dispatched.handle
        self._check_combine(y_PH, weights_TK, handle, out)
        y_PH = y_PH.contiguous()
        out_TH = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype) if out is None else out
        self._write_answers(y_PH, handle)
        self._travel(self._combine_clock, self._space.answer_send, self._space.answer_recv, meanwhile)
        if handle.dtype in _SUMS:
            stranger = self._sum(y_PH, weights_TK, handle, out_TH)
        else:
            stranger = self._sum_any(y_PH, weights_TK, handle, out_TH)
        if stranger >= 0:
            ours = f"rank {self.wire.rank}'s combine with H={handle.hidden}, {handle.dtype}"
            raise RanksDisagree(f"rank {stranger} made another call than {ours}")
        return out_TH

    def check(self) -> None:
        """See `TokenDispatcher`. Every call says itself what went wrong."""

    def close(self) -> None:
        """Close the wire; peers that wait for this rank get PeerLost. Local; may be called twice."""
        self.wire.close()

    def _send(self, x_TH: Tensor, slots_TK: Tensor, capacity: int) -> _Call:
        """Plan, and write the messages."""
        space, wire, (S, R, rank) = self._space, self.wire, self._shape
        (T, H), K, dtype, slots = x_TH.shape, slots_TK.shape[1], x_TH.dtype, slots_TK.data_ptr()
        room, row_bytes = capacity or T, self._rows.row_bytes(H, dtype)
        rows = self._rows.encode(x_TH, room)
        space.reserve_tokens(room, K)
        mask, sizes, choices = wire.mask.address, space.send_bytes, space.choices.address
        bad = kernels.plan(
            slots, T, K, S, R, rank, space.tables, row_bytes, capacity,
            space.homes_at, mask, sizes.address, choices,
        )  # fmt: skip
        if bad >= 0:
            self._refuse(slot_problem(slots_TK, bad, R, S))
        space.write_header(self._call, row_bytes, K, S, capacity, self._rows.code(dtype))
        wire.open_windows(sizes)
        kernels.pack(
            rows, slots, choices, T, K, S, R, rank, space.tables, space.header_at,
            mask, wire.send_addresses.address, space.own_tokens.address, space.own_slots.address,
        )  # fmt: skip
        return _Call(x_TH, rows, T, K, H, dtype, capacity)

    def _travel(
        self, clock: ExchangeClock, sent: RankTable, received: RankTable | None, meanwhile: Meanwhile
    ) -> None:
        """Exchange the messages; the time of `meanwhile` is not the exchange's."""
        wire, begun_ns = self.wire, perf_counter_ns()
        wire.begin_exchange(sent, received)
        if meanwhile is not nothing:
            left_ns = perf_counter_ns()
            meanwhile()
            begun_ns += perf_counter_ns() - left_ns
        wire.finish_exchange()
        clock.add(perf_counter_ns() - begun_ns)

    def _receive(self, call: _Call) -> tuple[Tensor, int]:
        """Read what came, order its pairs and bring its rows together; return the rows and the number of pairs."""
        space, rows, R = self._space, self._rows, self._shape[1]
        in_place = call.num_tokens if R == 1 and rows.is_plain else -1
        num_rows, num_pairs, row_room, stranger = self._read(call, in_place)
        if stranger >= 0:
            self._disagree(stranger, call)
        if num_pairs > space.pair_of_answer.capacity or row_room < num_rows != in_place:
            space.reserve_pairs(R * call.capacity * call.num_choices or num_pairs)
            rows.reserve(R * call.capacity or num_rows, call.hidden, call.dtype)
            self._read(call, in_place)
        if num_rows == in_place:
            return call.x_TH, num_pairs
        return rows.decode(num_rows, call.hidden, call.dtype), num_pairs

    def _read(self, call: _Call, in_place: int) -> tuple[int, int, int, int]:
        """Take in the messages if there is room; return rows, pairs, room for rows, and a peer that disagrees."""
        space, (S, R, rank) = self._space, self._shape
        rows_at, row_room = self._rows.room(call.hidden, call.dtype)
        num_rows, num_pairs, stranger = kernels.receive(
            space.header_at, call.num_choices, S, R, rank, space.tables, self.wire.recv_addresses.address,
            space.own_slots.address, space.row_of_pair.address, space.offsets_at, space.pair_of_answer.address,
            space.pair_of_answer.capacity, call.rows, space.own_tokens.address, rows_at, row_room, in_place,
        )  # fmt: skip
        return num_rows, num_pairs, row_room, stranger

    def _write_answers(self, y_PH: Tensor, handle: Handle) -> None:
        space, wire, (_, R, rank) = self._space, self.wire, self._shape
        row_bytes, call = handle.hidden * handle.dtype.itemsize, handle.call + 1
        sent, received = space.answer_send, space.answer_recv
        kernels.size_answers(
            row_bytes, R, rank, space.tables, wire.mask.address, sent.address, received.address
        )
        wire.open_windows(sent)
        kernels.pack_answers(
            y_PH.data_ptr(), row_bytes, R, rank, space.tables, sent.address,
            wire.send_addresses.address, space.pair_of_answer.address, call,
        )  # fmt: skip

    def _sum(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle, out_TH: Tensor) -> int:
        """Sum the answers; return a peer whose message is not of this call, or -1."""
        space, (_, R, rank) = self._space, self._shape
        T, K, H = handle.num_tokens, handle.num_choices, handle.hidden
        weights_TK = weights_TK.float().contiguous()
        return _SUMS[handle.dtype](
            y_PH.data_ptr(), weights_TK.data_ptr(), space.choices.address, T, K, H, R, rank, space.tables,
            self.wire.recv_addresses.address, space.pair_of_answer.address,
            space.scratch.reserve(8 * H), out_TH.data_ptr(), handle.call + 1,
        )  # fmt: skip

    def _sum_any(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle, out_TH: Tensor) -> int:
        """The same with the oracle, for types without a compiled sum."""
        space, (_, R, rank) = self._space, self._shape
        T, K, H = handle.num_tokens, handle.num_choices, handle.hidden
        row_bytes, windows = H * handle.dtype.itemsize, self.wire.recv_addresses.address
        stranger = kernels.check_answers(row_bytes, R, rank, windows, handle.call + 1)
        if stranger >= 0:
            return stranger
        gathered = space.scratch.reserve(T * K * row_bytes)
        kernels.gather_answers(
            y_PH.data_ptr(), row_bytes, space.choices.address, T, K, R, rank, space.tables,
            self.wire.recv_addresses.address, space.pair_of_answer.address, gathered,
        )  # fmt: skip
        answer_QH = space.scratch.view(T * K * row_bytes).view(y_PH.dtype).view(T * K, H)
        has_choice_TK = space.choices.view(2 * T * K).view(T, K, 2)[:, :, 0] >= 0
        position_TK = torch.where(has_choice_TK, torch.arange(T * K).view(T, K), layout.NO_CHOICE)
        out_TH.copy_(layout.sum_answers(answer_QH, position_TK, weights_TK, handle.dtype))
        return -1

    def _check_combine(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle, out: Tensor | None) -> None:
        if handle.call != self._call:
            self._refuse("dispatched is not of the last dispatch; its buffers are overwritten")
        pairs, tokens = (handle.num_pairs, handle.hidden), (handle.num_tokens, handle.num_choices)
        problem = combine_problem(
            y_PH, weights_TK, out, pairs_shape=pairs, tokens_shape=tokens, dtype=handle.dtype
        )
        if problem:
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        """Tell all ranks that this one's arguments are bad; collective."""
        self.wire.refuse(problem)
        raise ValueError(problem)

    def _disagree(self, peer: int, call: _Call) -> NoReturn:
        """Name what differs. Every rank gets here: where not all are equal, each has a peer that differs."""
        rank = self.wire.rank
        theirs = self.wire.received(peer)[: message.HEADER_BYTES].view(torch.int64).tolist()
        ours = list(self._space.header)
        wrong = [
            f"its {name} is {theirs[i]}, here {ours[i]}"
            for i, name in _FIELDS.items()
            if theirs[i] != ours[i]
        ]
        made = f"H={call.hidden}, K={call.num_choices}, {call.dtype}, slots per rank {self.slots_per_rank}"
        raise RanksDisagree(
            f"rank {peer} made another call than rank {rank}'s dispatch with {made}: {'; '.join(wrong)}"
        )
