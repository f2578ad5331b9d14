"""One rank's engine with its step loop in a thread of this process, for one load after another.

Between loads the loop sleeps, so that the caller may use the model and the scheduler. A load of decodes begins without a
prefill: the scheduler plans its prompts and commits them, but the model does not run. The pages keep their present keys
and values.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import torch

from scheduler.assembly import Assembled, assemble
from scheduler.engine import Engine
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, Request, RequestOutput, SamplingParams

OnStep = Callable[[list[RequestOutput]], None]
_GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)
_SETTLES = 8  # steps before those that are measured


class _Jobs:
    """The doorbell of a single rank: instead of sleeping, it runs the next job."""

    engine: Engine

    def __init__(self) -> None:
        self.queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.is_idle = threading.Event()

    def ring(self, step: int) -> None:
        """Do nothing: no other rank sleeps."""

    def wait(self, step: int) -> None:
        """Run the next job; stop after the last one."""
        self.is_idle.set()
        job = self.queue.get()
        if job is None:
            self.engine.stop()
            return
        job()


class EngineLoop:
    """An engine and the thread of its loop, as a context."""

    def __init__(self, config: EngineConfig) -> None:
        """Assemble the engine."""
        self._jobs = _Jobs()
        self.assembled: Assembled = assemble(config, self._jobs)
        self._jobs.engine = self.assembled.engine
        self._max_step_tokens = config.max_num_batched_tokens
        self._on_step: OnStep = lambda _outputs: None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="step loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.queue.put(None)
        self._thread.join()

    def run(self, load: Callable[[], None], on_step: OnStep) -> None:
        """Run a load to its end.

        Args:
            load: Submits requests, or puts them into the scheduler. The loop's thread calls it.
            on_step: Receives the outputs of every step.

        Raises:
            RuntimeError: The loop ended with an error.
        """
        self._jobs.is_idle.wait()
        self._on_step = on_step
        self._jobs.is_idle.clear()
        self._jobs.queue.put(load)
        self._jobs.is_idle.wait()
        if self._error is not None:
            raise RuntimeError(f"the step loop ended: {self._error!r}") from self._error

    def decode_steps_s(
        self,
        batch: int,
        context: int,
        num_steps: int,
        params: SamplingParams = _GREEDY,
    ) -> list[float]:
        """Return the seconds from each step's tokens to the next one's, for steps in which `batch` sequences decode.

        The contexts are `context` tokens on average, so `max_model_len` must be larger: see `room`.
        """
        ahead = self._room(batch, context, num_steps)
        requests = self._requests(batch, max(1, context - ahead // 2), params)
        stamps: list[float] = []

        def on_step(outputs: list[RequestOutput]) -> None:
            if sum(len(output.token_ids) for output in outputs) == batch:
                stamps.append(time.perf_counter())
                if len(stamps) == num_steps + _SETTLES:
                    for request in requests:
                        self.assembled.engine.abort(request.request_id)

        self.run(lambda: self._seat(requests), on_step)
        measured = stamps[_SETTLES - 1 : _SETTLES + num_steps]
        return [end - begin for begin, end in itertools.pairwise(measured)]

    def arrivals_s(
        self, streams: int, context: int, prompt: int, count: int, every_s: float
    ) -> tuple[list[float], list[float]]:
        """Let prompts arrive while streams decode.

        Args:
            streams: Sequences that decode all the time, with contexts of `context` tokens at first.
            prompt: Tokens of each arriving prompt; its answer has one token.
            count: Number of arriving prompts, one every `every_s` seconds.

        Returns:
            Seconds from each arrival to its token, and from each token of the streams to the next one.
        """
        asked = self._requests(streams, context, _GREEDY)
        arriving = self._requests(count, prompt, SamplingParams(max_tokens=1, temperature=0.0), streams)
        engine, begun_s = self.assembled.engine, time.perf_counter() + every_s
        arrived_s: dict[str, float] = {}
        first_s: list[float] = []
        stamps: list[float] = []

        def on_step(outputs: list[RequestOutput]) -> None:
            now_s = time.perf_counter()
            ended = [
                output.request_id for output in outputs if output.request_id in arrived_s and output.token_ids
            ]
            first_s.extend(now_s - arrived_s[request_id] for request_id in ended)
            if any(output.request_id == "0" and output.token_ids for output in outputs):
                stamps.append(now_s)
            if len(first_s) == count:
                for request in asked:
                    engine.abort(request.request_id)
            elif len(arrived_s) < count and now_s >= begun_s + len(arrived_s) * every_s:
                request = arriving[len(arrived_s)]
                arrived_s[request.request_id] = now_s
                engine.submit(request)

        self.run(lambda: self._seat(asked), on_step)
        return first_s, [end - begin for begin, end in itertools.pairwise(stamps[_SETTLES:])]

    def _requests(self, count: int, length: int, params: SamplingParams, first: int = 0) -> list[Request]:
        """Return requests with random prompts, named by numbers from `first` on."""
        vocabulary = int(self.assembled.model.lm_head.shape[0])
        ids = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(first))
        return [
            Request(request_id=f"{first + at}", prompt_ids=tuple(row), params=params, arrival_s=0.0)
            for at, row in enumerate(ids.tolist())
        ]

    def _room(self, batch: int, context: int, num_steps: int) -> int:
        return room(batch, context, num_steps, self._max_step_tokens)

    def _seat(self, requests: Sequence[Request]) -> None:
        """Let the scheduler take requests, as if their prompts had run."""
        scheduler = self.assembled.scheduler
        for request in requests:
            scheduler.add(request)
        while scheduler.stats.num_waiting or any(each.is_prefilling for each in scheduler.running):
            batch = scheduler.schedule()
            count = sum(item.num_samples for item in batch.items)
            scheduler.commit(batch, [1] * count, [None] * count)

    def _run(self) -> None:
        try:
            if self.assembled.model.device.type == "cuda":
                torch.cuda.set_device(self.assembled.model.device)
            self.assembled.engine.run(self._take)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._error = error
            self._jobs.is_idle.set()

    def _take(self, outputs: list[RequestOutput], _stats: RankStats) -> None:
        self._on_step(outputs)


def room(batch: int, context: int, num_steps: int, max_step_tokens: int) -> int:
    """Return how many tokens longer than its prompt a sequence of `decode_steps_s` becomes, at most."""
    seating = (
        -(-batch * context // max(max_step_tokens - batch, 1)) + 1
    )  # steps in which the first ones decode
    return seating + _SETTLES + num_steps + 2
