"""The routes for operators and load balancers: /health, /ping, /version, /metrics, /throughput, and membership.

GET /v1/fault_tolerance/status reports the serving ranks, the missing ranks with reason and time, and KV tiers. Its path,
`schema_version`, `total_engines` and `engines` with `id`, `status` and `fault_info` are vLLM's, so that monitors of vLLM's
ranks work here; the other fields are WideEP's. There are no instructions to apply, because ranks return by themselves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from server.front import errors
from server.front.events import EventLog
from server.front.members.membership import Epochs, Phase
from server.front.members.resize import Resize
from server.front.routing.moves import Drain
from server.front.sleep_mode import SleepMode
from server.http.errors import ErrorResponse
from server.http.json_writer import json_response
from server.http.observability import metrics
from server.http.observability.throughput import Throughput
from server.http.observability.tiers import TierTotals
from server.http.routes import new_router
from server.options.pools import Role


class MetricsText(Protocol):
    """Metrics that can be scraped: of one front, or of the whole service."""

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format."""


def ops_routes(version: str, registry: MetricsText, why_not_ready: Callable[[], str | None]) -> APIRouter:
    """Return the routes.

    Args:
        why_not_ready: Returns None while some rank serves, and otherwise the reason.
    """
    router = new_router()

    async def show_health() -> Response:
        """Return 200 while some rank serves (all ranks at the start), and otherwise 503 with the reason."""
        reason = why_not_ready()
        return ErrorResponse(errors.not_ready(reason)) if reason else json_response({"status": "ready"})

    async def show_ping() -> dict[str, Any]:
        """Return 200 while this process is alive."""
        return {"ping": "pong"}

    async def show_version() -> dict[str, Any]:
        """Return the version of WideEP."""
        return {"version": version}

    async def show_metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(await registry.text(), media_type=metrics.CONTENT_TYPE)

    router.add_api_route("/health", show_health, methods=["GET"], response_model=None)
    router.add_api_route("/ping", show_ping, methods=["GET"], response_model=None)
    router.add_api_route("/version", show_version, methods=["GET"], response_model=None)
    router.add_api_route("/metrics", show_metrics, methods=["GET"], response_class=PlainTextResponse)
    # A route with several methods would have one operation id for all, which is invalid in /openapi.json.
    for path, answer in (
        ("/health", show_health),
        ("/ping", show_ping),
        ("/version", show_version),
        ("/metrics", show_metrics),
    ):
        router.add_api_route(path, answer, methods=["HEAD"], response_model=None, include_in_schema=False)
    router.add_api_route("/ping", show_ping, methods=["POST"], response_model=None)
    return router


def throughput_routes(throughput: Throughput) -> APIRouter:
    """Return the route of /throughput."""
    router = new_router()

    async def show_throughput() -> dict[str, Any]:
        """Return tokens per second, requests, time to first token and KV usage: current, by rank, and over time."""
        return throughput.to_json()

    router.add_api_route("/throughput", show_throughput, methods=["GET"], response_model=None)
    return router


SCHEMA_VERSION = 1


def membership_routes(
    pools: Mapping[str, Epochs],
    num_replayed: Callable[[], int],
    num_parked: Callable[[], int],
    events: EventLog,
    tiers: TierTotals,
    drains: Callable[[], Sequence[Drain]],
    sleep_mode: SleepMode,
    roles: Callable[[], Mapping[str, Role]],
    resize: Resize,
) -> APIRouter:
    """Return the route of /v1/fault_tolerance/status. `roles` returns the present roles of pools, by name."""
    router = new_router()

    async def show_status() -> dict[str, Any]:
        """Return the serving ranks, the missing ranks with reason and time, draining ranks, pools with their roles, sleep mode, the
        newest resize, the tiers of the KV cache, and past events.
        """
        status = status_of(pools, time.monotonic(), time.time(), drains(), roles=roles())
        level, is_waking, seconds = sleep_mode.state
        sleep = {"level": level, "waking": is_waking, "seconds": round(seconds, 3)}
        return {
            **status,
            "replays": num_replayed(),
            "waiting_requests": num_parked(),
            "sleep": sleep,
            "resize": resize.to_json(),
            "tiers": tiers.to_json(),
            "events": events.to_json(),
        }

    router.add_api_route("/v1/fault_tolerance/status", show_status, methods=["GET"], response_model=None)
    return router


def status_of(
    pools: Mapping[str, Epochs],
    now_s: float,
    now_unix_s: float,
    drains: Sequence[Drain] = (),
    *,
    roles: Mapping[str, Role] | None = None,
) -> dict[str, Any]:
    """Return the ranks' state as JSON, of the service and of each pool.

    Args:
        pools: The membership of each pool, by name.
        now_s: The present, on the monotonic clock. `now_unix_s`: The same in seconds since 1970.
        roles: The present roles of pools, by name. None: every pool has the role both.
    """
    roles = dict.fromkeys(pools, Role.BOTH) if roles is None else roles
    every = list(pools.values())
    missing = [
        {
            "rank": rank,
            "reason": absence.reason,
            "since": round(now_unix_s - (now_s - absence.since_s), 3),
            "seconds": round(now_s - absence.since_s, 3),
        }
        for epochs in every
        for rank, absence in sorted(epochs.missing.items())
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "phase": phase_of(every).value,
        "epoch": sum(epochs.number for epochs in every),
        "members": [rank for epochs in every for rank in epochs.members],
        "missing": missing,
        "faults": [
            {"rank": rank, "reason": reason}
            for epochs in every
            for rank, reason in sorted(epochs.faults.items())
        ],
        "draining": [
            {"rank": each.rank, "requests": each.num_requests, "seconds": round(each.seconds, 3)}
            for each in drains
        ],
        "losses": sum(sum(epochs.num_losses.values()) for epochs in every),
        "total_engines": sum(epochs.num_ranks for epochs in every),
        "engines": [_engine(epochs, rank) for epochs in every for rank in epochs.ranks],
        "pools": [_pool(name, roles[name], epochs) for name, epochs in pools.items()],
    }


def phase_of(pools: Sequence[Epochs]) -> Phase:
    """Return the phase of the service: that of the pool that is closest to serving, once all have started."""
    phases = [epochs.phase for epochs in pools]
    if any(epochs.phase is Phase.STARTING and not epochs.is_resuming for epochs in pools):
        return Phase.STARTING
    return next(
        phase for phase in (Phase.SERVING, Phase.REGROUPING, Phase.WAITING, Phase.STARTING) if phase in phases
    )


def _pool(name: str, role: Role, epochs: Epochs) -> dict[str, Any]:
    return {
        "pool": name,
        "role": role.value,
        "ranks": list(epochs.ranks),
        "phase": epochs.phase.value,
        "epoch": epochs.number,
        "members": list(epochs.members),
    }


def _engine(epochs: Epochs, rank: int) -> dict[str, Any]:
    """Return a rank in the form of vLLM's engines."""
    if rank in epochs.missing:
        return {"id": rank, "status": "dead", "fault_info": epochs.missing[rank].reason}
    if rank in epochs.faults:
        return {"id": rank, "status": "unhealthy", "fault_info": epochs.faults[rank]}
    is_serving = epochs.phase is Phase.SERVING and rank in epochs.members
    return {"id": rank, "status": "healthy" if is_serving else "unhealthy"}
