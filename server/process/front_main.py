"""The front process: one event loop with the HTTP server, the ranks' gRPC server and the journal between them.

Both sockets are bound and announced before anything slow happens, so that ranks and clients find a door while the
tokenizer loads. torch stays out: this process only tokenizes, and would pay 180 MB for it. A rank that is lost while
others are left, or until one comes back, is a matter for `front.leader`; one that is lost at the start ends all.

A front that replaces one that was killed takes over its ports and its token. The ranks come back to it with what it has to
know, and meet anew; what the one before was answering has been cut off with it.

SIGTERM ends it gently: /health is 503, new requests are refused, open ones end by themselves for as long as
--shutdown-timeout-seconds says. SIGINT, a second SIGTERM and its supervisor's END_NOW_SIGNAL end it at once.
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
from typing import TYPE_CHECKING

from expert_placement.survivors import surviving
from scheduler.epochs.connections import break_silent
from scheduler.epochs.heartbeat import LOOK_EVERY_S, Heartbeat, Watch
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, MoveState, PlacementReport
from scheduler.policy.request import RankStats, RequestOutput
from server.errors import ApiError
from server.front.journal import Journal
from server.front.leader import Leader
from server.front.membership import Epochs
from server.front.nodes import Nodes
from server.http.observability.logs import logging_to
from server.http.observability.metrics import Metrics
from server.link.messages import Claim, Claimed, Fault, PlacementUpdate, RankFacts, Served
from server.link.ranks import Ranks
from server.options.flag import OptionsError
from server.options.table import Options
from server.parent_death import die_with_parent
from server.process.children import (
    END_NOW_SIGNAL,
    FRONT_VARIABLE,
    KEPT_VARIABLE,
    raise_descriptor_limit,
)
from server.process.unix_socket import listening_at

if TYPE_CHECKING:  # it imports the planner's compiled kernels
    from server.process.http_service import HttpService

_LOG = logging.getLogger("wideep.front")
LOCAL_HOST = "127.0.0.1"
SWITCH_S = (
    0.5e-3  # after which a thread that plans lets the event loop go on; CPython's own 5 ms are many tokens
)
_ANSWERS_S = 2.0  # for answers that are still being sent when all requests have ended
_STOP_TIMEOUT_S = 1.2  # for ranks that were asked to stop; the supervisor kills after STOP_GRACE_S


def run_front(
    options: Options,
    *,
    num_ranks: int,
    ready_fd: int | None,
    ranks_host: str = LOCAL_HOST,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Serve until told to stop; returns the exit status.

    Args:
        options: its `model` is a directory; whoever starts the front has resolved other names.
        ready_fd: where the addresses are announced, closed afterwards; None announces nothing.
    """
    die_with_parent()
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    with logging_to(options.log):
        try:
            with _listener(options) as listener, _kept_in(environment) as kept:
                return asyncio.run(
                    _run(options, num_ranks, listener, ready_fd, ranks_host, environment, Path(kept))
                )
        except OptionsError as error:
            return _complain(str(error))


def _listener(options: Options) -> contextlib.AbstractContextManager[socket.socket]:
    return bind_http(options.host, options.port) if options.uds is None else listening_at(options.uds)


def _kept_in(environment: Mapping[str, str]) -> contextlib.AbstractContextManager[str]:
    """Return the folder for what outlives a front; one without a supervisor has a folder of its own."""
    given = environment.get(KEPT_VARIABLE)
    return contextlib.nullcontext(given) if given else tempfile.TemporaryDirectory(prefix="wideep_")


async def _run(
    options: Options,
    num_ranks: int,
    listener: socket.socket,
    ready_fd: int | None,
    ranks_host: str,
    environment: Mapping[str, str],
    kept: Path,
) -> int:
    ending = _Ending()
    before = json.loads(
        environment.get(FRONT_VARIABLE, "null")
    )  # announced by the front that this one replaces
    token = before["token"] if before else secrets.token_urlsafe(32)
    try:
        ranks = Ranks(num_ranks, token, cluster_key=options.cluster_key)
        ranks_address = ranks.bind(ranks_host, _port_of(before["ranks_address"]) if before else 0)
    except OptionsError as error:
        return _complain(str(error))
    except RuntimeError as error:
        return _complain(f"cannot listen for ranks on --ranks-host {ranks_host}: {error}")
    if ready_fd is not None:
        announce(ready_fd, listener, options, ranks_address, token)
    slow = await asyncio.to_thread(_import_http_service)  # meanwhile connections wait in both sockets
    drafts = options.speculative.num_drafts if options.speculative else 0
    metrics = Metrics(options.served_model_names[0], num_ranks, drafts)
    epochs = Epochs(num_ranks, recovery_timeout_s=options.rank_recovery_timeout_s)
    try:
        tokenizer = await asyncio.to_thread(
            slow.Tokenizer, options.model, options.chat_template, options.tokenizer_mode
        )
        http = slow.HttpService(
            options,
            tokenizer,
            ranks=ranks,
            epochs=epochs,
            journal=Journal(),
            metrics=metrics,
            kept=kept,
            secret=token,
        )
    except ValueError as error:  # TokenizerError: its class came with the slow import
        return _complain(str(error))
    gc.freeze()  # what is here now stays: full collections, which stop all streams, pass it over
    front = _Front(options, ranks, epochs, metrics, http, ending)
    return await front.run(listener, is_again=before is not None)


