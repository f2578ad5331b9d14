"""GET /docs: a page that shows every endpoint of /openapi.json and needs no network.

One plain file next to this module renders the description in the browser. The Content-Security-Policy allows only the page's
own script and style, and this service. Rejected: FastAPI's Swagger page, which loads its script from another host and
stays blank on a machine without internet access.
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
        "Cache-Control": "no-cache",  # so that an upgraded service shows its new page
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
    }

    async def show_docs() -> Response:
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    router.add_api_route("/docs", show_docs, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _hash_of(tag: str, page: bytes) -> str:
    """Return the CSP hash of the page's only element with this tag."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, flags=re.DOTALL)
    assert len(found) == 1, f"the page has one {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
