"""The half of the front that is slow to import: tokenizer, served model, routes and the HTTP server.

`front` binds its sockets first and imports this afterwards, with torch hidden, by name.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from expert_placement.history import History
from server.anthropic.messages import messages_routes
from server.app import build_app
from server.dashboard.routes import dashboard_routes
from server.experts_http import experts_routes
from server.experts_load import ExpertsLoad
from server.experts_metrics import ExpertsMetrics
from server.front_metrics import FrontMetrics
from server.journal import Journal
from server.metrics import Metrics
from server.openai.chat import chat_routes
from server.openai.completions import completion_routes
from server.openai.load import load_routes
from server.openai.models import model_routes
from server.openai.responses import responses_routes
from server.openai.responses_store import ResponseStore
from server.openai.tokenize import tokenize_routes
from server.ops import ops_routes
from server.options import Options
from server.parsers.registry import markup_of
from server.placement_control import PlacementControl
from server.placement_http import placement_routes
from server.ranks import Ranks
from server.requests import Requests
from server.router import Router
from server.served import ServedModel
from server.tokenizer import Tokenizer

# What vLLM, too, takes from generation_config.json as defaults.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RECORD_VARIABLE = (
    "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"  # so that scripts written for SGLang find their files
)
_GRACE_S = 2  # for open connections when the server ends
_KEEP_ALIVE_S = 60  # between requests of one client; shorter makes pooled clients meet closed connections


class HttpService:
    """Requests in over HTTP; the ranks' outputs back out."""

    def __init__(
        self,
        options: Options,
        tokenizer: Tokenizer,
        *,
        ranks: Ranks,
        journal: Journal,
        metrics: Metrics,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Put the application together."""
        router = Router(ranks.num_ranks)
        self.requests = Requests(
            decoder=tokenizer,
            ranks=ranks,
            router=router,
            journal=journal,
            metrics=metrics,
            timeout_s=options.request_timeout_s,
        )
        self.model = ServedModel(
            names=options.served_model_names,
            tokenizer=tokenizer,
            sampling_defaults=_sampling_defaults(Path(options.model)),
            max_len=_max_len(options, tokenizer, ranks),
            created=int(time.time()),
            markup=markup_of(
                tokenizer.template.text,
                tools=options.tool_call_parser,
                reasoning=options.reasoning_parser,
            ),
        )
        eplb = options.eplb_config
        self.experts_load = ExpertsLoad(options.served_model_names[0], window_steps=eplb.window_size)
        history = History(Path(eplb.history_file) if eplb.history_file else None)
        self.placement = PlacementControl(ranks, self.experts_load, eplb, history)
        self._balances = options.enable_eplb
        metrics.add(ExpertsMetrics(self.experts_load, options.served_model_names[0]))
        metrics.add(FrontMetrics(self.requests, router, options.served_model_names[0]))
        version = _version()
        app = build_app(
            [
                chat_routes(self.model, self.requests),
                completion_routes(self.model, self.requests),
                responses_routes(self.model, self.requests, ResponseStore()),
                messages_routes(self.model, self.requests),
                tokenize_routes(self.model),
                load_routes(lambda: self.requests.num_answers),
                model_routes(self.model),
                placement_routes(self.placement, eplb),
                ops_routes(version, metrics, lambda: why_not_ready(ranks)),
                dashboard_routes(),
                experts_routes(
                    self.experts_load,
                    rank_steps=lambda: _steps(ranks),
                    record_directory=Path(environment.get(_RECORD_VARIABLE) or tempfile.gettempdir()),
                ),
            ],
            version=version,
            api_keys=options.api_keys,
            metrics=metrics,
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer on a bound socket until `stop`."""
        balancing = asyncio.create_task(self.placement.run()) if self._balances else None
        try:
            await self._server.serve(sockets=[listener])
        finally:
            if balancing is not None:
                balancing.cancel()

    def stop(self) -> None:
        """Let `serve` return soon: no new connections, open ones have a moment to end."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to the front."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture: the front tells ranks and clients first, then stops this server."""
        yield


def why_not_ready(ranks: Ranks) -> str | None:
    """Return what the service waits for, None when it is ready."""
    missing = ranks.missing()
    if not missing:
        return None
    numbers = ", ".join(map(str, missing))
    return f"waiting for rank{'s' if len(missing) > 1 else ''} {numbers} of {ranks.num_ranks}"


def _steps(ranks: Ranks) -> dict[int, int]:
    """The last step that each attached rank has told of."""
    told = {rank: stream.stats for rank, stream in ranks.attached.items()}
    return {rank: stats.step for rank, stats in told.items() if stats is not None}


def _max_len(options: Options, tokenizer: Tokenizer, ranks: Ranks) -> Callable[[], int]:
    """The ranks know the limit for certain; before they attach it is what the user or the checkpoint says."""

    def limit() -> int:
        said = [stream.facts.max_model_len for stream in ranks.attached.values()]
        return min(said, default=options.max_model_len or tokenizer.model_max_len or 0)

    return limit


def _sampling_defaults(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: config[name] for name in _DEFAULTS if config.get(name) is not None}


def _version() -> str:
    try:
        return importlib.metadata.version("wideep")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a checkout that is not installed
