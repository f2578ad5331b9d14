"""How much does HTTP cost: per token and per request, in time to the first token, and in tokens per second?

Five parts, each with its own question.
cost: CPU seconds of the front process per token and per request, by the number of streams. Ranks without a model yield
  one token per stream and step. A run of one-token answers gives the cost of a request, a run of long ones the rest. CPU
  time is used instead of wall time so that the result is valid on a busy machine; what the idle front uses is subtracted.
  With --against, the front of another checkout is measured in turn. With --profile, Python's profiler shows the functions
  of one more run. Expected bound: a token is a lookup, a part of a JSON object and one write to a socket, about 10 us of
  Python and 10 us of kernel on this class of core. A message of a rank costs more, and is shared by the tokens of its step.
ttft: time that the front adds to the first token: one chat at a time, answered immediately by its rank. It includes
  everything: connection, parse, template, tokenizer, transfer to the rank and back, the first event. Goal: 5 ms.
loss: tokens/s of one engine in its own process, and of the same engine behind HTTP with a client on the same machine,
  in turn with the same prompts. Goal: at most 5 % less. With as many threads as cores, the front competes with the
  engine for a core; with fewer threads it has its own.
bench: CPU seconds of `wideep bench` per token at 1,000 tokens/s, one chunk per token: long answers minus short ones, which
  excludes its start. Goal: below 5 % of a core.
fronts: CPU seconds per token of several fronts together (`--api-server-count`), by their number, with the same streams. Each
  front gets a message of each rank in a step with tokens for it, so several fronts share the cost of tokens, but not that of
  messages. On as many cores, N fronts yield N x cost of one / cost of N times the tokens of one, which is printed. Their number
  may exceed the cores of this machine, because CPU time is counted. Goal: 3.5 times with four.

Run: `python -m benchmarks.front [--parts cost,ttft,loss,bench,fronts] [--streams 1,32,256] [--endpoint chat|completions]
[--fronts 1,2,4] [--against DIRECTORY] [--profile] [--model demo|random] [--threads 1,2] [--rounds 3] [--quick] [--save]`.
"""

import argparse
import asyncio
import functools
import json
import pstats
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import ensure_random_model
from benchmarks.serving.closed_loop import Complete, ExactPrompts, closed_loop, summarise
from benchmarks.serving.engine_alone import EngineAlone
from benchmarks.serving.front_alone import FrontAlone
from benchmarks.serving.service import HOST, BenchServiceError, Service, stream_chat, stream_completion
from moe.demo_model import ensure_demo_model
from scheduler.policy.config import EngineConfig
from server.front.tokenizer import Tokenizer
from server.machine.roots import WIDEEP_COMMAND
from server.tools.bench.figures import percentile
from server.tools.bench.stream import STREAMED, StreamClient

PARTS = ("cost", "ttft", "loss", "bench", "fronts")
_ROOT = Path(__file__).parents[1]
NUM_RANKS = 2
COST_TOKENS_PER_S, LEAST_STEP_S = 2000, 0.005  # of all streams together, and between a stream's tokens
COST_S, IDLE_S = 4.0, 2.0
SHOWN_FUNCTIONS = 30  # of a profile
PROMPT_TOKENS = 128
LOSS_TOKENS, LOSS_CONCURRENCY = 64, 16
CHATS = 200
BENCH_STREAMS, BENCH_TOKENS_PER_S = 16, 1000
BENCH_TOKENS = (50, 650)  # per answer: a short and a long run


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """Settings of the benchmark."""

    parts: tuple[str, ...]
    model: str
    streams: tuple[int, ...]  # one measurement of the cost each
    tokens: int | None  # per stream; None for as many as take COST_S
    step_s: float | None  # between a stream's tokens; None for COST_TOKENS_PER_S
    endpoint: str
    against: str | None
    profile: bool
    threads: tuple[int, ...]  # of the engine, one measurement of the loss each
    fronts: tuple[int, ...]  # one measurement of several fronts each
    rounds: int
    save: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    card = environment_card()
    print_card(card)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM unwinds like Ctrl-C
    directory = ensure_demo_model() if options.model == "demo" else ensure_random_model()
    measure = {
        "cost": measure_cost,
        "ttft": measure_ttft,
        "loss": measure_loss,
        "bench": measure_bench,
        "fronts": measure_fronts,
    }
    other = {"against": options.against and Path(options.against).name}
    result: dict[str, Any] = {"benchmark": "front", "environment": card, "options": asdict(options) | other}
    try:
        for part in options.parts:
            result[part] = measure[part](directory, options)
    except BenchServiceError as error:
        print(f"benchmarks.front: {error}", file=sys.stderr)
        return 1
    if options.save:
        path = save_result("front", result)
        print(f"written to {path.relative_to(_ROOT)}")
    print_tail(result)
    return 0


