"""One rank's engine without a service: requests go in and tokens come out in the same process, in a closed loop.

`benchmarks.serving.service` measures the same engine over HTTP. The engine runs as a child process that gets jobs over a pipe,
so that it and the service can take turns. Without a job it sleeps and runs no steps.
"""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from benchmarks.serving.closed_loop import RequestTiming
from scheduler.assembly import assemble
from scheduler.engine import Engine
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, Request, RequestOutput, SamplingParams
from server.machine.parent_death import die_with_parent

STOP_TIMEOUT_S = 20.0


class Job(NamedTuple):
    """A closed loop to run."""

    prompts: list[list[int]]
    num_tokens: int
    concurrency: int


class EngineAlone:
    """A child process with an engine, as a context that stops it."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the process and wait until it is ready.

        Raises:
            EOFError: The process ended; the reason is on stderr.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(config, other, os.getpid()), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        self._process.kill()

    def run(self, prompts: Sequence[list[int]], num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Complete prompts with greedy tokens."""
        self._pipe.send(Job(list(prompts), num_tokens, concurrency))
        timings: list[RequestTiming] = self._pipe.recv()
        return timings


class _Loop:
    """Doorbell that takes a job instead of sleeping, and callback that submits the job's requests."""

    engine: Engine

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: deque[tuple[str, list[int]]] = deque()
        self._open: dict[str, RequestTiming] = {}
        self._ended: list[RequestTiming] = []
        self._num_tokens = 0

    def ring(self, step: int) -> None:
        """Do nothing: no other rank sleeps."""

    def wait(self, step: int) -> None:
        """Send the last job's timings and take the next job; stop after the last one."""
        if self._ended:
            self._pipe.send(self._ended)
            self._ended = []
        try:
            job: Job = self._pipe.recv()
        except EOFError:
            self.engine.stop()
            return
        self._num_tokens = job.num_tokens
        self._waiting.extend((f"{step}-{number}", prompt) for number, prompt in enumerate(job.prompts))
        for _ in range(min(job.concurrency, len(self._waiting))):
            self._submit_next()

    def on_step(self, outputs: list[RequestOutput], _stats: RankStats) -> None:
        """Record tokens, and submit the next request for each ended one."""
        now_s = time.perf_counter()
        for output in outputs:
            timing = self._open[output.request_id]
            timing.arrivals_s.extend([now_s] * bool(output.token_ids))
            if output.finish_reason is not None:
                self._ended.append(self._open.pop(output.request_id))
                if self._waiting:
                    self._submit_next()

    def _submit_next(self) -> None:
        request_id, prompt = self._waiting.popleft()
        params = SamplingParams(max_tokens=self._num_tokens, temperature=0.0)
        self._open[request_id] = RequestTiming(time.perf_counter(), [], self._num_tokens)
        self.engine.submit(
            Request(
                request_id=request_id, prompt_ids=tuple(prompt), params=params, arrival_s=time.monotonic()
            )
        )


def _serve(config: EngineConfig, pipe: Connection, parent_pid: int) -> None:
    die_with_parent(parent_pid=parent_pid)
    loop = _Loop(pipe)
    loop.engine = assemble(config, loop).engine
    pipe.send("ready")
    loop.engine.run(loop.on_step)
