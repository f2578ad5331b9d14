"""Dispatch and combine: send tokens to the ranks that hold their slots, bring the answers back and sum them.

The service uses it to move tokens between CPUs. On GPUs it is the reference for the other dispatchers. It checks
arguments and runs both halves of an `Exchange` at once. A call allocates only its results; in low-latency mode with
`out=` it allocates nothing (see `mode`).
It knows slots, not experts or placements, and keeps no process group: a new membership epoch gets a new Dispatcher.

A bad argument is refused on every rank before anything is sent, and the next call works (`Wire.refuse`). A rank
that the wire masks as lost takes part in no call: choices of its slots add nothing to the sum.

Idea: DeepEP (one copy of a token per rank; low-latency combine sums in top-k order at the source); see `layout`.

Legend: T tokens of this rank, K choices, H hidden, N rows received, P pairs, R ranks, S slots per rank.
"""

from typing import NoReturn

import torch
from torch import Tensor

from dispatch.arguments import answers_problem, dispatch_problem, slot_problem
from dispatch.dispatched import (
    Check,
    Dispatched,
    DispatchHandle,
    Exchanges,
    TokenDispatcher,
    Traffic,
    Waits,
    no_errors,
)
from dispatch.errors import DispatchError
from dispatch.exchange import Exchange
from dispatch.mode import NORMAL, Mode
from dispatch.programmed import ProgrammedExchange
from dispatch.row_formats import PlainRows, RowFormat
from dispatch.wires.shm import ShmWire
from dispatch.wires.wire import Wire

__all__ = ["DispatchHandle", "Dispatched", "Dispatcher", "TokenDispatcher", "Traffic"]


class Dispatcher:
    """One rank's end of the exchange. Calls are collective, in the same order on all ranks.

    Args:
        wire: Owned; `close` closes it.
        slots_per_rank: S; physical slot p is local slot p % S of rank p // S.
        rows: Format of rows on the wire (default: unchanged); equal on all ranks. Answers always travel unchanged.
    """

    is_replayable = False

    def __init__(self, wire: Wire, *, slots_per_rank: int, rows: RowFormat | None = None) -> None:
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank is {slots_per_rank}; it must be at least 1")
        self.wire, self.slots_per_rank = wire, slots_per_rank
        self.world_size, self.name, self.reason = wire.world_size, wire.name, wire.reason
        self._exchange: Exchange
        if isinstance(wire, ShmWire) and (rows is None or isinstance(rows, PlainRows)):
            self._exchange = ProgrammedExchange(wire, slots_per_rank=slots_per_rank)
        else:
            self._exchange = Exchange(wire, slots_per_rank=slots_per_rank, rows=rows)

    @property
    def row_format(self) -> str:
        """Description of the format of rows on the wire."""
        return self._exchange.rows.name

    @property
    def in_programs(self) -> ProgrammedExchange | None:
        """Exchange for compiled programs, which replaces `dispatch` and `combine`. None if this wire has none."""
        return self._exchange if isinstance(self._exchange, ProgrammedExchange) else None

    @property
    def traffic(self) -> Traffic:
        """Bytes sent by this rank so far."""
        dispatched, combined = self.sent_to_ranks()
        return Traffic(sum(dispatched), sum(combined))

    @property
    def waits(self) -> Waits:
        dispatch, combine = self._exchange.dispatch_clock, self._exchange.combine_clock
        return Waits(dispatch.total_ns, combine.total_ns, dispatch.wire_ns + combine.wire_ns)

    @property
    def exchanges(self) -> Exchanges:
        return Exchanges(self._exchange.num_begun, self._exchange.num_ended)

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        return self._exchange.sent_bytes()

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """Send each token once to every rank that holds one of its choices. Collective.

        Args:
            x_TH: Any floating dtype, CPU. T may be 0 and may differ between ranks; H, K and dtype may not.
            slots_TK: int64, physical slots in [0, R*S), -1 for no choice; a slot may repeat within a token.
            mode: Equal on all ranks; `low_latency(M)` takes at most M tokens, contiguous.

        Returns:
            Views of this object's buffers. With one rank, if every token has a choice, x_NH is `x_TH`.

        Raises:
            ValueError: An argument is bad; all other ranks get PeerRefused. Nothing is sent, the next call works.
            RanksDisagree: H, K, dtype, S or mode differ between ranks; on all ranks, and the next call works.
            PeerLost, DispatchTimeout: The wire can no longer be used.
        """
        self._exchange.calls += 2  # for a refused call too, as on all ranks
        problem = dispatch_problem(x_TH, slots_TK, mode)
        if problem:
            self._refuse(problem)
        exchange, slots_TK = self._exchange, slots_TK.contiguous()
        bad = exchange.send_rows(x_TH.contiguous(), slots_TK, call=exchange.calls, capacity=mode.capacity)
        if bad >= 0:
            self._refuse(slot_problem(slots_TK, bad, self.world_size, self.slots_per_rank))
        x_NH, num_pairs = exchange.receive_rows()
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        handle = DispatchHandle(exchange.calls, T, K, H, x_TH.dtype, num_pairs)
        return Dispatched(x_NH, exchange.row_of_pair, exchange.slot_offsets, handle)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Bring the answers back and sum them. Collective.

        Args:
            y_PH: One unweighted row per pair, in pair order, in the dtype of x.
            weights_TK: This rank's weights, any floating dtype. The weight of a -1 choice is not read.
            dispatched: Result of the last `dispatch`.
            out: Contiguous [T, H] in the dtype of x to write into (default: new memory).

        Returns:
            `out`: the sum over k = 0..K-1 of weight times row, multiplied, then added, in float32 (float64 for
            float64) in that order, rounded once. Zeros for a token without any choice.

        Raises:
            As `dispatch`.
        """
        handle, exchange = dispatched.handle, self._exchange
        problem = answers_problem(y_PH, weights_TK, out, handle, last_call=exchange.calls)
        if problem:
            self._refuse(problem)
        out_TH = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype) if out is None else out
        y_PH = y_PH.contiguous()
        exchange.send_answers(y_PH, call=handle.call + 1)
        exchange.receive_answers()
        exchange.sum_answers(weights_TK, out_TH)
        return out_TH

    def begin_check(self) -> Check:
        return no_errors

    def interrupt(self, error: DispatchError) -> None:
        self.wire.interrupt(error)

    def close(self) -> None:
        """Close the wire; peers that wait for this rank get PeerLost. Local; may be called twice."""
        self.wire.close()

    def _refuse(self, problem: str) -> NoReturn:
        """Refuse the call on all ranks. Collective."""
        self.wire.refuse(problem)
        raise ValueError(problem)
