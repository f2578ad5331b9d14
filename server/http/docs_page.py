"""GET /docs: every endpoint, as /openapi.json describes it, on a page that needs no network.

One plain file beside this module that draws the description in the browser. The Content-Security-Policy holds it to its own
script and style and to this service. Rejected: FastAPI's Swagger page, which loads its script from another host and is
blank on a machine that reaches none.
"""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from server.http.routes import new_router

_PAGE = "docs_page.html"


def docs_routes() -> APIRouter:
    """Return the page's route."""
    router = new_router()
    content = (files("server.http") / _PAGE).read_bytes()
    policy = (
        f"default-src 'none'; script-src {_hash_of('script', content)}; style-src {_hash_of('style', content)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    headers = {
        "Cache-Control": "no-cache",  # an upgraded service shows its own page
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
    }

    async def show_docs() -> Response:
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    router.add_api_route("/docs", show_docs, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _hash_of(tag: str, page: bytes) -> str:
    """Return what a policy calls the page's only element of a kind."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, flags=re.DOTALL)
    assert len(found) == 1, f"the page has one {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