def measure_cost(directory: Path, options: FrontOptions) -> dict[str, Any]:
    """Measure the CPU time of the front per request and per token, by the number of concurrent streams."""
    roots = {"front": _ROOT}
    if options.against is not None:
        roots["against"] = Path(options.against).resolve()
    found: dict[str, Any] = {}
    for streams in options.streams:
        load = _Load.of(directory, options, streams)
        found[str(streams)] = _cost_at(directory, options, load, roots)
        if options.profile:
            _show_profile(directory, load)
    return found


@dataclass(frozen=True, kw_only=True)
class _Load:
    """Streams that begin together, each with one token per step."""

    streams: int
    tokens: int  # per stream
    step_s: float
    prompts: list[list[int]]
    complete: Callable[[int, int], Complete]  # takes the port and the number of tokens

    @classmethod
    def of(cls, directory: Path, options: FrontOptions, streams: int) -> "_Load":
        tokenizer = Tokenizer(str(directory))

        def chat(port: int, num_tokens: int) -> Complete:
            return lambda ids: stream_chat(
                port, tokenizer.decode(ids, skip_special_tokens=False), num_tokens=num_tokens
            )

        def completion(port: int, num_tokens: int) -> Complete:
            return functools.partial(stream_completion, port, num_tokens=num_tokens)

        step_s = options.step_s or max(LEAST_STEP_S, streams / COST_TOKENS_PER_S)
        return cls(
            streams=streams,
            tokens=options.tokens or max(8, round(COST_S / step_s)),
            step_s=step_s,
            prompts=_prompts(directory).take(streams),
            complete=chat if options.endpoint == "chat" else completion,
        )

    def run(self, front: FrontAlone, num_tokens: int) -> tuple[float, float]:
        """Stream all answers at once. Return the front's CPU seconds and the elapsed seconds."""
        before_s, begun_s = front.cpu_s, time.perf_counter()
        asyncio.run(closed_loop(self.complete(front.port, num_tokens), self.prompts, self.streams))
        return front.cpu_s - before_s, time.perf_counter() - begun_s


