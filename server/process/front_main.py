"""The front process: one event loop with the HTTP server, the ranks' gRPC server and the journal between them.

Both sockets are bound and announced before anything slow happens, so that ranks and clients find a door while the
tokenizer loads. torch stays out: this process only tokenizes, and would pay 180 MB for it. A rank that is lost while
others are left, or until one comes back, is a matter for `front.leader`; one that is lost at the start ends all.

SIGTERM ends it gently: /health is 503, new requests are refused, open ones end by themselves for as long as
--shutdown-timeout-seconds says. SIGINT, and a second SIGTERM, end it at once.
"""

import asyncio
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
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from expert_placement.survivors import surviving
from scheduler.policy.request import RequestOutput
from server.errors import ApiError
from server.front.journal import Journal
from server.front.leader import Leader
from server.front.membership import Epochs
from server.front.requests import Requests
from server.http.logs import logging_to
from server.http.metrics import Metrics
from server.link.placement_wire import PlacementWord
from server.link.ranks import Ranks, listen
from server.link.wire import RankFacts
from server.options.flag import OptionsError
from server.options.table import Options
from server.parent_death import die_with_parent

if TYPE_CHECKING:  # it imports the planner's compiled kernels
    from server.experts.control import PlacementControl
    from server.experts.load import ExpertsLoad
    from server.process.http_service import HttpService

_LOG = logging.getLogger("wideep.front")
LOCAL_HOST = "127.0.0.1"
SWITCH_S = (
    0.5e-3  # after which a thread that plans lets the event loop go on; CPython's own 5 ms are many tokens
)
_ANSWERS_S = 2.0  # for answers that are still being sent when all requests have ended
_STOP_TIMEOUT_S = 1.2  # for ranks that were asked to stop; the supervisor kills after STOP_GRACE_S


def run_front(options: Options, *, num_ranks: int, ready_fd: int | None, ranks_host: str = LOCAL_HOST) -> int:
    """Serve until told to stop; returns the exit status.

    Args:
        options: its `model` is a directory; whoever starts the front has resolved other names.
        ready_fd: where the addresses are announced, closed afterwards; None announces nothing.
    """
    die_with_parent()
    sys.setswitchinterval(SWITCH_S)
    with logging_to(options.log):
        try:
            listener = bind_http(options.host, options.port)
        except OptionsError as error:
            return _complain(str(error))
        with listener:
            return asyncio.run(_Front(options, num_ranks).run(listener, ready_fd, ranks_host))


