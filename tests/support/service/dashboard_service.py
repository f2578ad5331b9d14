"""The dashboard with answers that a test chooses, without a service."""

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import RankStats
from server.experts.dashboard.routes import dashboard_routes
from server.front.events import EventLog
from server.front.members.membership import Epochs
from server.http.observability.ops import status_of
from server.http.observability.throughput import Throughput
from server.http.observability.tiers import TierTotals
from server.link.messages import RankFacts

TIMEOUT_S = 30.0
TIERS = TierFigures(
    host_bytes=3 << 29,
    host_capacity_bytes=4 << 30,
    disk_bytes=5 << 30,
    disk_capacity_bytes=200 << 30,
    num_faults=2,
    num_dropped=7,
)


def rank_status(
    num_ranks: int, *, lost: Mapping[int, str] | None = None, waits: bool = False, failed_disks: int = 0
) -> dict[str, Any]:
    """Return the answer of GET /v1/fault_tolerance/status, with some ranks lost for 12 s.

    Args:
        lost: Reasons by rank.
        waits: Whether the other ranks wait for them.
        failed_disks: Number of nodes with a disabled tier on disk.
    """
    epochs = Epochs(num_ranks, recovery_timeout_s=600.0)
    for rank in range(num_ranks):
        epochs.attach(rank, 0.0)
    for rank, reason in (lost or {}).items():
        epochs.lose(rank, reason, 10.0)
    for rank in epochs.members:
        if waits:
            epochs.take_fault(rank, epochs.number, "no memory for its experts", is_final=True, now_s=11.0)
        else:
            epochs.take_regrouped(rank, epochs.number, 11.0)
    events = EventLog()
    for rank, reason in (lost or {}).items():
        events.note("rank_lost", f"rank {rank} is lost: {reason}", rank=rank)
        events.note("regrouped", f"epoch {epochs.number}: ranks 0 serve", seconds=0.4)
    status = status_of({"both": epochs}, 22.0, time.time())
    return {
        **status,
        "replays": 3 if lost else 0,
        "waiting_requests": 0,
        "tiers": _tiers_of(num_ranks, failed_disks),
        "events": events.to_json(),
    }


def _tiers_of(num_ranks: int, failed_disks: int) -> list[dict[str, Any]]:
    """Return tiers of nodes with one rank each."""
    totals = TierTotals("tiny", num_ranks)
    for rank in range(num_ranks):
        totals.note_rank(rank_facts(rank))
        totals.note_stats(replace(_stats_of(rank, 1), tiers=TIERS._replace(is_disk_off=rank < failed_disks)))
    return totals.to_json()


def throughput_answer(*, seconds: int = 600, tokens_per_s: int = 40) -> dict[str, Any]:
    """Return the answer of GET /throughput for a busy service of two ranks, with every kind of figure."""
    now_s = 0.0
    throughput = Throughput(clock=lambda: now_s, calendar=lambda: time.time() - seconds + now_s)
    for rank in (0, 1):
        throughput.note_rank(rank_facts(rank))
    for tick in range(seconds // 2):
        num_tokens = 2 * tokens_per_s + 30 * (tick // 30 % 2)
        throughput.note_tokens(num_tokens, {0.02 * (1 + tick % 4) / num_tokens: num_tokens})
        throughput.note_end(1.5 + tick % 3)
        if tick % 3 == 0:
            throughput.note_first_token(0.2 + 0.1 * (tick % 5), num_prompt_tokens=90)
        for rank in (0, 1):
            throughput.note_stats(_stats_of(rank, tick), TierFigures(host_hit_tokens=4, disk_hit_tokens=2))
        now_s += 2.0
        throughput.tick(logs=False)
    return throughput.to_json()


def rank_facts(rank: int) -> RankFacts:
    """Return the facts that a rank reports."""
    return RankFacts(
        rank=rank, world_size=2, host=f"node-{rank}", pid=4000 + rank, max_model_len=8192, num_blocks=1000, block_tokens=16,
        max_num_seqs=64, max_num_batched_tokens=512, device="cpu", num_restarts=rank,
    )  # fmt: skip


def _stats_of(rank: int, tick: int) -> RankStats:
    return RankStats(
        rank=rank,
        step=tick,
        num_running=4,
        num_waiting=rank,
        num_free_blocks=700 - tick % 100,
        num_blocks=1000,
        num_step_tokens=4,
        num_preemptions=0,
        prefix_query_tokens=30 * tick,
        prefix_hit_tokens=12 * tick,
    )


class DashboardService:
    """An HTTP server in a thread. A context manager. `stop` and `start` simulate an outage of the service."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}  # answer of GET /experts/load
        self.status = 200
        self.asked_pools: list[str | None] = []  # of GET /experts/load
        self.ranks = rank_status(2)  # GET /v1/fault_tolerance/status
        self.throughput = throughput_answer()  # GET /throughput; {} is a 404
        self.facts: dict[str, Any] = {  # GET /server_info; {} is a 401, as with API keys
            "version": "0.1.0", "served_model_name": "tiny", "device": "cpu", "context_length": 8192,
            "max_total_num_tokens": 32_000, "max_running_requests": 128,
        }  # fmt: skip
        self._app = FastAPI()
        self._app.include_router(dashboard_routes())
        for path, show in (
            ("/experts/load", self._show_load),
            ("/v1/fault_tolerance/status", self._show_ranks),
            ("/throughput", self._show_throughput),
            ("/server_info", self._show_facts),
        ):
            self._app.add_api_route(path, show, response_model=None)
        self._port = 0
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self._port}/dashboard"

    async def _show_load(self, pool: str | None = None) -> Response:
        self.asked_pools.append(pool)
        return JSONResponse(self.answer, self.status)

    async def _show_ranks(self) -> Response:
        return JSONResponse(self.ranks)

    async def _show_facts(self) -> Response:
        return JSONResponse(self.facts, 200 if self.facts else 401)

    async def _show_throughput(self) -> Response:
        return JSONResponse(self.throughput, 200 if self.throughput else 404)

    def start(self) -> Self:
        """Listen, on the same port as before after a `stop`."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._port = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        return self

    def _run(self, listener: socket.socket) -> None:
        with listener:
            self._server.run(sockets=[listener])

    def stop(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        assert self._thread is not None, "stop was called before start"
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not end"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.stop()
