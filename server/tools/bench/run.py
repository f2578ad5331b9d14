"""`wideep bench`: put a load on a service, level by level, and report the results.

It is an ordinary client of any service with OpenAI's chat or completions endpoint. The service gets no other requests during
a measurement, because prompts are prepared before a level begins. The exception is a closed loop that only --duration ends:
it may send chat prompts to /detokenize (`BenchOptions.cuts_while_measuring`). Ctrl-C ends the level; answers until then count.
"""

import argparse
import asyncio
import functools
import importlib.metadata
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from server.clients.progress import RequestProgress
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.interrupts import run_interruptibly, terminate_as_interrupt
from server.machine.lines import printable, say
from server.options.flag import OptionsError
from server.tools.bench.figures import figures_of
from server.tools.bench.flags import (
    LEAST_REQUESTS,
    REQUESTS_PER_CLIENT,
    STDOUT,
    BenchOptions,
    Load,
    bench_options_from,
)
from server.tools.bench.load import closed_loop, open_loop, poisson_times
from server.tools.bench.prompts import (
    CheckpointTokenizer,
    Prompts,
    PromptTokenizer,
    RequestLengths,
    ServiceTokenizer,
    passages_of,
    read_prompts,
)
from server.tools.bench.report import LevelResult, check_plot, json_of, level_lines, summary_lines, write_plot
from server.tools.bench.stream import STREAMED, StreamClient, StreamedAnswer
from server.tools.traces import PREFIX_TOKENS, TracedRequest, TraceError, read_trace

_PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}  # by "is a chat"
_WARMUP_CLIENTS = 4  # for a load without a number of clients
_FOREVER_S = 1e12
STOPPED = 130  # the exit status after Ctrl-C


def run_bench(args: argparse.Namespace, *, environment: Mapping[str, str] = os.environ) -> int:
    """Run the measurement of the command line.

    Returns:
        The exit status: 0 if all requests succeeded, 1 if some failed or no service answers, 2 for invalid flags, 130
        if the run was stopped.
    """
    try:
        options = bench_options_from(args)
        if options.plot_to is not None:
            check_plot(options.plot_to)
        api_key = api_key_of(environment, options.api_keys)
        with terminate_as_interrupt(), ServiceClient(options.url, api_key) as service:
            bench = _prepare(options, service)
            results, failure = _sweep(bench, api_key)
            return _finish(bench, results, failure)
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
    """The settings and prompts of all levels."""

    options: BenchOptions
    url: str
    model: str
    prompts: Prompts

    @property
    def title(self) -> str:
        """Return a line that describes the measured endpoint."""
        return f"{self.model} at {self.url}{_PATHS[self.options.is_chat]}"

    def body(self, lengths: RequestLengths) -> dict[str, Any]:
        """Return a request's body, with a unique prompt."""
        options, prompt = self.options, self.prompts.take(lengths)
        asked = {"messages": [{"role": "user", "content": prompt}]} if options.is_chat else {"prompt": prompt}
        counting = {"include_usage": True, "continuous_usage_stats": True}
        return {
            "model": self.model,
            **asked,
            "max_tokens": lengths.output_tokens,
            **STREAMED,
            **({"stream_options": counting} if options.counts_chunks else {}),
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra_body,
        }


def _prepare(options: BenchOptions, service: ServiceClient) -> _Bench:
    """Find the model and the text for prompts. Raises for errors in files and flags."""
    for level in options.levels:
        _jobs(options, level)  # reports a broken trace before the service is contacted
    if options.trace is not None:
        deque(read_trace(options.trace), maxlen=0)  # also checks lines that no level may reach
    model = service.served_model(options.model)
    if not options.is_cut:
        assert options.prompts is not None, "prompts without a length come from a file"
        return _Bench(
            options=options, url=service.url, model=model, prompts=Prompts(read_prompts(options.prompts))
        )
    tokenizer: PromptTokenizer = (
        ServiceTokenizer(service, model)
        if options.tokenizer is None
        else CheckpointTokenizer(options.tokenizer)
    )
    passages = passages_of(options.prompts, tokenizer, seed=options.seed)
    prompts = Prompts(passages, tokenizer, is_chat=options.is_chat)
    return _Bench(options=options, url=service.url, model=model, prompts=prompts)


def _jobs(options: BenchOptions, level: float) -> list[tuple[float, RequestLengths]]:
    """Return a level's requests with their times. A closed loop that ends only by its duration has no list yet.

    Raises:
        TraceError: The trace cannot be read.
    """
    most = options.num_requests
    if options.load is Load.CONCURRENCY and most is None and options.duration_s is None:
        most = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * int(level))
    if options.load is Load.CONCURRENCY and most is None:
        return []
    return list(itertools.islice(_timed(options, level), most))


def _timed(options: BenchOptions, level: float) -> Iterator[tuple[float, RequestLengths]]:
    """Yield a level's requests, with the times at which an open loop sends them."""
    if options.load is Load.TRACE:
        assert options.trace is not None
        is_once = options.duration_s is None and options.num_requests is None
        duration_s = None if is_once else options.duration_s or _FOREVER_S
        for each in read_trace(options.trace, rate_scale=level, duration_s=duration_s):
            yield each.arrival_s, _traced(options, each)
        return
    times = poisson_times(level, options.seed) if options.load is Load.RATE else itertools.repeat(0.0)
    for at_s, lengths in zip(times, _lengths(options), strict=False):
        if options.load is Load.RATE and options.duration_s is not None and at_s >= options.duration_s:
            return
        yield at_s, lengths


