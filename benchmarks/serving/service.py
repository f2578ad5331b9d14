"""A server to measure: a separate process tree, and a client that streams from it; ours is `wideep serve`.

The client is that of `wideep bench`.
"""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.serving.closed_loop import RequestTiming, closed_loop
from benchmarks.serving.processes import tree
from dispatch.ports import free_port
from server.http.client import ServiceClient, ServiceError
from server.machine.parent_death import die_with_parent
from server.serve.preflight.probe import is_healthy
from server.tools.bench.stream import STREAMED, StreamClient

HOST = "127.0.0.1"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 10.0  # serve promises 5
_POLL_S = 0.02


class BenchServiceError(RuntimeError):
    """The service did not start, or refused a request that it should serve; the message gives the reason."""


class Server:
    """A running server with OpenAI's completions endpoint, as a context that stops it.

    Attributes:
        start_s: Seconds from its start until it was healthy.
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
        """Start the server and wait until /health answers 200.

        Args:
            command: Command that serves at `port`.
            log: File for its output.
            environment: Variables added to ours.
            fields: Fields added to every request.
            timeout_s: Longest time until it is healthy.

        Raises:
            BenchServiceError: It ended, or did not answer in time; the message quotes its log.
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
            process_group=0,  # Ctrl-C reaches only this process, which stops the server in order
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

    def pids(self) -> list[int]:
        """Return its living processes."""
        return tree(self.process.pid)

    def close(self) -> None:
        """Stop it with SIGINT, as a user does, and kill it if it does not end."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children die with it
            self.process.wait()

    def run(self, prompts: Sequence[list[int]], num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Stream a completion of `num_tokens` greedy tokens for each prompt, in a closed loop.

        Raises:
            BenchServiceError: The service has ended (the message quotes its log), or refused or failed a request.
        """
        complete = functools.partial(stream_completion, self.port, num_tokens=num_tokens, **self._fields)
        try:
            return asyncio.run(closed_loop(complete, prompts, concurrency))
        except BenchServiceError as error:
            if self.process.poll() is None:
                raise
            raise BenchServiceError(f"{error}; the service has ended. Its log:\n{self._said()}") from error

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens after a prompt."""
        return greedy_tokens(self.port, prompt, num_tokens)

    def _wait_until_healthy(self, timeout_s: float) -> None:
        while not is_healthy(HOST, self.port):
            waited_s = time.monotonic() - self._started_s
            if self.process.poll() is not None or waited_s > timeout_s:
                raise BenchServiceError(
                    f"the service did not answer within {waited_s:.0f} s. Its log:\n{self._said()}"
                )
            time.sleep(_POLL_S)

    def _said(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


class Service(Server):
    """A running `wideep serve`."""

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        log: IO[bytes],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the service (see `Server`)."""
        port = free_port()
        command = [sys.executable, "-m", "server", "serve", model, f"--port={port}", *arguments]
        super().__init__(command, port, log, environment=environment)


def greedy_tokens(port: int, prompt: list[int], num_tokens: int) -> list[int]:
    """Request the greedy tokens after a prompt from the service at a port.

    Raises:
        BenchServiceError: The status is not 200.
    """
    body = _body(prompt, num_tokens, logprobs=0, return_tokens_as_token_ids=True)
    try:
        with ServiceClient(f"http://{HOST}:{port}") as service:
            answer = service.post("/v1/completions", body).json()
    except ServiceError as error:
        raise BenchServiceError(str(error)) from error
    spelled = answer["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in spelled]


def metric_samples(client: ServiceClient) -> Iterator[Sample]:
    """Read the service's metrics."""
    for family in text_string_to_metric_families(client.get_bytes("/metrics").decode()):
        yield from family.samples


async def stream_completion(port: int, prompt: list[int], *, num_tokens: int, **fields: Any) -> RequestTiming:
    """Stream one completion and record when each piece arrived; `fields` are added to the request.

    Raises:
        BenchServiceError: The status is not 200, or the number of tokens is not the requested one.
    """
    return await _stream(port, "/v1/completions", _body(prompt, num_tokens, **STREAMED, **fields), num_tokens)


async def stream_chat(port: int, text: str, *, num_tokens: int) -> RequestTiming:
    """Stream the answer to a chat, as `stream_completion` does for a prompt."""
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "temperature": 0}
    return await _stream(port, "/v1/chat/completions", {**fields, "ignore_eos": True, **STREAMED}, num_tokens)


async def _stream(port: int, path: str, body: dict[str, Any], num_tokens: int) -> RequestTiming:
    client = StreamClient(f"http://{HOST}:{port}")
    try:
        answer = await client.ask(path, body)
    finally:
        client.close()
    if answer.failure or answer.output_tokens != num_tokens:
        told = answer.failure or f"{answer.output_tokens} tokens"
        raise BenchServiceError(f"a stream of {num_tokens} tokens ended with {told}")
    return RequestTiming(answer.start_s, answer.arrivals_s, num_tokens)


def _body(prompt: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
    greedy = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    plain = {"repetition_penalty": 1}  # overrides the checkpoint's generation_config.json
    return {**greedy, **plain, **fields}
