"""The front process: one event loop with the HTTP server, the gRPC server for ranks, and the journal between them.

It binds and announces both sockets before any slow work, so that ranks and clients can connect while the tokenizer
loads. It does not import torch: it only tokenizes, and torch would cost 180 MB. `pool_front` leads each pool. A rank that is
lost while serving is its pool's concern; a rank that is lost during the start ends the service.

A front that replaces a killed one takes over its ports and its token. The ranks reconnect with the state it needs and form a
new group. Answers in progress ended with the old front. The standby's front (`--standby`) is such a replacement on another node.

SIGTERM drains: /health returns 503, new requests are refused, and open requests have --shutdown-timeout-seconds to finish.
SIGINT, a second SIGTERM and the supervisor's END_NOW_SIGNAL end the front immediately.
"""

import asyncio
import contextlib
import errno
import gc
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, assert_never

from scheduler.epochs.connections import break_silent
from scheduler.epochs.heartbeat import LOOK_EVERY_S, Heartbeat
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.policy.request import AdapterReport
from scheduler.weights.versions import WeightReport
from server.front.errors import ApiError
from server.front.journal import Journal
from server.front.members.nodes import JoinedPools, Nodes
from server.front.members.resize import ResizeRecord
from server.front.several.seat import Seat
from server.http.observability.logs import logging_to
from server.http.observability.metrics import Metrics
from server.http.observability.throughput import LatencyTargets
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
from server.machine.parent_death import die_with_parent
from server.options.flag import OptionsError
from server.options.pools import Pool
from server.options.table import Options
from server.serve.child_messages import FrontAddresses, encode, ranks_addresses
from server.serve.children import END_NOW_SIGNAL, FRONT_VARIABLE, KEPT_VARIABLE, raise_descriptor_limit
from server.serve.preflight.unix_socket import listening_at
from server.serve.rank_processes import LauncherLine
from server.serve.standby.first_front import FirstFront
from server.serve.standby.leading import KeptFiles, ranks_near
from server.serve.standby.waiting import copies_in, keep_ending, wait_until_lost
from server.serve.store.rendezvous import NODE_VARIABLE

if TYPE_CHECKING:  # it imports the planner's compiled kernels
    from server.serve.front.http_service import HttpService
    from server.serve.front.pool_front import PoolFront

_LOG = logging.getLogger("wideep.front")
LOCAL_HOST = "127.0.0.1"
# The interval after which a planning thread yields to the event loop. CPython's default, 5 ms, is worth many tokens.
SWITCH_S = 0.5e-3
_ANSWERS_S = 2.0  # for responses still being sent after all requests have ended
_BACKLOG = 2048
_REPLACED = (
    "this node was cut off, and the standby has taken over; let the node rejoin with `wideep worker --join` and the standby's "
    "address"
)
_STOP_TIMEOUT_S = 1.2  # for ranks to stop; the supervisor kills them after STOP_GRACE_S


