"""How much do the service's router and its moves gain over plain round robin, on recorded traffic?

Two services run side by side, one with `--routing-policy prefix` (and moves of waiting requests), one with `round-robin` (without
moves). They get the same requests in turn, in an open loop, while the other sleeps. Lengths, shared prefixes and arrival gaps
come from a trace (Azure's CSV, Mooncake's JSON lines), with lengths and rate scaled to this machine; texts come from Python's
documentation. Load generator and figures are those of `wideep bench`. Waits are shares of all ranks' time in steps, by cause.

Expected bound: if prompts share prefixes (Mooncake), round robin on R ranks finds a conversation's prefix in one of R turns. If
they do not (Azure), routers differ only in how evenly they spread load, and not at all on a machine with little load.

Run: `python -m benchmarks.routing TRACE ... [--model demo] [--ranks 2] [--rate 1.5] [--prompt-tokens 150] [--output-tokens 30] [--duration 20] [--rounds 2]
[--slo ttft:2000,tpot:200] [--save]`.
"""

import argparse
import asyncio
import functools
import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.service import HOST, BenchServiceError, Service, metric_samples
from server.http.client import ServiceClient, ServiceError
from server.tools.bench.figures import figures_of
from server.tools.bench.flags import objectives, positive, whole
from server.tools.bench.load import open_loop
from server.tools.bench.prompts import Prompts, RequestLengths, ServiceTokenizer, passages_of
from server.tools.bench.stream import STREAMED, StreamClient, StreamedAnswer
from server.tools.traces import PREFIX_TOKENS, TracedRequest, TraceError, read_trace

POLICIES = ("prefix", "round-robin")
MOST_TIMES = 8  # largest multiple of the mean length: longer prompts are cut

