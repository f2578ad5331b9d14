"""The front's end of the ranks' streams: who is attached, and what is said to and by each.

A gRPC servicer in the front's event loop. It authenticates, keeps one outbox per rank, and hands outputs to the
callbacks it was given; it does not know requests' clients, nor choose ranks. The other end is `rank_link`.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.policy.request import RankStats, Request, RequestOutput
from server.link import load_wire, membership_wire, placement_wire, wire
from server.link import ranks_pb2 as pb
from server.link.channel import METADATA_KEY, OPTIONS, bearer
from server.link.membership_wire import FaultWord
from server.link.placement_wire import PlacementWord
from server.link.ranks_pb2_grpc import FrontServicer, add_FrontServicer_to_server
from server.link.wire import RankFacts

MAX_OUTBOX = 1 << 16  # messages; a rank that reads so little has stopped


class AttachedRank:
    """One rank's stream: its facts, its last stats and what is still to be sent to it."""

    def __init__(self, facts: RankFacts) -> None:
        self.facts = facts
        self.stats: RankStats | None = None
        self.asked_to_stop = False
        self.said_goodbye: str | None = None
        self.ended = asyncio.Event()  # set by this side; the other's end is the stream's
        self._outbox: asyncio.Queue[pb.ToRank] = asyncio.Queue(MAX_OUTBOX)

    def post(self, message: pb.ToRank) -> None:
        """Queue a message.

        Raises:
            asyncio.QueueFull: the rank does not read.
        """
        self._outbox.put_nowait(message)

    async def next_message(self) -> pb.ToRank:
        """Wait for the next message to write."""
        return await self._outbox.get()