def _lengths(options: BenchOptions) -> Iterator[RequestLengths]:
    """Yield endless lengths: a trace's, repeated from its beginning, or the same ones."""
    if options.trace is None:
        yield from itertools.repeat(RequestLengths(options.output_tokens, options.prompt_tokens))
    else:
        for each in read_trace(options.trace, duration_s=_FOREVER_S):
            yield _traced(options, each)


def _traced(options: BenchOptions, request: TracedRequest) -> RequestLengths:
    scale = options.token_scale
    prompt, output = (max(1, round(each * scale)) for each in (request.input_tokens, request.output_tokens))
    return RequestLengths(output, prompt, request.hash_ids, PREFIX_TOKENS * scale)


def _sweep(bench: _Bench, api_key: str | None) -> tuple[list[LevelResult], str]:
    """Measure the levels and print each as it ends. A level that was stopped, or failed completely, is the last one.

    Returns:
        The levels, and the reason why the next one could not be measured; empty without one.

    Raises:
        ServiceError, TraceError: Even the first level could not be measured.
    """
    results: list[LevelResult] = []
    _print(bench.options, f"wideep bench: {bench.title}")
    if bench.options.cuts_while_measuring:
        say(
            "wideep bench: with --duration alone, the service tokenizes each prompt during the measurement; use "
            "--num-requests or --tokenizer DIRECTORY to prepare the prompts in advance",
            error=True, level="info",
        )  # fmt: skip
    for value in bench.options.levels:
        try:
            result = _measure(bench, value, api_key)
        except (ServiceError, TraceError) as error:
            if not results:
                raise
            return results, f"{bench.options.load} {value:g} was not measured: {error}"
        results.append(result)
        for line in level_lines(result):
            _print(bench.options, line)
        if not result.is_whole or 0 < result.figures.num_requests == result.figures.num_failed:
            break
    return results, ""


def _measure(bench: _Bench, value: float, api_key: str | None) -> LevelResult:
    answers: list[StreamedAnswer] = []
    is_whole = False
    with suppress(KeyboardInterrupt):
        run_interruptibly(_run_level(bench, value, api_key, answers))
        is_whole = True
    figures = figures_of(answers, bench.options.objectives)
    load = bench.options.load
    return LevelResult(load=load, value=value, figures=figures, answers=answers, is_whole=is_whole)


async def _run_level(bench: _Bench, value: float, api_key: str | None, answers: list[StreamedAnswer]) -> None:
    """Warm up, then put a level's load on the service; answers are appended as they end."""
    options, client = bench.options, StreamClient(bench.url, api_key)
    try:
        if options.num_warmup:
            await _warm_up(bench, value, client)
        bench.prompts.begin_level()
        bodies = []
        for at_s, lengths in _jobs(options, value):
            bodies.append((at_s, bench.body(lengths)))
            await asyncio.sleep(0)  # lets Ctrl-C take effect
        with RequestProgress(len(bodies) or None, f"{options.load} {value:g}", lines=True) as progress:
            ask = functools.partial(_ask, bench, client, answers, progress)
            if options.load is not Load.CONCURRENCY:
                await open_loop(ask, bodies)
                return
            closed = functools.partial(closed_loop, concurrency=int(value), duration_s=options.duration_s)
            await closed(ask, (body for _, body in bodies) if bodies else map(bench.body, _lengths(options)))
    finally:
        client.close()


async def _ask(
    bench: _Bench,
    client: StreamClient,
    answers: list[StreamedAnswer],
    progress: RequestProgress,
    body: dict[str, Any],
    due_s: float | None = None,
) -> None:
    """Send one request and store its answer."""
    answer = await client.ask(_PATHS[bench.options.is_chat], body)
    answer.late_s = 0.0 if due_s is None else max(0.0, answer.start_s - due_s)
    answers.append(answer)
    progress.step(failed=bool(answer.failure))


async def _warm_up(bench: _Bench, value: float, client: StreamClient) -> None:
    """Send uncounted requests, as a closed loop.

    Raises:
        ServiceError: All of them failed.
    """
    options = bench.options
    clients = int(value) if options.load is Load.CONCURRENCY else _WARMUP_CLIENTS
    failures: list[str] = []

    async def ask(body: dict[str, Any]) -> None:
        failures.append((await client.ask(_PATHS[options.is_chat], body)).failure)

    bench.prompts.begin_level()
    bodies = [bench.body(lengths) for lengths in itertools.islice(_lengths(options), options.num_warmup)]
    await closed_loop(ask, bodies, concurrency=clients)
    if all(failures):
        raise ServiceError(f"the warm-up failed: {failures[0]}")


def _finish(bench: _Bench, results: list[LevelResult], failure: str) -> int:
    """Write the measurements and the reason for missing ones, and return the exit status."""
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
        _print(options, f"plot written to {options.plot_to}")
    if not results[-1].is_whole:
        _say("stopped; the results above were measured before")
        return STOPPED
    if failure:
        _say(failure)
    return int(bool(failure) or any(each.figures.num_failed for each in results))


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
        "num_requests": options.num_requests,
        "duration_s": options.duration_s,
        "tokenizer": options.tokenizer,
        "counts_chunks": options.counts_chunks,
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
    """Print a line for users: to stderr if JSON goes to stdout."""
    print(printable(line), file=sys.stderr if options.json_to == STDOUT else sys.stdout, flush=True)


def _say(text: str) -> None:
    print(f"wideep bench: {printable(text)}", file=sys.stderr, flush=True)