Body = tuple[float, dict[str, Any]]  # send time in seconds, request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status, which is 1 if a request failed."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    try:
        traces = measure(args)
    except (BenchServiceError, ServiceError, TraceError, OSError) as error:
        print(f"benchmarks.routing: {error}", file=sys.stderr)
        return 1
    options = {**vars(args), "traces": [trace.name for trace in args.traces]}
    result = {"benchmark": "routing", "environment": card, "options": options, "traces": traces}
    if args.save:
        save_result("routing", result)
    print_tail(result)
    return int(any(row["num_failed"] for rows in traces.values() for each in rows.values() for row in each))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", allow_abbrev=False)
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="Azure's CSV or Mooncake's JSON lines"
    )
    parser.add_argument("--model", default="demo", help="a directory or 'demo' (default)")
    parser.add_argument("--ranks", type=whole, default=2, help="default: %(default)s")
    parser.add_argument(
        "--seats", type=whole, default=4, help="--max-num-seqs of a rank (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=positive, default=1.5, help="mean requests per second (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=150.0, help="mean tokens per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=positive, default=30.0, help="mean tokens per answer (default: %(default)s)"
    )
    parser.add_argument(
        "--duration", type=positive, default=20.0, help="seconds of arrivals (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=whole, default=2, help="rounds per service (default: %(default)s)")
    parser.add_argument(
        "--slo", type=objectives, default={"ttft": 2000.0, "tpot": 200.0}, metavar="NAME:MS,..."
    )
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/routing-<date>-<cpu>.json"
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Send requests to both services in turn. Return rows by trace and policy."""
    flags = [f"-dp={args.ranks}", f"--max-num-seqs={args.seats}", "--disable-access-log"]
    with (
        tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
        Service(args.model, [*flags, "--routing-policy", POLICIES[0]], log) as first,
        Service(args.model, [*flags, "--routing-policy", POLICIES[1]], log) as second,
        ServiceClient(f"http://{HOST}:{first.port}") as connection,
    ):
        services = dict(zip(POLICIES, (first, second), strict=True))
        model = connection.served_model()
        tokenizer = ServiceTokenizer(connection, model)
        passages = passages_of(None, tokenizer, seed=0)
        for service in services.values():
            service.tokens(passages.take(64), 8)  # a warm-up
        prompts = Prompts(passages, tokenizer, is_chat=False)
        return {trace.name: _measure_trace(args, trace, services, prompts, model) for trace in args.traces}


def _measure_trace(
    args: argparse.Namespace, trace: Path, services: Mapping[str, Service], prompts: Prompts, model: str
) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(args.rounds):
        prompts.begin_level()  # new prompts for every round, so that caches hold nothing of the one before
        bodies = bodies_of(args, trace, prompts, model)
        for policy in POLICIES if number % 2 == 0 else POLICIES[::-1]:
            row = _ask_all(services[policy], bodies, args.slo)
            rows[policy].append(row)
            print(f"{trace.name}, round {number + 1}, {policy}: {_line(row)}", flush=True)
    return rows


def bodies_of(args: argparse.Namespace, trace: Path, prompts: Prompts, model: str) -> list[Body]:
    """Build a round's requests, with a trace's lengths and gaps scaled to the wanted means."""
    sample = list(itertools.islice(read_trace(trace), max(2, round(args.rate * args.duration))))
    own_rate = len(sample) / max(sample[-1].arrival_s, 1.0)
    scale = args.prompt_tokens / statistics.fmean(each.input_tokens for each in sample)
    output_scale = args.output_tokens / statistics.fmean(each.output_tokens for each in sample)
    requests = read_trace(trace, rate_scale=args.rate / own_rate, duration_s=args.duration)
    timed = ((each.arrival_s, _lengths(each, scale, output_scale, args.prompt_tokens)) for each in requests)
    return [
        (
            at_s,
            {
                "model": model,
                "prompt": prompts.take(lengths),
                "max_tokens": lengths.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                **STREAMED,
            },
        )
        for at_s, lengths in timed
    ]


def _lengths(request: TracedRequest, scale: float, output_scale: float, mean_tokens: float) -> RequestLengths:
    most = int(MOST_TIMES * mean_tokens)
    prompt = max(1, round(scale * request.input_tokens))
    output = max(1, round(output_scale * request.output_tokens))
    return RequestLengths(min(output, most), min(prompt, most), request.hash_ids, scale * PREFIX_TOKENS)


def _ask_all(service: Service, bodies: Sequence[Body], slo: Mapping[str, float]) -> dict[str, Any]:
    """Send a round's requests to a service. Return its figures."""
    url = f"http://{HOST}:{service.port}"
    with ServiceClient(url) as connection:
        before = _counters(connection)
        answers = asyncio.run(_replay(url, bodies))
        gained = _counters(connection)
    gained.subtract(before)
    figures = figures_of(answers, slo)
    step_s = gained.pop("step") or 1.0
    itl = figures.itl_ms
    return {
        **asdict(figures),
        "itl_p99_over_p50": round(itl.p99 / itl.p50, 2) if itl is not None and itl.p50 else None,
        "cache_hits": round(figures.cached_tokens / max(1, figures.prompt_tokens), 4),
        "moved": int(gained.pop("moved")),
        "wait_shares": {cause: round(seconds / step_s, 4) for cause, seconds in sorted(gained.items())},
        "failures": dict(Counter(each.failure for each in answers if each.failure)),
    }


async def _replay(url: str, bodies: Sequence[Body]) -> list[StreamedAnswer]:
    client, answers = StreamClient(url), list[StreamedAnswer]()
    try:
        await open_loop(functools.partial(_ask, client, answers), bodies)
    finally:
        client.close()
    return answers


async def _ask(
    client: StreamClient, answers: list[StreamedAnswer], body: dict[str, Any], due_s: float
) -> None:
    answer = await client.ask("/v1/completions", body)
    answer.late_s = max(0.0, answer.start_s - due_s)
    answers.append(answer)


def _counters(connection: ServiceClient) -> Counter[str]:
    """Return totals over all ranks: seconds in steps ("step"), waits by cause, and moved requests ("moved")."""
    names = {"wideep:step_seconds_total": "step", "wideep:moved_requests_total": "moved"}
    found: Counter[str] = Counter()
    for sample in metric_samples(connection):
        cause = sample.labels.get("cause") if sample.name == "wideep:step_wait_seconds_total" else None
        if name := cause or names.get(sample.name):
            found[name] += sample.value  # seconds, or a number of requests
    return found


def _line(row: Mapping[str, Any]) -> str:
    times = ", ".join(
        f"{name.upper()} p50 {row[f'{name}_ms']['p50']:.0f} p99 {row[f'{name}_ms']['p99']:.0f}"
        for name in ("ttft", "tpot", "itl")
        if row[f"{name}_ms"] is not None
    )
    waits = ", ".join(f"{cause} {share:.1%}" for cause, share in row["wait_shares"].items())
    return (
        f"{row['num_requests']} requests, {row['num_failed']} failed; ms {times} (x {row['itl_p99_over_p50']}); "
        f"goodput {row['goodput_per_s']}/s of {row['requests_per_s']}/s; cache hits {row['cache_hits']:.1%}; "
        f"{row['moved']} moved; waits {waits}"
    )


if __name__ == "__main__":
    sys.exit(main())
