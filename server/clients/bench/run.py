"""`wideep bench`: put a load on a service, level by level, and say what it came to.

An ordinary client of the endpoint, of any service with OpenAI's chats or completions. Prompts are made before a level begins,
so that making them takes nothing from the service while it is measured. Ctrl-C ends the level; what was answered by then
counts.
"""

import argparse
import asyncio
import functools
import importlib.metadata
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from server.clients.bench.figures import figures_of
from server.clients.bench.flags import (
    LEAST_REQUESTS,
    REQUESTS_PER_CLIENT,
    STDOUT,
    BenchOptions,
    Load,
    bench_options_from,
)
from server.clients.bench.load import closed_loop, open_loop, poisson_times
from server.clients.bench.prompts import (
    CheckpointTokens,
    Prompts,
    ServiceTokens,
    Tokens,
    Wanted,
    passages_of,
    read_prompts,
)
from server.clients.bench.report import (
    LevelResult,
    check_plot,
    json_of,
    level_lines,
    summary_lines,
    write_plot,
)
from server.clients.bench.stream import STREAMED, StreamClient, StreamedAnswer
from server.clients.connection import Connection, ServiceError, api_key_of
from server.clients.progress import RequestProgress
from server.options.flag import OptionsError
from server.process.serve import terminate_as_interrupt
from server.traces import PREFIX_TOKENS, TraceError, read_trace

_PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}  # by whether it is a chat
_WARMUP_CLIENTS = 4  # where the load has no number of clients
STOPPED = 130  # the exit status of what Ctrl-C ended


def run_bench(args: argparse.Namespace, *, environment: Mapping[str, str] = os.environ) -> int:
    """Measure what the command line names.

    Returns:
        The exit status: 0 if every request was answered well, 1 if not or there is no service, 2 for what was asked
        wrongly, 130 if it was stopped.
    """
    try:
        options = bench_options_from(args)
        if options.plot_to is not None:
            check_plot(options.plot_to)
        api_key = api_key_of(environment, options.api_keys)
        with terminate_as_interrupt(), Connection(options.url, api_key) as service:
            bench = _prepare(options, service)
            return _finish(bench, _sweep(bench, api_key))
    except (OptionsError, TraceError) as error:
        _say(str(error))
        return 2
    except (ServiceError, OSError) as error:  # OSError: a file that cannot be written
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("stopped before anything was measured")
        return STOPPED


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """All that a level needs."""

    options: BenchOptions
    url: str
    model: str
    prompts: Prompts

    @property
    def title(self) -> str:
        """What is measured, in a line."""
        return f"{self.model} at {self.url}{_PATHS[self.options.is_chat]}"

    def body(self, wanted: Wanted) -> dict[str, Any]:
        """Make a request's body, with a prompt that no other has."""
        options, prompt = self.options, self.prompts.take(wanted)
        asked = {"messages": [{"role": "user", "content": prompt}]} if options.is_chat else {"prompt": prompt}
        counting = {"include_usage": True, "continuous_usage_stats": True}
        return {
            "model": self.model,
            **asked,
            "max_tokens": wanted.output_tokens,
            **STREAMED,
            **({"stream_options": counting} if options.counts_chunks else {}),
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra_body,
        }


def _prepare(options: BenchOptions, service: Connection) -> _Bench:
    """Find the model, and the text that prompts are made of; whatever is wrong is said here."""
    for level in options.levels:
        _jobs(options, level)  # a broken trace is told of before the service is asked
    model = service.served_model(options.model)
    if not options.is_cut:
        assert options.prompts is not None, "without a length prompts come from a file"
        return _Bench(
            options=options, url=service.url, model=model, prompts=Prompts(read_prompts(options.prompts))
        )
    tokens: Tokens = (
        ServiceTokens(service, model) if options.tokenizer is None else CheckpointTokens(options.tokenizer)
    )
    passages = passages_of(options.prompts, tokens, seed=options.seed)
    prompts = Prompts(passages, tokens, is_chat=options.is_chat)
    return _Bench(options=options, url=service.url, model=model, prompts=prompts)


def _jobs(options: BenchOptions, level: float) -> list[tuple[float, Wanted]]:
    """Return a level's requests with their times; a closed loop that only its duration ends has none yet.

    Raises:
        TraceError: the trace cannot be read.
    """
    most = options.num_requests
    if options.load is Load.CONCURRENCY and most is None and options.duration_s is None:
        most = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * int(level))
    if options.load is Load.CONCURRENCY and most is None:
        return []
    return list(itertools.islice(_timed(options, level), most))


def _timed(options: BenchOptions, level: float) -> Iterator[tuple[float, Wanted]]:
    """Yield a level's requests, with the times at which an open loop sends them."""
    if options.load is Load.TRACE:
        assert options.trace is not None
        for each in read_trace(options.trace, rate_scale=level, duration_s=options.duration_s):
            yield each.arrival_s, _traced(options, each.input_tokens, each.output_tokens, each.hash_ids)
        return
    times = poisson_times(level, options.seed) if options.load is Load.RATE else itertools.repeat(0.0)
    for at_s, wanted in zip(times, _wanted(options), strict=False):
        if options.load is Load.RATE and options.duration_s is not None and at_s >= options.duration_s:
            return
        yield at_s, wanted


def _wanted(options: BenchOptions) -> Iterator[Wanted]:
    """Yield lengths: a trace's, once, or the same without end."""
    if options.trace is None:
        yield from itertools.repeat(Wanted(options.output_tokens, options.prompt_tokens))
    else:
        for each in read_trace(options.trace):
            yield _traced(options, each.input_tokens, each.output_tokens, each.hash_ids)