def _cost_at(
    directory: Path, options: FrontOptions, load: _Load, roots: Mapping[str, Path]
) -> dict[str, Any]:
    """Measure each front, in turn."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    with ExitStack() as stack:
        fronts = {
            name: stack.enter_context(_front(directory, load.step_s, root=root))
            for name, root in roots.items()
        }
        idle = {name: _idle_share(front) for name, front in fronts.items()}
        for front in fronts.values():  # warm
            load.run(front, 8)
        for number in range(options.rounds):
            for name in sorted(fronts, reverse=bool(number % 2)):
                rows[name].append(_cost_of(fronts[name], load, idle[name]))
    found: dict[str, Any] = {name: {"median": _medians(rows[name]), "rows": rows[name]} for name in roots}
    for name in roots:
        middle = found[name]["median"]
        print(
            f"   cost at {load.streams} streams ({name}): {middle['request_us']:.0f} us per request, "
            f"{middle['token_us']:.1f} us per token; {middle['share_of_core']:.0%} of a core at "
            f"{middle['tokens_per_s']:.0f} tokens/s",
            flush=True,
        )
    if len(rows) == 2:
        ratios = [
            own["token_us"] / other["token_us"]
            for own, other in zip(rows["front"], rows["against"], strict=True)
        ]
        found["ratio"] = round(statistics.median(ratios), 3)
        print(
            f"   ratio per token: {found['ratio']} ({', '.join(f'{each:.2f}' for each in ratios)})",
            flush=True,
        )
    return {"tokens": load.tokens, "step_s": load.step_s, **found}


def measure_fronts(directory: Path, options: FrontOptions) -> dict[str, Any]:
    """Measure the CPU time per token of all fronts together, by their number."""
    streams = max(options.streams)
    load = _Load.of(directory, options, streams)
    rows: dict[int, list[dict[str, float]]] = {number: [] for number in options.fronts}
    shares: dict[int, list[float]] = {}
    with ExitStack() as stack:
        fronts = {
            number: stack.enter_context(_front(directory, load.step_s, num_fronts=number))
            for number in options.fronts
        }
        idle = {number: _idle_share(front) for number, front in fronts.items()}
        for front in fronts.values():  # warm
            load.run(front, 8)
        for turn in range(options.rounds):
            for number in sorted(fronts, reverse=bool(turn % 2)):
                before = fronts[number].cpu_of_each_s
                rows[number].append(_cost_of(fronts[number], load, idle[number]))
                used = [
                    after - each for after, each in zip(fronts[number].cpu_of_each_s, before, strict=True)
                ]
                shares[number] = [round(each / sum(used), 3) for each in used]
    found: dict[str, Any] = {"streams": streams, "tokens": load.tokens, "step_s": load.step_s}
    alone_us = _medians(rows[min(rows)])["token_us"]
    for number, each in rows.items():
        middle = _medians(each)
        times = round(number / min(rows) * alone_us / middle["token_us"], 2)
        found[str(number)] = {"median": middle, "times": times, "shares": shares[number], "rows": each}
        print(
            f"   {number} fronts at {streams} streams: {middle['token_us']:.1f} us per token in all, measured at "
            f"{middle['tokens_per_s']:.0f} tokens/s; on {number} cores {times:.2f} times the tokens of {min(rows)}; "
            f"shares {', '.join(f'{share:.0%}' for share in shares[number])}",
            flush=True,
        )
    return found


def _cost_of(front: FrontAlone, load: _Load, idle: float) -> dict[str, float]:
    """Measure a front once. `idle` is the share of a core that it uses without requests."""
    (short_s, short_wall_s), (long_s, wall_s) = load.run(front, 1), load.run(front, load.tokens)
    request_s = (short_s - idle * short_wall_s) / load.streams
    token_s = ((long_s - idle * wall_s) / load.streams - request_s) / (load.tokens - 1)
    return {
        "request_us": round(1e6 * request_s, 1),
        "token_us": round(1e6 * token_s, 1),
        "tokens_per_s": round(load.streams * load.tokens / wall_s, 1),
        "share_of_core": round(long_s / wall_s, 3),
    }


def _idle_share(front: FrontAlone) -> float:
    before_s, begun_s = front.cpu_s, time.perf_counter()
    time.sleep(IDLE_S)
    return (front.cpu_s - before_s) / (time.perf_counter() - begun_s)


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def _show_profile(directory: Path, load: _Load) -> None:
    """Print the functions of the front by own time, from a long run minus a short one, so without the start.

    The profiler adds some time to each call.
    """
    short, long = (_profiled(directory, load, num_tokens) for num_tokens in (1, load.tokens))
    num_tokens = load.streams * (load.tokens - 1)
    gained = {
        place: [after - before for after, before in zip(long[place], short.get(place, (0, 0.0)), strict=True)]
        for place in long
    }
    print(f"   {'us/token':>9} {'calls/token':>12}  function, at {load.streams} streams, profiled")
    rows = sorted((row for row in gained.items() if row[1][0] > 0), key=lambda row: -row[1][1])
    for place, (num_calls, own_s) in rows[:SHOWN_FUNCTIONS]:
        print(f"   {1e6 * own_s / num_tokens:9.2f} {num_calls / num_tokens:12.2f}  {place}", flush=True)


def _profiled(directory: Path, load: _Load, num_tokens: int) -> dict[str, tuple[int, float]]:
    """Return the number of calls and the seconds of each function of a front that streams answers of this length."""
    with tempfile.NamedTemporaryFile(prefix="wideep_profile_") as file:
        with _front(directory, load.step_s, profile=Path(file.name)) as front:
            load.run(front, num_tokens)
        stats = pstats.Stats(file.name).stats  # type: ignore[attr-defined]
    found: dict[str, tuple[int, float]] = {}
    for (path, line, function), (_, num_calls, own_s, *_) in stats.items():
        place = f"{Path(path).name}:{line} {function}" if line else function
        before = found.get(place, (0, 0.0))
        found[place] = before[0] + num_calls, before[1] + own_s
    return found


def measure_ttft(directory: Path, options: FrontOptions) -> dict[str, Any]:
    """Measure the seconds from a chat's start to its first event if the rank takes no time."""
    tokenizer = Tokenizer(str(directory))
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in _prompts(directory).take(CHATS + 20)]
    with _front(directory, 0.0) as front:
        times_s = [asyncio.run(_first_event_s(front.port, text)) for text in texts][20:]
    result = {
        "chats": len(times_s),
        "prompt_tokens": PROMPT_TOKENS,
        **{f"p{percent}_ms": round(1e3 * percentile(times_s, percent), 2) for percent in (50, 90, 99)},
    }
    print(
        f"   ttft added: p50 {result['p50_ms']} ms, p90 {result['p90_ms']} ms, p99 {result['p99_ms']} ms",
        flush=True,
    )
    return result


