"""How fast does the service serve, compared with `transformers` continuous batching on the same machine?

A closed loop at several concurrencies, with prompts of 128 and answers of 64 tokens, greedy and streamed: over HTTP from our
service (1 rank with 2 threads, 2 ranks with 1 thread each), in its own process from the peer. All are loaded at once and take
turns round by round with the same prompts. Their greedy tokens must be equal before anything is timed. The peer runs with its
fastest settings at each concurrency, found in its warm-up.

Expected bound: a decode step reads every active weight once, so at concurrency 1 tokens/s is at most memory bandwidth
over active bytes (19 GB/s over 172 MB of the random model: 110); with a large batch, operations over rate.
A row in which other processes used more than 0.1 core is marked noisy (~) and is used only if there is no quiet row.

Run: `make bench-serve` or `python -m benchmarks.serve [--models demo,random] [--concurrency 1,4,16,32] [--rounds 3]
[--requests-per-level 2,8,16,32] [--ranks 1x2,2x1] [--static] [--quick] [--save]`.
"""

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import ensure_random_model
from benchmarks.serving.closed_loop import ExactPrompts, summarise
from benchmarks.serving.options import BenchOptionsError, ServedLayout, ServingOptions, parse_options
from benchmarks.serving.processes import ProcessWatch
from benchmarks.serving.service import BenchServiceError, Service
from benchmarks.serving.table import print_level, print_summary, summary_of
from benchmarks.serving.transformers_peer import PeerError, PeerSetting, TransformersPeer, fastest
from moe.demo_model import ensure_demo_model
from server.front.tokenizer import Tokenizer

PEER = "transformers"
CHECKED_PROMPTS = 3
CHECKED_TOKENS = 32
WARM_UP_TOKENS = 16


class CheckError(RuntimeError):
    """Raised if two programs gave different tokens; nothing was timed."""


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """One model, loaded by all services and the peer."""

    services: dict[str, Service]  # by the layout's name
    peer: TransformersPeer
    prompts: ExactPrompts
    tokenizer: Tokenizer
    options: ServingOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    try:
        options = parse_options(arguments)
    except BenchOptionsError as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return 2
    card = environment_card()
    print_card(card)
    # SIGTERM unwinds like Ctrl-C, so that started processes are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        models = {name: measure_model(name, options) for name in options.models}
    except (CheckError, BenchServiceError, PeerError) as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return 1
    result = {"benchmark": "serve", "environment": card, "options": asdict(options), "models": models}
    if options.save:
        path = save_result("-".join(("serve", *models)), result)
        print(f"written to {path.relative_to(Path(__file__).parents[1])}")
    print_tail(result)
    return 0


def measure_model(name: str, options: ServingOptions) -> dict[str, Any]:
    """Load a model everywhere, check it, measure every level, and return rows and summaries."""
    directory = ensure_demo_model() if name == "demo" else ensure_random_model()
    print(f"== {name}: loading {', '.join([*map(str, options.layouts), PEER])}", flush=True)
    with everything_running(directory, options) as bench:
        check_tokens(bench)
        print(f"   greedy tokens are equal ({CHECKED_PROMPTS} prompts, {CHECKED_TOKENS} tokens)", flush=True)
        levels = [measure_level(bench, *level) for level in options.levels]
    summary = [summary_of(level) for level in levels]
    print_summary(name, summary)
    return {"levels": levels, "summary": summary}


@contextlib.contextmanager
def everything_running(directory: Path, options: ServingOptions) -> Iterator[ServeBench]:
    """Start the services and the peer one after the other, and stop them at the end."""
    tokenizer = Tokenizer(str(directory))
    with contextlib.ExitStack() as stack:
        services = {
            str(layout): stack.enter_context(
                Service(str(directory), _service_flags(layout, options), stack.enter_context(_log()))
            )
            for layout in options.layouts
        }
        peer = TransformersPeer(
            directory,
            threads=options.peer_threads,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            log=stack.enter_context(_log()),
        )
        stack.enter_context(peer)
        prompts = ExactPrompts(
            lambda text: tokenizer.encode(text, add_special_tokens=False), options.prompt_tokens
        )
        yield ServeBench(services=services, peer=peer, prompts=prompts, tokenizer=tokenizer, options=options)


