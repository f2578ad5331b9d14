"""Ray Serve: each replica runs one `wideep serve` on its node, and passes requests on to it (docs/autoscaling.md).

Run it with `serve run wideep_app:app`. Requests reach WideEP over a Unix domain socket, so replicas of one node need no ports.
"""

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

MODEL = os.environ.get("MODEL", "demo")
FLAGS = shlex.split(os.environ.get("FLAGS", ""))  # further flags of `wideep serve`
CPUS = float(os.environ.get("CPUS", "8"))
GPUS = float(os.environ.get("GPUS", "0"))  # with FLAGS="--device cuda"
DRAIN_S, KILL_S = 25, 35  # for open requests after SIGTERM, and until SIGKILL
URL = "http://localhost"  # a name that the service accepts as its own
# Headers of one connection, and those that the next one sets itself.
OWN_HEADERS = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade"}

routes = FastAPI()


def command(socket: str) -> list[str]:
    """Return the command of a replica."""
    return ["wideep", "serve", MODEL, "--uds", socket, "--shutdown-timeout-seconds", str(DRAIN_S), *FLAGS]


@serve.deployment(
    max_ongoing_requests=256,
    ray_actor_options={"num_cpus": CPUS, "num_gpus": GPUS},
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": 96,  # three quarters of --max-num-seqs (64) times the ranks of a replica (2)
        "upscale_delay_s": 30,
        "downscale_delay_s": 900,
    },
    health_check_period_s=10,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=KILL_S + 10,
)
@serve.ingress(routes)
class WideEP:
    """One service."""

    def __init__(self) -> None:
        """Start the service, and wait until it serves. Ray sends no request before that."""
        self._folder = tempfile.TemporaryDirectory(prefix="wideep-")
        socket = str(Path(self._folder.name) / "http")
        self._process = subprocess.Popen(command(socket))
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url=URL) as client:
            while not _is_serving(client):
                self._check_process()
                time.sleep(1)
        # A response may take as long as it likes; the service has its own limits.
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket), base_url=URL, timeout=None
        )

    async def check_health(self) -> None:
        """Raise if the service does not live. Ray calls this, and then replaces the replica."""
        self._check_process()
        (await self._client.get("/ping")).raise_for_status()

    def _check_process(self) -> None:
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"wideep serve ended with status {status}; see its log")

    @routes.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE"])
    async def pass_on(self, request: Request) -> StreamingResponse:
        """Pass a request on, and stream the response."""
        headers = [(name, value) for name, value in request.headers.items() if name not in OWN_HEADERS]
        sent = self._client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=headers,
            content=request.stream() if request.method == "POST" else None,
        )
        answer = await self._client.send(sent, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in OWN_HEADERS}
        return StreamingResponse(_content(answer), answer.status_code, kept)

    def __del__(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _is_serving(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:  # it has not bound its socket yet
        return False


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a response's bytes as they arrive. The service cancels the request if the client leaves."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


app = WideEP.bind()
