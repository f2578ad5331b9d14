"""GET /dashboard: the page that displays GET /experts/load, and its files.

Plain files next to this module, read once and sent unchanged: no build step, and nothing from another host (enforced by
the Content-Security-Policy). The page uses only the service's HTTP responses, so it shows the same figures as scripts and
`wideep experts`.
"""

from functools import partial
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from server.http.routes import new_router

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # so that an upgraded service shows its new page
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
}
_PAGE = "index.html"


def dashboard_routes() -> APIRouter:
    """Return the routes: the page, and each of its files under /dashboard/."""
    router = new_router()
    for name, content in _read_files().items():
        path = "/dashboard" if name == _PAGE else f"/dashboard/{name}"
        router.add_api_route(
            path, partial(_send, name, content), methods=["GET", "HEAD"], include_in_schema=False
        )
    icon = "icon.svg"  # browsers request /favicon.ico for every page
    router.add_api_route(
        "/favicon.ico",
        partial(_send, icon, _read_files()[icon]),
        methods=["GET", "HEAD"],
        include_in_schema=False,
    )
    return router


def _read_files() -> dict[str, bytes]:
    static = files("server.experts.dashboard") / "static"
    return {entry.name: entry.read_bytes() for entry in static.iterdir() if _suffix(entry.name) in _TYPES}


async def _send(name: str, content: bytes) -> Response:
    return Response(content, media_type=_TYPES[_suffix(name)], headers=_HEADERS)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