async def _first_event_s(port: int, text: str) -> float:
    client = StreamClient(f"http://{HOST}:{port}")
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    try:
        answer = await client.ask("/v1/chat/completions", {**chat, **STREAMED})
    finally:
        client.close()
    if answer.failure:
        raise BenchServiceError(answer.failure)
    return answer.first_s - answer.start_s


def measure_loss(directory: Path, options: FrontOptions) -> dict[str, Any]:
    """Compare tokens per second over HTTP with those of the engine alone, by the engine's threads."""
    return {f"1x{threads}": _measure_loss(directory, options, threads) for threads in options.threads}


def _measure_loss(directory: Path, options: FrontOptions, threads: int) -> dict[str, Any]:
    prompts, length = _prompts(directory), PROMPT_TOKENS + LOSS_TOKENS
    limits: dict[str, Any] = {"max_num_seqs": LOSS_CONCURRENCY, "max_model_len": length}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    flags += ["--data-parallel-size=1", f"--threads={threads}", "--dtype=float32", "--kv-cache-memory=1G"]
    config = EngineConfig(
        directory=directory, kv_cache_bytes=1 << 30, dtype="float32", threads=threads, **limits
    )
    rows = []
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile(prefix="wideep_bench_", suffix=".log"))
        service = stack.enter_context(Service(str(directory), flags, log))
        engine = stack.enter_context(EngineAlone(config))
        for number in range(-1, options.rounds):  # the first round is a warm-up for both
            lot = prompts.take(2 * LOSS_CONCURRENCY)
            pair = [("engine", engine.run), ("http", service.run)]
            rates = {
                name: summarise(run(lot, LOSS_TOKENS, LOSS_CONCURRENCY)).tokens_per_s
                for name, run in (pair if number % 2 else pair[::-1])
            }
            if number >= 0:
                rows.append({**rates, "loss": round(1 - rates["http"] / rates["engine"], 4)})
    loss = statistics.median(row["loss"] for row in rows)
    pairs = ", ".join(f"{row['http']:.0f} of {row['engine']:.0f}" for row in rows)
    print(f"   loss with {threads} engine threads: {loss:.1%} ({pairs} tokens/s)", flush=True)
    return {"concurrency": LOSS_CONCURRENCY, "loss": loss, "rows": rows}


def measure_bench(directory: Path, options: FrontOptions) -> dict[str, Any]:
    """Measure the CPU time of `wideep bench` per token, with ranks that yield BENCH_TOKENS_PER_S."""
    rows, (few, many) = [], BENCH_TOKENS
    with _front(directory, BENCH_STREAMS / BENCH_TOKENS_PER_S) as front:
        for _ in range(options.rounds):
            short_s, _ = _cpu_of_bench(front.port, few)
            long_s, tokens_per_s = _cpu_of_bench(front.port, many)
            token_s = (long_s - short_s) / (BENCH_STREAMS * (many - few))
            rows.append(
                {
                    "token_us": round(1e6 * token_s, 1),
                    "share_of_core": round(token_s * BENCH_TOKENS_PER_S, 4),
                    "tokens_per_s": round(tokens_per_s, 1),
                }
            )
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(
        f"   wideep bench: {middle['token_us']:.0f} us per token, {middle['share_of_core']:.1%} of a core at "
        f"{BENCH_TOKENS_PER_S} tokens/s (measured at {middle['tokens_per_s']:.0f})",
        flush=True,
    )
    return {"median": middle, "rows": rows}


