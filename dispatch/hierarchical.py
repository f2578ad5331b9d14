"""Node-limited dispatch: a token crosses to another node once, even if several ranks of that node need it.

Two exchanges in sequence, with the messages and passes of the flat one: "rail" connects the ranks of the same local
index across nodes, "inner" the ranks of one node. On the rail, a node acts as one rank with all slots of its ranks: a
row goes once to every node that holds one of its choices, to the rank with the sender's local index there. That rank
sends it on to the ranks of its node that hold a choice. Rows keep their source node as origin, so they arrive as in flat
dispatch, ordered by source rank, then token. Answers take the same way back, one row per (token, choice), and are
summed at the source in the order of the choices: rows, pairs and bits are those of `Dispatcher`.
So combine saves no bytes. Rejected: sum each node's answers before they cross. This would save bytes, but results would
depend on the placement.

Ranks are numbered node by node, as torchrun does: rank = node * node size + local index. The node size is a parameter,
not read from the hosts. So nodes can be smaller than a host (in tests) or larger (racks with links as fast as a host's).

A refusal must also reach ranks that share no wire with the refusing rank. Every rank takes part in both stages, every
node has a member on every rail, and every rail has one in every node. A rank that refused or received a refusal in
stage one refuses stage two. After two stages all ranks have the refusal, so none starts a third.

Idea: DeepEP's internode kernels (RDMA between equal local indices, NVLink inside a node), and group-limited routing of
DeepSeek-V3 (arXiv 2412.19437), which bounds the number of nodes per token.

Legend: T tokens, K choices, H hidden, N rows, P pairs, S slots per rank, M nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.arguments import answers_problem, dispatch_problem, slot_problem
from dispatch.dispatched import Check, Dispatched, DispatchHandle, Exchanges, Traffic, Waits, no_errors
from dispatch.errors import (
    DispatchError,
    DispatchTimeout,
    PeerLost,
    PeerRefused,
    RanksDisagree,
    WireUnavailable,
)
from dispatch.exchange import Exchange
from dispatch.gathered import gather_values
from dispatch.mode import NORMAL, Mode
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from dispatch.wires.wire import Wire

_ORIGIN_END = "|"  # a forwarded refusal begins with the refusing rank: "5|slots_TK[0, 1] is ..."


class _Stage:
    """An exchange between some ranks of the group. Its errors use the group's rank numbers.

    Only the ranks of a stage notice that a peer is lost or late in it. The rank that notices closes all stages, so that
    peers that wait for it in the other stage get an error at once instead of a timeout.
    """

    def __init__(
        self, wire: Wire, ranks: Sequence[int], rank: int, slots: int, rows: str, close: Callable[[], None]
    ) -> None:
        """`ranks`: group ranks of the wire's ranks; `slots`: slots per wire rank; `close`: closes all stages."""
        assert len(ranks) == wire.world_size, "every rank of the wire has a number"
        self.wire, self._ranks, self._rank, self._close = wire, ranks, rank, close
        self.exchange = Exchange(wire, slots_per_rank=slots, rows=row_format(rows), names=ranks)
        self._interruption: DispatchError | None = None  # already has the group's rank numbers

    def interrupt(self, error: DispatchError) -> None:
        """Make waits of this stage raise an error with the group's rank numbers. May be called from any thread."""
        self._interruption = error
        self.wire.interrupt(error)

    def refuse(self, origin: int, text: str) -> None:
        """Refuse the exchange of this stage on its ranks, in the name of rank `origin`. Collective."""
        try:
            self.wire.refuse(f"{origin}{_ORIGIN_END}{text}")
        except DispatchError as error:
            raise self._translated(error) from error.__cause__

    @contextmanager
    def exchanging(self, *then: Self) -> Iterator[None]:
        """Translate errors. Forward refusals to the stages that follow, which have not received them."""
        try:
            yield
        except DispatchError as found:
            error = self._translated(found)
            if isinstance(error, PeerRefused | RanksDisagree):
                heard = (
                    (error.rank, error.text) if isinstance(error, PeerRefused) else (self._rank, str(error))
                )
                for stage in then:
                    stage.refuse(*heard)
            raise error from found.__cause__

    def add_sent(self, dispatched: list[int], combined: list[int]) -> None:
        """Add the bytes sent to each rank of the group."""
        for rank, sent, answered in zip(self._ranks, *self.exchange.sent_bytes(), strict=True):
            dispatched[rank] += sent
            combined[rank] += answered

    def _translated(self, error: DispatchError) -> DispatchError:
        """Return the same error with the group's rank numbers."""
        if isinstance(error, PeerRefused):
            origin, _, text = error.text.partition(_ORIGIN_END)
            return PeerRefused(int(origin), text)
        if isinstance(error, PeerLost | DispatchTimeout):
            self._close()
            if error.rank is not None and error is not self._interruption:
                own, error.rank = error.rank, self._ranks[error.rank]
                error.args = (f"rank {error.rank}{str(error).removeprefix(f'rank {own}')}",)
        return error