def run_front(
    options: Options,
    num_ranks: int,
    ready_fd: int | None,
    ranks_host: str = LOCAL_HOST,
    number: int = 0,
    is_standby: bool = False,
    *,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Serve until a signal arrives or the service fails; return the exit status.

    Args:
        options: The options. `model` is a directory; the caller has resolved other names.
        ready_fd: Descriptor to which the addresses are written, closed afterwards. None disables the announcement.
        number: The front's number among several.
        is_standby: Whether another front leads until its node is lost.
    """
    die_with_parent()
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    with logging_to(options.log):
        try:
            # Announced by the front that this one replaces, or by the leading one.
            before = json.loads(environment.get(FRONT_VARIABLE, "null"))
            first, listens = before is None, not is_standby
            with (
                _listener(options, is_first=first, listens=listens) as listener,
                _kept_in(environment) as kept,
            ):
                place = _Place(number, before, ranks_host, Path(kept), is_standby)
                return asyncio.run(_run(options, num_ranks, listener, ready_fd, place, environment))
        except OptionsError as error:
            return _complain(str(error))


class _Place(NamedTuple):
    """What distinguishes this front from others."""

    number: int  # among several fronts
    announced: dict[str, str] | None  # addresses of the fronts, as in WIDEEP_FRONT
    ranks_host: str
    kept: Path  # folder that outlives this front
    is_standby: bool = False
    has_taken_over: bool = False

    @property
    def ranks_port(self) -> int:
        """The port for ranks of the front that this one replaces; 0 if there was none."""
        addresses = ranks_addresses(self.announced) if self.announced else []
        return _port_of(addresses[self.number]) if self.number < len(addresses) else 0

    @property
    def is_again(self) -> bool:
        """Whether this front replaces one."""
        return self.has_taken_over or self.ranks_port > 0


def _listener(
    options: Options, *, is_first: bool, listens: bool
) -> contextlib.AbstractContextManager[socket.socket]:
    """Bind the socket for HTTP. The first of several fronts also checks that no other program has the port."""
    if options.uds is not None:
        return listening_at(options.uds)
    if options.api_server_count == 1:
        return bind_http(options.host, options.port, listens=listens)
    if is_first and options.port:
        bind_http(options.host, options.port).close()
    return bind_http(options.host, options.port, is_shared=True)


def _kept_in(environment: Mapping[str, str]) -> contextlib.AbstractContextManager[str]:
    """Return the folder that outlives this front; without a supervisor, a temporary folder."""
    given = environment.get(KEPT_VARIABLE)
    return contextlib.nullcontext(given) if given else tempfile.TemporaryDirectory(prefix="wideep_")


async def _run(
    options: Options,
    num_ranks: int,
    listener: socket.socket,
    ready_fd: int | None,
    place: _Place,
    environment: Mapping[str, str],
) -> int:
    ending = _Ending()
    record = ResizeRecord(place.kept / "resize.json")
    num_ranks = record.num_ranks or num_ranks
    token = place.announced["token"] if place.announced else secrets.token_urlsafe(32)
    seat = None
    if options.api_server_count > 1:
        seat = Seat.take(
            place.kept, number=place.number, num_fronts=options.api_server_count, num_ranks=num_ranks
        )
    try:
        ranks = Ranks(num_ranks, token, cluster_key=options.cluster_key)
        ranks_address = ranks.bind(place.ranks_host, place.ranks_port)
        if record.num_ranks:  # ranks may know an earlier number
            ranks.resize(num_ranks, num_ranks)
    except OptionsError as error:
        return _complain(str(error))
    except RuntimeError as error:
        return _complain(f"cannot listen for ranks on {place.ranks_host} (--ranks-host): {error}")
    if ready_fd is not None:
        announce(ready_fd, listener, options, ranks_address, token)
    slow = await asyncio.to_thread(_import_http_service)  # meanwhile connections wait in both sockets
    first: FirstFront | None = None  # the leading front on a lost node
    files: KeptFiles | None = None  # for the standby
    metrics = Metrics(
        options.served_model_names[0],
        num_ranks,
        options.engine.num_drafts,
        has_tiers=options.engine.has_kv_tiers or options.has_own_pool,  # other pools may have them
        targets=LatencyTargets(options.target_ttft_ms, options.engine.target_itl_ms),
    )
    try:
        tokenizer = await asyncio.to_thread(
            slow.Tokenizer, options.model, options.chat_template, options.tokenizer_mode
        )
        if place.is_standby:
            first = await _stand_by(options, place, ending)
            if first is None:
                return 0
            token, place = first.token, place._replace(kept=copies_in(place.kept), has_taken_over=True)
            record = ResizeRecord(place.kept / "resize.json")
            if record.num_ranks:
                ranks.resize(record.num_ranks, record.num_ranks)
                metrics.grow(record.num_ranks)
            ranks.use_token(token)
            listener.listen(_BACKLOG)
        elif options.standby is not None:
            try:
                node = environment.get(NODE_VARIABLE, "")
                files = KeptFiles(place.kept, lambda kind, text: http.events.note(kind, text), node)
            except OSError as error:
                return _complain(f"--standby: {error}")
        http = slow.HttpService(
            options,
            tokenizer,
            ranks=ranks,
            journal=Journal(),
            metrics=metrics,
            kept=place.kept,
            record=record,
            secret=token,
            seat=seat,
            files=files,
        )
    except ValueError as error:  # TokenizerError: its class came with the slow import
        return _complain(str(error))
    gc.freeze()  # full collections stop all streams; exclude every object that exists now
    joined = JoinedPools(Path(place.kept) / "pools", is_again=place.is_again)
    front = _Front(options, ranks, metrics, http, ending, joined, files)
    front.begin_resizes(environment)
    if first is not None:
        front.take_over_from(first, ranks_near(place.kept))
    return await front.run(listener, is_again=place.is_again)


async def _stand_by(options: Options, place: _Place, ending: "_Ending") -> FirstFront | None:
    return await wait_until_lost(
        place.kept,
        cluster_key=options.cluster_key,
        silence_s=options.engine.heartbeat_timeout_s,
        begun=ending.begun,
        now=ending.now,
    )


class _Ending:
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


class _Front:
    """The parts that share the event loop, and their shutdown."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        metrics: Metrics,
        http: "HttpService",
        ending: _Ending,
        joined: JoinedPools,
        files: KeptFiles | None,
    ) -> None:
        self._options, self._ranks, self._metrics = options, ranks, metrics
        self._files = files
        self._ending_first: asyncio.Task[None] | None = None
        self._lost: Sequence[int] = ()  # ranks that were lost with the front before this one
        if files is not None:
            ranks.on_follow = files.serve
            files.on_replaced = lambda: self._fail(_REPLACED)
        self._http, self._ending, self._joined = http, ending, joined
        self._nodes = Nodes([each.pool for each in http.pools])
        for pool in joined.pools:  # while an earlier front served
            self._nodes.put(pool)
            http.add_pool(pool)
        self._pools = {rank: pool for pool in http.pools for rank in pool.pool.ranks}  # by rank
        self._fatal: str | None = None
        self._is_closing = False  # open requests have ended; responses may still be in flight
        for each in http.pools if http.leads else ():
            each.lead(http.requests, self._fail_pool)
        http.weights.on_ready = lambda rank: self._pools[rank].leader.attach(rank)
        http.on_size = self._on_size
        ending.on_hurry = self._hurry

    def begin_resizes(self, environment: Mapping[str, str]) -> None:
        """Connect to the launcher, if there is one. Ranks that an interrupted resize left behind end."""
        resize = self._http.resize
        if not self._http.leads:
            return
        if (line := LauncherLine.of(environment, resize.take_end)) is not None:
            resize.processes = line
        resize.recover()

    def take_over_from(self, first: FirstFront, lost: Sequence[int]) -> None:
        """Lead instead of a front on a lost node with some ranks. If that one still runs, it ends when it can be reached."""
        self._lost = lost
        self._http.events.note("took_over", "the node of the leading front is lost, and the standby leads")
        ended = lambda: _LOG.warning("the former leading front was reached again, and ends")  # noqa: E731
        self._ending_first = asyncio.create_task(keep_ending(first, self._options.cluster_key, ended))

    def _on_size(self, num_ranks: int, most: int) -> None:
        """Follow a resize. `most`: ranks that may attach."""
        self._nodes.put(self._http.pools.first.pool)
        # Ranks that have left stay here: their last messages may still arrive.
        self._pools |= dict.fromkeys(range(most), self._http.pools.first)

    async def run(self, listener: socket.socket, *, is_again: bool) -> int:
        """Serve until a signal or a fatal error; return the exit status.

        Args:
            is_again: Whether this front replaces one that has served.
        """
        if is_again and self._http.leads:
            for pool in self._http.pools:
                pool.resume(self._lost)
        self._look_at_links()
        await self._ranks.serve(self._receive, self._claim, self._find_return, self._nodes.world_size_of)
        serving = asyncio.create_task(self._http.serve(listener))
        serving.add_done_callback(self._on_http_end)
        await self._ending.begun.wait()
        await self._close(serving)
        if self._fatal is None:
            await self._wait_for_ranks()
        await self._ranks.close()
        if self._files is not None:
            self._files.close()
        return _complain(self._fatal) if self._fatal else 0

    def _look_at_links(self) -> None:
        """Break connections to ranks with an unresponsive host, periodically. Client connections may stay silent."""
        asyncio.get_running_loop().call_later(2 * LOOK_EVERY_S, self._look_at_links)
        if self._options.engine.heartbeat_timeout_s:
            # OSError: no descriptor is free for listing connections; the next call may have one.
            with contextlib.suppress(OSError):
                break_silent(self._options.engine.heartbeat_timeout_s, port=self._ranks.port)

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
        if not self._http.leads:
            await self._close_following(serving, grace_s)
            return
        for pool in self._http.pools:
            pool.leader.close()
        if self._ending.now.is_set():
            self._ranks.stop()
        self._http.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        self._http.stop(grace_s)
        await asyncio.wait([serving])
        self._ranks.stop()

    async def _close_following(self, serving: "asyncio.Task[None]", grace_s: float) -> None:
        """End requests and responses, and keep the links until the leading front has stopped the ranks."""
        self._ranks.expect_end()
        self._http.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        self._http.stop(grace_s)
        await asyncio.wait([serving])

    async def _drain(self) -> float:
        """Wait for open requests, unless the front must end now. Returns the seconds left for responses being sent."""
        if self._ending.now.is_set():
            return _ANSWERS_S
        until_s = time.monotonic() + self._options.http.shutdown_timeout_s
        tasks = [
            asyncio.create_task(self._http.drain()),
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
        if not self._http.leads and not self._ending.now.is_set():  # the other fronts may still drain
            timeout_s += self._options.http.shutdown_timeout_s
        try:
            await asyncio.wait_for(self._ranks.wait_until_empty(), timeout_s)
        except TimeoutError:
            ranks = ", ".join(map(str, self._ranks.attached))
            _LOG.error("rank %s did not detach in time", ranks)

    def _receive(self, rank: int, message: RankFacts | FromRank | RankLost) -> None:
        """Handle a rank's message: its facts first, its loss last."""
        http = self._http
        match message:
            case StepOutput(outputs, stats):
                if stats is not None:
                    if http.leads:  # one of several fronts counts a rank's steps
                        self._metrics.note_stats(stats)
                    http.requests.note_stats(stats)
                if outputs:
                    http.requests.deliver(rank, outputs)
            case Heartbeat() | LoadReport() | ExpertMap() | PlacementUpdate() | Regrouped() | Fault():
                self._pools[rank].receive(rank, message)
            case ExpertsRead(version, problem):
                http.resize.take_read(rank, version, problem)
            case MemorySwitched(number):
                http.sleep_mode.take_switched(rank, number)
            case WeightReport():
                http.weights.take_report(message)
            case AdapterReport():
                http.adapters.places.take_report(rank, message)
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
            for pool in self._http.pools
            for rank, absence in pool.epochs.missing.items()
        }
        return self._nodes.claim(claim, missing, time.monotonic(), self._http.resize.coming)

    def _find_return(self, asked: ReturnOf) -> ReturnTo:
        """Describe to an engine the ranks that it returns to or joins."""
        pool = self._pools.get(asked.rank)
        if pool is None and self._nodes.world_size_of(asked.rank) is not None:  # of a pool that joins
            return ReturnTo(0, None)
        found = None if pool is None else self._http.placement_for(pool, asked.rank)
        if found is None:
            return ReturnTo(
                0, None, f"the service has {self._ranks.num_ranks} ranks, and does not wait for this one"
            )
        return ReturnTo(*found)

    def _admit(self, pool: Pool) -> None:
        """Add the pool of a first rank that attaches. Its ranks get requests when all have attached and met."""
        made = self._http.add_pool(pool)
        self._pools |= dict.fromkeys(pool.ranks, made)
        self._joined.add(pool)
        made.lead(self._http.requests, self._fail_pool)
        made.gather()
        _LOG.warning("%s joins the service", pool.in_words)
        self._http.events.note("pool_joined", f"{pool.in_words} joins the service")

    def _attach(self, facts: RankFacts) -> None:
        if self._http.following is not None:
            self._http.following.attach(facts)
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
        self._http.requests.note_rank(facts)
        pool = self._pools[facts.rank]
        pool.attach(facts)
        if self._is_closing:
            self._ranks.stop()  # too late to serve
        else:
            self._http.sleep_mode.note_rank(facts.rank, facts.memory)
            self._http.adapters.places.note_rank(facts.rank)
            if self._http.weights.may_join(facts):
                pool.leader.attach(facts.rank, epoch=facts.served.epoch if facts.served else 0)

    def _lose(self, rank: int, reason: str) -> None:
        """Hand a lost rank's requests to the other ranks. While the service is ending, only log the loss."""
        self._metrics.note_lost(rank)
        self._http.adapters.places.note_lost(rank)
        if self._http.weights.lose(rank):
            _LOG.warning("rank %d is lost before it had loaded the serving weights: %s", rank, reason)
            self._http.resize.take_end(rank, reason)
        elif self._is_closing or self._ending.now.is_set():
            _LOG.warning("rank %d is lost while the service ends: %s", rank, reason)
        elif self._http.following is not None:
            self._http.following.lose(rank)
        else:
            self._http.resize.take_end(rank, reason)
            self._pools[rank].leader.lose(rank, reason)

    def _fail_pool(self, pool: "PoolFront", reason: str) -> None:
        """End the service because a pool cannot serve, unless another one serves or may do so again."""
        pools = self._http.pools
        if pool.is_starting or all(each.has_failed or each.epochs.is_gathering for each in pools):
            self._fail(reason)
            return
        said = f"pool {pool.pool.name} does not serve until its ranks return: {reason}"
        _LOG.error("%s", said)
        self._http.events.note("pool_lost", said)

    def _fail(self, reason: str) -> None:
        """End the service with this reason, unless an earlier one exists."""
        if self._fatal is None and not self._ending.now.is_set():
            self._fatal = reason
        self._http.requests.fail_all(ApiError(503, f"The service is ending: {self._fatal}."))
        self._ending.begun.set()
        self._ending.now.set()


