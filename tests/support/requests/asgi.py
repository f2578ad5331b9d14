"""Requests to an application in this process, without a socket."""

import asyncio
from typing import Any

import httpx


def client_of(app: Any) -> httpx.AsyncClient:
    """Return a client of an application. Its unhandled exceptions become responses."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def ask(app: Any, method: str, path: str, **how: Any) -> httpx.Response:
    """Make one request."""

    async def send() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **how)

    return asyncio.run(send())
