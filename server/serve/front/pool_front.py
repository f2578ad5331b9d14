"""The pools of a service, as the front leads them: each one's members, heartbeats, placement and expert load.

A `PoolFront` is one pool. They share nothing, so a pool regroups and rebalances while the others serve.
Requests, the router, the journal and metrics belong to the service. Ranks have their numbers in the service here.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import assert_never

import numpy as np

from expert_placement.config import slots_of_rank
from expert_placement.history import History
from expert_placement.placement import Placement
from expert_placement.resized import resized
from expert_placement.survivors import surviving
from scheduler.epochs.heartbeat import Heartbeat, Watch
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, MoveState, PlacementReport
from server.experts.control import PlacementControl
from server.experts.load import ExpertsLoad
from server.front.events import EventLog
from server.front.members.leader import FollowingRequests, Leader
from server.front.members.membership import Epochs, Phase
from server.front.members.readiness import why_no_change
from server.link.messages import Fault, PlacementUpdate, RankFacts, Regrouped, Served
from server.link.ranks import PoolRanks, Ranks
from server.machine.tasks import logging_errors
from server.options.pools import Pool
from server.options.table import Options

_BALANCING_PAUSE_S = 60.0  # after an error in rebalancing
# The messages of a rank that concern its pool only.
PoolMessage = Heartbeat | LoadReport | ExpertMap | PlacementUpdate | Regrouped | Fault


class PoolFront:
    """The state of one pool in the front."""

    def __init__(
        self,
        pool: Pool,
        options: Options,
        ranks: Ranks,
        events: EventLog,
        *,
        is_only: bool = True,
        others_serve: Callable[[], bool] | None = None,
        why_paused: Callable[[], str | None] = lambda: None,
        weights: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start without attached ranks. `lead` must follow before any rank attaches.

        Args:
            is_only: Whether the service has no other pool, so that messages need not name it.
            others_serve: Returns whether another pool serves. None if the service has no other.
            why_paused: Returns why the whole service changes no placement now, or None if it may.
            weights: Returns the version of the base weights that ranks serve.
        """
        engine, eplb = options.engine, options.engine.eplb_config
        self.pool, self._ranks, self._events = pool, ranks, events
        self._name = "" if is_only else pool.name
        self._weights = weights
        self._num_redundant = eplb.num_redundant_experts
        self.epochs = Epochs(
            pool.num_ranks,
            recovery_timeout_s=engine.rank_recovery_timeout_s,
            first_rank=pool.first_rank,
            others_serve=others_serve,
        )
        self.load = ExpertsLoad(
            options.served_model_names[0], first_rank=pool.first_rank, window_steps=eplb.window_size
        )
        self.placement = PlacementControl(
            PoolRanks(ranks, pool.ranks),
            self.load,
            eplb,
            History(_history_file(eplb.history_file, self._name)),
            why_no_change=lambda: why_no_change(self.epochs) or why_paused(),
            pool=self._name,
        )
        self._watch = Watch(engine.heartbeat_timeout_s)
        self._watch.begin_epoch(0, pool.ranks)
        self._loaded: tuple[int, Served] | None = None  # rank and placement of a restarted engine
        self._is_resumed = False  # it has served, or it joins a service that does
        self.has_failed = False  # its ranks did not return in time; cleared when one returns
        self.leader: Leader

    def lead(self, requests: FollowingRequests, on_failure: Callable[["PoolFront", str], None]) -> None:
        """Begin to lead the pool.

        Args:
            on_failure: Called with the reason if the pool cannot serve. It may serve again if its ranks return.
        """

        def fail(reason: str) -> None:
            self.has_failed = True
            on_failure(self, reason)

        self.leader = Leader(
            self.epochs,
            self._ranks,
            requests,
            self.placement,
            surviving=surviving,
            on_order=self._on_order,
            on_failure=fail,
            on_no_home=self._take_loaded,
            events=self._events,
            pool=self._name,
            weights=self._weights,
        )

    def resume(self, lost: Collection[int] = ()) -> None:
        """Lead the pool after a restart of the front. `lost`: ranks that were lost with that front."""
        self._is_resumed = True
        self.leader.resume(lost)

    def gather(self) -> None:
        """Lead a pool that joins while the service runs."""
        self._is_resumed = True
        self.leader.gather()

    @property
    def is_starting(self) -> bool:
        """Whether the pool starts with the service and has not served yet. A pool that returns to a restarted front has."""
        is_new = self.epochs.phase is Phase.STARTING or self.placement.home is None
        return is_new and not self._is_resumed

    @property
    def home(self) -> Placement | None:
        """The placement over all ranks of the pool."""
        return self.placement.home

    @property
    def is_changing(self) -> bool:
        """Whether experts move."""
        return self.placement.is_changing

    async def plan(self, num_ranks: int) -> Placement:
        """Return a placement over another number of ranks, for the load in the window.

        Raises:
            ValueError: The experts do not fit.
        """
        home, window = self.placement.home, self.load.window
        assert home is not None, "the pool serves"
        load = np.zeros((home.num_layers, home.num_experts)) if window is None else window.expert_tokens()
        slots = slots_of_rank(home.num_experts, num_ranks, self._num_redundant)
        planned = await asyncio.to_thread(resized, home, num_ranks, slots, load)
        return planned.with_version(self.placement.next_version())

    def attach(self, facts: RankFacts) -> None:
        """Record the facts of a rank that attaches. `leader.attach` must follow if it is to serve."""
        self.has_failed = False
        self.load.note_rank(facts.rank, facts.host)
        if facts.served is not None:
            self._take_served(facts.rank, facts.served)
        if facts.loaded is not None:
            self._loaded = facts.rank, facts.loaded

    def receive(self, rank: int, message: PoolMessage) -> None:
        """Handle a message of one of the pool's ranks."""
        match message:
            case Heartbeat():
                self._note_heartbeat(message)
            case LoadReport():
                self.load.take_load(message)
            case ExpertMap():
                self.load.take_experts(message)
            case PlacementUpdate():
                self.placement.take_update(message)
            case Regrouped(epoch):
                self.leader.take_regrouped(rank, epoch)
            case Fault():
                self.leader.take_fault(rank, message)
            case _:
                assert_never(message)

    def _take_served(self, rank: int, served: Served) -> None:
        """Restore the previous front's state from a rank."""
        placement, home = self.placement, served.home
        if home is not None and self.load.experts is None:
            self.load.take_experts(served.experts)
        if placement.home is None and home is not None and home.num_ranks == self.epochs.num_ranks:
            report = PlacementReport(rank=rank, version=home.version, state=MoveState.SERVING)
            placement.take_update(PlacementUpdate(report, home, served.expert_bytes))
        placement.expert_bytes = placement.expert_bytes or served.expert_bytes
        placement.skip_versions(served.version)

    def _take_loaded(self) -> None:
        """Begin with the placement of a restarted engine, because all engines of the pool died with the previous front."""
        if self._loaded is not None:
            self._take_served(*self._loaded)

    def _note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record a rank's progress, and drop ranks with a stuck step; their supervisors restart them."""
        now_s = time.monotonic()
        self._watch.take(heartbeat, now_s)
        for rank, reason in self._watch.suspects(now_s):
            self._ranks.give_up(rank, reason)

    def _on_order(self, order: Order) -> None:
        self._watch.begin_epoch(order.epoch, order.members)
        self.load.regroup(order)


