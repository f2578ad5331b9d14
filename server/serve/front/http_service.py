"""The HTTP side of a front: the served model, the routes over a `FrontService`, and the HTTP server.

The front (`front_main`) binds its sockets, then imports this module by name, with torch hidden: it is slow to import.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastapi import APIRouter
from starlette.types import ASGIApp

from server.api.anthropic.messages import messages_routes
from server.api.ollama.routes import ollama_routes
from server.api.openai.batches.batch_store import BatchStore
from server.api.openai.batches.file_store import FileStore, is_in_use
from server.api.openai.batches.routes import batch_routes, file_routes
from server.api.openai.batches.runs import BatchRuns, LinePlaces
from server.api.openai.chat import chat_routes
from server.api.openai.completions import completion_routes
from server.api.openai.responses.kept import ResponseStore
from server.api.openai.responses.left_runs import FOLDER, LeftRuns
from server.api.openai.responses.routes import new_response_id, responses_routes
from server.api.openai.responses.run_copies import RunCopies
from server.api.openai.responses.runs_of_others import RunsOfOthers
from server.api.sglang.generate import generate_routes
from server.api.sglang.service_routes import service_routes
from server.api.tokenize import tokenize_routes
from server.experts.dashboard.routes import dashboard_routes
from server.experts.metrics import ExpertsMetrics
from server.experts.record_files import default_folder
from server.experts.routes import expert_load_routes, placement_routes
from server.front.adapters.folder import AdapterFolder
from server.front.errors import ApiError
from server.front.members.readiness import why_service_not_ready
from server.front.several.seat import folder_of
from server.front.tokenizer import Tokenizer
from server.front.weights.group import WeightGroup
from server.http.app import build_app
from server.http.docs_page import docs_routes
from server.http.exchanges import HttpExchange
from server.http.guards import ApiKeys
from server.http.observability.gauges import FrontMetrics, MembershipMetrics, ResizeMetrics, SpeedMetrics
from server.http.observability.images import ImageMetrics
from server.http.observability.logs import AccessLog
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
from server.http.retries.idempotency import IdempotentAnswers
from server.http.retries.kept_answers import KeptAnswers
from server.http.wire.http_server import GRACE_S, HttpServer, connection_bound
from server.link.ranks import Ranks
from server.machine.steady_clock import SteadyClock
from server.machine.tasks import logging_errors, start_task
from server.machine.versions import version_of
from server.options.adapters import modules_of
from server.options.table import HttpOptions, Options
from server.serve.front.image_files import fetched_images, stored_images
from server.serve.front.served_model import served_model
from server.serve.front.service import FrontService
from server.serve.front.several_fronts import inner_app
from server.serve.standby.leading import CopiedFirst, KeptFiles

# The name is SGLang's, so that scripts written for it find their files.
_RECORD_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
_LOOK_S = 0.5
_LOG = logging.getLogger("wideep.front")


class HttpService:
    """The HTTP application of a service, on its server."""

    def __init__(
        self,
        service: FrontService,
        tokenizer: Tokenizer,
        *,
        metrics: Metrics,
        kept: Path,
        secret: str,
        files: KeptFiles | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Build the application.

        Args:
            kept: Folder that outlives this process, for answers kept for retries, and for files without --files-dir.
            secret: A secret that all fronts of a service share.
            files: The files that this front copies to the standby, if there is one.

        Raises:
            OptionsError: The folder for files is unusable.
        """
        options, fronts = service.options, service.fronts
        self._service, self._options, self._throughput = service, options, metrics.throughput
        self._weight_group = WeightGroup()
        keys, clock = _keys(options), SteadyClock()
        # The leading front has the files.
        stored = _file_store(options.http, keys, kept, clock) if service.leads else None
        most_bytes = options.images.most_bytes
        if stored is not None:
            read_image = stored_images(stored, most_bytes)
        else:
            assert fronts is not None, "a front without files follows another one"
            read_image = fetched_images(fronts.ask_leader, most_bytes)
        self._model = served_model(options, tokenizer, service.ranks, service.known_adapters, read_image)
        self._add_metrics(metrics, options.served_model_names[0])
        version = version_of("wideep") or "0+unknown"  # an uninstalled checkout
        self._traces = Traces.to(options.log.otlp_endpoint, service_version=version)
        responses = ResponseStore()
        self._run_copies = None  # at the leading front, if that is on another node
        if fronts is not None and not fronts.is_near:
            self._run_copies = RunCopies(fronts.ask_leader, fronts.owners.number)
            fronts.owners.has_response = responses.has
        self._left_runs = LeftRuns(kept / self._own_folder(FOLDER), self._run_copies)
        answering = [
            chat_routes(self._model, service.requests),
            completion_routes(self._model, service.requests),
            responses_routes(
                self._model,
                service.requests,
                are_several=lambda: keys.are_several,
                new_id=new_response_id if fronts is None else fronts.owners.new_response_id,
                left=self._left_runs,
                store=responses,
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
        wait_until_copied = None if files is None else files.wait_until_copied
        if options.standby is not None and fronts is not None and not service.leads:
            wait_until_copied = fronts.wait_until_copied
        outer = app if wait_until_copied is None else CopiedFirst(app, wait_until_copied)
        bound = connection_bound(options.http, None if fronts is None else fronts.board)
        self._server = HttpServer(outer, options.http, bound)
        self._inner = None  # for the other fronts
        if fronts is not None:
            # Its clients are fronts, which forward the address of theirs.
            runs_of_others = RunsOfOthers(kept, self._left_runs)
            fronts.take_over = runs_of_others.take_over
            inner = inner_app(app, wait_until_copied, runs_of_others)
            self._inner = HttpServer(inner, HttpOptions(forwarded_allow_ips=("*",)))

    def _add_metrics(self, metrics: Metrics, name: str) -> None:
        service, add = self._service, metrics.add
        pools, requests = service.pools, service.requests
        are_named = pools.has_several
        add(ExpertsMetrics(pools.loads, name, are_named=are_named))
        add(AdapterMetrics(service.known_adapters, name))
        if self._model.images is not None:
            encoder = self._model.images.encoder
            add(ImageMetrics(lambda: encoder.counts))
        add(FrontMetrics(requests, service.router, name))
        add(
            MembershipMetrics(
                pools.memberships, service.journal, lambda: requests.num_parked, name, are_named=are_named
            )
        )
        add(ResizeMetrics(service.resize, name))
        add(SpeedMetrics(self._throughput, name))

    def _answer_once(self, app: ASGIApp, kept: Path, secret: str, clock: SteadyClock) -> ASGIApp:
        """Return the layer that answers requests with an Idempotency-Key, at the front that the key belongs to."""
        answers = KeptAnswers(_made(kept / self._own_folder("answers")), clock=clock)
        once = IdempotentAnswers(app, answers, secret)
        fronts = self._service.fronts
        return once if fronts is None else fronts.forwarding(once)

    def _own_folder(self, name: str) -> str:
        """Return the name of a folder in which each front keeps what its replacement needs."""
        fronts = self._service.fronts
        return name if fronts is None else folder_of(name, fronts.owners.number)

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
        room = LinePlaces(self._service.num_places, self._service.num_unbounded)
        endpoints = build_app(
            answering,
            version=version,
            keys=ApiKeys(),
            http=HttpOptions(max_request_bytes=http.max_request_bytes),
        )
        self._batch_runs = BatchRuns(batches, files, room, endpoints)
        return [file_routes(files, batches), batch_routes(batches, files, self._batch_runs)]

    def _routers(
        self, options: Options, metrics: Metrics, version: str, environment: Mapping[str, str]
    ) -> list[APIRouter]:
        service, requests, fronts = self._service, self._service.requests, self._service.fronts
        return [
            messages_routes(self._model, requests),
            generate_routes(self._model, requests),
            ollama_routes(self._model, requests, version=version, is_on_gpu=options.device == "cuda"),
            tokenize_routes(self._model),
            service_routes(
                self._model,
                requests,
                version=version,
                pools=service.roles.present,
                forget_prefixes=service.forget_prefixes,
                facts=lambda: [stream.facts for _, stream in sorted(service.ranks.attached.items())],
                target_itl_ms=options.engine.target_itl_ms,
                shows_path=not options.needs_key,
                weight_version=service.label_of,
            ),
            placement_routes(service.pools.placements, options.engine.eplb_config),
            ops_routes(
                version,
                metrics if fronts is None else fronts.service_metrics(),
                service.why_not_ready,
            ),
            membership_routes(
                service.pools.memberships,
                service.num_replayed,
                service.num_parked,
                service.events,
                metrics.tiers,
                service.moves.drains,
                service.sleep_mode,
                lambda: service.roles.roles,
                service.resize,
            ),
            rank_routes(service.moves, service.why_not_ready),
            resize_routes(service.resize),
            pool_routes(service.roles, service.why_not_ready),
            sleep_routes(service.sleep_mode, lambda: service.all_requests.num_open),
            weight_routes(service.weights, service.pausing, service.all_requests, self._weight_group),
            adapter_routes(service.adapters),
            dashboard_routes(),
            docs_routes(),
            throughput_routes(metrics.throughput),
            expert_load_routes(
                service.pools.loads,
                rank_steps=lambda: _steps(service.ranks),
                record_directory=Path(environment.get(_RECORD_VARIABLE) or default_folder()),
            ),
        ]

    async def serve(self, listener: socket.socket) -> None:
        """Serve HTTP on a bound socket until `stop` is called."""
        service, fronts = self._service, self._service.fronts
        tasks = [
            start_task(self._keep_ticking(), "ticker"),
            start_task(self._left_runs.resume(), "background responses"),
        ]
        if service.leads:
            tasks.append(start_task(self._batch_runs.serve(), "batches"))
        if self._run_copies is not None:
            tasks.append(start_task(self._run_copies.serve(), "copies of background responses"))
        if self._model.images is not None:
            tasks.append(start_task(self._model.images.encoder.start(), "start of the image encoder"))
        if self._options.enable_eplb and service.leads:
            service.pools.balance()
        starting = asyncio.create_task(self._start_adapters())
        tasks.append(starting)
        serving = [self._server.serve(sockets=[listener])]
        if fronts is not None and self._inner is not None:
            tasks.append(start_task(fronts.keep_looking(service.look), "several fronts"))
            serving.append(self._inner.serve(sockets=[fronts.bind_inner()]))
        try:
            await asyncio.gather(*serving)
            if starting.done():
                starting.result()  # raises if an adapter of the start cannot be served
        finally:
            tasks += service.pools.balancing
            if fronts is not None:
                await fronts.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._traces.close)
            await self._model.structures.close()
            await self._weight_group.close()
            if self._model.images is not None:
                await self._model.images.close()

    async def _start_adapters(self) -> None:
        """Load the adapters of the start, and then those of a watched folder; end the server if one of the start cannot be served."""
        service = self._service
        if not service.leads:  # it follows the adapters of the leading front
            return
        try:
            await service.adapters.start(
                modules_of(self._options.lora_modules),
                lambda: why_service_not_ready(service.pools.memberships) is None,
            )
            if self._options.lora_dir is not None:
                await AdapterFolder(Path(self._options.lora_dir), service.adapters, service.events).run()
        except Exception as error:
            if not isinstance(error, ApiError):
                _LOG.exception("the adapters of the start cannot be loaded")
            self.stop(0)
            raise

    async def _keep_ticking(self) -> None:
        """Sample the throughput, and log it unless disabled. Let the roles of pools follow the load."""
        service = self._service
        while True:
            await asyncio.sleep(EVERY_S)
            with logging_errors("cannot sample the throughput"):
                self._throughput.tick(logs=self._options.log.stats and service.leads)
                if service.fronts is not None:
                    service.fronts.exchange_speed()
            if service.leads:
                with logging_errors("the roles of pools cannot follow the load"):
                    service.roles.balance()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Make `serve` return soon: accept no connections, and allow `grace_s` for responses being sent.

        May be called again with a shorter time.
        """
        for server in (self._server, self._inner):
            if server is not None:
                server.stop(grace_s)


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


async def until_files_are_free(http: HttpOptions, timeout_s: float) -> None:
    """Wait until the lost node of the leading front no longer holds --files-dir: a file server may keep its locks for a while."""
    until_s, has_said = time.monotonic() + timeout_s, False
    while http.files_dir is not None and is_in_use(Path(http.files_dir)) and time.monotonic() < until_s:
        if not has_said:
            _LOG.warning("waiting for --files-dir %s, which the lost node still holds", http.files_dir)
            has_said = True
        await asyncio.sleep(_LOOK_S)


def _file_store(http: HttpOptions, keys: ApiKeys, kept: Path, clock: SteadyClock) -> FileStore:
    directory = kept / "files" if http.files_dir is None else Path(http.files_dir)
    return FileStore(
        directory, max_bytes=http.max_files_bytes, are_several=lambda: keys.are_several, clock=clock
    )
