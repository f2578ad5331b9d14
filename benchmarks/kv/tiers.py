"""What do tiers of the KV cache gain? Hits and time to first token without tiers, with host memory, with disk, and after a kill -9.

Conversations of a trace (Mooncake's JSON lines, given on the command line) with scaled lengths, or synthetic ones without a file,
go to a real service in a closed loop, in the trace's order. The KV cache holds a tenth of the distinct tokens, the tiers hold all
of them. Every service gets all prompts twice: at first, a prefix is only cached if an earlier turn computed it; again, every prompt
has been seen. Then the service with a disk is killed with SIGKILL, its files are dropped from the page cache, and a new service
gets the prompts again. Some answers are compared between all services, after the times were taken.

Expected bound: of a cached prefix, a tier saves the prompt's computation (tokens over prefill rate) and costs reading its bytes
(tokens times bytes per token over the tier's rate). No tier can find more than the printed ideal hits.

Run: `python -m benchmarks.kv.tiers [TRACE] [--model demo] [--ranks 1] [--conversations 60] [--token-scale 0.03] [--share 0.1]
[--clients 2] [--tokens 8] [--folder DIR] [--save]`. On two cores, the defaults take about a quarter of an hour.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.service import HOST, BenchServiceError, Service, metric_samples
from kvcache.paged_cache import BLOCK_TOKENS
from server.http.client import ServiceClient, ServiceError
from server.serve.preflight.model import PreflightError, resolve_model
from server.tools.bench.figures import figures_of, percentile, ttft_s
from server.tools.bench.flags import positive, whole
from server.tools.bench.load import closed_loop
from server.tools.bench.prompts import CheckpointTokenizer, Prompts, RequestLengths, passages_of
from server.tools.bench.stream import STREAMED, StreamClient, StreamedAnswer
from server.tools.size.costs.read_model import read_model
from server.tools.traces import PREFIX_TOKENS, TracedRequest, TraceError, read_trace

AGAIN = "again"
PASSES = ("first", AGAIN)
TURNS = 4  # of a synthetic conversation
MOST_TIMES = 4  # of a prompt's length over the mean
COMPARED = 8  # answers per service
_ROOM = 2  # capacity of a tier, in working sets: prompts, answers, and sets that fill unevenly
_SOURCES = ("device", "host", "disk")
_COUNTERS = {  # a metric's name -> its name in a row
    "vllm:kv_offload_load_bytes_total": "load_bytes",
    "vllm:kv_offload_load_time_total": "load_s",
    "vllm:kv_offload_store_bytes_total": "store_bytes",
    "wideep:kv_tier_faults_total": "faults",
    "wideep:kv_tier_dropped_total": "dropped",
}


class TieredLoad(NamedTuple):
    """The prompts, and what a cache without limits would know of them."""

    prompts: list[list[int]]
    shared_tokens: list[int]  # of each prompt, cached if all earlier prompts are, once each
    distinct_tokens: int  # in whole blocks

    @property
    def prompt_tokens(self) -> int:
        """All tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status, which is 1 if a request failed or an answer differs."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    try:
        result = {"benchmark": "tiers", "environment": card, **measure(args)}
    except (BenchServiceError, PreflightError, ServiceError, TraceError, OSError) as error:
        print(f"benchmarks.kv.tiers: {error}", file=sys.stderr)
        return 1
    if args.save:
        save_result("tiers", result)
    print_tail(result)
    num_failed = sum(row["num_failed"] for rows in result["services"].values() for row in rows.values())
    return int(num_failed > 0 or not result["equal_answers"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.tiers", allow_abbrev=False)
    add = parser.add_argument
    add("trace", nargs="?", type=Path, metavar="TRACE", help="JSON lines in Mooncake's format")
    add("--model", default="demo", help="a directory or 'demo' (default)")
    add("--ranks", type=whole, default=1, help="default: %(default)s")
    add("--conversations", type=whole, default=60, help="number of conversations (default: %(default)s)")
    add("--token-scale", type=positive, default=0.03, help="factor for lengths (default: %(default)s)")
    add(
        "--share",
        type=positive,
        default=0.1,
        help="of the distinct tokens, in the KV cache (default: %(default)s)",
    )
    add("--clients", type=whole, default=2, help="requests at once (default: %(default)s)")
    add("--tokens", type=whole, default=8, help="tokens of an answer (default: %(default)s)")
    add("--folder", type=Path, help="where to put the tier on disk (default: the system's temporary folder)")
    add("--save", action="store_true", help="write benchmarks/results/tiers-<date>-<cpu>.json")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Send the load to all services. Returns the result without the environment."""
    model = resolve_model(args.model)
    tokenizer = CheckpointTokenizer(str(model))
    requests = (
        synthetic_conversations(args.conversations)
        if args.trace is None
        else sampled_conversations(read_trace(args.trace), args.conversations)
    )
    prompts = Prompts(passages_of(None, tokenizer, seed=0), tokenizer, is_chat=False)
    load = load_of([prompts.take(lengths_of(each, args.token_scale)) for each in requests])
    token_bytes = sum(shape.token_bytes for shape in read_model(model, on_gpu=False, float_bytes=None).shapes)
    flags, pool_tokens = service_flags(args, load, token_bytes)
    size = _ROOM * load.distinct_tokens * token_bytes
    facts = {
        "requests": len(load.prompts),
        "prompt_tokens": load.prompt_tokens,
        "distinct_tokens": load.distinct_tokens,
        "pool_tokens": pool_tokens,
        "pool_share": round(pool_tokens / load.distinct_tokens, 4),
        "token_bytes": token_bytes,
        "ideal_hits": round(sum(load.shared_tokens) / load.prompt_tokens, 4),
    }
    print(", ".join(f"{name} {value:,}" for name, value in facts.items()), flush=True)
    services: dict[str, dict[str, dict[str, Any]]] = {}
    answers: dict[str, list[list[int]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="wideep_tiers_", dir=args.folder) as folder,
        tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
    ):
        disk = [f"--kv-offloading-dir={folder}/kv", f"--kv-offloading-disk-size={size}B"]
        for name, own, passes in (
            ("none", [], PASSES),
            ("host", [f"--kv-offloading-size={size}B"], PASSES),
            ("disk", disk, PASSES),
            ("disk after kill -9", disk, (AGAIN,)),
        ):
            services[name], answers[name] = _measure_service(
                args, [*flags, *own], load, passes, log, is_killed=name == "disk"
            )
            drop_page_cache(Path(folder))
            for each, row in services[name].items():
                print(f"{name}, {each}: {line_of(row)}", flush=True)
    return {
        "options": {
            **{name: value for name, value in vars(args).items() if name not in ("trace", "folder", "save")},
            "trace": None if args.trace is None else args.trace.name,
        },
        "load": facts,
        "services": services,
        "ttft_p50_over_none": ratios_of(services),
        "equal_answers": all(each == answers["none"] for each in answers.values()),
    }


def sampled_conversations(trace: Iterable[TracedRequest], count: int) -> list[TracedRequest]:
    """Return all requests of some conversations of a trace, in its order.

    Requests of a conversation have the same second hash id: the first one is often a system prompt that all share.
    Conversations with a prompt of more than `MOST_TIMES` the mean are left out: a KV cache must hold the longest request,
    so it could not be a tenth of the distinct tokens of a few conversations.

    Raises:
        TraceError: The trace has no hash ids.
    """
    requests = list(trace)
    turns: dict[int, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        if request.hash_ids:
            turns[request.hash_ids[:2][-1]].append(place)
    if not turns:
        raise TraceError(
            "the trace has no hash ids, so its prompts share no prefixes; give one of Mooncake's"
        )
    most = MOST_TIMES * statistics.fmean(each.input_tokens for each in requests)
    short = [key for key in sorted(turns) if all(requests[at].input_tokens <= most for at in turns[key])]
    chosen = random.Random(0).sample(short, min(count, len(short)))
    return [requests[place] for place in sorted(place for key in chosen for place in turns[key])]


def synthetic_conversations(count: int) -> list[TracedRequest]:
    """Return interleaved conversations of `TURNS` prompts: each is the one before and 3 to 9 new blocks."""
    draw = random.Random(0)
    fresh = iter(range(1, sys.maxsize))
    texts: list[list[int]] = [[0] for _ in range(count)]  # 0 is a system prompt that all share
    found = []
    for _turn in range(TURNS):
        for text in texts:
            text += [next(fresh) for _ in range(draw.randint(3, 9))]
            found.append(TracedRequest(0.0, PREFIX_TOKENS * len(text), 1, tuple(text)))
    return found


def lengths_of(request: TracedRequest, scale: float) -> RequestLengths:
    """Return a request's scaled lengths."""
    prompt = max(1, round(scale * request.input_tokens))
    return RequestLengths(1, prompt, request.hash_ids, scale * PREFIX_TOKENS)


def load_of(prompts: Sequence[Any]) -> TieredLoad:
    """Compare prompts block by block, as an unlimited cache would."""
    seen: set[int] = set()
    shared = []
    for prompt in prompts:
        keys, key = [], 0
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, *prompt[start : start + BLOCK_TOKENS]))
            keys.append(key)
        usable = keys[: (len(prompt) - 1) // BLOCK_TOKENS]  # the last token is always computed
        num_known = next((at for at, each in enumerate(usable) if each not in seen), len(usable))
        shared.append(num_known * BLOCK_TOKENS)
        seen.update(keys)
    return TieredLoad([list(prompt) for prompt in prompts], shared, len(seen) * BLOCK_TOKENS)


def service_flags(args: argparse.Namespace, load: TieredLoad, token_bytes: int) -> tuple[list[str], int]:
    """Return the flags that all services share, and the tokens in their KV caches."""
    longest = -(-(load.longest + args.tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
    # A rank must have room for the longest request, and a block per request for its newest token.
    least = longest + BLOCK_TOKENS * (1 + args.clients)
    of_rank = max(least, round(args.share * load.distinct_tokens) // args.ranks)
    flags = [
        f"-dp={args.ranks}", f"--max-model-len={longest}", f"--max-num-seqs={max(2, args.clients)}",
        f"--kv-cache-memory={of_rank * token_bytes}B", "--disable-access-log",
    ]  # fmt: skip
    return flags, of_rank * args.ranks


def _measure_service(
    args: argparse.Namespace,
    flags: Sequence[str],
    load: TieredLoad,
    passes: Sequence[str],
    log: IO[bytes],
    *,
    is_killed: bool,
) -> tuple[dict[str, dict[str, Any]], list[list[int]]]:
    """Start a service and send it the load. Returns a row per pass, and some answers.

    Args:
        is_killed: End the service with SIGKILL.
    """
    with Service(args.model, flags, log) as service:
        service.tokens(load.prompts[0][: BLOCK_TOKENS - 1], 2)  # a warm-up, too short to be cached
        rows = {name: _send_all(service, load, args) for name in passes}
        compared = load.prompts[:: max(1, len(load.prompts) // COMPARED)]
        answers = [service.tokens(prompt, args.tokens) for prompt in compared]
        if is_killed:
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
    return rows, answers


def _send_all(service: Service, load: TieredLoad, args: argparse.Namespace) -> dict[str, Any]:
    url = f"http://{HOST}:{service.port}"
    with ServiceClient(url) as connection:
        model = connection.served_model()
        before = counters_of(connection)
        answers = asyncio.run(_replay(url, model, load.prompts, args))
        gained = counters_of(connection)
    gained.subtract(before)
    return row_of(answers, load, gained)


async def _replay(
    url: str, model: str, prompts: Sequence[list[int]], args: argparse.Namespace
) -> list[StreamedAnswer]:
    """Return the answers in the order of the prompts."""
    client, answers = StreamClient(url), dict[int, StreamedAnswer]()
    fixed = {"model": model, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0, **STREAMED}

    async def send(place: int) -> None:
        answers[place] = await client.ask("/v1/completions", {**fixed, "prompt": prompts[place]})

    try:
        await closed_loop(send, range(len(prompts)), concurrency=args.clients)
    finally:
        client.close()
    return [answers[place] for place in range(len(prompts))]


def counters_of(connection: ServiceClient) -> Counter[str]:
    """Return totals over all ranks: cached tokens by source, and what the tiers did."""
    found: Counter[str] = Counter()
    for sample in metric_samples(connection):
        if sample.name == "vllm:prompt_tokens_cached_by_source_total":
            found[sample.labels["source"]] += sample.value
        elif name := _COUNTERS.get(sample.name):
            found[name] += sample.value  # bytes, seconds or a number
    return found


def row_of(
    answers: Sequence[StreamedAnswer], load: TieredLoad, gained: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of one pass.

    Args:
        answers: In the order of the prompts.
        gained: Growth of the counters.
    """
    figures = figures_of(answers)
    # Prompts of later turns: at least half of their tokens were in an earlier prompt.
    later_s = [
        ttft_s(answer)
        for answer, prompt, shared in zip(answers, load.prompts, load.shared_tokens, strict=True)
        if not answer.failure and 2 * shared >= len(prompt)
    ]
    ttft = figures.ttft_ms
    return {
        "num_failed": figures.num_failed,
        "failures": dict(Counter(each.failure for each in answers if each.failure)),
        "duration_s": figures.duration_s,
        "hits": round(figures.cached_tokens / max(1, figures.prompt_tokens), 4),
        "ttft_p50_ms": ttft and ttft.p50,
        "ttft_p99_ms": ttft and ttft.p99,
        "later_turns": len(later_s),
        "later_ttft_p50_ms": round(1e3 * statistics.median(later_s), 3) if later_s else None,
        "later_ttft_p99_ms": round(1e3 * percentile(later_s, 99), 3) if later_s else None,
        "cached_tokens": {source: int(gained.get(source, 0)) for source in _SOURCES},
        **{name: round(gained.get(name, 0), 3) for name in _COUNTERS.values()},
    }


def ratios_of(services: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the median time to first token over that without tiers, in the same pass."""
    return {
        name: {
            each: round(row["ttft_p50_ms"] / services["none"][each]["ttft_p50_ms"], 3)
            for each, row in rows.items()
            if row["ttft_p50_ms"] and services["none"][each]["ttft_p50_ms"]
        }
        for name, rows in services.items()
        if name != "none"
    }


def drop_page_cache(folder: Path) -> None:
    """Write the files in a folder to the disk and remove them from the page cache, as after a restart of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def line_of(row: Mapping[str, Any]) -> str:
    """Return a pass in one line."""
    times = f"TTFT p50 {row['ttft_p50_ms'] or 0:.0f} ms, p99 {row['ttft_p99_ms'] or 0:.0f} ms"
    if row["later_turns"]:
        times += f"; {row['later_turns']} later turns p50 {row['later_ttft_p50_ms']:.0f} ms"
    sources = ", ".join(f"{source} {count:,}" for source, count in row["cached_tokens"].items())
    return (
        f"{row['duration_s']:.1f} s, {row['num_failed']} failed; hits {row['hits']:.1%} ({sources} tokens); {times}; "
        f"loaded {row['load_bytes'] / 2**20:,.0f} MiB in {row['load_s']:.2f} s, stored {row['store_bytes'] / 2**20:,.0f} MiB; "
        f"{row['faults']:g} faults, {row['dropped']:g} dropped"
    )


if __name__ == "__main__":
    sys.exit(main())
