"""The running front: it connects HTTP, the ranks and the pools, until it ends them in order.

Messages of ranks arrive here and go on to the part that they concern. `pool_front` leads each pool. A rank that is lost while
serving is its pool's concern; a rank that is lost during the start ends the service.

SIGTERM drains: /health returns 503, new requests are refused, and open requests have --shutdown-timeout-seconds to finish.
SIGINT, a second SIGTERM and the supervisor's END_NOW_SIGNAL end the front immediately.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, assert_never

from scheduler.epochs.connections import break_silent
from scheduler.epochs.heartbeat import LOOK_EVERY_S, Heartbeat
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.policy.request import AdapterReport
from scheduler.weights.versions import WeightReport
from server.front.errors import ApiError
from server.front.members.nodes import JoinedPools, Nodes
from server.http.observability.metrics import Metrics
from server.link.messages import (
    Claim,
    Claimed,
    ExpertsRead,
    Fault,
    FromRank,
    MemorySwitched,
    MemoryUse,
    PlacementUpdate,
    RankFacts,
    Regrouped,
    ReturnOf,
    ReturnTo,
    StepOutput,
)
from server.link.ranks import RankLost, Ranks
from server.machine.tasks import start_task
from server.options.pools import Pool
from server.options.table import Options
from server.serve.children import END_NOW_SIGNAL
from server.serve.rank_processes import LauncherLine
from server.serve.standby.first_front import FirstFront
from server.serve.standby.leading import KeptFiles
from server.serve.standby.waiting import keep_ending

if TYPE_CHECKING:  # they import the planner's compiled kernels
    from server.serve.front.http_service import HttpService
    from server.serve.front.pool_front import PoolFront
    from server.serve.front.service import FrontService

_LOG = logging.getLogger("wideep.front")
_ANSWERS_S = 2.0  # for responses still being sent after all requests have ended
_REPLACED = (
    "this node was cut off, and the standby has taken over; let the node rejoin with `wideep worker --join` and the standby's "
    "address"
)
_FOLLOW_S, _POLL_S = 10.0, 0.02  # for the other fronts to follow a claim
_STREAMS_END_S = 0.2  # for streams to fronts of other nodes to end; gRPC logs an error for each that is cut
_STOP_TIMEOUT_S = 1.2  # for ranks to stop; the supervisor kills them after STOP_GRACE_S


class Ending:
    """Requests to end the front, by signals or by the front itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.now = asyncio.Event()  # do not wait for open requests
        self.on_hurry: Callable[[], None] = lambda: None  # called at each request to end immediately
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end_gently)
        for number in (signal.SIGINT, END_NOW_SIGNAL):
            loop.add_signal_handler(number, self.end_now)

    def _end_gently(self) -> None:
        if self.begun.is_set():  # a second SIGTERM
            self.end_now()
        self.begun.set()

    def end_now(self) -> None:
        """End without waiting for open requests."""
        self.on_hurry()
        self.begun.set()
        self.now.set()


