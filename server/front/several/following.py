"""A front that follows the decisions of the leading one, with its own requests, router and links to ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from server.front.errors import FrontCutOffError
from server.front.requests import Requests
from server.front.routing.loads import RankLoads
from server.front.routing.moves import Moves
from server.front.several.board import Board, Cell
from server.front.several.followed_adapters import FollowedAdapters
from server.front.several.front_map import FENCE_S
from server.front.several.service_state import ServiceState
from server.link.messages import RankFacts
from server.link.ranks import Ranks
from server.options.pools import Pool

_DROPPED = "the leading front has dropped it"
_UNREACHABLE = "The node of the leading front does not answer this one. Try again, or try another node."


class FollowingFront:
    """Applies the published state of the service to this front's requests and router."""

    def __init__(
        self,
        board: Board,
        folder: Path,
        *,
        ranks: Ranks,
        router: RankLoads,
        requests: Requests,
        moves: Moves,
        adapters: FollowedAdapters,
        on_level: Callable[[int], None],
        on_size: Callable[[int, int], None],
        is_near: bool = True,
    ) -> None:
        """Take the number of ranks from the newest state, which a front before this one may have followed.

        Args:
            is_near: Whether the leading front is on this node.
            on_level: Called with the level of sleep whenever it may have changed.
            on_size: Called with the number of ranks and with the largest number that may attach, when one of them changes.
        """
        self._board, self._folder = board, folder
        self._ranks, self._router, self._requests, self._moves = ranks, router, requests, moves
        self._adapters, self._on_level, self._on_size = adapters, on_level, on_size
        self._is_near = is_near
        self._entered: set[int] = set()  # ranks that requests are routed to
        self._is_linked = False  # all ranks have attached to this front
        self._state: ServiceState | None = None  # None also while this front is cut off
        self._applied: ServiceState | None = None  # the newest one, also while this front is cut off
        # Called with the pools of the service, and with those that are announced.
        self.on_pools: Callable[[Sequence[Pool], Sequence[Pool]], None] = lambda _pools, _announced: None
        for rank in range(ranks.num_ranks):
            router.keep_out(rank)
        if (newest := ServiceState.read(folder)) is not None:
            self._follow_sizes(newest)

    def why_not_ready(self) -> str | None:
        """Return why this front refuses requests, or None if it accepts them.

        While the service serves, requests that come before a rank has connected to this front wait for it.
        """
        if self._state is None:
            return "waiting for the front that leads the service"
        return self._state.why_not_ready or None

    @property
    def lost_fronts(self) -> Sequence[int]:
        """The fronts of nodes that do not answer the leading front."""
        return () if self._state is None else self._state.lost_fronts

    def label_of(self, number: int | None = None) -> str:
        """Return the label of a version of the weights, by default of the serving one; "" if it has none."""
        state = self._state
        return (
            "" if state is None else dict(state.labels).get(state.weights if number is None else number, "")
        )

    def attach(self, facts: RankFacts) -> None:
        """Take a rank that has attached to this front."""
        self._requests.note_rank(facts)
        self._enter_serving()

    def lose(self, rank: int) -> None:
        """Move the requests of a lost rank to other ranks."""
        self._entered.discard(rank)
        self._requests.leave([rank])

    def look(self) -> None:
        """Apply the newest state if it has changed."""
        if not self._is_linked and len(self._ranks.attached) >= self._ranks.num_ranks:
            self._is_linked = True
            self._board.set(Cell.IS_READY, 1)
        if not self._is_near and self._board.leader_silent_s > FENCE_S:
            self._cut_off()
            return
        version = self._board.version
        if version == self._board.read(Cell.APPLIED, self._board.number):
            self._adapters.publish()
            return
        state = ServiceState.read(self._folder)
        if state is not None:
            self._apply(state)
            self._adapters.publish()  # before the leading front learns that this one follows
            self._board.set(Cell.APPLIED, version)

    def _cut_off(self) -> None:
        """End all requests and refuse new ones until this node hears of the leading one again: that one may decide without
        regard to them."""
        if self._state is not None:
            self._state = None
            self._requests.fail_open(FrontCutOffError(503, _UNREACHABLE, headers={"Retry-After": "1"}))
        self._board.set(Cell.APPLIED, 0)

    def _apply(self, state: ServiceState) -> None:
        before, self._applied, self._state = self._applied, state, state
        self.on_pools(state.pools, state.announced)
        self._follow_sizes(state)
        for rank, num_restarts in state.given_up:
            stream = self._ranks.attached.get(rank)
            if stream is not None and stream.facts.num_restarts <= num_restarts:
                self._ranks.give_up(rank, _DROPPED)  # which calls `lose`
        if released := self._entered.intersection(state.released):
            self._entered -= released
            self._requests.leave(released)
        self._enter_serving()
        for pool in state.pools:
            for rank in pool.ranks:
                self._router.set_pool(rank, pool.name)
                self._router.set_role(rank, pool.role)
        if before is not None and state.num_aborts > before.num_aborts:
            self._requests.abort_all()
        if before is not None and state.num_forgets > before.num_forgets:
            self._requests.forget_prefixes()
        self._adapters.follow(state)
        self._on_level(state.sleep_level)
        self._follow_pauses(dict(before.pauses if before else ()), dict(state.pauses))
        self._moves.look(is_urgent=True)

    def _follow_sizes(self, state: ServiceState) -> None:
        """Accept the ranks that a resize adds, before they attach. Services with several pools have no resizes."""
        if len(state.pools) == 1 and state.sizes != self._ranks.sizes:
            self._ranks.resize(*state.sizes)
            self._on_size(state.sizes[0], max(state.sizes))

    def _follow_pauses(self, before: dict[str, bool], now: dict[str, bool]) -> None:
        for by, withdraws in now.items():
            if before.get(by) != withdraws:
                self._requests.pause(by=by, withdraws=withdraws)
        for by in before.keys() - now.keys():
            self._requests.resume(by=by)

    def _enter_serving(self) -> None:
        """Route requests to serving ranks that have attached here. A rank leaves when its link ends or its requests are
        released: until then it has its requests, also while it meets the others in a new epoch."""
        state, attached = self._state, self._ranks.attached
        if state is None:
            return
        serving = {rank for rank, _ in state.serving}
        for rank, num_restarts in state.serving:
            stream = attached.get(rank)
            if stream is not None and stream.facts.num_restarts == num_restarts and rank not in self._entered:
                self._entered.add(rank)
                self._requests.enter(rank)
        for rank in self._entered:
            if rank in state.draining and not self._router.is_draining(rank):
                self._router.drain(rank)
            # A rank that leaves the service drains until it ends.
            elif rank in serving and rank not in state.draining:
                self._router.undrain(rank)
