"""A server as a benchmark sees it: processes of its own, and a client that streams from it; ours is `wideep serve`.

The client speaks just enough HTTP/1.1 to time a stream. It runs on the cores that it measures, and a full client
library takes several times the CPU per token.
"""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.serving.closed_loop import RequestTiming, closed_loop
from dispatch.ports import free_port
from server.parent_death import die_with_parent
from server.process.serve import is_healthy

HOST = "127.0.0.1"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 10.0  # serve promises 5
_POLL_S = 0.02


class BenchServiceError(RuntimeError):
    """The service did not start, or refused a request that it should serve; the message says why."""


class Server:
    """A running server with OpenAI's completions; a context that ends it.

    Attributes:
        start_s: from its start until it was healthy.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: IO[bytes],
        *,
        environment: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start, and wait until /health answers 200.

        Args:
            command: what serves at `port`.
            log: takes what it says.
            environment: added to ours.
            fields: added to every request.
            timeout_s: for it to be healthy.

        Raises:
            BenchServiceError: it ended, or did not answer in time; quotes its log.
        """
        self.port, self._log, self._fields = port, log, dict(fields or {})
        self._started_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches us alone, and we stop it in order
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM, parent_pid=os.getpid()),
        )
        try:
            self._wait_until_healthy(timeout_s)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - self._started_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask it to end as a user does, and kill it when it does not."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what it started dies with it
            self.process.wait()

    def run(self, prompts: Sequence[list[int]], num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Stream a completion of `num_tokens` greedy tokens for each prompt, in a closed loop.

        Raises:
            BenchServiceError: the service has ended, or refused or failed a request.
        """
        complete = functools.partial(stream_completion, self.port, num_tokens=num_tokens, **self._fields)
        try:
            return asyncio.run(closed_loop(complete, prompts, concurrency))
        except OSError as error:
            raise BenchServiceError(
                f"the service broke a connection ({error}); it said:\n{self._said()}"
            ) from error

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens after a prompt."""
        return greedy_tokens(self.port, prompt, num_tokens)

    def _wait_until_healthy(self, timeout_s: float) -> None:
        while not is_healthy(HOST, self.port):
            waited_s = time.monotonic() - self._started_s
            if self.process.poll() is not None or waited_s > timeout_s:
                raise BenchServiceError(
                    f"the service did not answer within {waited_s:.0f} s; it said:\n{self._said()}"
                )
            time.sleep(_POLL_S)

    def _said(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


class Service(Server):
    """A running `wideep serve`."""

    def __init__(self, model: str, arguments: Sequence[str], log: IO[bytes]) -> None:
        """See `Server`."""
        port = free_port()
        super().__init__(
            [sys.executable, "-m", "server", "serve", model, f"--port={port}", *arguments], port, log
        )


def greedy_tokens(port: int, prompt: list[int], num_tokens: int) -> list[int]:
    """Ask the service at a port for the greedy tokens after a prompt.

    Raises:
        BenchServiceError: any status but 200.
    """
    body = _body(prompt, num_tokens, logprobs=0, return_tokens_as_token_ids=True)
    status, lines = asyncio.run(post(port, body))
    if status != 200:
        raise BenchServiceError(f"POST /v1/completions answered {status}: {lines[0][1].decode()[:300]}")
    spelled = json.loads(lines[0][1])["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in spelled]


async def stream_completion(port: int, prompt: list[int], *, num_tokens: int, **fields: Any) -> RequestTiming:
    """Stream one completion and note when each piece came; `fields` are added to the request.

    Raises:
        BenchServiceError: any status but 200, or another number of tokens than was asked for.
    """
    start_s = time.perf_counter()
    body = _body(prompt, num_tokens, stream=True, stream_options={"include_usage": True}, **fields)
    status, lines = await post(port, body)
    if status != 200:
        raise BenchServiceError(f"POST /v1/completions answered {status}: {lines[0][1].decode()[:300]}")
    events = [(at_s, json.loads(line[5:])) for at_s, line in lines if line.startswith(b"data: {")]
    failure = next((event["error"] for _, event in events if "error" in event), None)
    usage = events[-1][1].get("usage") if events else None
    if failure or usage is None or usage["completion_tokens"] != num_tokens:
        raise BenchServiceError(f"a stream of {num_tokens} tokens ended with {failure or usage}")
    arrivals_s = [at_s for at_s, event in events if event["choices"]]
    return RequestTiming(start_s, arrivals_s, num_tokens)


def _body(prompt: list[int], num_tokens: int, **fields: Any) -> bytes:
    greedy = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    plain = {"repetition_penalty": 1}  # whatever the checkpoint's generation_config.json says
    return json.dumps({**greedy, **plain, **fields}).encode()


async def post(
    port: int, body: bytes, path: str = "/v1/completions"
) -> tuple[int, list[tuple[float, bytes]]]:
    """Post to an endpoint; return the status and the body's lines with the times they came.

    The lines that frame chunks are among those of a stream; what is read there starts with "data: ".
    """
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        head_words = (await reader.readline()).split()
        if not head_words:
            raise ConnectionResetError("no answer before the connection's end")
        status = int(head_words[1])
        while (await reader.readline()).strip():
            pass  # headers
        lines = []
        while line := await reader.readline():
            lines.append((time.perf_counter(), line.rstrip(b"\r\n")))
        return status, lines or [(time.perf_counter(), b"")]
    finally:
        writer.close()
