"""The part of the front that is slow to import: tokenizer, served model, routes and the HTTP server.

The front (`front_main`) binds its sockets, then imports this module by name, with torch hidden.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastapi import APIRouter
from starlette.types import ASGIApp

from expert_placement.placement import Placement
from server.api.anthropic.messages import messages_routes
from server.api.ollama.routes import ollama_routes
from server.api.openai.batches.batch_store import BatchStore
from server.api.openai.batches.file_store import FileStore
from server.api.openai.batches.routes import batch_routes, file_routes
from server.api.openai.batches.runs import BatchRuns, LinePlaces
from server.api.openai.chat import chat_routes
from server.api.openai.completions import completion_routes
from server.api.openai.responses.left_runs import LeftRuns
from server.api.openai.responses.routes import new_response_id, responses_routes
from server.api.sglang.generate import generate_routes
from server.api.sglang.service_routes import service_routes
from server.api.tokenize import tokenize_routes
from server.experts.dashboard.routes import dashboard_routes
from server.experts.metrics import ExpertsMetrics
from server.experts.record_files import default_folder
from server.experts.routes import expert_load_routes, placement_routes
from server.front.adapters.folder import AdapterFolder
from server.front.adapters.registry import Adapters
from server.front.admission import Admission
from server.front.errors import ApiError, bad_request, draining
from server.front.events import EventLog
from server.front.generations import Ask
from server.front.journal import Journal
from server.front.members.pool_roles import PoolRoles
from server.front.members.readiness import why_service_not_ready
from server.front.members.resize import Resize, ResizeRecord
from server.front.pausing import Pausing
from server.front.requests import Requests
from server.front.routing.moves import Moves
from server.front.routing.routers import ROUTERS
from server.front.several.seat import Seat
from server.front.several.service_state import ServiceState
from server.front.sleep_mode import SleepMode
from server.front.tokenizer import Tokenizer
from server.front.weights.group import WeightGroup
from server.front.weights.updates import WeightUpdates
from server.http.app import build_app
from server.http.docs_page import docs_routes
from server.http.exchanges import (
    HttpExchange,
    asker_of_exchange,
    note_answer,
)
from server.http.guards import ApiKeys
from server.http.http_server import GRACE_S, HttpServer
from server.http.idempotency import IdempotentAnswers
from server.http.kept_answers import KeptAnswers
from server.http.observability.gauges import FrontMetrics, MembershipMetrics, ResizeMetrics, SpeedMetrics
from server.http.observability.images import ImageMetrics
from server.http.observability.logs import AccessLog, RequestLog
from server.http.observability.metrics import Metrics
from server.http.observability.ops import membership_routes, ops_routes, throughput_routes
from server.http.observability.series import EVERY_S
from server.http.observability.tracing import Traces
from server.http.operators.adapter_routes import AdapterMetrics, adapter_routes
from server.http.operators.pool_routes import pool_routes
from server.http.operators.rank_routes import rank_routes
from server.http.operators.resize_routes import resize_routes
from server.http.operators.sleep_routes import sleep_routes
from server.http.operators.weight_routes import weight_routes
from server.link.ranks import Ranks
from server.machine.steady_clock import SteadyClock
from server.machine.versions import version_of
from server.options.adapters import modules_of
from server.options.pools import Pool
from server.options.table import HttpOptions, Options
from server.serve.front.image_files import fetched_images, stored_images
from server.serve.front.pool_front import PoolFront, PoolFronts
from server.serve.front.served_model import served_model
from server.serve.front.several_fronts import FrontOfSeveral, inner_app, share_of, state_of
from server.serve.preflight.resizes import why_no_resizes, why_not_resized
from server.serve.standby.leading import CopiedFirst, KeptFiles

# The name is SGLang's, so that scripts written for it find their files.
_RECORD_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
_LOG = logging.getLogger("wideep.front")
_NO_SLEEP = "The service cannot sleep: sleep mode is not implemented on GPUs. It works with --device cpu."
_NO_UPDATE = (
    "The service cannot change its weights: updates are not implemented on GPUs. They work with --device cpu."
)
_ONE_FRONT_ONLY = "This works with one front only: restart the service without --api-server-count."


class HttpService:
    """The HTTP application: passes requests to the ranks and their outputs to clients."""

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
        secret: str,
        seat: Seat | None = None,
        files: KeptFiles | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Build the application.

        Args:
            kept: Folder that outlives this process, for answers kept for retries, and for files without --files-dir.
            record: The number of ranks, kept for the front that replaces this one.
            secret: A secret that all fronts of a service share.
            seat: The place of this front among several; None if it is the only one.
            files: The files that are copied to the standby, if there is one.

        Raises:
            OptionsError: The folder for files is unusable.
        """
        if seat is not None:
            options = share_of(options, seat)
        self._ranks, self._journal, self._metrics = ranks, journal, metrics
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
            model_type=_model_type(Path(options.model)),
            why_impossible=_NO_UPDATE if options.device == "cuda" else None,
            why_not_now=self._why_paused,
            all_know=lambda: self._leading is None or self._leading.all_follow(),
            on_served=lambda: self._all_requests.forget_prefixes(),
            events=self.events,
        )
        self._options, self._throughput = options, metrics.throughput
        self._is_draining = False
        self.leads = seat is None or seat.leads
        router = ROUTERS[options.routing_policy](
            ranks.num_ranks,
            prefill_threshold=options.prefill_threshold,
            shared=None if seat is None else seat.board,
        )
        self._moves = Moves(router, ranks, journal, events=self.events)
        self._roles = PoolRoles(pools, router, self._moves, self.events, is_auto=options.pool_roles == "auto")
        engine = options.engine
        self.adapters = Adapters(
            ranks,
            num_places=engine.num_adapters,
            max_rank=engine.max_lora_rank,
            modules=options.lora_target_modules,
            base_names=options.served_model_names,
            kept=kept / "adapters.json" if engine.enable_lora else None,
            events=self.events,
        )
        self.requests = Requests(
            decoder=tokenizer,
            ranks=ranks,
            router=router,
            journal=journal,
            moves=self._moves,
            metrics=metrics,
            timeout_s=options.request_timeout_s,
            admission=Admission(options.max_num_queued_reqs),
            on_ask=RequestLog(tokenizer).note if options.log.requests else _ignore,
            on_answer=note_answer,
            why_not_ready=self._why_refused,
            who_asks=asker_of_exchange,
            label_of=self._label_of,
            adapters=self.adapters.places,
            shared=None if seat is None else seat.board,
        )
        self._weight_group = WeightGroup()
        self.fronts = (
            None
            if seat is None
            else FrontOfSeveral(
                seat, ranks=ranks, router=router, requests=self.requests, moves=self._moves, journal=journal,
                metrics=metrics, events=self.events, decisions=self._decisions,
            )
        )  # fmt: skip
        self.following = None if self.fronts is None else self.fronts.following
        self._leading = None if self.fronts is None else self.fronts.leading
        self._router = router
        self._all_requests = self._leading or self.requests
        self.pausing = Pausing(self._all_requests)
        self.sleep_mode = SleepMode(
            self._all_requests,
            ranks,
            members=self.pools.members,
            why_impossible=_NO_SLEEP if options.device == "cuda" else None,
            why_not_now=self.weights.why_busy,
            on_level=metrics.note_sleep,
            events=self.events,
        )
        self.on_size: Callable[[int, int], None] = lambda _num_ranks, _most: None  # see `Resize`
        self.resize = Resize(
            self.pools.first,
            self._moves,
            ranks,
            record,
            timeout_s=options.resize_timeout_s,
            why_not=lambda num_ranks, wanted: why_not_resized(options, num_ranks, wanted),
            why_not_now=self._why_not_resized_now,
            impossible=_no_resizes(options),
            on_size=self._on_size,
            events=self.events,
        )
        if record.home is not None:  # the earlier front ended while ranks met
            self.pools.first.placement.resize(record.home)
        self.adapters.on_broken = self._forget_prefixes
        keys, clock = _keys(options), SteadyClock()
        # The leading front has the files.
        stored = _file_store(options.http, keys, kept, clock) if self.leads else None
        most_bytes = options.images.most_bytes
        if stored is not None:
            read_image = stored_images(stored, most_bytes)
        else:
            assert self.fronts is not None, "a front without files follows another one"
            read_image = fetched_images(self.fronts.ask_leader, most_bytes)
        self.model = served_model(options, tokenizer, ranks, self.adapters, read_image)
        self._add_metrics(options.served_model_names[0])
        version = version_of("wideep") or "0+unknown"  # an uninstalled checkout
        self._traces = Traces.to(options.log.otlp_endpoint, service_version=version)
        self._left_runs = LeftRuns(kept / self._own_folder("background"))
        answering = [
            chat_routes(self.model, self.requests),
            completion_routes(self.model, self.requests),
            responses_routes(
                self.model,
                self.requests,
                are_several=lambda: keys.are_several,
                new_id=new_response_id if self.fronts is None else self.fronts.owners.new_response_id,
                left=self._left_runs,
            ),
        ]
        batching = [] if stored is None else self._batching(options.http, stored, answering, version, clock)
        app = build_app(
            [*answering, *batching, *self._routers(options, metrics, version, environment)],
            version=version,
            keys=keys,
            http=options.http,
            own_names=_own_names(options.host),
            observers=_observers(options, metrics, self._traces),
            answer_once=lambda app: self._answer_once(app, kept, secret, clock),
        )
        self._server = HttpServer(app if files is None else CopiedFirst(app, files), options.http)
        self._inner = None  # for the other fronts
        if self.fronts is not None:
            # Its clients are fronts, which forward the address of theirs.
            self._inner = HttpServer(inner_app(app), HttpOptions(forwarded_allow_ips=("*",)))

    def _add_metrics(self, name: str) -> None:
        pools, add = self.pools, self._metrics.add
        are_named = pools.has_several
        add(ExpertsMetrics(pools.loads, name, are_named=are_named))
        add(AdapterMetrics(self.adapters, name))
        if self.model.images is not None:
            encoder = self.model.images.encoder
            add(ImageMetrics(lambda: encoder.counts))
        add(FrontMetrics(self.requests, self._router, name))
        add(MembershipMetrics(pools.memberships, self._journal, self._num_parked, name, are_named=are_named))
        add(ResizeMetrics(self.resize, name))
        add(SpeedMetrics(self._throughput, name))

    def _answer_once(self, app: ASGIApp, kept: Path, secret: str, clock: SteadyClock) -> ASGIApp:
        """Return the layer that answers requests with an Idempotency-Key, at the front that the key belongs to."""
        answers = KeptAnswers(_made(kept / self._own_folder("answers")), clock=clock)
        once = IdempotentAnswers(app, answers, secret)
        return once if self.fronts is None else self.fronts.forwarding(once)

    def _own_folder(self, name: str) -> str:
        """Return the name of a folder in which each front keeps what its replacement needs."""
        return name if self.leads or self.fronts is None else f"{name}-{self.fronts.owners.number}"

    def add_pool(self, pool: Pool) -> PoolFront:
        """Add a pool that joins while the service runs. Its ranks are away; they have the next numbers."""
        made, num_ranks = self.pools.add(pool), pool.ranks.stop
        if num_ranks > self._ranks.num_ranks:
            self._ranks.grow(num_ranks)
            self._router.grow(num_ranks)
            self._metrics.grow(num_ranks)
        self._roles.add(pool)
        return made

    def _batching(
        self,
        http: HttpOptions,
        files: FileStore,
        answering: Sequence[APIRouter],
        version: str,
        clock: SteadyClock,
    ) -> list[APIRouter]:
        """Return the routes of files and batches. Batch lines call the routes in `answering`, without a key."""
        batches = BatchStore(files.directory / "batches", clock=clock)
        files.is_read = lambda file_id: batches.reader_of(file_id) is not None
        room = LinePlaces(self._num_places, self._num_unbounded)
        endpoints = build_app(
            answering,
            version=version,
            keys=ApiKeys(),
            http=HttpOptions(max_request_bytes=http.max_request_bytes),
        )
        self._batch_runs = BatchRuns(batches, files, room, endpoints)
        return [file_routes(files, batches), batch_routes(batches, files, self._batch_runs)]

    def _num_places(self) -> int:
        """Return how many requests the ranks can run at once; 0 if the service is not ready."""
        if self.why_not_ready() is not None:
            return 0
        attached = self._ranks.attached.items()
        return sum(stream.facts.max_num_seqs for rank, stream in attached if self._moves.takes_requests(rank))

    def _routers(
        self, options: Options, metrics: Metrics, version: str, environment: Mapping[str, str]
    ) -> list[APIRouter]:
        return [
            messages_routes(self.model, self.requests),
            generate_routes(self.model, self.requests),
            ollama_routes(self.model, self.requests, version=version, is_on_gpu=options.device == "cuda"),
            tokenize_routes(self.model),
            service_routes(
                self.model,
                self.requests,
                version=version,
                pools=self._roles.present,
                forget_prefixes=self._forget_prefixes,
                facts=lambda: [stream.facts for _, stream in sorted(self._ranks.attached.items())],
                target_itl_ms=options.engine.target_itl_ms,
                shows_path=not options.needs_key,
                weight_version=self._label_of,
            ),
            placement_routes(self.pools.placements, options.engine.eplb_config),
            ops_routes(
                version,
                metrics if self.fronts is None else self.fronts.service_metrics(),
                self.why_not_ready,
            ),
            membership_routes(
                self.pools.memberships,
                self._num_replayed,
                self._num_parked if self.fronts is None else self.fronts.num_parked,
                self.events,
                metrics.tiers,
                self._moves.drains,
                self.sleep_mode,
                lambda: self._roles.roles,
                self.resize,
            ),
            rank_routes(self._moves, self.why_not_ready),
            resize_routes(self.resize),
            pool_routes(self._roles, self.why_not_ready),
            sleep_routes(self.sleep_mode, lambda: self._all_requests.num_open),
            weight_routes(self.weights, self.pausing, self._all_requests, self._weight_group),
            adapter_routes(self.adapters),
            dashboard_routes(),
            docs_routes(),
            throughput_routes(metrics.throughput),
            expert_load_routes(
                self.pools.loads,
                rank_steps=lambda: _steps(self._ranks),
                record_directory=Path(environment.get(_RECORD_VARIABLE) or default_folder()),
            ),
        ]

    async def serve(self, listener: socket.socket) -> None:
        """Serve HTTP on a bound socket until `stop` is called."""
        tasks = [asyncio.create_task(self._keep_ticking()), asyncio.create_task(self._left_runs.resume())]
        if self.leads:
            tasks.append(asyncio.create_task(self._batch_runs.serve()))
        if self.model.images is not None:
            tasks.append(asyncio.create_task(self.model.images.encoder.start()))
        if self._options.enable_eplb and self.leads:
            self.pools.balance()
        starting = asyncio.create_task(self._start_adapters())
        tasks.append(starting)
        serving = [self._server.serve(sockets=[listener])]
        if self.fronts is not None and self._inner is not None:
            tasks.append(asyncio.create_task(self.fronts.keep_looking()))
            serving.append(self._inner.serve(sockets=[self.fronts.bind_inner()]))
        try:
            await asyncio.gather(*serving)
            if starting.done():
                starting.result()  # raises if an adapter of the start cannot be served
        finally:
            tasks += self.pools.balancing
            if self.fronts is not None:
                await self.fronts.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._traces.close)
            await self.model.structures.close()
            await self._weight_group.close()
            if self.model.images is not None:
                await self.model.images.close()

    async def _start_adapters(self) -> None:
        """Load the adapters of the start, and then those of a watched folder; end the server if one of the start cannot be served."""
        try:
            await self.adapters.start(
                modules_of(self._options.lora_modules),
                lambda: why_service_not_ready(self.pools.memberships) is None,
            )
            if self._options.lora_dir is not None:
                await AdapterFolder(Path(self._options.lora_dir), self.adapters, self.events).run()
        except ApiError:
            self.stop(0)
            raise

    async def _keep_ticking(self) -> None:
        """Sample the throughput, and log it unless disabled. Let the roles of pools follow the load."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._throughput.tick(logs=self._options.log.stats and self.leads)
            if self.fronts is not None:
                self.fronts.exchange_speed()
            if self.leads:
                self._roles.balance()

    async def drain(self) -> None:
        """Turn /health to 503, refuse new requests, and wait for the open ones to end."""
        self._is_draining = True
        self.requests.refuse(draining())
        await self.requests.wait_until_empty()
        if self.fronts is not None:
            await self.fronts.finish()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Make `serve` return soon: accept no connections, and allow `grace_s` for responses being sent.

        May be called again with a shorter time.
        """
        for server in (self._server, self._inner):
            if server is not None:
                server.stop(grace_s)

    def _num_parked(self) -> int:
        return self.requests.num_parked

    def _num_unbounded(self) -> int:
        return self.requests.num_unbounded if self.fronts is None else self.fronts.num_unbounded()

    def _num_replayed(self) -> int:
        return self._journal.num_replayed if self.fronts is None else self.fronts.num_replayed()

    def _forget_prefixes(self) -> None:
        self._ranks.forget_prefixes()
        self._all_requests.forget_prefixes()

    def _decisions(self) -> ServiceState:
        """Return the state of the service that the other fronts follow. This front leads."""
        return state_of(
            self._ranks,
            self._router,
            pools={each.pool.name: each.pool for each in self.pools},
            roles=self._roles.roles,
            why_not_ready=self._why_not_serving(),
            sleep_level=self.sleep_mode.state.level,
            weights=self.weights,
        )

    def _label_of(self, number: int | None = None) -> str:
        """Return the label of a version of the weights, by default of the serving one; "" if it has none."""
        return self.weights.label_of(number) if self.following is None else self.following.label_of(number)

    def _why_paused(self) -> str | None:
        return self.sleep_mode.why_not_ready() or self.resize.why_paused()

    def _why_not_resized_now(self) -> str | None:
        if self.weights.is_open:
            return "a weight update has begun"
        return self.why_not_ready() or self.weights.why_no_moves()

    def _on_size(self, num_ranks: int, most: int) -> None:
        """Follow a resize: make room for `most` ranks, of which `num_ranks` belong to the service."""
        self._router.grow(most)
        self._metrics.grow(most)
        only = self.pools.first
        only.pool = only.pool._replace(num_ranks=num_ranks)
        self._roles.resize(only.pool)
        self._moves.resize(num_ranks)
        for rank in range(num_ranks, self._router.num_ranks):  # they have left, or have yet to come
            self._metrics.note_lost(rank)
        self.on_size(num_ranks, most)

    def placement_for(self, pool: PoolFront, rank: int) -> tuple[int, Placement | None] | None:
        """Return the number of ranks and the placement with which an engine of a pool begins. Returns None if it is not wanted.

        The number is 0 if the service has pools. Their sizes do not change.
        """
        if self.pools.has_several:
            return 0, pool.home
        return self.resize.placement_for(rank)

    def _why_no_moves(self) -> str | None:
        return self._why_paused() or self.weights.why_no_moves()

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


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _keys(options: Options) -> ApiKeys:
    file, operators = options.http.api_key_file, options.http.operator_key_file
    return ApiKeys(
        options.api_keys,
        None if file is None else Path(file),
        operators=None if operators is None else ApiKeys(file=Path(operators), flag="--operator-key-file"),
    )