class _Front:
    """What lives in the event loop, and how it ends."""

    def __init__(self, options: Options, num_ranks: int) -> None:
        self._options = options
        self._metrics = Metrics(options.served_model_names[0], num_ranks)
        self._token = secrets.token_urlsafe(32)
        self._epochs = Epochs(num_ranks, recovery_timeout_s=options.rank_recovery_timeout_s)
        self._ranks = Ranks(
            num_ranks,
            self._token,
            on_outputs=self._deliver,
            on_stats=self._metrics.note_stats,
            on_attached=self._attach,
            on_lost=self._lose,
            on_load=lambda load: self._tell_load(lambda experts: experts.take_load(load)),
            on_experts=lambda known: self._tell_load(lambda experts: experts.take_experts(known)),
            on_placement=self._take_placement,
            on_regrouped=lambda rank, epoch: self._leader.take_regrouped(rank, epoch),
            on_fault=lambda word: self._leader.take_fault(word),
        )
        self._leader = Leader(
            self._epochs,
            self._ranks,
            surviving=surviving,
            on_order=lambda order: self._tell_load(lambda experts: experts.regroup(order)),
            on_failure=self._fail,
        )
        self._placement: PlacementControl | None = None  # as the next: once the slow half is imported
        self._early_words: list[PlacementWord] = []
        self._experts_load: ExpertsLoad | None = None  # once the slow half is imported
        self._early: list[Callable[[ExpertsLoad], None]] = []  # what it is to be told then
        self._requests: Requests | None = None  # once the tokenizer is loaded
        self._fatal: str | None = None
        self._http: HttpService | None = None  # likewise
        self._ending = asyncio.Event()
        self._ending_now = asyncio.Event()  # open requests are not waited for
        self._is_closing = False  # they have ended; answers may still be on their way

    async def run(self, listener: socket.socket, ready_fd: int | None, ranks_host: str) -> int:
        """Serve until a signal or a lost rank; returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end_gently)
        loop.add_signal_handler(signal.SIGINT, self._end_now)
        try:
            rank_server, ranks_address = await listen(self._ranks, ranks_host)
        except RuntimeError as error:
            return _complain(f"cannot listen for ranks on --ranks-host {ranks_host}: {error}")
        if ready_fd is not None:
            announce(ready_fd, listener, self._options, ranks_address, self._token)
        slow = await asyncio.to_thread(_import_http_service)  # meanwhile ranks attach
        try:
            options = self._options
            tokenizer = await asyncio.to_thread(slow.Tokenizer, options.model, options.chat_template)
            http = slow.HttpService(
                options,
                tokenizer,
                ranks=self._ranks,
                epochs=self._epochs,
                journal=Journal(),
                metrics=self._metrics,
            )
        except ValueError as error:  # TokenizerError: its class came with the slow import
            return _complain(str(error))
        gc.freeze()  # what is here now stays: full collections, which stop all streams, pass it over
        self._take_service(http)
        serving = asyncio.create_task(http.serve(listener))
        await self._ending.wait()
        await self._close(http, serving)
        if self._fatal is None:
            await self._wait_for_ranks()
        await rank_server.stop(0)
        return _complain(self._fatal) if self._fatal else 0

    def _take_service(self, http: "HttpService") -> None:
        """Pass on what came before there was anybody to take it."""
        self._http, self._requests, self._experts_load = http, http.requests, http.experts_load
        for tell in self._early:
            tell(http.experts_load)
        self._placement = http.placement
        for word in self._early_words:
            http.placement.take_word(word)
        self._leader.take_service(http.requests, http.placement)

    async def _close(self, http: "HttpService", serving: "asyncio.Task[None]") -> None:
        """End requests, answers and ranks. Gently: one after the other; else all at the same time."""
        grace_s = await self._drain(http)
        self._is_closing = True
        self._leader.close()
        if self._ending_now.is_set():
            self._ranks.stop()
        http.requests.fail_all(ApiError(503, self._fatal or "The service is stopping."))
        http.stop(grace_s)
        await serving
        self._ranks.stop()

    async def _drain(self, http: "HttpService") -> float:
        """Let open requests end, if there is time; returns the seconds left for answers still being sent."""
        if self._ending_now.is_set():
            return _ANSWERS_S
        until_s = time.monotonic() + self._options.http.shutdown_timeout_s
        tasks = [asyncio.create_task(http.drain()), asyncio.create_task(self._ending_now.wait())]
        _, pending = await asyncio.wait(
            tasks,
            timeout=self._options.http.shutdown_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in pending:
            task.cancel()
        left_s = 0.0 if self._ending_now.is_set() else until_s - time.monotonic()
        return max(_ANSWERS_S, left_s)

    def _end_gently(self) -> None:
        if self._ending.is_set():  # a second time: somebody cannot wait
            self._end_now()
        self._ending.set()

    def _end_now(self) -> None:
        if self._http is not None and self._is_closing:
            self._http.stop(0)
        self._ending.set()
        self._ending_now.set()

    async def _wait_for_ranks(self) -> None:
        try:
            await asyncio.wait_for(self._ranks.wait_until_empty(), _STOP_TIMEOUT_S)
        except TimeoutError:
            ranks = ", ".join(map(str, self._ranks.attached))
            _LOG.error("did not hear goodbye from rank %s", ranks)

    def _attach(self, facts: RankFacts) -> None:
        self._metrics.note_rank(facts, enable_prefix_caching=self._options.enable_prefix_caching)
        self._tell_load(lambda experts: experts.note_rank(facts.rank, facts.host))
        if self._is_closing:
            self._ranks.stop()  # it comes too late
        else:
            self._leader.attach(facts.rank)

    def _tell_load(self, tell: "Callable[[ExpertsLoad], None]") -> None:
        if self._experts_load is None:
            self._early.append(tell)
        else:
            tell(self._experts_load)

    def _take_placement(self, word: PlacementWord) -> None:
        if self._placement is None:
            self._early_words.append(word)
        else:
            self._placement.take_word(word)

    def _deliver(self, rank: int, outputs: Sequence[RequestOutput]) -> None:
        assert self._requests is not None, "outputs come only for requests that were submitted"
        self._requests.deliver(rank, outputs)

    def _lose(self, rank: int, reason: str) -> None:
        """A rank is gone: an end that has begun goes on, else others go on with its requests."""
        self._metrics.note_lost(rank)
        if self._is_closing or self._ending_now.is_set():
            self._fail(f"rank {rank} is lost: {reason}")
        else:
            self._leader.lose(rank, reason)

    def _fail(self, reason: str) -> None:
        """The service cannot go on: the first reason is why it ends."""
        if self._fatal is None and not self._ending_now.is_set():
            self._fatal = reason
        if self._requests is not None:
            self._requests.fail_all(ApiError(503, f"The service is ending: {self._fatal}."))
        self._ending.set()
        self._ending_now.set()


def _import_http_service() -> ModuleType:
    """Import the slow half, with torch hidden: transformers would import it, and needs none of it to tokenize."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: import raises ModuleNotFoundError
    return importlib.import_module("server.process.http_service")


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
    port = listener.getsockname()[1]
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{options.http.scheme}://{shown}:{port}"
    line = json.dumps({"http": url, "ranks_address": ranks_address, "token": token})
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(line + "\n")
