"""The front's end of the ranks' streams: the attached ranks, and the messages to and from each.

It serves one gRPC method in the front's event loop. It authenticates ranks, keeps an outbox for each, and passes their
messages on. It does not know clients and does not choose ranks for requests. The other end is `rank_link`.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import grpc
import grpc.aio

from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.policy.request import ForgetPrefixes, RankStats, Request
from server.link.image_rows import row_parts
from server.link.messages import (
    DEFINITION,
    DEFINITION_KEY,
    METHOD,
    OPTIONS,
    SERVICE,
    TOKEN_KEY,
    Claim,
    Claimed,
    Expect,
    Follow,
    FromRank,
    Goodbye,
    MirrorOf,
    RankFacts,
    ReturnOf,
    ReturnTo,
    RowsPart,
    StepOutput,
    Stop,
    Submit,
    ToRank,
    Tunnel,
    Welcome,
    bearer,
    decode,
    encode,
)
from server.link.seal import NONCE_KEY, SAME_KEY, Seal, SealError, make_nonce

_LOG = logging.getLogger("wideep.front")
END_WRITE_S = 1.0  # for a write in progress at the end of a stream
MAX_WRITE_S = 30.0  # longest time for writing one message; after that, the rank counts as stopped
_LONG_MESSAGE = 1 << 18  # bytes; longer ones (log-probabilities of a long prompt) are decoded in a thread
SILENCE_S = 1.0  # a longer silence before the end of a stream is added to the reason
_STAYS_AWAY = "it was already restarted as often as --max-rank-restarts allows and stays away"
FirstT = TypeVar("FirstT")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RankLost(NamedTuple):
    """The end of a rank's stream without a requested stop; received after its last message."""

    reason: str


class PoolRanks:
    """The ranks of a pool."""

    def __init__(self, ranks: "Ranks", numbers: range) -> None:
        """Args: numbers are the ranks' numbers in the service."""
        self.num_ranks = len(numbers)
        self._ranks, self._numbers = ranks, numbers

    def resize(self, num_ranks: int) -> None:
        """Change the number of ranks."""
        self.num_ranks = num_ranks
        self._numbers = range(self._numbers.start, self._numbers.start + num_ranks)

    def post_all(self, message: ToRank) -> None:
        """Send a message to all ranks of the pool."""
        for rank in self._numbers:
            self._ranks.post(rank, message)


class AttachedRank:
    """One rank's stream: its facts, its last statistics and its outbox."""

    def __init__(self, facts: RankFacts, attached_s: float, seal: Seal) -> None:
        self.facts, self.attached_s, self.seal = facts, attached_s, seal
        self.stats: RankStats | None = None
        self.asked_to_stop = False
        self.beat_s = math.inf  # time of its last heartbeat
        self.said_goodbye: str | None = None
        self.ended = asyncio.Event()  # set when this side ends the stream
        self.write_begun_s = math.inf  # time.monotonic() at which the current write began
        self._outbox: deque[object] = deque()
        self._posted = asyncio.Event()
        self._ends_writes = False

    def post(self, message: object) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._posted.set()

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        """Write queued messages until `end_writes`."""
        while not self._ends_writes:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox and not self._ends_writes:
                self.write_begun_s = time.monotonic()
                message = self.seal.seal(encode(self._outbox.popleft()))
                with contextlib.suppress(grpc.aio.BaseError):  # the stream has ended: `_read` learns why
                    await context.write(message)
            self.write_begun_s = math.inf

    def end_writes(self) -> None:
        """Let `write` return after the present message."""
        self._ends_writes = True
        self._posted.set()


def _is_far(stream: AttachedRank) -> bool:
    return stream.facts.host != socket.gethostname()


class PeerStream(Generic[FirstT]):
    """A stream that another front has opened: that of the standby, or one of another node."""

    def __init__(
        self, first: FirstT, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext, seal: Seal
    ) -> None:
        self.first, self._messages, self._context, self._seal = first, messages, context, seal

    async def send(self, message: object) -> None:
        """Send a message. Only one task may send."""
        await self._context.write(self._seal.seal(encode(message)))

    async def received(self) -> AsyncIterator[Any]:
        """Yield the other front's further messages.

        Raises:
            SealError: It has no cluster key, or another one.
        """
        async for message in self._messages:
            yield decode(self._seal.open(message))