def _log() -> Any:
    return tempfile.NamedTemporaryFile(prefix="wideep_bench_", suffix=".log")


def _service_flags(layout: ServedLayout, options: ServingOptions) -> list[str]:
    return [
        f"--data-parallel-size={layout.ranks}",
        f"--threads={layout.threads}",
        f"--max-model-len={options.max_model_len}",
        f"--max-num-seqs={options.max_num_seqs}",
        "--dtype=float32",
    ]


def check_tokens(bench: ServeBench) -> None:
    """Compare every service's greedy tokens with the peer's.

    Raises:
        CheckError: Names the service, the position and the tokens there.
    """
    bench.peer.configure(bench.options.peer_settings[0])
    for prompt in bench.prompts.take(CHECKED_PROMPTS):
        theirs = bench.peer.tokens(prompt, CHECKED_TOKENS)
        for name, service in bench.services.items():
            ours = service.tokens(prompt, CHECKED_TOKENS)
            for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
                if our != their:
                    raise CheckError(
                        f"{name} and {PEER} differ at token {place} ({our!r} and {their!r}) after a prompt "
                        f"ending in {bench.tokenizer.decode(prompt[-12:], skip_special_tokens=False)!r}"
                    )


def measure_level(bench: ServeBench, concurrency: int, num_requests: int) -> dict[str, Any]:
    """Warm up, then measure all programs in turn at one concurrency."""
    options = bench.options
    setting, tried = warm_up(bench, concurrency)
    rows: list[dict[str, Any]] = []
    for round_number in range(options.rounds):
        prompts = bench.prompts.take(num_requests)
        names = [*bench.services, PEER]
        turn = round_number % len(names)  # changes the order, so that no program always follows the same one
        for name in names[turn:] + names[:turn]:
            row = measure_row(bench, name, prompts, concurrency)
            rows.append({"round": round_number, **row})
    level = {
        "concurrency": concurrency,
        "requests": num_requests,
        "peer_setting": str(setting),
        "peer_settings_tried": tried,
        "static": measure_static(bench, concurrency) if options.static else None,
        "rows": rows,
    }
    print_level(level)
    return level


def measure_static(bench: ServeBench, concurrency: int) -> dict[str, Any]:
    """Measure one `generate` call of the peer on a batch of this size."""
    prompts = bench.prompts.take(concurrency)
    with ProcessWatch(bench.peer.process.pid) as watch:
        tokens_per_s = bench.peer.static(prompts, bench.options.output_tokens)
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "other_cores": watch.usage.other_cores,
        "noisy": watch.usage.is_noisy,
    }


def warm_up(bench: ServeBench, concurrency: int) -> tuple[PeerSetting, dict[str, float]]:
    """Run some requests everywhere, and find the peer's fastest setting for this concurrency."""
    settings = bench.options.peer_settings
    lots = [bench.prompts.take(concurrency) for _ in settings]
    for service in bench.services.values():
        service.run(lots[0], WARM_UP_TOKENS, concurrency)
    return fastest(bench.peer, settings, lots, WARM_UP_TOKENS, concurrency)


def measure_row(
    bench: ServeBench, name: str, prompts: Sequence[list[int]], concurrency: int
) -> dict[str, Any]:
    """Measure one program once."""
    program = bench.peer if name == PEER else bench.services[name]
    with ProcessWatch(program.process.pid) as watch:
        timings = program.run(prompts, bench.options.output_tokens, concurrency)
    usage = watch.usage
    return {
        "program": name,
        **asdict(summarise(timings)),
        "peak_pss_mib": round(usage.peak_pss_bytes / 2**20),
        "own_cores": usage.own_cores,
        "other_cores": usage.other_cores,
        "noisy": usage.is_noisy,
    }


if __name__ == "__main__":
    sys.exit(main())