class HierarchicalDispatcher:
    """One rank's end of a node-limited exchange. Calls are collective, in the same order on all ranks.

    Args:
        rail, inner: Wires between the ranks of this local index, by node, and between this node's ranks. Owned. This
            rank's number is `rail.rank * inner.world_size + inner.rank`.
        slots_per_rank: S, equal on all ranks; physical slot p is local slot p % S of rank p // S.
        rows: Format of rows on the wire, a name of `row_formats`; equal on all ranks.
        release: Called once by `close`, after the wires are closed.

    Attributes:
        rank, world_size, node, num_nodes, node_size: This rank's position.
        name, reason: The two wires, and why they were chosen.
    """

    is_replayable = False

    def __init__(
        self,
        rail: Wire,
        inner: Wire,
        *,
        slots_per_rank: int,
        rows: str = "auto",
        release: Callable[[], None] = lambda: None,
    ) -> None:
        if slots_per_rank < 1:
            raise ValueError(f"slots_per_rank is {slots_per_rank}; it must be at least 1")
        self.slots_per_rank = slots_per_rank
        self.node, self.num_nodes, self.node_size = rail.rank, rail.world_size, inner.world_size
        self.rank, self.world_size = self.node * self.node_size + inner.rank, self.num_nodes * self.node_size
        self.name = f"{rail.name} across {self.num_nodes} nodes and {inner.name} inside"
        self.reason = f"{rail.reason} (across), {inner.reason} (inside)"
        on_rail = range(inner.rank, self.world_size, self.node_size)
        in_node = range(self.node * self.node_size, (self.node + 1) * self.node_size)
        node_slots = slots_per_rank * self.node_size
        self._rail = _Stage(rail, on_rail, self.rank, node_slots, rows, self.close)
        self._inner = _Stage(inner, in_node, self.rank, slots_per_rank, rows, self.close)
        self._stages = (self._rail, self._inner)
        self._release: Callable[[], None] | None = release
        self._call = 0

    @property
    def row_format(self) -> str:
        """Description of the format of rows on the wire."""
        return self._rail.exchange.rows.name

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other ranks so far."""
        dispatched, combined = self.sent_to_ranks()
        return Traffic(sum(dispatched), sum(combined))

    @property
    def crossing(self) -> Traffic:
        """The part of `traffic` that went to other nodes."""
        dispatched, combined = self._rail.exchange.sent_bytes()
        return Traffic(sum(dispatched), sum(combined))

    @property
    def waits(self) -> Waits:
        """Time spent in exchanges so far, of both stages; the wires' part is unknown."""
        exchanges = [stage.exchange for stage in self._stages]
        return Waits(
            sum(each.dispatch_clock.total_ns for each in exchanges),
            sum(each.combine_clock.total_ns for each in exchanges),
        )

    @property
    def exchanges(self) -> Exchanges:
        """Exchanges of both stages so far."""
        begun, ended = zip(
            *((stage.exchange.num_begun, stage.exchange.num_ended) for stage in self._stages), strict=True
        )
        return Exchanges(sum(begun), sum(ended))

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes sent to each rank so far, by dispatches and by combines. They count for the next rank on a
        token's way, which is not always its destination."""
        dispatched, combined = [0] * self.world_size, [0] * self.world_size
        for stage in self._stages:
            stage.add_sent(dispatched, combined)
        return dispatched, combined

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """Send each token once to every node, and there to every rank, that holds one of its choices. Collective.

        Arguments, result and errors: as `Dispatcher.dispatch`.
        """
        self._call += 2  # for a refused call too, as on all ranks
        problem = dispatch_problem(x_TH, slots_TK, mode)
        if problem:
            self._refuse(problem, self._rail, self._inner)
        x_TH, slots_TK, call, capacity = x_TH.contiguous(), slots_TK.contiguous(), self._call, mode.capacity
        with self._rail.exchanging(self._inner):
            bad = self._rail.exchange.send_rows(x_TH, slots_TK, call=call, capacity=capacity)
            if bad < 0:
                rows_at, slots_NK, node_N = self._rail.exchange.receive_to_hand_on()
        if bad >= 0:
            problem = slot_problem(slots_TK, bad, self.world_size, self.slots_per_rank)
            self._refuse(problem, self._rail, self._inner)
        with self._inner.exchanging():
            inner = self._inner.exchange
            bad = inner.send_rows(
                x_TH[:0], slots_NK, call=call, capacity=capacity, travelling=rows_at, origins_T=node_N
            )
            assert bad < 0, "the rail's dispatch already checked the slots"
            x_NH, num_pairs = inner.receive_rows(self.num_nodes)
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        handle = DispatchHandle(call, T, K, H, x_TH.dtype, num_pairs)
        return Dispatched(x_NH, inner.row_of_pair, inner.slot_offsets, handle)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Bring the answers back and sum them. Collective.

        Arguments, result (bit for bit) and errors: as `Dispatcher.combine`.
        """
        handle, call = dispatched.handle, dispatched.handle.call + 1
        problem = answers_problem(y_PH, weights_TK, out, handle, last_call=self._call)
        if problem:
            self._refuse(problem, self._inner, self._rail)
        out_TH = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype) if out is None else out
        y_PH = y_PH.contiguous()
        with self._inner.exchanging(self._rail):
            self._inner.exchange.send_answers(y_PH, call=call)
            self._inner.exchange.receive_answers()
            answer_QH = self._inner.exchange.gather_answers(handle.dtype)
        with self._rail.exchanging():
            self._rail.exchange.send_answers(answer_QH, call=call)
            self._rail.exchange.receive_answers()
            self._rail.exchange.sum_answers(weights_TK, out_TH)
        return out_TH

    def begin_check(self) -> Check:
        return no_errors

    def interrupt(self, error: DispatchError) -> None:
        for stage in self._stages:
            stage.interrupt(error)

    def close(self) -> None:
        """Close both wires; peers that wait for this rank get PeerLost. Local; may be called twice."""
        for stage in self._stages:
            stage.wire.close()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _refuse(self, problem: str, *stages: _Stage) -> NoReturn:
        """Refuse the call on every rank, through both stages in the order of the call, and raise."""
        for stage in stages:
            stage.refuse(self.rank, problem)
        raise ValueError(problem)


def open_hierarchical(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    node_size: int,
    slots_per_rank: int,
    timeout_s: float = 30.0,
    epoch: int = 0,
    rows: str = "auto",
) -> HierarchicalDispatcher:
    """Open node-limited dispatch over the ranks of `group`. Collective over the default group.

    Args:
        name: Wire of both stages, as in `open_wire`; auto uses shared memory inside a host and another available wire
            across hosts.
        group: A gloo group of consecutive nodes; None is one rank. A stage that connects all its ranks (node size 1 or
            the group's size) uses the group itself.
        node_size: Ranks per node; divides the number of ranks. With 1 or the number of ranks, dispatch is flat.
        slots_per_rank, rows: See `HierarchicalDispatcher`; equal on all ranks.
        timeout_s, epoch: As in `open_wire`.

    Raises:
        ValueError: The node size is bad, or the settings differ between ranks; on every rank.
        WireUnavailable: A stage's wire cannot work here, or a peer did not join.
    """
    settings = {"node_size": node_size, "slots_per_rank": slots_per_rank, "rows": rows}
    _check_agreement(group, settings)
    world_size = 1 if group is None else dist.get_world_size(group)
    if node_size < 1 or world_size % node_size:
        allowed = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(f"node_size is {node_size} for {world_size} ranks; it must be one of {allowed}")
    rails = [range(local, world_size, node_size) for local in range(node_size)]
    nodes = [range(first, first + node_size) for first in range(0, world_size, node_size)]
    rail_group, inner_group = (_join(group, ranks, timeout_s) for ranks in (rails, nodes))
    made = [own for own in (rail_group, inner_group) if own is not None and own is not group]
    rail, inner = (
        open_wire(name, own, timeout_s=timeout_s, epoch=epoch) for own in (rail_group, inner_group)
    )

    def release() -> None:
        for own in made:
            dist.destroy_process_group(own)

    return HierarchicalDispatcher(rail, inner, slots_per_rank=slots_per_rank, rows=rows, release=release)


def _check_agreement(group: dist.ProcessGroup | None, settings: dict[str, object]) -> None:
    if group is None:
        return
    everybody = gather_values(str(settings), group)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise ValueError(
                f"rank {rank} has the settings {theirs} and rank 0 has {everybody[0]}; they must be equal"
            )


def _join(
    group: dist.ProcessGroup | None, sets: Sequence[range], timeout_s: float
) -> dist.ProcessGroup | None:
    """Make a group of each set and return this rank's. Returns None if this rank is alone in its set."""
    if group is None or len(sets[0]) == 1:
        return None
    if len(sets) == 1:
        return group
    of_group, own = dist.get_process_group_ranks(group), None
    for ranks in sets:
        members = [of_group[rank] for rank in ranks]
        try:
            made = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend="gloo")
        except RuntimeError as error:  # gloo has no other error for a peer that is gone
            raise WireUnavailable(f"ranks {list(ranks)} could not connect: {error}") from error
        if dist.get_rank(group) in ranks:
            own = made
    return own