def _cpu_of_bench(port: int, num_tokens: int) -> tuple[float, float]:
    """Run `wideep bench` with one request per client. Return its CPU seconds and the tokens per second it measured."""
    load = f"--concurrency={BENCH_STREAMS} --num-requests={BENCH_STREAMS} --prompt-tokens=16 --ignore-eos"
    words = [f"http://{HOST}:{port}", *load.split(), f"--output-tokens={num_tokens}", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([*WIDEEP_COMMAND, "bench", *words], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise BenchServiceError(f"wideep bench: {ended.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, json.loads(ended.stdout)["levels"][0]["output_tokens_per_s"]


def _prompts(directory: Path) -> ExactPrompts:
    tokenizer = Tokenizer(str(directory))
    return ExactPrompts(lambda text: tokenizer.encode(text, add_special_tokens=False), PROMPT_TOKENS)


@contextmanager
def _front(
    directory: Path,
    step_s: float,
    *,
    root: Path = _ROOT,
    profile: Path | None = None,
    num_fronts: int = 1,
) -> Iterator[FrontAlone]:
    with (
        tempfile.NamedTemporaryFile(prefix="wideep_bench_", suffix=".log") as log,
        FrontAlone(
            directory,
            num_ranks=NUM_RANKS,
            step_s=step_s,
            log=log,
            root=root,
            profile=profile,
            num_fronts=num_fronts,
        ) as front,
    ):
        yield front


def _parse(arguments: Sequence[str] | None) -> FrontOptions:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.front", description="The cost of the front.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="some of cost, ttft, loss, bench and fronts (default: all)")
    add("--model", choices=("demo", "random"), default="demo", help="(default: %(default)s)")
    add(
        "--streams",
        default="1,32,256",
        metavar="NUMBERS",
        help="concurrent streams for measuring the cost (default: %(default)s)",
    )
    add("--tokens", type=int, metavar="N", help=f"tokens per stream (default: as many as take {COST_S:g} s)")
    add(
        "--step-s",
        type=float,
        metavar="S",
        help=f"seconds between a stream's tokens (default: {COST_TOKENS_PER_S} tokens/s in all)",
    )
    add(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="for measuring the cost (default: %(default)s)",
    )
    add("--against", metavar="DIRECTORY", help="another checkout; its front is measured in turn")
    add("--profile", action="store_true", help="also print the functions of the front by own time")
    add(
        "--threads",
        default="1,2",
        metavar="NUMBERS",
        help="engine threads for measuring the loss (default: %(default)s)",
    )
    add(
        "--fronts",
        default="1,2,4",
        metavar="NUMBERS",
        help="numbers of fronts for measuring several (default: %(default)s)",
    )
    add("--rounds", type=int, metavar="N", help="(default: 3)")
    add("--quick", action="store_true", help="smoke test: one round, 8 tokens, 1 thread")
    add("--save", action="store_true", help="write benchmarks/results/front-<date>-<cpu>.json")
    args = parser.parse_args(arguments)
    parts = tuple(args.parts.split(","))
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts is {args.parts!r}; give names of {', '.join(PARTS)}, separated by commas")
    lists = {name: getattr(args, name).split(",") for name in ("threads", "streams", "fronts")}
    for name, numbers in lists.items():
        if not all(number.isdecimal() and int(number) for number in numbers):
            parser.error(
                f"--{name} is {','.join(numbers)!r}; give whole numbers above 0, separated by commas"
            )
    threads, streams, fronts = (tuple(map(int, each[:1] if args.quick else each)) for each in lists.values())
    return FrontOptions(
        parts=parts,
        model=args.model,
        streams=streams,
        tokens=args.tokens or (8 if args.quick else None),
        step_s=args.step_s,
        endpoint=args.endpoint,
        against=args.against,
        profile=args.profile,
        threads=threads,
        fronts=fronts,
        rounds=args.rounds or (1 if args.quick else 3),
        save=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
