"""The HTTP server: uvicorn's, with our protocol and our listener, and without its signal handlers."""

import contextlib
import math
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from server.http.wire.connections import ConnectionBound, Listener, SharedConnections, default_most
from server.http.wire.protocol import PunctualProtocol
from server.options.table import HttpOptions

GRACE_S = 2  # for open connections when the server ends
_KEEP_ALIVE_S = 60  # between a client's requests; with less, pooled clients meet closed connections


class HttpServer(uvicorn.Server):
    """Serves an application on bound sockets."""

    def __init__(self, app: ASGIApp, http: HttpOptions, bound: ConnectionBound | None = None) -> None:
        """`bound` limits connections; by default it follows from the options."""
        super().__init__(_config(app, http))
        self._bound = bound or connection_bound(http)
        self._listener: Listener | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the bound sockets."""
        assert sockets, "the sockets are bound first"
        self.servers = []  # asyncio's servers are not used
        self._listener = Listener(sockets, self._make_protocol, self._bound, self.config.ssl)
        self._listener.start()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections already queued in the kernel, then no more. End each one after its response."""
        assert self._listener is not None, "startup has run"
        await self._listener.close()
        await super().shutdown(sockets)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Accept no connections, and allow `grace_s` for responses being sent. A second call with 0 ends at once."""
        self.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self.force_exit = self.should_exit and grace_s == 0
        self.should_exit = True

    def _make_protocol(self) -> PunctualProtocol:
        protocol = PunctualProtocol(self.config, self.server_state, {})
        protocol.bound = self._bound
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: the front informs ranks and clients before it stops this server."""
        yield


def _config(app: ASGIApp, http: HttpOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PunctualProtocol,
        lifespan="off",
        log_config=None,  # `logs` configures the loggers
        access_log=False,  # `logs.AccessLog` replaces it
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=http.ssl_certfile,
        ssl_keyfile=http.ssl_keyfile,
        proxy_headers=bool(http.forwarded_allow_ips),
        forwarded_allow_ips=list(http.forwarded_allow_ips),
    )


def connection_bound(http: HttpOptions, shared: SharedConnections | None = None) -> ConnectionBound:
    """Return the limit of connections; by default it follows from the limit of open files. `shared`: as for `ConnectionBound`."""
    most = http.max_connections or default_most(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return ConnectionBound(most, http.max_connections_per_address, http.forwarded_allow_ips, shared)