class Ranks(FrontServicer):  # type: ignore[misc]
    """The attached ranks, by number."""

    def __init__(
        self,
        num_ranks: int,
        token: str,
        *,
        on_outputs: Callable[[int, Sequence[RequestOutput]], None],
        on_stats: Callable[[RankStats], None],
        on_attached: Callable[[RankFacts], None],
        on_lost: Callable[[int, str], None],
        on_load: Callable[[LoadReport], None] = lambda _load: None,
        on_experts: Callable[[ExpertMap], None] = lambda _experts: None,
        on_placement: Callable[[PlacementWord], None] = lambda _word: None,
        on_regrouped: Callable[[int, int], None] = lambda _rank, _epoch: None,
        on_fault: Callable[[FaultWord], None] = lambda _word: None,
    ) -> None:
        """Args: on_lost(rank, reason) is called when a stream ends that was not asked to stop."""
        self.num_ranks = num_ranks
        self.attached: dict[int, AttachedRank] = {}
        self._left = asyncio.Event()
        self._secret = bearer(token).encode()
        self._on_outputs = on_outputs
        self._on_stats = on_stats
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._on_load = on_load
        self._on_experts = on_experts
        self._on_placement = on_placement
        self._on_regrouped = on_regrouped
        self._on_fault = on_fault

    def submit(self, rank: int, request: Request, *, now_s: float) -> None:
        """Give a request to a rank."""
        self._post(rank, pb.ToRank(submit=wire.submit_from(request, now_s=now_s)))

    def abort(self, rank: int, request_id: str) -> None:
        """Ask a rank to drop a request; a rank that is gone has dropped it."""
        if rank in self.attached:
            self._post(rank, pb.ToRank(abort=pb.Abort(request_id=request_id)))

    def prepare(self, placement: Placement) -> None:
        """Ask every rank to move experts and to switch once all have theirs."""
        content = placement_wire.placement_to_wire(placement)
        for rank in list(self.attached):
            self._post(rank, pb.ToRank(prepare=pb.Prepare(placement=content)))

    def drop_placement(self, version: int) -> None:
        """Ask every rank to give up a placement that does not serve yet."""
        for rank in list(self.attached):
            self._post(rank, pb.ToRank(drop=pb.DropPlacement(version=version)))

    def regroup(self, order: Order) -> None:
        """Tell an order to its members; what they said of their steps before is over."""
        message = pb.ToRank(regroup=membership_wire.order_to_wire(order))
        for rank in order.members:
            if rank in self.attached:
                self.attached[rank].stats = None
                self._post(rank, message)

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream; a rank that is gone has closed it."""
        if rank in self.attached:
            self._lose(self.attached[rank], reason)

    def stop(self) -> None:
        """Ask every rank to end in an orderly way, once."""
        for rank, stream in list(self.attached.items()):
            if not stream.asked_to_stop:
                stream.asked_to_stop = True
                self._post(rank, pb.ToRank(stop=pb.Stop()))

    async def wait_until_empty(self) -> None:
        """Wait until every rank has left."""
        while self.attached:
            self._left.clear()
            await self._left.wait()

    def _post(self, rank: int, message: pb.ToRank) -> None:
        try:
            self.attached[rank].post(message)
        except asyncio.QueueFull:
            self._lose(self.attached[rank], f"it does not read: {MAX_OUTBOX} messages are waiting")

    async def Attach(self, messages: AsyncIterator[pb.FromRank], context: grpc.aio.ServicerContext) -> None:
        """Serve one rank's stream until it ends."""
        stream = await self._greet(messages, context)
        reader = asyncio.create_task(self._read(stream, messages))
        others = [asyncio.create_task(_write(stream, context)), asyncio.create_task(stream.ended.wait())]
        try:
            await asyncio.wait([reader, others[1]], return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()  # raises what went wrong here
        finally:
            for task in (reader, *others):
                task.cancel()
            await asyncio.gather(reader, *others, return_exceptions=True)
            self._lose(stream, "its connection closed")

    async def _read(self, stream: AttachedRank, messages: AsyncIterator[pb.FromRank]) -> None:
        """Take what a rank says until it has no more to say."""
        reason = "its connection closed"
        try:
            async for message in messages:
                self._take(stream.facts.rank, stream, message)
                if stream.said_goodbye is not None:
                    reason = stream.said_goodbye or "it left without being asked"
                    break
        except grpc.RpcError as error:
            reason = f"its connection broke ({error})"
        self._lose(stream, reason)

    async def _greet(
        self, messages: AsyncIterator[pb.FromRank], context: grpc.aio.ServicerContext
    ) -> AttachedRank:
        """Authenticate the stream, read its Hello and attach the rank, or refuse with a reason."""
        metadata = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(str(metadata.get(METADATA_KEY, "")).encode(), self._secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this front's")
        first = await anext(aiter(messages), pb.FromRank())
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        facts = wire.facts_from(first.hello)
        if facts.rank >= self.num_ranks or facts.world_size != self.num_ranks:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {facts.rank} of {facts.world_size} does not belong to this service of {self.num_ranks}",
            )
        before = self.attached.get(facts.rank)
        if before is not None and before.facts.num_restarts < facts.num_restarts:
            self._lose(before, "its engine was started again")
        elif before is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"rank {facts.rank} is already attached")
        stream = AttachedRank(facts)
        stream.post(pb.ToRank(welcome=pb.Welcome()))
        self.attached[facts.rank] = stream
        self._on_attached(facts)
        return stream

    def _take(self, rank: int, stream: AttachedRank, message: pb.FromRank) -> None:
        if stream.ended.is_set():
            return
        kind = message.WhichOneof("kind")
        if kind == "output":
            if message.output.HasField("stats"):
                stream.stats = wire.stats_from(message.output.stats)
                self._on_stats(stream.stats)
            if message.output.outputs:
                self._on_outputs(rank, [wire.output_from(output) for output in message.output.outputs])
        elif kind == "load":
            self._on_load(load_wire.load_from(message.load))
        elif kind == "experts":
            self._on_experts(load_wire.experts_from(message.experts))
        elif kind == "placement":
            self._on_placement(placement_wire.word_from(message.placement))
        elif kind == "regrouped":
            self._on_regrouped(rank, message.regrouped.epoch)
        elif kind == "fault":
            self._on_fault(membership_wire.fault_from(rank, message.fault))
        elif kind == "goodbye":
            stream.said_goodbye = message.goodbye.reason

    def _lose(self, stream: AttachedRank, reason: str) -> None:
        """End a stream once; its rank may be attached again by then."""
        if stream.ended.is_set():
            return
        stream.ended.set()
        rank = stream.facts.rank
        del self.attached[rank]
        self._left.set()
        if not stream.asked_to_stop:
            self._on_lost(rank, reason)


async def _write(stream: AttachedRank, context: grpc.aio.ServicerContext) -> None:
    """Write a rank's outbox to its stream until cancelled."""
    while True:
        await context.write(await stream.next_message())


async def listen(ranks: Ranks, host: str) -> tuple[grpc.aio.Server, str]:
    """Bind the ranks' socket on `host` and serve; returns the server and its "HOST:PORT".

    Raises:
        RuntimeError: the address cannot be bound.
    """
    server = grpc.aio.server(options=OPTIONS)
    add_FrontServicer_to_server(ranks, server)
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"