class Front:
    """The parts that share the event loop, and their shutdown."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        metrics: Metrics,
        service: "FrontService",
        http: "HttpService",
        ending: Ending,
        joined: JoinedPools,
        files: KeptFiles | None,
    ) -> None:
        self._options, self._ranks, self._metrics = options, ranks, metrics
        self._files = files
        self._ending_first: asyncio.Task[None] | None = None
        self._lost: Sequence[int] = ()  # ranks that were lost with the front before this one
        if files is not None:
            ranks.on_follow = files.serve
            files.on_replaced = self._end_replaced
            service.resize.until_copied = files.wait_until_copied
        self._service, self._http = service, http
        self._ending, self._joined = ending, joined
        self._nodes = Nodes([each.pool for each in service.pools])
        for pool in joined.pools:  # while an earlier front served
            self._nodes.put(pool)
            service.add_pool(pool)
        self._pools = {rank: pool for pool in service.pools for rank in pool.pool.ranks}  # by rank
        self._fatal: str | None = None
        self._is_closing = False  # open requests have ended; responses may still be in flight
        self._is_replaced = False  # by the standby, after the link between the nodes was cut
        for each in service.pools if service.leads else ():
            each.lead(service.requests, self._fail_pool)
        service.weights.on_ready = lambda rank: self._join(ranks.attached[rank].facts)
        service.on_size = self._on_size
        service.announced = lambda: self._nodes.announced
        if service.following is not None:
            service.following.on_pools = self._follow_pools
        elif service.fronts is not None:
            ranks.until_expected = self._until_all_follow
        self._other_nodes = None if service.fronts is None else service.fronts.nodes
        if self._other_nodes is not None:
            ranks.on_peer = self._other_nodes.serve
        ending.on_hurry = self._hurry

    def begin_resizes(self, environment: Mapping[str, str]) -> None:
        """Connect to the launcher, if there is one. Ranks that an interrupted resize left behind end."""
        resize = self._service.resize
        if not self._service.leads:
            return
        if (line := LauncherLine.of(environment, resize.take_end)) is not None:
            resize.processes = line
        resize.recover()

    def take_over_from(self, first: FirstFront, lost: Sequence[int]) -> None:
        """Lead instead of a front on a lost node with some ranks. If that one still runs, it ends when it can be reached."""
        self._lost = lost
        self._service.events.note("took_over", "the node of the leading front is lost, and the standby leads")
        ended = lambda: _LOG.warning("the former leading front was reached again, and ends")  # noqa: E731
        ending = keep_ending(first, self._options.cluster_key, ended)
        self._ending_first = start_task(ending, "end of the former leading front")

    def _on_size(self, num_ranks: int, most: int) -> None:
        """Follow a resize. `most`: ranks that may attach."""
        self._nodes.put(self._service.pools.first.pool)
        # Ranks that have left stay here: their last messages may still arrive.
        self._pools |= dict.fromkeys(range(most), self._service.pools.first)

    async def run(self, listener: socket.socket, *, is_again: bool) -> str | None:
        """Serve until a signal or a fatal error; return the error.

        Args:
            is_again: Whether this front replaces one that has served.
        """
        if is_again and self._service.leads:
            for pool in self._service.pools:
                pool.resume(self._lost)
        self._look_at_links()
        if self._service.following is not None:
            self._service.following.look()  # at the pools whose ranks may attach
        await self._ranks.serve(self._receive, self._claim, self._find_return, self._nodes.world_size_of)
        if self._other_nodes is not None:
            await self._other_nodes.start()
        serving = asyncio.create_task(self._http.serve(listener))
        serving.add_done_callback(self._on_http_end)
        await self._ending.begun.wait()
        await self._close(serving)
        if self._fatal is None:
            await self._wait_for_ranks()
        grace_s = 0.0
        if self._other_nodes is not None:
            await self._other_nodes.close()
            grace_s = _STREAMS_END_S
        await self._ranks.close(grace_s)
        if self._files is not None:
            self._files.close()
        return self._fatal

    def _look_at_links(self) -> None:
        """Break connections to ranks and other nodes' fronts with an unresponsive host, periodically. Client connections may stay
        silent."""
        asyncio.get_running_loop().call_later(2 * LOOK_EVERY_S, self._look_at_links)
        if self._options.engine.heartbeat_timeout_s:
            # OSError: no descriptor is free for listing connections; the next call may have one.
            with contextlib.suppress(OSError):
                break_silent(
                    self._options.engine.heartbeat_timeout_s,
                    port=self._ranks.port,
                    peer_ports=() if self._other_nodes is None else self._other_nodes.ports,
                )

    def _on_http_end(self, serving: "asyncio.Task[None]") -> None:
        """End the front if its HTTP server has ended, because it is useless without one."""
        if not self._is_closing and not serving.cancelled():
            self._fail(f"the HTTP server has ended: {serving.exception() or 'no error was reported'}")

    async def _close(self, serving: "asyncio.Task[None]") -> None:
        """End requests, responses and ranks: one after the other when draining, otherwise all at once."""
        if self._files is not None:
            self._files.end()
        if self._ending_first is not None:
            self._ending_first.cancel()
        grace_s = await self._drain()
        self._is_closing = True
        if not self._service.leads:
            await self._close_following(serving, grace_s)
            return
        for pool in self._service.pools:
            pool.leader.close()
        if self._ending.now.is_set():
            self._stop_ranks()
        self._service.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        self._http.stop(grace_s)
        await asyncio.wait([serving])
        self._stop_ranks()

    def _end_replaced(self) -> None:
        """End after the standby has taken over, with the ranks of this node. The others go on to the standby's front."""
        self._is_replaced = True
        self._fail(_REPLACED)

    def _stop_ranks(self) -> None:
        if self._is_replaced and self._files is not None:
            self._ranks.retire([rank for rank in self._ranks.attached if rank in self._files.near])
        else:
            self._ranks.stop()

    async def _close_following(self, serving: "asyncio.Task[None]", grace_s: float) -> None:
        """End requests and responses, and keep the links until the leading front has stopped the ranks."""
        self._ranks.expect_end()
        self._service.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        self._http.stop(grace_s)
        await asyncio.wait([serving])

    async def _drain(self) -> float:
        """Wait for open requests, unless the front must end now. Returns the seconds left for responses being sent."""
        if self._ending.now.is_set():
            return _ANSWERS_S
        until_s = time.monotonic() + self._options.http.shutdown_timeout_s
        tasks = [
            asyncio.create_task(self._service.drain()),
            asyncio.create_task(self._ending.now.wait()),
        ]
        _, pending = await asyncio.wait(
            tasks,
            timeout=self._options.http.shutdown_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in pending:
            task.cancel()
        left_s = 0.0 if self._ending.now.is_set() else until_s - time.monotonic()
        return max(_ANSWERS_S, left_s)

    def _hurry(self) -> None:
        if self._is_closing:
            self._http.stop(0)

    async def _wait_for_ranks(self) -> None:
        timeout_s = _STOP_TIMEOUT_S
        if not self._service.leads and not self._ending.now.is_set():  # the other fronts may still drain
            timeout_s += self._options.http.shutdown_timeout_s
        try:
            await asyncio.wait_for(self._ranks.wait_until_empty(), timeout_s)
        except TimeoutError:
            ranks = ", ".join(map(str, self._ranks.attached))
            _LOG.error("rank %s did not detach in time", ranks)

    def _receive(self, rank: int, message: RankFacts | FromRank | RankLost) -> None:
        """Handle a rank's message: its facts first, its loss last."""
        service = self._service
        match message:
            case StepOutput(outputs, stats):
                if stats is not None:
                    if service.leads:  # one of several fronts counts a rank's steps
                        self._metrics.note_stats(stats)
                    service.requests.note_stats(stats)
                if outputs:
                    service.requests.deliver(rank, outputs)
            case Heartbeat() | LoadReport() | ExpertMap() | PlacementUpdate() | Regrouped() | Fault():
                self._pools[rank].receive(rank, message)
                if isinstance(message, Regrouped | Fault):
                    service.adapters.places.note_epochs()
            case ExpertsRead(version, problem):
                service.resize.take_read(rank, version, problem)
            case MemorySwitched(number):
                service.sleep_mode.take_switched(rank, number)
            case WeightReport():
                service.weights.take_report(message)
            case AdapterReport():
                service.adapters.places.take_report(rank, message)
            case MemoryUse(resident_bytes):
                self._metrics.note_memory(rank, resident_bytes)
            case RankFacts():
                self._attach(message)
            case RankLost(reason):
                self._lose(rank, reason)
            case _:
                assert_never(message)

    def _claim(self, claim: Claim) -> Claimed:
        missing = {
            rank: absence.since_s
            for pool in self._service.pools
            for rank, absence in pool.epochs.missing.items()
        }
        return self._nodes.claim(claim, missing, time.monotonic(), self._service.resize.coming)

    async def _until_all_follow(self) -> None:
        """Wait until every front expects the ranks that were claimed, or _FOLLOW_S."""
        until_s = time.monotonic() + _FOLLOW_S
        while not self._service.all_follow() and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)

    def _find_return(self, asked: ReturnOf) -> ReturnTo:
        """Describe to an engine the ranks that it returns to or joins."""
        pool = self._pools.get(asked.rank)
        if pool is None and self._nodes.world_size_of(asked.rank) is not None:  # of a pool that joins
            return ReturnTo(0, None)
        found = None if pool is None else self._service.placement_for(pool, asked.rank)
        if found is None:
            return ReturnTo(
                0, None, f"the service has {self._ranks.num_ranks} ranks, and does not wait for this one"
            )
        return ReturnTo(*found)

    def _admit(self, pool: Pool) -> None:
        """Add the pool of a first rank that attaches. Its ranks get requests when all have attached and met."""
        made = self._add_pool(pool)
        self._joined.add(pool)
        made.lead(self._service.requests, self._fail_pool)
        made.gather()
        _LOG.warning("%s joins the service", pool.in_words)
        self._service.events.note("pool_joined", f"{pool.in_words} joins the service")

    def _add_pool(self, pool: Pool) -> "PoolFront":
        made = self._service.add_pool(pool)
        self._pools |= dict.fromkeys(pool.ranks, made)
        return made

    def _follow_pools(self, pools: Sequence[Pool], announced: Sequence[Pool]) -> None:
        """Add the pools that the leading front has admitted, and expect those that it has announced."""
        for pool in pools:
            if pool.name not in self._service.pools.memberships:
                self._nodes.put(pool)
                self._add_pool(pool)
        self._nodes.expect(announced)

    def _attach(self, facts: RankFacts) -> None:
        if self._service.following is not None:
            if (pool_joins := self._nodes.admit(facts.rank)) is not None:
                self._add_pool(pool_joins)
            self._service.following.attach(facts)
            if self._is_closing:
                self._ranks.expect_end()
            return
        if (pool_joins := self._nodes.admit(facts.rank)) is not None:
            self._admit(pool_joins)
        self._nodes.note(facts.rank, facts.node, facts.num_restarts)
        if self._files is not None:
            self._files.note_rank(facts.rank, facts.node)
        engine = self._options.engine
        self._metrics.note_rank(
            facts, cache_dtype=engine.kv_cache_dtype, enable_prefix_caching=engine.enable_prefix_caching
        )
        self._service.requests.note_rank(facts)
        self._ranks.take_generation(facts)
        pool = self._pools[facts.rank]
        pool.attach(facts)
        if self._is_closing:
            self._ranks.stop()  # too late to serve
        else:
            self._service.sleep_mode.note_rank(facts.rank, facts.memory)
            self._service.adapters.places.note_rank(facts.rank)
            if self._service.weights.may_join(facts):
                self._join(facts)

    def _join(self, facts: RankFacts) -> None:
        """Let a rank meet the others of its pool."""
        epochs = [known.epoch for known in (facts.served, facts.loaded) if known is not None]
        self._pools[facts.rank].leader.attach(facts.rank, epoch=max(epochs, default=0))

    def _lose(self, rank: int, reason: str) -> None:
        """Hand a lost rank's requests to the other ranks. While the service is ending, only log the loss."""
        self._metrics.note_lost(rank)
        self._service.adapters.places.note_lost(rank)
        self._service.requests.note_lost(rank)
        if self._service.weights.lose(rank):
            _LOG.warning("rank %d is lost before it had loaded the serving weights: %s", rank, reason)
            self._service.resize.take_end(rank, reason)
        elif self._is_closing or self._ending.now.is_set():
            _LOG.warning("rank %d is lost while the service ends: %s", rank, reason)
        elif self._service.following is not None:
            self._service.following.lose(rank)
        else:
            self._service.resize.take_end(rank, reason)
            self._pools[rank].leader.lose(rank, reason)
            self._service.adapters.places.note_epochs()

    def _fail_pool(self, pool: "PoolFront", reason: str) -> None:
        """End the service because a pool cannot serve, unless another one serves or may do so again."""
        pools = self._service.pools
        if pool.is_starting or all(each.has_failed or each.epochs.is_gathering for each in pools):
            self._fail(reason)
            return
        said = f"pool {pool.pool.name} does not serve until its ranks return: {reason}"
        _LOG.error("%s", said)
        self._service.events.note("pool_lost", said)

    def _fail(self, reason: str) -> None:
        """End the service with this reason, unless an earlier one exists."""
        if self._fatal is None and not self._ending.now.is_set():
            self._fatal = reason
        self._service.requests.fail_all(ApiError(503, f"The service is ending: {self._fatal}."))
        self._ending.begun.set()
        self._ending.now.set()