def _traced(
    options: BenchOptions, input_tokens: int, output_tokens: int, hash_ids: tuple[int, ...]
) -> Wanted:
    scaled = [
        max(1, round(each * options.token_scale)) for each in (output_tokens, input_tokens, PREFIX_TOKENS)
    ]
    return Wanted(scaled[0], scaled[1], hash_ids, scaled[2])


def _sweep(bench: _Bench, api_key: str | None) -> list[LevelResult]:
    """Measure the levels, and print each as it ends; one that was stopped, or of which nothing was answered, is the last."""
    results: list[LevelResult] = []
    _print(bench.options, f"wideep bench: {bench.title}")
    for value in bench.options.levels:
        result = _measure(bench, value, api_key)
        results.append(result)
        for line in level_lines(result):
            _print(bench.options, line)
        if not result.is_whole or result.figures.num_failed == result.figures.num_requests:
            break
    return results


def _measure(bench: _Bench, value: float, api_key: str | None) -> LevelResult:
    """Measure one level."""
    answers: list[StreamedAnswer] = []
    is_whole = False
    with suppress(KeyboardInterrupt):
        asyncio.run(_run_level(bench, value, api_key, answers))
        is_whole = True
    figures = figures_of(answers, bench.options.objectives)
    load = bench.options.load
    return LevelResult(load=load, value=value, figures=figures, answers=answers, is_whole=is_whole)


async def _run_level(bench: _Bench, value: float, api_key: str | None, answers: list[StreamedAnswer]) -> None:
    """Warm up, then put a level's load on the service; answers are added as they end."""
    # SIGTERM becomes Ctrl-C, which asyncio turns into an end in order: open requests hang up and free their places.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    options, client = bench.options, StreamClient(bench.url, api_key)
    try:
        if options.num_warmup:
            await _warm_up(bench, value, client)
        bench.prompts.begin_level()
        jobs = _jobs(options, value)
        bodies = [(at_s, bench.body(wanted)) for at_s, wanted in jobs]
        with RequestProgress(len(bodies) or None, f"{options.load} {value:g}", lines=True) as progress:
            ask = functools.partial(_ask, bench, client, answers, progress)
            if options.load is not Load.CONCURRENCY:
                await open_loop(ask, bodies)
                return
            closed = functools.partial(closed_loop, concurrency=int(value), duration_s=options.duration_s)
            await closed(ask, (body for _, body in bodies) if bodies else _wanted(options))
    finally:
        client.close()


async def _ask(
    bench: _Bench,
    client: StreamClient,
    answers: list[StreamedAnswer],
    progress: RequestProgress,
    asked: dict[str, Any] | Wanted,
    late_s: float = 0.0,
) -> None:
    """Send one request and keep its answer."""
    if isinstance(asked, Wanted):  # its prompt is made now: nobody knew how many there would be
        asked = await asyncio.to_thread(bench.body, asked) if bench.prompts.is_slow else bench.body(asked)
    answer = await client.ask(_PATHS[bench.options.is_chat], asked)
    answer.late_s = late_s
    answers.append(answer)
    progress.step(failed=bool(answer.failure))


async def _warm_up(bench: _Bench, value: float, client: StreamClient) -> None:
    """Send requests that do not count, as a closed loop.

    Raises:
        ServiceError: none of them was answered well.
    """
    options = bench.options
    clients = int(value) if options.load is Load.CONCURRENCY else _WARMUP_CLIENTS
    failures: list[str] = []

    async def ask(body: dict[str, Any]) -> None:
        failures.append((await client.ask(_PATHS[options.is_chat], body)).failure)

    bench.prompts.begin_level()
    bodies = [bench.body(wanted) for wanted in itertools.islice(_wanted(options), options.num_warmup)]
    await closed_loop(ask, bodies, concurrency=clients)
    if all(failures):
        raise ServiceError(f"the warm-up failed: {failures[0]}")


def _finish(bench: _Bench, results: list[LevelResult]) -> int:
    """Write what was measured; returns the exit status."""
    options = bench.options
    measured = [each for each in results if each.answers]
    if len(measured) > 1:
        _print(options, "")
        for line in summary_lines(measured):
            _print(options, line)
    if options.json_to is not None:
        _write_json(bench, measured)
    if options.plot_to is not None and measured:
        write_plot(options.plot_to, bench.title, measured)
        _print(options, f"drawn in {options.plot_to}")
    if not results[-1].is_whole:
        _say("stopped; what is shown was measured before")
        return STOPPED
    return int(any(each.figures.num_failed for each in results))


def _write_json(bench: _Bench, results: list[LevelResult]) -> None:
    options = bench.options
    head = {
        "benchmark": "wideep bench",
        "version": importlib.metadata.version("wideep"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "url": bench.url,
        "model": bench.model,
        "endpoint": _PATHS[options.is_chat],
        "trace": options.trace and str(options.trace),
        "token_scale": options.token_scale,
        "prompts": options.prompts and str(options.prompts),
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": None if options.trace else options.output_tokens,
        "ignore_eos": options.ignore_eos,
        "extra_body": options.extra_body,
        "num_warmup": options.num_warmup,
        "seed": options.seed,
        "objectives_ms": options.objectives,
    }
    text = json_of(head, results) + "\n"
    if options.json_to == STDOUT:
        print(text, end="")
        return
    with open(str(options.json_to), "w", encoding="utf-8") as file:
        file.write(text)
    _print(options, f"written to {options.json_to}")


def _print(options: BenchOptions, line: str) -> None:
    """Print for people: not where the output is JSON."""
    print(line, file=sys.stderr if options.json_to == STDOUT else sys.stdout, flush=True)


def _say(text: str) -> None:
    print(f"wideep bench: {text}", file=sys.stderr, flush=True)
