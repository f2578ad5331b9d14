"""The ASGI application: the layers around the routes.

From the outside in: open the exchange and report its end to observers; CORS; keys or origins; bodies; idempotent
answers; errors; routes. FastAPI declares and describes the routes. Starlette, on which FastAPI is built, dispatches them:
FastAPI's application would add 20 us of CPU per request for features that are not used here.
"""

from collections.abc import Callable, Collection, Sequence

from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server.http.bodies import BodyBudget, BodyGuard
from server.http.errors import ERROR_HANDLERS
from server.http.exchanges import ExchangeWatch, HttpExchange
from server.http.guards import ApiKeys, KeyGuard, OperatorGuard, OriginGuard
from server.options.table import HttpOptions


def build_app(
    routers: Sequence[APIRouter],
    *,
    version: str,
    keys: ApiKeys,
    http: HttpOptions | None = None,
    own_names: Collection[str] = (),
    observers: Sequence[Callable[[HttpExchange], None]] = (),
    answer_once: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> ASGIApp:
    """Build the application.

    Args:
        keys: Each opens /v1, /api, the other guarded paths, and changes. Without keys, everything except operator paths is open.
        http: None for the defaults.
        own_names: Names of this machine, as used in URLs of the service's own pages.
        observers: Called with every exchange at its end.
        answer_once: The layer that answers requests with an Idempotency-Key (`idempotency`).
    """
    http = http or HttpOptions()
    described = FastAPI(title="WideEP", version=version, docs_url=None, redoc_url=None)  # `docs_page`
    routes = [route for router in routers for route in router.routes]
    # Our routes are used more often than /openapi.json, and are searched in this order.
    described.router.routes[:0] = routes
    app = Starlette(routes=described.routes, exception_handlers=ERROR_HANDLERS)
    budget = BodyBudget(http.most_inflight_bytes)
    layered: ASGIApp = BodyGuard(answer_once(app), http.max_request_bytes, budget)
    if keys.operators is not None:
        layered = OperatorGuard(layered, keys.operators)
    if keys.are_needed:
        layered = KeyGuard(layered, keys)
    elif "*" not in http.allowed_origins:  # not needed with keys, because a foreign page has none
        layered = OriginGuard(
            layered, allowed=http.allowed_origins, own_names=own_names, allowed_hosts=http.allowed_hosts
        )
    if http.allowed_origins:
        layered = CORSMiddleware(
            layered,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After", "Idempotent-Replayed"),
        )
    return ExchangeWatch(layered, observers, root_path=http.root_path)
