"""The ASGI application: the layers around the routes.

From outside in: the exchange is opened and, at its end, told to observers; CORS; keys or origins; bodies; answers that were
asked for before; errors; routes. FastAPI
declares and describes the routes. Starlette, which FastAPI is built on, finds them: FastAPI's application would put 20 us
of CPU around each request for what is not used here.
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
    """Put the application together.

    Args:
        keys: any of them opens /v1, /api and what changes something; none leaves all open, but for what is its operators'.
        http: None is the defaults.
        own_names: what this machine is called, in URLs of the service's own pages.
        observers: told of every exchange at its end.
        answer_once: the layer that answers requests with an Idempotency-Key (`idempotency`).
    """
    http = http or HttpOptions()
    described = FastAPI(title="WideEP", version=version, docs_url=None, redoc_url=None)  # `docs_page`
    routes = [route for router in routers for route in router.routes]
    described.router.routes[:0] = (
        routes  # ours are asked more often than /openapi.json, and looked through in this order
    )
    app = Starlette(routes=described.routes, exception_handlers=ERROR_HANDLERS)
    budget = BodyBudget(http.most_inflight_bytes)
    layered: ASGIApp = BodyGuard(answer_once(app), http.max_request_bytes, budget)
    if keys.operators is not None:
        layered = OperatorGuard(layered, keys.operators)
    if keys.are_needed:
        layered = KeyGuard(layered, keys)
    elif "*" not in http.allowed_origins:  # a page that has no key can do nothing anyway
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