def _own_names(host: str) -> tuple[str, ...]:
    """Return the host names that users may put into the URLs of this service's pages."""
    name = socket.gethostname()
    return (host, name, name.partition(".")[0], f"{name}.local")  # .local: multicast DNS


def _observers(options: Options, metrics: Metrics, traces: Traces) -> list[Callable[[HttpExchange], None]]:
    observers: list[Callable[[HttpExchange], None]] = [metrics.http.note, traces.note]
    return [*observers, AccessLog(options.log.quiet_paths).note] if options.log.access else observers


def _steps(ranks: Ranks) -> dict[int, int]:
    """Return the last reported step of each attached rank."""
    told = {rank: stream.stats for rank, stream in ranks.attached.items()}
    return {rank: stats.step for rank, stats in told.items() if stats is not None}


def _no_resizes(options: Options) -> ApiError | None:
    if options.api_server_count > 1:
        return ApiError(501, f"The service cannot be resized: it has several fronts. {_ONE_FRONT_ONLY}")
    reason = why_no_resizes(options)
    return None if reason is None else bad_request(reason)


def _file_store(http: HttpOptions, keys: ApiKeys, kept: Path, clock: SteadyClock) -> FileStore:
    directory = kept / "files" if http.files_dir is None else Path(http.files_dir)
    return FileStore(
        directory, max_bytes=http.max_files_bytes, are_several=lambda: keys.are_several, clock=clock
    )


def _model_type(directory: Path) -> str:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return str(config.get("model_type", ""))