class Ranks:
    """The attached ranks, by number."""

    def __init__(
        self,
        num_ranks: int,
        token: str,
        *,
        cluster_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_ranks, self._cluster_key = num_ranks, cluster_key
        self._sizes: tuple[int, int] | None = None  # the number of ranks, and the one that a resize leads to
        self.attached: dict[int, AttachedRank] = {}
        self.port = 0  # set by `bind`
        self._clock = clock
        self._forgotten: ForgetPrefixes | None = None  # the last order to forget prefixes
        self._has_forgotten = False  # that order is of this front, not of an earlier one
        self._generation = 0  # the newest that this front knows, of orders and of records in tiers
        self.given_up: dict[int, int] = {}  # by rank, the restarts of the newest engine that was dropped
        # Set by `serve`; no rank attaches before.
        self._receive: Callable[[int, RankFacts | FromRank | RankLost], None]
        self._claim: Callable[[Claim], Claimed]
        self._world_size_of: Callable[[int], int | None]
        self._find_return: Callable[[ReturnOf], ReturnTo]
        self.on_follow: Callable[[PeerStream[Follow]], Awaitable[None]] | None = (
            None  # serves the standby's front
        )
        # Serves fronts of other nodes, if there are some.
        self.on_peer: Callable[[PeerStream[MirrorOf | Tunnel]], Awaitable[None]] | None = None
        # Waits until a rank that was claimed may attach to every front.
        self.until_expected: Callable[[], Awaitable[None]] | None = None
        self._left = asyncio.Event()
        self._secret = bearer(token).encode()
        self._server = grpc.aio.server(options=OPTIONS)
        attach = grpc.stream_stream_rpc_method_handler(self._attach)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: attach}),)
        )

    def use_token(self, token: str) -> None:
        """Let ranks attach that know this token."""
        self._secret = bearer(token).encode()

    def bind(self, host: str, port: int = 0) -> str:
        """Bind a port for the ranks. They may connect from now on; `serve` handles them.

        Args:
            host: Name or address at which ranks reach this machine. A name may resolve differently here (127.0.1.1
                in Debian's /etc/hosts), so all addresses are bound unless it is loopback.
            port: Port number; 0 picks a free one.

        Returns:
            "HOST:PORT" for the announcement.

        Raises:
            RuntimeError: The address cannot be bound.
        """
        is_v6 = ":" in host
        shown = f"[{host}]" if is_v6 else host
        wildcard = "[::]" if is_v6 else "0.0.0.0"
        bound = shown if host in LOOPBACK else wildcard
        self.port = self._server.add_insecure_port(f"{bound}:{port}")
        return f"{shown}:{self.port}"

    async def serve(
        self,
        receive: Callable[[int, RankFacts | FromRank | RankLost], None],
        claim: Callable[[Claim], Claimed],
        find_return: Callable[[ReturnOf], ReturnTo],
        world_size_of: Callable[[int], int | None] | None = None,
    ) -> None:
        """Let ranks attach from now on.

        Args:
            receive: Called in the event loop with each rank and message: `RankFacts` first, `RankLost` last.
            claim: Assigns a rank to a worker of a joining node.
            find_return: Describes to an engine the ranks that it returns to.
            world_size_of: Returns the number of ranks that a rank must know, or None if the service has no such rank. By
                default the ranks are those of the start. Not used after `resize`.
        """
        self._receive, self._claim, self._find_return = receive, claim, find_return
        self._world_size_of = world_size_of or self._at_start
        await self._server.start()

    def _at_start(self, rank: int) -> int | None:
        return self.num_ranks if rank < self.num_ranks else None

    def grow(self, num_ranks: int) -> None:
        """Have this many ranks from now on."""
        self.num_ranks = num_ranks

    async def close(self, grace_s: float = 0.0) -> None:
        """Close all streams and the port. Streams that are ending have `grace_s`."""
        await self._server.stop(grace_s)

    def submit(self, rank: int, request: Request, *, now_s: float) -> None:
        """Send a request to a rank. A rank of this host reads the rows of images from their files.

        Raises:
            ImageRowsError: The rows cannot be sent to a rank of another host.
        """
        stream = self.attached[rank]
        if request.images and _is_far(stream):
            for part in row_parts(request):
                self.post(rank, part)
        self.post(rank, Submit.of(request, now_s))

    def expect(self, rank: int, request: Request, *, now_s: float, in_step: bool = False) -> None:
        """Announce a request that another rank of the same host will hand over to this one. Its blocks need no rows of images.

        `in_step`: whether these ranks run in lock-step.
        """
        self.post(rank, Expect(request.request_id, Submit.of(request, now_s), in_step))

    @property
    def has_far(self) -> bool:
        """Whether a rank of another host is attached, which cannot open files of this one."""
        return any(map(_is_far, self.attached.values()))

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of ranks, and the one that a resize leads to; without a resize, the same."""
        return self._sizes or (self.num_ranks, self.num_ranks)

    def resize(self, num_ranks: int, next_num: int) -> None:
        """Accept ranks of a service with this number of ranks, and of the one that a resize leads to."""
        self.num_ranks, self._sizes = num_ranks, (num_ranks, next_num)
        # Later ranks with these numbers are other ones.
        self.given_up = {rank: num for rank, num in self.given_up.items() if rank < min(self._sizes)}

    def post(self, rank: int, message: ToRank | RowsPart) -> None:
        """Send a message to a rank, unless it is gone."""
        if rank in self.attached:
            self._post(rank, message)

    def post_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in list(self.attached):
            self.post(rank, message)  # losing one rank may lose another

    def forget_prefixes(self) -> None:
        """Make cached prefixes unavailable to later requests on all ranks, including ranks that are away now.

        KV tiers on disks remember the generation over restarts. The calendar exceeds those of earlier services. If it is behind, for
        example after a leap of the clock or on the standby's node, the newest known generation is exceeded.
        """
        self._generation = max(time.time_ns(), self._generation + 1)
        self._forgotten, self._has_forgotten = ForgetPrefixes(self._generation), True
        self.post_all(self._forgotten)

    def take_generation(self, facts: RankFacts) -> None:
        """Take the generations of a rank that attaches to the front that leads.

        A restarted front learns the last order of the one before, for ranks that were away. If this front's order would not exceed
        the rank's generation, because the clock is behind and the rank was away, all ranks get another order.
        """
        last = 0 if self._forgotten is None else self._forgotten.generation
        newest = max(facts.forgotten, facts.kv_generation)
        self._generation = max(self._generation, newest)
        if facts.forgotten > last and not self._has_forgotten:
            self._forgotten = ForgetPrefixes(facts.forgotten)
            self.post_all(self._forgotten)
        elif facts.forgotten != last and newest > last > 0:
            self.forget_prefixes()

    def regroup(self, order: Order) -> None:
        """Send an order to its members and to those that leave, and discard the statistics of their earlier steps."""
        for rank in (*order.members, *order.leaving):
            if rank in self.attached:
                self.attached[rank].stats = None
                self._post(rank, order)

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream, unless it has closed already."""
        if rank in self.attached:
            self.given_up[rank] = self.attached[rank].facts.num_restarts
            self._lose(self.attached[rank], reason)

    def expect_end(self) -> None:
        """Expect each rank to end, because another front stops it."""
        for stream in self.attached.values():
            stream.asked_to_stop = True

    def stop(self) -> None:
        """Ask each rank once to end in an orderly way."""
        self.retire(list(self.attached))

    def retire(self, ranks: Iterable[int]) -> None:
        """Ask some ranks once to end in an orderly way. Their ends are no losses."""
        for rank in ranks:
            stream = self.attached.get(rank)
            if stream is not None and not stream.asked_to_stop:
                stream.asked_to_stop = True
                self._post(rank, Stop())

    async def wait_until_empty(self) -> None:
        """Wait until every rank has left."""
        while self.attached:
            self._left.clear()
            await self._left.wait()

    def _post(self, rank: int, message: object) -> None:
        stream = self.attached[rank]
        if self._clock() - stream.write_begun_s > MAX_WRITE_S:
            self._lose(stream, f"it has not read its messages for {MAX_WRITE_S:g} s")
        else:
            stream.post(message)

    async def _attach(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one rank's stream until it ends."""
        try:
            stream = await self._greet(messages, context)
        except grpc.aio.InternalError:  # the stream ended during a write
            return
        if stream is None:
            return
        reader = asyncio.create_task(self._read(stream, messages))
        writer = asyncio.create_task(stream.write(context))
        ended = asyncio.create_task(stream.ended.wait())
        tasks = [reader, writer, ended]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises errors of this side
        finally:
            # gRPC cannot end a stream during a write, even one that was cancelled: the rank would notice nothing.
            stream.end_writes()
            try:
                await asyncio.wait([writer], timeout=END_WRITE_S)
            finally:  # gRPC may cancel this once more
                for task in tasks:
                    task.cancel()
                self._lose(stream, "its connection closed")
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: AttachedRank, messages: AsyncIterator[bytes]) -> None:
        """Handle a rank's messages until its stream ends."""
        reason = "its connection closed"
        try:
            async for message in messages:
                content = stream.seal.open(message)
                is_long = len(content) > _LONG_MESSAGE
                self._take(stream, await asyncio.to_thread(decode, content) if is_long else decode(content))
                if stream.said_goodbye is not None:
                    reason = stream.said_goodbye or "it left without a request to stop"
                    break
        except grpc.RpcError as error:
            reason = f"its connection broke ({error})"
        except SealError as error:
            reason = str(error)
        self._lose(stream, reason)

    async def _greet(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AttachedRank | None:
        """Authenticate a stream and attach its rank, or refuse it with a reason.

        Returns None if it was another kind of stream, such as a worker's claim, which is served here.
        """
        metadata = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(str(metadata.get(TOKEN_KEY, "")).encode(), self._secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this front's")
        if metadata.get(DEFINITION_KEY) != DEFINITION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "it runs another version of WideEP, with other messages (another link digest); install a version with the "
                "service's link digest",
            )
        seal = await self._agree_on_seal(str(metadata.get(NONCE_KEY, "")), context)
        first = await anext(aiter(messages), None)
        try:
            facts = None if first is None else decode(seal.open(first))
        except SealError as error:
            await self._refuse(context, str(error))
        if isinstance(facts, Claim):
            claimed = self._claim(facts)
            if self.until_expected is not None:
                await self.until_expected()
            await context.write(seal.seal(encode(claimed)))
            return None
        if isinstance(facts, ReturnOf):
            await context.write(seal.seal(encode(self._find_return(facts))))
            return None
        if isinstance(facts, Follow):
            if self.on_follow is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this service has no --standby")
            else:
                await self.on_follow(PeerStream(facts, messages, context, seal))
            return None
        if isinstance(facts, MirrorOf | Tunnel):
            if self.on_peer is None:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "this service has fronts on one node only"
                )
            else:
                await self.on_peer(PeerStream(facts, messages, context, seal))
            return None
        if not isinstance(facts, RankFacts):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be RankFacts")
        assert isinstance(facts, RankFacts), "abort raises"
        if not self._fits(facts):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {facts.rank} of {facts.world_size} does not belong to this service of {self.num_ranks} ranks",
            )
        before = self.attached.get(facts.rank)
        if before is not None and before.facts.num_restarts < facts.num_restarts:
            self._lose(before, "its engine was restarted")
        elif before is not None and facts.served is not None:  # the rank noticed the broken connection first
            self._lose(before, "it reconnected")
        elif before is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"rank {facts.rank} is already attached")
        stream = AttachedRank(facts, self._clock(), seal)
        stream.post(Welcome())
        if self._forgotten is not None and facts.forgotten < self._forgotten.generation:
            stream.post(self._forgotten)  # it was away
        self.attached[facts.rank] = stream
        try:
            self._receive(facts.rank, facts)
        except Exception:
            self._lose(stream, "the front failed to attach it")
            raise
        return stream

    def _fits(self, facts: RankFacts) -> bool:
        """Return whether a rank belongs to this service."""
        if self._sizes is None:
            return facts.world_size == self._world_size_of(facts.rank)
        # A rank that reconnects may have missed the order of a resize.
        return facts.rank < max(self._sizes) and (facts.served is not None or facts.world_size in self._sizes)

    async def _agree_on_seal(self, rank_nonce: str, context: grpc.aio.ServicerContext) -> Seal:
        """Send this end's nonce. Refuse a rank if only one end has a cluster key."""
        if self._cluster_key is None and rank_nonce:
            await self._refuse(context, f"it has a cluster key, but the front does not; {SAME_KEY}, or none")
        if self._cluster_key is not None and not rank_nonce:
            await self._refuse(context, f"the front has a cluster key, but it does not; {SAME_KEY}")
        nonce = make_nonce()
        if self._cluster_key is not None:
            await context.send_initial_metadata(((NONCE_KEY, nonce),))
        return Seal(self._cluster_key, is_front=True, rank_nonce=rank_nonce, front_nonce=nonce)

    async def _refuse(self, context: grpc.aio.ServicerContext, reason: str) -> NoReturn:
        """End a stream and also log the reason here, because the other side's log may be out of sight."""
        _LOG.warning("refused a rank at %s: %s", context.peer(), reason)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        raise AssertionError("abort raises")

    def _take(self, stream: AttachedRank, message: FromRank | RankFacts | Goodbye) -> None:
        if stream.ended.is_set():
            return
        match message:
            case RankFacts():
                raise ValueError("RankFacts must be the first message only")
            case Goodbye(reason):
                stream.said_goodbye = reason
                return
            case StepOutput(_, stats) if stats is not None:
                stream.stats = stats
            case Heartbeat():
                stream.beat_s = self._clock()
        self._receive(stream.facts.rank, message)

    def _lose(self, stream: AttachedRank, reason: str) -> None:
        """End a stream once. A new stream of the same rank may already be attached."""
        if stream.ended.is_set():
            return
        stream.ended.set()
        rank = stream.facts.rank
        del self.attached[rank]
        self._left.set()
        if not stream.asked_to_stop:
            silent_s = self._clock() - stream.beat_s
            if silent_s > SILENCE_S:
                reason = f"{reason}, {silent_s:.1f} s after its last heartbeat"
            stays_away = self._clock() - stream.attached_s < stream.facts.restartable_in_s
            self._receive(rank, RankLost(f"{reason}; {_STAYS_AWAY}" if stays_away else reason))