class PoolFronts:
    """All pools of a service. Routes and metrics keep its mappings, to which `add` adds."""

    def __init__(
        self,
        pools: Sequence[Pool],
        options: Options,
        ranks: Ranks,
        events: EventLog,
        *,
        why_paused: Callable[[], str | None],
        weights: Callable[[], int],
    ) -> None:
        """`why_paused` and `weights` are as for `PoolFront`."""
        self._options, self._ranks, self._events = options, ranks, events
        self._why_paused, self._weights = why_paused, weights
        self.has_several = len(pools) > 1 or options.has_own_pool
        self._all: list[PoolFront] = []
        # By name.
        self.memberships: dict[str, Epochs] = {}
        self.loads: dict[str, ExpertsLoad] = {}
        self.placements: dict[str, PlacementControl] = {}
        self.balancing: list[asyncio.Task[None]] = []  # after `balance`
        for pool in pools:
            self._make(pool)

    def __iter__(self) -> Iterator[PoolFront]:
        """Yield the pools in the order of their ranks."""
        return iter(self._all)

    @property
    def first(self) -> PoolFront:
        """The pool with rank 0."""
        return self._all[0]

    def _make(self, pool: Pool) -> PoolFront:
        made = PoolFront(
            pool,
            self._options,
            self._ranks,
            self._events,
            is_only=not self.has_several,
            others_serve=partial(self._others_serve, pool.name),
            why_paused=self._why_paused,
            weights=self._weights,
        )
        self._all.append(made)
        self.memberships[pool.name], self.loads[pool.name] = made.epochs, made.load
        self.placements[pool.name] = made.placement
        return made

    def _others_serve(self, name: str) -> bool:
        """Return whether a pool other than this one serves."""
        return any(epochs.phase is Phase.SERVING for pool, epochs in self.memberships.items() if pool != name)

    def add(self, pool: Pool) -> PoolFront:
        """Add a pool that joins while the service runs."""
        self.has_several = True
        made = self._make(pool)
        if self.balancing:
            self.balancing.append(asyncio.create_task(_keep_balancing(made.placement)))
        return made

    def balance(self) -> None:
        """Begin to rebalance the experts of all pools, until the tasks in `balancing` are cancelled."""
        self.balancing = [asyncio.create_task(_keep_balancing(each.placement)) for each in self._all]

    def members(self) -> tuple[int, ...] | None:
        """Return the ranks that serve, or None while a pool regroups."""
        pools = self.memberships.values()
        if any(epochs.phase is not Phase.SERVING for epochs in pools):
            return None
        return tuple(rank for epochs in pools for rank in epochs.members)

    def in_epochs(self) -> frozenset[int]:
        """Return the ranks that may run steps without a further order."""
        return frozenset().union(*(epochs.in_epoch for epochs in self.memberships.values()))

    def epochs(self) -> tuple[int, ...]:
        """Return the number of each pool's epoch."""
        return tuple(epochs.number for epochs in self.memberships.values())

    def is_moving(self) -> bool:
        """Return whether experts of some pool move."""
        return any(pool.is_changing for pool in self._all)


async def _keep_balancing(placement: PlacementControl) -> None:
    """Rebalance a pool's experts. After an error, log it and start again after a pause."""
    while True:
        with logging_errors(f"expert rebalancing failed; retrying in {_BALANCING_PAUSE_S:g} s"):
            await placement.run()
        await asyncio.sleep(_BALANCING_PAUSE_S)


def _history_file(file: str, pool: str) -> Path | None:
    """Return the file of a pool's history, or None if `file` is "". Several pools have one each, named after the pool."""
    if not file:
        return None
    return Path(f"{file}.{pool}" if pool else file)
