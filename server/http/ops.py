"""The routes that operators and load balancers use: /health, /ping, /version, /metrics."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server import errors
from server.http import metrics
from server.http.error_response import ErrorResponse
from server.http.metrics import Metrics


def ops_routes(version: str, registry: Metrics, why_not_ready: Callable[[], str | None]) -> APIRouter:
    """Return the routes.

    Args:
        why_not_ready: None while some rank serves, else the reason.
    """
    router = APIRouter()

    async def show_health() -> Response:
        """200 while some rank serves (from the start on: all), else 503 with the reason."""
        reason = why_not_ready()
        return ErrorResponse(errors.not_ready(reason)) if reason else JSONResponse({"status": "ready"})

    async def show_ping() -> dict[str, Any]:
        """200 as long as this process lives."""
        return {"ping": "pong"}

    async def show_version() -> dict[str, Any]:
        """The distribution's version."""
        return {"version": version}

    async def show_metrics() -> Response:
        """Everything for Prometheus."""
        return Response(registry.text(), media_type=metrics.CONTENT_TYPE)

    router.add_api_route("/health", show_health, methods=["GET"], response_model=None)
    router.add_api_route("/ping", show_ping, methods=["GET"], response_model=None)
    router.add_api_route("/version", show_version, methods=["GET"], response_model=None)
    router.add_api_route("/metrics", show_metrics, methods=["GET"], response_class=PlainTextResponse)
    # A route of several methods has one operation id for all of them, which /openapi.json may not have.
    for path, answer in (
        ("/health", show_health),
        ("/ping", show_ping),
        ("/version", show_version),
        ("/metrics", show_metrics),
    ):
        router.add_api_route(path, answer, methods=["HEAD"], response_model=None, include_in_schema=False)
    router.add_api_route("/ping", show_ping, methods=["POST"], response_model=None)
    return router