def _import_http_service() -> ModuleType:
    """Import the slow half, with torch hidden: transformers would import it but does not need it for tokenizing."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None makes the import raise ModuleNotFoundError
    return importlib.import_module("server.serve.front.http_service")


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _complain(message: str) -> int:
    """Log why the front ends and return its exit status."""
    _LOG.critical("%s", message)
    return 1


def bind_http(host: str, port: int, *, is_shared: bool = False, listens: bool = True) -> socket.socket:
    """Bind and listen.

    Args:
        listens: Whether to listen. Otherwise the kernel refuses connections until this process does.
        is_shared: Whether several fronts listen on the port. The kernel spreads connections over them.

    Raises:
        OptionsError: The port is in use, or the address does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionsError(f"invalid --host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if listens:
            listener.listen(_BACKLOG)  # immediately: bind alone does not reserve a port that allows reuse
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionsError(f"port {port} on {host} is in use; choose another with --port") from error
        raise OptionsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def announce(
    ready_fd: int, listener: socket.socket, options: Options, ranks_address: str, token: str
) -> None:
    """Write the addresses to the supervisor as one JSON line."""
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"unix:{options.uds}"
    if options.uds is None:
        url = f"{options.http.scheme}://{shown}:{listener.getsockname()[1]}"
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(encode(FrontAddresses(url, ranks_address, token)) + "\n")
