"""Node-limited dispatch: a token crosses to another node once, however many of that node's ranks it is for.

The same calls, rows, pairs and bits as the flat `Dispatcher` (I2 of the design), over two wires: "rail" joins the
ranks of the same local index across nodes, "inner" the ranks of one node. `plan` has the arithmetic; see there
for the stages. Answers come home the same way back, one row per (token, choice), and are summed at the source in the
order of the choices: no byte is saved in combine then. With `reduce_in_node` each node's answers to a token are summed
on the rank that forwarded it and one row per (token, node) crosses; that grouping changes with the placement, so it is
outside I2 and opt-in, and it costs one more small exchange, which carries the weights.

Idea: DeepEP's internode kernels (RDMA between equal local indices, NVLink inside a node), and group-limited routing of
DeepSeek-V3 (arXiv 2412.19437), which bounds the nodes of a token. Rejected: node-limited sending inside the flat
dispatcher's kernels, which would tie both to one message; plain torch serves what is bound by slow links.

A refusal must reach ranks that share neither wire with who refuses. Every rank meets in both stages, every node
has a member on every rail, and every rail one in every node: who refused or heard of it in stage one refuses stage
two. After two stages all know, so a third is never entered.

Legend: T tokens, K choices, H hidden, N rows, P pairs, Q answers, S slots per rank, M nodes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dispatch import layout
from dispatch.arguments import combine_problem, dispatch_problem, slot_problem
from dispatch.dispatched import Dispatched, Handle, Traffic, Waits
from dispatch.hierarchical.messages import Message
from dispatch.hierarchical.plan import Arrival, Spread, node_choices, plan_arrival, plan_spread
from dispatch.hierarchical.rows import decode_rows, encode_rows
from dispatch.hierarchical.stage import Stage
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode
from dispatch.row_formats import row_format
from dispatch.wires.wire import Wire

_DISPATCH, _WEIGHTS, _ANSWERS = 1, 2, 3  # first word of a message: what it is


class _Trip(NamedTuple):
    """What combine needs of its dispatch, beside the handle."""

    route: layout.Route  # of this rank's tokens over the nodes
    position_TK: Tensor  # int64: where the answer to each choice lies among all that come home
    node_TM: Tensor  # int64: node_choices
    node_rows: list[int]  # rows this rank forwards, per source node
    spread: Spread
    arrival: Arrival


class HierarchicalDispatcher:
    """One rank's end of a node-limited exchange. Calls are collective, in the same order on all ranks.

    Args:
        rail, inner: over the ranks of this local index, by node, and over this node's ranks; taken over. This rank's
            number is `rail.rank * inner.world_size + inner.rank`.
        slots_per_rank: S, equal on all ranks; physical slot p is local slot p % S of rank p // S.
        rows: how rows travel, "auto" or "fp8", as for `Dispatcher`; equal on all ranks.
        reduce_in_node: sum each node's answers before they cross; equal on all ranks. Outside I2.
        release: called once by `close`, after the wires are closed.

    Attributes:
        rank, world_size, node, num_nodes, node_size: this rank's place.
        name, reason: the two wires and why they were taken, as a wire says it.
    """

    is_replayable = False

    def __init__(
        self,
        rail: Wire,
        inner: Wire,
        *,
        slots_per_rank: int,
        rows: str = "auto",
        reduce_in_node: bool = False,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank is {slots_per_rank}; it must be at least 1")
        self.slots_per_rank, self.reduce_in_node = slots_per_rank, reduce_in_node
        self._rows, self._format = rows, row_format(rows)
        self.node, self.num_nodes, self.node_size = rail.rank, rail.world_size, inner.world_size
        self.rank, self.world_size = self.node * self.node_size + inner.rank, self.num_nodes * self.node_size
        self.name = f"{rail.name} across {self.num_nodes} nodes and {inner.name} inside"
        self.reason = f"{rail.reason} (across), {inner.reason} (inside)"
        on_rail = range(inner.rank, self.world_size, self.node_size)
        in_node = range(self.node * self.node_size, (self.node + 1) * self.node_size)
        self._rail = Stage(rail, on_rail, self.rank, self.close)
        self._inner = Stage(inner, in_node, self.rank, self.close)
        self._release: Callable[[], None] | None = release
        self._call = 0
        self._trip: _Trip | None = None

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL, *, meanwhile: Meanwhile = nothing
    ) -> Dispatched:
        """Send each token once to every node, and there to every rank, that holds one of its choices. Collective.

        Arguments and errors are those of `Dispatcher.dispatch`; `mode` limits tokens but not the size of messages.
        The result's rows, pairs and bits are too; its tensors are new. `meanwhile` runs beside the way across nodes.
        """
        self._call += 1  # of a refused call too, as on all ranks
        self._trip = None
        problem = dispatch_problem(x_TH, slots_TK, mode) or self._slot_problem(slots_TK)
        if problem:
            self._refuse(problem, self._rail, self._inner)
        (T, H), K, S = x_TH.shape, slots_TK.shape[1], self.slots_per_rank
        words = (_DISPATCH, self._call, H, K, S, self._format.code(x_TH.dtype), mode.capacity)
        route = layout.route(slots_TK, S * self.node_size, self.num_nodes)
        crossed = self._to_nodes(encode_rows(x_TH, self._rows), route, words, meanwhile)
        node_rows = [message.parts[0].numel() // (4 * K) for message in crossed]
        node_slots_NK = _join(crossed, 0, torch.int32, K).to(torch.int64)
        spread = plan_spread(node_slots_NK, node_rows, S, self.node_size)
        arrived = self._to_mates(torch.cat([message.parts[1] for message in crossed]), spread, words)
        local_slots_NK = _join(arrived, 1, torch.int32, K).to(torch.int64)
        arrival = plan_arrival(local_slots_NK, [m.parts[0].view(torch.int64) for m in arrived], S)
        x_NH = decode_rows(torch.cat([m.parts[2] for m in arrived]), x_TH, self._rows)[arrival.row_N]
        self._trip = self._pack(slots_TK, route, node_rows, spread, arrival)
        row_P = arrival.pairs.row_P
        handle = Handle(self._call, T, K, H, x_TH.dtype, row_P.numel())
        return Dispatched(x_NH, row_P, arrival.pairs.slot_offsets, handle)

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

        Arguments and errors are those of `Dispatcher.combine`.

        Returns:
            `out`, or a new [T, H]: the same bits as the flat dispatcher's. With `reduce_in_node`: the sum over nodes
            in ascending order, in float32 (float64 for float64), rounded once, of each node's sum over its choices in
            order of k, likewise in float32 and rounded once.
        """
        handle, trip = dispatched.handle, self._trip
        problem = self._combine_problem(y_PH, weights_TK, handle, out)
        if problem:
            stages = (self._rail, self._inner) if self.reduce_in_node else (self._inner, self._rail)
            self._refuse(problem, *stages)
        assert trip is not None, "a handle of this call has its trip"
        combine = self._combine_by_node if self.reduce_in_node else self._combine_by_choice
        combined = combine(y_PH, weights_TK, trip, handle, meanwhile)
        return combined if out is None else out.copy_(combined)

    @property
    def row_format(self) -> str:
        """How rows travel, in words."""
        return self._format.name

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far to other ranks."""
        return _traffic((self._rail, self._inner))

    @property
    def waits(self) -> Waits:
        """Time in exchanges so far, of both stages."""
        waited_ns = self._rail.waited_ns + self._inner.waited_ns
        return Waits(waited_ns[_DISPATCH], waited_ns[_WEIGHTS] + waited_ns[_ANSWERS])

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Bytes that this rank has sent to each rank so far, by dispatches and by combines: to whom it hands a token,
        which is not always where the token ends."""
        sent = self._rail.sent_bytes + self._inner.sent_bytes
        ranks = range(self.world_size)
        combined = [sent[_WEIGHTS, rank] + sent[_ANSWERS, rank] for rank in ranks]
        return [sent[_DISPATCH, rank] for rank in ranks], combined

    @property
    def crossing(self) -> Traffic:
        """What of it went to other nodes."""
        return _traffic((self._rail,))

    def check(self) -> None:
        """See `TokenDispatcher`. Every call says itself what went wrong."""

    def close(self) -> None:
        """Close both wires; peers that wait for this rank get PeerLost. Local; may be called twice."""
        self._rail.wire.close()
        self._inner.wire.close()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _to_nodes(
        self, rows_TB: Tensor, route: layout.Route, words: tuple[int, ...], meanwhile: Meanwhile
    ) -> list[Message]:
        """Stage one of dispatch: each row's choices as slots of this node, and the row, by source node."""
        counts = route.row_counts_R.tolist()
        tokens, slots = (
            torch.split(route.token_N, counts),
            torch.split(route.local_slots_NK.to(torch.int32), counts),
        )
        messages = [Message(words, (s, rows_TB[t])) for s, t in zip(slots, tokens, strict=True)]
        return self._rail.swap(messages, words, then=(self._inner,), meanwhile=meanwhile)

    def _to_mates(self, rows: Tensor, spread: Spread, words: tuple[int, ...]) -> list[Message]:
        """Stage two of dispatch: rows per source node, local slots and rows from each rank of this node."""
        rows_NB = rows.view(spread.position_NK.shape[0], -1) if rows.numel() else rows.view(0, 0)
        counts = spread.route.row_counts_R.tolist()
        places = torch.split(spread.route.token_N, counts)
        slots = torch.split(spread.route.local_slots_NK.to(torch.int32), counts)
        parts = zip(spread.source_counts, slots, places, strict=True)
        return self._inner.swap([Message(words, (c, s, rows_NB[p])) for c, s, p in parts], words)

    def _combine_by_choice(
        self, y_PH: Tensor, weights_TK: Tensor, trip: _Trip, handle: Handle, meanwhile: Meanwhile
    ) -> Tensor:
        answer_QH = self._to_forwarders(y_PH, trip, handle, then=(self._rail,))
        position_NK = trip.spread.position_NK
        by_row_QH = answer_QH[position_NK[position_NK != layout.NO_CHOICE]]
        counts = trip.spread.node_pairs, trip.route.pair_counts_R
        home_QH = self._home(by_row_QH, *counts, handle, meanwhile)
        return layout.sum_answers(home_QH, trip.position_TK, weights_TK, handle.dtype)

    def _combine_by_node(
        self, y_PH: Tensor, weights_TK: Tensor, trip: _Trip, handle: Handle, meanwhile: Meanwhile
    ) -> Tensor:
        weights_NK = self._cross_weights(weights_TK, trip, handle)
        answer_QH = self._to_forwarders(y_PH, trip, handle, then=())
        sums_NH = layout.sum_answers(answer_QH, trip.spread.position_NK, weights_NK, handle.dtype)
        home_QH = self._home(sums_NH, trip.node_rows, trip.route.row_counts_R, handle, meanwhile)
        position_TM = layout.answer_positions(trip.node_TM, 1)
        ones_TM = torch.ones(position_TM.shape, dtype=weights_NK.dtype)  # times one changes no bit
        return layout.sum_answers(home_QH, position_TM, ones_TM, handle.dtype)

    def _cross_weights(self, weights_TK: Tensor, trip: _Trip, handle: Handle) -> Tensor:
        """Send each row's weights after it; return those of the rows that this rank forwards."""
        wide = torch.float64 if handle.dtype == torch.float64 else torch.float32
        rows = torch.split(weights_TK.to(wide)[trip.route.token_N], trip.route.row_counts_R.tolist())
        words, row_bytes = (_WEIGHTS, handle.call), handle.num_choices * wide.itemsize
        expected = [(count * row_bytes,) for count in trip.node_rows]
        messages = [Message(words, (part,)) for part in rows]
        return _join(
            self._rail.swap(messages, words, expected, then=(self._inner,)), 0, wide, handle.num_choices
        )

    def _to_forwarders(self, y_PH: Tensor, trip: _Trip, handle: Handle, then: tuple[Stage, ...]) -> Tensor:
        """Give the answers back to the ranks that forwarded the rows; return those this rank gets."""
        parts = torch.split(y_PH[trip.arrival.pair_of_answer_P], trip.arrival.answer_counts)
        return _swap_answers(self._inner, parts, trip.spread.route.pair_counts_R.tolist(), handle, then)

    def _home(
        self, rows_NH: Tensor, sent: list[int], received: Tensor, handle: Handle, meanwhile: Meanwhile
    ) -> Tensor:
        """Send rows back across the nodes, `sent` to each; return the `received` [M] that come."""
        parts = torch.split(rows_NH, sent)
        return _swap_answers(self._rail, parts, received.tolist(), handle, (), meanwhile)

    def _pack(
        self, slots_TK: Tensor, route: layout.Route, node_rows: list[int], spread: Spread, arrival: Arrival
    ) -> _Trip:
        node_slots = self.slots_per_rank * self.node_size
        position_TK = layout.answer_positions(slots_TK, node_slots)
        return _Trip(
            route, position_TK, node_choices(slots_TK, node_slots, self.num_nodes), node_rows, spread, arrival
        )

    def _refuse(self, problem: str, *stages: Stage) -> NoReturn:
        """Tell every rank, through both stages in the order of the call, and raise."""
        for stage in stages:
            stage.refuse(self.rank, problem)
        raise ValueError(problem)

    def _slot_problem(self, slots_TK: Tensor) -> str:
        num_slots = self.world_size * self.slots_per_rank
        bad = ((slots_TK < layout.NO_CHOICE) | (slots_TK >= num_slots)).flatten().nonzero()
        if not bad.numel():
            return ""
        return slot_problem(slots_TK, int(bad[0]), self.world_size, self.slots_per_rank)

    def _combine_problem(self, y_PH: Tensor, weights_TK: Tensor, handle: Handle, out: Tensor | None) -> str:
        if self._trip is None or handle.call != self._call:
            return "dispatched is not of the last dispatch; its routes are gone"
        return combine_problem(
            y_PH,
            weights_TK,
            out,
            pairs_shape=(handle.num_pairs, handle.hidden),
            tokens_shape=(handle.num_tokens, handle.num_choices),
            dtype=handle.dtype,
        )


def _swap_answers(
    stage: Stage,
    parts: Sequence[Tensor],
    counts: list[int],
    handle: Handle,
    then: tuple[Stage, ...],
    meanwhile: Meanwhile = nothing,
) -> Tensor:
    """Swap rows of answers, of which `counts` come from each rank."""
    words, row_bytes = (_ANSWERS, handle.call), handle.hidden * handle.dtype.itemsize
    expected = [(count * row_bytes,) for count in counts]
    messages = [Message(words, (part,)) for part in parts]
    answers = stage.swap(messages, words, expected, then=then, meanwhile=meanwhile)
    return _join(answers, 0, handle.dtype, handle.hidden)


def _join(messages: Sequence[Message], part: int, dtype: torch.dtype, columns: int) -> Tensor:
    """Put one part of all messages together as rows of `columns` values."""
    return torch.cat([message.parts[part] for message in messages]).view(dtype).view(-1, columns)


def _traffic(stages: Sequence[Stage]) -> Traffic:
    sent = [(kind, count) for stage in stages for (kind, _), count in stage.sent_bytes.items()]
    dispatched = sum(count for kind, count in sent if kind == _DISPATCH)
    return Traffic(dispatched, sum(count for _, count in sent) - dispatched)
