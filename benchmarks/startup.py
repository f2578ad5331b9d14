"""How long does the service take to start, and how much memory does a rank use?

`wideep serve demo` from a warm cache, for 1, 2 and 4 ranks: seconds from the command to /health 200, then a small load, and
the peak memory of the engine processes (one per rank): PSS, which divides shared pages among the processes that share them,
and RSS, which does not.

Expected bound: a start reads the checkpoint once per machine (page cache: about 1 s per GB) and imports torch and
transformers in every engine (4 to 5 s of one core each), so with more ranks than cores it grows with the ranks. A
rank's weights are its dense part plus its share of the experts; both are float32.

Run: `python -m benchmarks.startup [--ranks 1,2,4] [--repeats 3] [--save]`.
"""

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.closed_loop import ExactPrompts, summarise
from benchmarks.serving.processes import ProcessWatch, command_of, peak_rss_bytes, pss_bytes, tree
from benchmarks.serving.service import BenchServiceError, Service
from moe.demo_model import ensure_demo_model
from server.front.tokenizer import Tokenizer

LOAD_CLIENTS = 4  # per rank
LOAD_PROMPT_TOKENS, LOAD_OUTPUT_TOKENS = 128, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", allow_abbrev=False)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="starts per rank count (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/startup-<date>-<cpu>.json"
    )
    args = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    tokenizer = Tokenizer(str(ensure_demo_model()))
    rows = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM unwinds like Ctrl-C
    try:
        for repeat in range(args.repeats):
            for ranks in map(int, args.ranks.split(",")):
                rows.append({"repeat": repeat, **measure_start(ranks, tokenizer)})
                print(_line(rows[-1]), flush=True)
    except BenchServiceError as error:
        print(f"benchmarks.startup: {error}", file=sys.stderr)
        return 1
    summary = summarise_rows(rows)
    result = {"benchmark": "startup", "environment": card, "rows": rows, "summary": summary}
    print_summary(summary)
    if args.save:
        save_result("startup", result)
    print_tail(result)
    return 0


def measure_start(ranks: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Start once, send a small load, and read the memory of the processes."""
    prompts = ExactPrompts(lambda text: tokenizer.encode(text, add_special_tokens=False), LOAD_PROMPT_TOKENS)
    flags = [f"--data-parallel-size={ranks}"]
    with tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log, Service("demo", flags, log) as service:
        clients = LOAD_CLIENTS * ranks
        with ProcessWatch(service.process.pid) as watch:
            timings = service.run(prompts.take(2 * clients), LOAD_OUTPUT_TOKENS, clients)
        engines = [pid for pid in tree(service.process.pid) if "engine" in command_of(pid)]
        return {
            "ranks": ranks,
            "start_s": round(service.start_s, 1),
            "engine_pss_mib": [_mib(pss_bytes(pid)) for pid in engines],
            "engine_peak_rss_mib": [_mib(peak_rss_bytes(pid)) for pid in engines],
            "service_peak_pss_mib": _mib(watch.usage.peak_pss_bytes),
            "load_tokens_per_s": summarise(timings).tokens_per_s,
            "other_cores_under_load": watch.usage.other_cores,
        }


def summarise_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per number of ranks, the median start and the largest rank."""
    summary = []
    for ranks in sorted({row["ranks"] for row in rows}):
        own = [row for row in rows if row["ranks"] == ranks]
        summary.append(
            {
                "ranks": ranks,
                "starts": len(own),
                "start_s": round(statistics.median(row["start_s"] for row in own), 1),
                "rank_pss_mib": max(max(row["engine_pss_mib"]) for row in own),
                "rank_peak_rss_mib": max(max(row["engine_peak_rss_mib"]) for row in own),
                "service_peak_pss_mib": max(row["service_peak_pss_mib"] for row in own),
            }
        )
    return summary


def print_summary(summary: Sequence[dict[str, Any]]) -> None:
    """Print one line per number of ranks."""
    print("\n   ranks  start s (median)  largest rank: PSS MiB, peak RSS MiB   whole service: peak PSS MiB")
    for each in summary:
        print(
            f"{each['ranks']:>8}{each['start_s']:>18}{each['rank_pss_mib']:>27}{each['rank_peak_rss_mib']:>14}"
            f"{each['service_peak_pss_mib']:>31}"
        )
    print(flush=True)


def _line(row: dict[str, Any]) -> str:
    return (
        f"   {row['ranks']} ranks: {row['start_s']:.1f} s, PSS per rank {row['engine_pss_mib']} MiB, "
        f"peak RSS {row['engine_peak_rss_mib']} MiB"
    )


def _mib(size_bytes: int) -> int:
    return round(size_bytes / 2**20)


if __name__ == "__main__":
    sys.exit(main())
