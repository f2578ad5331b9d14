"""A service in one front, without HTTP: requests, pools, weights, adapters, and the reasons why it does not serve.

The parts depend on each other: no placement moves during a sleep, and no sleep begins during a weight update. `FrontService`
builds them and makes the decisions that need several of them. `http_service` serves them to clients, and `front` passes
messages of ranks to them.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from expert_placement.placement import Placement
from server.front.adapters.registry import Adapters, KnownAdapters
from server.front.admission import Admission
from server.front.errors import ApiError, bad_request, draining
from server.front.events import EventLog
from server.front.generations import Ask
from server.front.journal import Journal
from server.front.members.pool_roles import PoolRoles
from server.front.members.readiness import why_service_not_ready
from server.front.members.resize import Resize
from server.front.members.resize_operation import ResizeRecord
from server.front.pausing import Pausing
from server.front.requests import Requests
from server.front.routing.moves import Moves
from server.front.routing.routers import ROUTERS
from server.front.several.followed_adapters import FollowedAdapters
from server.front.several.seat import Seat
from server.front.several.service_state import ServiceState
from server.front.sleep_mode import SleepMode
from server.front.tokenizer import Tokenizer
from server.front.weights.towers import check_tower
from server.front.weights.updates import WeightUpdates
from server.http.exchanges import asker_of_exchange, note_answer
from server.http.observability.logs import RequestLog
from server.http.observability.metrics import Metrics
from server.link.ranks import Ranks
from server.options.pools import Pool
from server.options.table import Options
from server.serve.front.pool_front import PoolFront, PoolFronts
from server.serve.front.several_fronts import FrontOfSeveral, share_of, state_of
from server.serve.preflight.images import takes_images
from server.serve.preflight.resizes import why_no_resizes, why_not_resized

_NO_SLEEP = "The service cannot sleep: sleep mode is not implemented on GPUs. It works with --device cpu."


class FrontService:
    """The parts of a service in one front, and what it is ready for."""

    def __init__(
        self,
        options: Options,
        tokenizer: Tokenizer,
        *,
        ranks: Ranks,
        journal: Journal,
        metrics: Metrics,
        kept: Path,
        record: ResizeRecord,
        seat: Seat | None = None,
    ) -> None:
        """Build the parts.

        Args:
            kept: Folder that outlives this process, for weights and adapters.
            record: The number of ranks, kept for the front that replaces this one.
            seat: The place of this front among several; None if it is the only one.
        """
        if seat is not None:
            options = share_of(options, seat)
        self.options, self.ranks, self.journal, self._metrics = options, ranks, journal, metrics
        self.events = EventLog()
        pools = options.pools_among(ranks.num_ranks)
        self.pools = PoolFronts(
            pools,
            options,
            ranks,
            self.events,
            why_paused=self._why_no_moves,
            weights=lambda: self.weights.number(),
        )
        self.weights = WeightUpdates(
            ranks,
            self.pools,
            folder=kept / "weights" if options.http.weights_dir is None else Path(options.http.weights_dir),
            kept=kept / "uploads.json",
            model_type=_model_type(Path(options.model)),
            has_checkpoint=options.engine.load_format != "dummy",
            check=partial(check_tower, directory=Path(options.model)) if takes_images(options) else None,
            why_not_now=self._why_paused,
            all_know=self.all_follow,
            on_served=lambda: self.all_requests.forget_prefixes(),
            events=self.events,
        )
        self._is_draining = False
        self.leads = seat is None or seat.leads
        self.router = router = ROUTERS[options.routing_policy](
            ranks.num_ranks,
            prefill_threshold=options.prefill_threshold,
            shared=None if seat is None else seat.board,
        )
        self.moves = Moves(router, ranks, journal, events=self.events)
        self.roles = PoolRoles(pools, router, self.moves, self.events, is_auto=options.pool_roles == "auto")
        engine = options.engine
        self.adapters = Adapters(
            ranks,
            num_places=engine.num_adapters,
            max_rank=engine.max_lora_rank,
            modules=options.lora_target_modules,
            base_names=options.served_model_names,
            kept=kept / "adapters.json" if engine.enable_lora else None,
            events=self.events,
            in_epochs=self.pools.in_epochs,
        )
        self.followed_adapters = (
            None
            if seat is None or seat.leads
            else FollowedAdapters(seat.folder, seat.board, is_enabled=engine.enable_lora)
        )
        self.on_size: Callable[[int, int], None] = lambda _num_ranks, _most: None  # see `Resize`
        self.announced: Callable[[], Sequence[Pool]] = lambda: ()  # see `server.front.members.nodes`
        self.requests = Requests(
            decoder=tokenizer,
            ranks=ranks,
            router=router,
            journal=journal,
            moves=self.moves,
            metrics=metrics,
            timeout_s=options.request_timeout_s,
            admission=Admission(options.max_num_queued_reqs),
            on_ask=RequestLog(tokenizer).note if options.log.requests else _ignore,
            on_answer=note_answer,
            why_not_ready=self._why_refused,
            who_asks=asker_of_exchange,
            label_of=self.label_of,
            adapters=self.adapters.places if self.followed_adapters is None else self.followed_adapters,
            shared=None if seat is None else seat.board,
        )
        self.fronts = (
            None
            if seat is None
            else FrontOfSeveral(
                seat, ranks=ranks, router=router, requests=self.requests, moves=self.moves, journal=journal,
                metrics=metrics, events=self.events, decisions=self._decisions, on_size=self._on_size,
                adapters=self.followed_adapters, cluster_key=options.cluster_key,
            )
        )  # fmt: skip
        self.following = None if self.fronts is None else self.fronts.following
        self._leading = None if self.fronts is None else self.fronts.leading
        needs = None if self.fronts is None else self.fronts.needs
        if self._leading is not None and needs is not None:
            self.adapters.all_follow = self._leading.all_follow
            self.adapters.places.others = needs
            if self._leading.before is not None:
                self.adapters.places.restore(self._leading.before.places)
        self.all_requests = self._leading or self.requests
        self.pausing = Pausing(self.all_requests)
        self.sleep_mode = SleepMode(
            self.all_requests,
            ranks,
            members=self.pools.members,
            why_impossible=_NO_SLEEP if options.device == "cuda" else None,
            why_not_now=self.weights.why_busy,
            is_moving=self.pools.is_moving,
            on_level=metrics.note_sleep,
            events=self.events,
        )
        self.resize = Resize(
            self.pools.first,
            self.moves,
            ranks,
            record,
            timeout_s=options.resize_timeout_s,
            why_not=lambda num_ranks, wanted: why_not_resized(options, num_ranks, wanted),
            why_not_now=self._why_not_resized_now,
            all_follow=self.all_follow,
            impossible=_no_resizes(options),
            on_size=self._on_size,
            events=self.events,
        )
        if record.home is not None:  # the earlier front ended while ranks met
            self.pools.first.placement.resize(record.home)
        self.adapters.on_broken = self.forget_prefixes

    @property
    def known_adapters(self) -> KnownAdapters:
        """The names of adapters, which the leading front registers."""
        return self.followed_adapters or self.adapters

    def look(self) -> None:
        """Follow the other fronts, or publish the state of the service. To be called periodically if there are several."""
        if self.fronts is not None:
            self.fronts.look()
        if self._leading is not None:
            self.adapters.places.look()

    def add_pool(self, pool: Pool) -> PoolFront:
        """Add a pool that joins while the service runs. Its ranks are away; they have the next numbers."""
        made, num_ranks = self.pools.add(pool), pool.ranks.stop
        if num_ranks > self.ranks.num_ranks:
            self.ranks.grow(num_ranks)
            self.router.grow(num_ranks)
            self._metrics.grow(num_ranks)
        self.roles.add(pool)
        return made

    def _on_size(self, num_ranks: int, most: int) -> None:
        """Follow a resize: make room for `most` ranks, of which `num_ranks` belong to the service."""
        self.router.grow(most)
        self._metrics.grow(most)
        only = self.pools.first
        only.pool = only.pool._replace(num_ranks=num_ranks)
        self.roles.resize(only.pool)
        for rank in range(num_ranks, self.router.num_ranks):  # they have left, or have yet to come
            self._metrics.note_lost(rank)
            self.requests.note_lost(rank)
            self.adapters.places.note_lost(rank)
        self.on_size(num_ranks, most)

    def placement_for(self, pool: PoolFront, rank: int) -> tuple[int, Placement | None] | None:
        """Return the number of ranks and the placement with which an engine of a pool begins. Returns None if it is not wanted.

        The number is 0 if the service has pools. Their sizes do not change.
        """
        if self.pools.has_several:
            return 0, pool.home
        return self.resize.placement_for(rank)

    def num_places(self) -> int:
        """Return how many requests the ranks can run at once; 0 if the service is not ready."""
        if self.why_not_ready() is not None:
            return 0
        attached = self.ranks.attached.items()
        return sum(stream.facts.max_num_seqs for rank, stream in attached if self.moves.takes_requests(rank))

    def num_parked(self) -> int:
        """Return the number of choices of all fronts that wait for a rank."""
        return self.requests.num_parked if self.fronts is None else self.fronts.num_parked()

    def num_unbounded(self) -> int:
        """Return the open choices of all fronts, excluding this front's answers that bound their choices at ranks."""
        return self.requests.num_unbounded if self.fronts is None else self.fronts.num_unbounded()

    def num_replayed(self) -> int:
        """Return how often a request of any front was taken from a lost rank."""
        return self.journal.num_replayed if self.fronts is None else self.fronts.num_replayed()

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes, at the ranks and for routing."""
        self.ranks.forget_prefixes()
        self.all_requests.forget_prefixes()

    def label_of(self, number: int | None = None) -> str:
        """Return the label of a version of the weights, by default of the serving one; "" if it has none."""
        return self.weights.label_of(number) if self.following is None else self.following.label_of(number)

    def _decisions(self) -> ServiceState:
        """Return the state of the service that the other fronts follow. This front leads."""
        return state_of(
            self.ranks,
            self.router,
            released=[rank for each in self.pools for rank in sorted(each.epochs.released)],
            pools=self.roles.present(),
            announced=self.announced(),
            why_not_ready=self._why_not_serving(),
            sleep_level=self.sleep_mode.state.level,
            weights=self.weights,
            adapters=self.adapters,
            lost_fronts=() if self.fronts is None else self.fronts.lost_fronts,
        )

    async def drain(self) -> None:
        """Turn /health to 503, refuse new requests, and wait for the open ones to end."""
        self._is_draining = True
        self.requests.refuse(draining())
        await self.requests.wait_until_empty()
        if self.fronts is not None:
            await self.fronts.finish()

    def all_follow(self) -> bool:
        """Return whether all other fronts, if there are any, have applied the present state of the service."""
        return self._leading is None or self._leading.all_follow()

    def _why_paused(self) -> str | None:
        return self.sleep_mode.why_not_ready() or self.resize.why_paused()

    def _why_no_moves(self) -> str | None:
        return self._why_paused() or self.weights.why_no_moves()

    def _why_not_resized_now(self) -> str | None:
        if self.weights.is_open:
            return "a weight update has begun"
        return self.why_not_ready() or self.weights.why_no_moves()

    def _why_refused(self) -> str | None:
        """Return why requests are refused now, or None if they are accepted."""
        if self.following is not None:
            return self.following.why_not_ready()
        if self._leading is not None and self._leading.is_resuming:
            # Requests wait for the ranks, because the other fronts serve.
            return self.sleep_mode.why_not_ready()
        return self._why_not_serving()

    def _why_not_serving(self) -> str | None:
        """Return why the service does not serve. This front leads, or is the only one."""
        reason = (
            why_service_not_ready(self.pools.memberships)
            or self.sleep_mode.why_not_ready()
            or self.adapters.why_not_ready()
        )
        if reason is None and self._leading is not None:
            return self._leading.why_not_ready()
        return reason

    def why_not_ready(self) -> str | None:
        """Return why the service is not ready, or None if it is."""
        return "it is shutting down" if self._is_draining else self._why_refused()


def _ignore(_ask: Ask) -> None:
    """Do nothing: request logging is off."""


def _no_resizes(options: Options) -> ApiError | None:
    reason = why_no_resizes(options)
    return None if reason is None else bad_request(reason)


def _model_type(directory: Path) -> str:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return str(config.get("model_type", ""))
