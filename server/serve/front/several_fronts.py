"""What a front does besides serving if it is one of several (`--api-server-count`, `--fronts per-node`): the wiring of `several`,
and one timer.

A service with one front has none of this.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.openai.responses.run_copies import PATH as LEFT_RUNS
from server.front.adapters.registry import Adapters
from server.front.events import EventLog
from server.front.journal import Journal
from server.front.requests import Requests
from server.front.routing.moves import Moves
from server.front.routing.router import Router
from server.front.several.adapter_needs import NeedsElsewhere
from server.front.several.board import Cell
from server.front.several.followed_adapters import FollowedAdapters
from server.front.several.following import FollowingFront
from server.front.several.leading import POLL_S, LeadingFront, watch_fronts
from server.front.several.seat import Seat
from server.front.several.service_state import EngineOfRank, ServiceState, WeightLabel
from server.front.weights.updates import WeightUpdates
from server.http.observability.metrics import Metrics
from server.http.observability.ops import MetricsText
from server.http.several.forwarding import LEADER, PASSED_ON, Forwarding, Owners
from server.http.several.merged_metrics import FETCH_S, ServiceMetrics
from server.http.several.shared_speed import SharedSpeed
from server.link.ranks import Ranks
from server.machine.tasks import logging_errors
from server.options.pools import Pool
from server.options.table import Options
from server.serve.front.other_nodes import OtherNodes
from server.serve.standby.leading import COPY_TIMEOUT_S

_LOG = logging.getLogger("wideep.front")
_COPIED = "/standby/copied"  # on the socket for other fronts: answers when the standby has all files
_BACKLOG = 128
_DRAIN_POLL_S = 0.02


class FrontOfSeveral:
    """This front among the others."""

    def __init__(
        self,
        seat: Seat,
        *,
        ranks: Ranks,
        router: Router,
        requests: Requests,
        moves: Moves,
        journal: Journal,
        metrics: Metrics,
        events: EventLog,
        decisions: Callable[[], ServiceState],
        on_size: Callable[[int, int], None],
        adapters: FollowedAdapters | None,
        cluster_key: bytes | None,
    ) -> None:
        """Begin to lead or to follow.

        Args:
            decisions: Returns the state of the service, if this front leads.
            on_size: As for `FollowingFront`.
            adapters: Those of a front that follows.
        """
        self._seat, self._requests, self._journal, self._metrics = seat, requests, journal, metrics
        self.board = seat.board
        self.owners = Owners(seat.number, seat.num_fronts)
        self._speed = SharedSpeed(metrics.throughput, seat)
        self._forwarding: Forwarding | None = None  # set by `forwarding`
        self.nodes: OtherNodes | None = None
        # Called with the numbers of fronts that are lost with their node, if this one leads.
        self.take_over: Callable[[Sequence[int]], None] = lambda _numbers: None
        if seat.fronts is not None:
            has_served = ServiceState.read(seat.kept) is not None
            self.nodes = OtherNodes(seat, seat.fronts, cluster_key, is_again=has_served)
        self.leading: LeadingFront | None = None
        self.following: FollowingFront | None = None
        self.needs: NeedsElsewhere | None = None  # if this front leads
        if seat.leads:
            self.leading = LeadingFront(requests, seat.board, seat.kept, decisions)
            self.needs = NeedsElsewhere(seat.folder, seat.board, self.leading.all_follow)
            moves.all_follow = self.leading.all_follow
            self._watch = watch_fronts(seat.board, events.note)
            if self.nodes is not None:
                self._follow_nodes(self.nodes, self.needs, events)
        else:
            assert adapters is not None, "this front follows"
            self.following = FollowingFront(
                seat.board,
                seat.kept,
                ranks=ranks,
                router=router,
                requests=requests,
                moves=moves,
                adapters=adapters,
                on_level=metrics.note_sleep,
                on_size=on_size,
                is_near=self.is_near,
            )
        if seat.num_cut_off:
            journal.cut_off(seat.num_cut_off)
            name, num = f"front {seat.number}", seat.num_cut_off
            events.note("front_back", f"{name} was killed with {num} open choices, and is back")

    @property
    def is_near(self) -> bool:
        """Whether the leading front is on this node."""
        return self._seat.fronts is None or LEADER in self._seat.fronts.near

    @property
    def lost_fronts(self) -> Sequence[int]:
        """The fronts of nodes that do not answer the leading front."""
        if self.following is not None:
            return self.following.lost_fronts
        return () if self.nodes is None else self.nodes.lost_fronts

    def num_parked(self) -> int:
        """Return the number of choices of all fronts that wait for a rank."""
        self._count()
        return self._seat.board.total(Cell.NUM_PARKED)

    def num_replayed(self) -> int:
        """Return how often a request of any front was taken from a lost rank."""
        self._count()
        return self._seat.board.total(Cell.NUM_REPLAYED)

    def num_unbounded(self) -> int:
        """Return the open choices of all fronts, excluding answers of this one that bound their choices at ranks."""
        return self._requests.num_unbounded + self._seat.board.of_others(Cell.NUM_OPEN)

    def service_metrics(self) -> MetricsText:
        """Return the metrics of all fronts if this one leads, otherwise its own."""
        if self.leading is None:
            return self._metrics
        return ServiceMetrics(self._metrics.text, self._seat, self._fetch_metrics)

    async def _fetch_metrics(self, number: int) -> bytes:
        assert self._forwarding is not None, "the application is built first"
        return await self._forwarding.fetch(number, "/metrics", timeout_s=FETCH_S)

    async def ask_leader(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the leading front. Read or close the response.

        Raises:
            httpx.HTTPError: It does not answer.
        """
        assert self._forwarding is not None, "the application is built first"
        return await self._forwarding.ask(LEADER, request)

    async def wait_until_copied(self) -> None:
        """Wait until the standby has the files of this front, which the leading one copies. Waits as long as that one would."""
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                response = await self.ask_leader(httpx.Request("GET", f"http://localhost{_COPIED}"))
                await response.aclose()
        except (httpx.HTTPError, TimeoutError):
            _LOG.warning("the leading front does not answer whether the standby has written its copies")

    def forwarding(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application: requests of clients that another front must answer are passed on."""
        self._forwarding = Forwarding(app, self.owners, self._seat.socket_path)
        return self._forwarding

    def bind_inner(self) -> socket.socket:
        """Bind the socket for the other fronts."""
        path = self._seat.socket_path(self._seat.number)
        if os.path.lexists(path):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(_BACKLOG)
        return listener

    async def keep_looking(self, look: Callable[[], None]) -> None:
        """Call `look` periodically, until cancelled."""
        while True:
            with logging_errors("cannot follow the service"):
                look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Follow the service, or publish its state."""
        self._count()
        if self.leading is not None:
            self.leading.publish()
            self._watch()
        if self.following is not None:
            self.following.look()
        self.owners.lost = self.lost_fronts

    def _count(self) -> None:
        board = self._seat.board
        board.set(Cell.NUM_PARKED, self._requests.num_parked)
        board.set(Cell.NUM_REPLAYED, self._journal.num_replayed)

    def exchange_speed(self) -> None:
        """Share the figures of the period that has just ended."""
        self._speed.exchange()

    def _follow_nodes(self, nodes: OtherNodes, needs: NeedsElsewhere, events: EventLog) -> None:
        """Note as events which nodes' fronts are lost and which are back, and take over what the lost ones have left."""

        def named(node: int) -> str:
            numbers = nodes.fronts_of(node)
            return f"front{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

        def lose(node: int) -> None:
            needs.forget(nodes.fronts_of(node))
            events.note("fronts_lost", f"the node of {named(node)} does not answer")
            self.take_over(nodes.fronts_of(node))

        nodes.on_lost = lose
        nodes.on_back = lambda node: events.note("fronts_back", f"the node of {named(node)} answers again")

    async def finish(self) -> None:
        """Record that this front has no open request any more. The leading one waits for the others, because it stops the ranks."""
        self._seat.board.set(Cell.IS_DONE, 1)
        while self.leading is not None and not self.leading.others_are_done():
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """Close the connections for requests to other fronts."""
        if self._forwarding is not None:
            await self._forwarding.close()


def inner_app(
    app: ASGIApp, wait_until_copied: Callable[[], Awaitable[None]] | None, runs_of_others: ASGIApp
) -> ASGIApp:
    """Return the application for requests of other fronts.

    Args:
        wait_until_copied: As of `KeptFiles`; None if this front copies no files.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == _COPIED:
            if wait_until_copied is not None:
                await wait_until_copied()
            await Response()(scope, receive, send)
            return
        if scope.get("path", "").startswith(f"{LEFT_RUNS}/"):
            await runs_of_others(scope, receive, send)
            return
        scope[PASSED_ON] = True
        await app(scope, receive, send)

    return serve


def share_of(options: Options, seat: Seat) -> Options:
    """Return the options of one of several fronts: its share of limits, and seeds that the others do not draw.

    The kernel spreads connections over the fronts evenly, but not exactly.
    """
    http, most = options.http, options.http.max_connections
    http = replace(
        http,
        max_connections=None if most is None else -(-most // seat.num_fronts),
        max_inflight_request_bytes=max(http.max_request_bytes, http.most_inflight_bytes // seat.num_fronts),
    )
    return replace(
        options, http=http, seed=None if options.seed is None else options.seed + (seat.number << 64)
    )


def state_of(
    ranks: Ranks,
    router: Router,
    *,
    released: Sequence[int],
    pools: Sequence[Pool],
    announced: Sequence[Pool],
    why_not_ready: str | None,
    sleep_level: int,
    weights: WeightUpdates,
    adapters: Adapters,
    lost_fronts: Sequence[int],
) -> ServiceState:
    """Return the state of the service as the leading front sees it."""
    serving = [
        EngineOfRank(rank, stream.facts.num_restarts)
        for rank, stream in sorted(ranks.attached.items())
        if router.is_available(rank)
    ]
    return ServiceState(
        sizes=ranks.sizes,
        serving=tuple(serving),
        given_up=tuple(EngineOfRank(*each) for each in sorted(ranks.given_up.items())),
        draining=tuple(rank for rank in range(ranks.num_ranks) if router.is_draining(rank)),
        released=tuple(released),
        pools=tuple(pools),
        announced=tuple(announced),
        why_not_ready=why_not_ready or "",
        sleep_level=sleep_level,
        weights=weights.number(),
        labels=tuple(WeightLabel(*each) for each in sorted(weights.labels.items())),
        adapters=adapters.registered,
        places=adapters.places.given,
        failures=adapters.places.failures,
        lost_fronts=tuple(lost_fronts),
    )