class _Ending:
    """The wish to end: set by signals, and by the front itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.now = asyncio.Event()  # open requests are not waited for
        self.on_hurry: Callable[[], None] = lambda: None  # told each time that somebody cannot wait
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end_gently)
        for number in (signal.SIGINT, END_NOW_SIGNAL):
            loop.add_signal_handler(number, self.end_now)

    def _end_gently(self) -> None:
        if self.begun.is_set():  # a second time: somebody cannot wait
            self.end_now()
        self.begun.set()

    def end_now(self) -> None:
        """End without waiting for anything."""
        self.on_hurry()
        self.begun.set()
        self.now.set()


class _Front:
    """What lives in the event loop, and how it ends. Told by `Ranks` what ranks say."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        epochs: Epochs,
        metrics: Metrics,
        http: "HttpService",
        ending: _Ending,
    ) -> None:
        self._options, self._ranks, self._metrics = options, ranks, metrics
        self._http, self._ending = http, ending
        self._watch = Watch(options.heartbeat_timeout_s)
        self._watch.begin_epoch(0, range(ranks.num_ranks))
        self._epochs, self._nodes = epochs, Nodes(ranks.num_ranks)
        self._fatal: str | None = None
        self._is_closing = False  # open requests have ended; answers may still be on their way
        self._leader = Leader(
            epochs,
            ranks,
            http.requests,
            http.placement,
            surviving=surviving,
            on_order=self._on_order,
            on_failure=self._fail,
            events=http.events,
        )
        ending.on_hurry = self._hurry

    async def run(self, listener: socket.socket, *, is_again: bool) -> int:
        """Serve until a signal or a lost rank; returns the exit status.

        Args:
            is_again: whether ranks have served, for a front that is gone.
        """
        if is_again:
            self._leader.resume()
        self._look_at_links()
        await self._ranks.serve(self)
        serving = asyncio.create_task(self._http.serve(listener))
        serving.add_done_callback(self._on_http_end)
        await self._ending.begun.wait()
        await self._close(serving)
        if self._fatal is None:
            await self._wait_for_ranks()
        await self._ranks.close()
        return _complain(self._fatal) if self._fatal else 0

    def _look_at_links(self) -> None:
        """Lose ranks whose host does not answer any more; clients may be away for as long as they like."""
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_at_links)
        if self._options.heartbeat_timeout_s:
            with contextlib.suppress(
                OSError
            ):  # no descriptor is free to list the others: the next look may have one
                break_silent(self._options.heartbeat_timeout_s, port=self._ranks.port)

    def _on_http_end(self, serving: "asyncio.Task[None]") -> None:
        """A front that does not answer over HTTP is of no use: it ends, and says why."""
        if not self._is_closing and not serving.cancelled():
            self._fail(f"the HTTP server has ended: {serving.exception() or 'nobody asked it to'}")

    async def _close(self, serving: "asyncio.Task[None]") -> None:
        """End requests, answers and ranks. Gently: one after the other; else all at the same time."""
        grace_s = await self._drain()
        self._is_closing = True
        self._leader.close()
        if self._ending.now.is_set():
            self._ranks.stop()
        self._http.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        self._http.stop(grace_s)
        await asyncio.wait([serving])
        self._ranks.stop()

    async def _drain(self) -> float:
        """Let open requests end, if there is time; returns the seconds left for answers still being sent."""
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
        try:
            await asyncio.wait_for(self._ranks.wait_until_empty(), _STOP_TIMEOUT_S)
        except TimeoutError:
            ranks = ", ".join(map(str, self._ranks.attached))
            _LOG.error("did not hear goodbye from rank %s", ranks)

    def refused(self, peer: str, reason: str) -> None:
        """Say that somebody may not be a rank."""
        _LOG.warning("refused a rank at %s: %s", peer, reason)

    def claim(self, claim: Claim) -> Claimed:
        """Give a worker of a node that joins its rank."""
        missing = {rank: absence.since_s for rank, absence in self._epochs.missing.items()}
        return self._nodes.claim(claim, missing, time.monotonic())

    def attached(self, facts: RankFacts) -> None:
        """Take a rank that is ready."""
        self._nodes.note(facts.rank, facts.node, facts.num_restarts)
        self._metrics.note_rank(facts, enable_prefix_caching=self._options.enable_prefix_caching)
        self._http.experts_load.note_rank(facts.rank, facts.host)
        self._http.requests.note_rank(facts)
        if facts.served is not None:
            self._take_served(facts.rank, facts.served)
        if self._is_closing:
            self._ranks.stop()  # it comes too late
        else:
            self._leader.attach(facts.rank, epoch=facts.served.epoch if facts.served else 0)

    def _take_served(self, rank: int, served: Served) -> None:
        """Learn from a rank what the front knew that is gone."""
        placement = self._http.placement
        if placement.home is None and served.home is not None:
            report = PlacementReport(rank=rank, version=served.home.version, state=MoveState.SERVING)
            placement.take_update(PlacementUpdate(report, served.home, served.expert_bytes))
            self._http.experts_load.take_experts(served.experts)
        placement.skip_versions(served.version)

    def lost(self, rank: int, reason: str) -> None:
        """A rank is gone: others go on with its requests. Where these have ended, so does the service, as it was to."""
        self._metrics.note_lost(rank)
        if self._is_closing or self._ending.now.is_set():
            _LOG.warning("rank %d is lost while the service ends: %s", rank, reason)
        else:
            self._leader.lose(rank, reason)

    def outputs(self, rank: int, outputs: Sequence[RequestOutput]) -> None:
        """Feed the answers that a rank's steps are for."""
        self._http.requests.deliver(rank, outputs)

    def stats(self, stats: RankStats) -> None:
        """Note a rank's state."""
        self._metrics.note_stats(stats)
        self._http.requests.note_stats(stats)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Note where a rank is, and give up those whose step is stuck: they end, and are started again."""
        now_s = time.monotonic()
        self._watch.take(heartbeat, now_s)
        for rank, reason in self._watch.suspects(now_s):
            self._ranks.give_up(rank, reason)

    def _on_order(self, order: Order) -> None:
        self._watch.begin_epoch(order.epoch, order.members)
        self._http.experts_load.regroup(order)

    def load(self, load: LoadReport) -> None:
        """Note what a rank's experts were asked to do."""
        self._http.experts_load.take_load(load)

    def experts(self, experts: ExpertMap) -> None:
        """Note which experts there are, and where."""
        self._http.experts_load.take_experts(experts)

    def placement(self, update: PlacementUpdate) -> None:
        """Note what became of a placement."""
        self._http.placement.take_update(update)

    def regrouped(self, rank: int, epoch: int) -> None:
        """Note that a rank serves in an epoch."""
        self._leader.take_regrouped(rank, epoch)

    def fault(self, rank: int, fault: Fault) -> None:
        """Note that a rank's steps broke off."""
        self._leader.take_fault(rank, fault)

    def _fail(self, reason: str) -> None:
        """The service cannot go on: the first reason is why it ends."""
        if self._fatal is None and not self._ending.now.is_set():
            self._fatal = reason
        self._http.requests.fail_all(ApiError(503, f"The service is ending: {self._fatal}."))
        self._ending.begun.set()
        self._ending.now.set()


def _import_http_service() -> ModuleType:
    """Import the slow half, with torch hidden: transformers would import it, and needs none of it to tokenize."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: import raises ModuleNotFoundError
    return importlib.import_module("server.process.http_service")


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _complain(message: str) -> int:
    """Say why the front ends; returns its exit status."""
    _LOG.critical("%s", message)
    return 1


def bind_http(host: str, port: int) -> socket.socket:
    """Bind and listen.

    Raises:
        OptionsError: the port is taken or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionsError(f"--host {host!r} is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # at once: bind alone does not claim a port that others may reuse
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionsError(f"port {port} on {host} is in use; choose another with --port") from error
        raise OptionsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def announce(
    ready_fd: int, listener: socket.socket, options: Options, ranks_address: str, token: str
) -> None:
    """Write the addresses for the supervisor."""
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"unix:{options.uds}"
    if options.uds is None:
        url = f"{options.http.scheme}://{shown}:{listener.getsockname()[1]}"
    line = json.dumps({"http": url, "ranks_address": ranks_address, "token": token})
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(line + "\n")
