"""A service with the dashboard and an answer to GET /experts/load that a test chooses; nothing behind it."""

import socket
import threading
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from server.experts.dashboard.routes import dashboard_routes

TIMEOUT_S = 30.0


class DashboardService:
    """An HTTP server in a thread. A context manager; `stop` and `start` are the service going and coming back."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}  # what GET /experts/load says
        self.status = 200
        self._app = FastAPI()
        self._app.include_router(dashboard_routes())
        self._app.add_api_route("/experts/load", self._show_load, response_model=None)
        self._port = 0
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self._port}/dashboard"

    async def _show_load(self) -> Response:
        return JSONResponse(self.answer, self.status)

    def start(self) -> Self:
        """Listen, on the port of the time before if there was one."""
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
        """Go away."""
        self._server.should_exit = True
        assert self._thread is not None, "stop comes after start"
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not end"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.stop()
