"""Is any answer lost or changed when engines are killed, hang or return under load, and how long do streams pause?

`wideep serve` on several ranks, with a constant number of open requests: greedy, seeded, with penalties, logprobs, several
choices or a form, streamed and whole. Faults occur one after the other, each kind in turn or (`--random`) drawn with a seed. A
client that is cut off when a front ends retries with its Idempotency-Key. Each answer is compared with the answer to the same
request before the first fault. After the last fault the service must be in its initial state: no running request, no block in
use, no leaked descriptor.

Expected bound: the kernel closes a dead process' connections at once (some ms), a step takes as long as before, new
groups take some 10 ms, lost experts are read from the page cache (1 s per GB), replayed requests are prefilled again:
tenths of a second. A hung engine is suspected after two seconds. All engines at once: the time of a start.

Run: `python -m benchmarks.faults [MODEL] [--ranks 3] [--open 10] [--random N] [--seed S] [--save]`. MODEL is a directory or
`demo` (default). The exit status is 1 if an answer was lost or changed, or if something was left behind.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.faults.campaign import Campaign
from benchmarks.faults.kinds import FAULTS, OWN_MOVE
from benchmarks.serving.closed_loop import ExactPrompts
from benchmarks.serving.service import BenchServiceError, Service
from moe.demo_model import ensure_demo_model
from server.front.tokenizer import Tokenizer

_EAGER = (  # rebalances often and moves slowly
    "--enable-eplb",
    '--eplb-config={"num_redundant_experts": 4, "window_size": 20, "step_interval": 40, "min_gain": 0.0, '
    '"max_bytes_per_step": 65536}',
)
_KINDS_OF_REQUESTS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "presence_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 9, "n": 2},
    {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-z ]{400}"}},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM unwinds like Ctrl-C
    try:
        result = measure(args)
    except (BenchServiceError, OSError) as error:
        print(f"benchmarks.faults: {error}", file=sys.stderr)
        return 1
    result = {"benchmark": "faults", "environment": card, **result}
    _print_summary(result)
    if args.save:
        save_result("faults", result)
    print_tail(result)
    return 1 if result["lost"] or result["changed"] or result["left_behind"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="demo", help="a directory or 'demo' (default)")
    parser.add_argument("--ranks", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--open", type=int, default=10, help="open requests at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--random", type=int, metavar="N", help="draw N faults (default: each kind once)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices (default: %(default)s)")
    parser.add_argument("--kinds", help=f"only these kinds, separated by commas: {', '.join(FAULTS)}")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/faults-<date>-<cpu>.json"
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the service, run the campaign, and return its result."""
    tokenizer = Tokenizer(str(ensure_demo_model()) if args.model == "demo" else args.model)
    prompts = ExactPrompts(lambda text: tokenizer.encode(text, add_special_tokens=False), 48)
    bodies = [
        {"prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, **options}
        for prompt, options in zip(
            prompts.take(2 * len(_KINDS_OF_REQUESTS)), [*_KINDS_OF_REQUESTS, *_KINDS_OF_REQUESTS], strict=True
        )
    ]
    drawn = random.Random(args.seed)
    names = args.kinds.split(",") if args.kinds else list(FAULTS)
    kinds = drawn.choices(names, k=args.random) if args.random else names
    flags = [
        f"--data-parallel-size={args.ranks}",
        f"--max-rank-restarts={3 * len(kinds) + 3}",
        "--disable-access-log",
        *(_EAGER if OWN_MOVE in kinds else ()),
    ]
    with (
        tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
        Service(args.model, flags, log) as service,
    ):
        campaign = Campaign(service, bodies, num_ranks=args.ranks, num_open=args.open, drawn=drawn)
        try:
            return asyncio.run(campaign.run([(kind, FAULTS[kind]) for kind in kinds]))
        except BenchServiceError as error:
            said = Path(log.name).read_text(errors="replace").splitlines()
            raise BenchServiceError("\n".join([str(error), "Last log lines:", *said[-30:]])) from error


def _print_summary(result: dict[str, Any]) -> None:
    print(
        f"\n   {result['faults']} faults, {result['answers']} answers: {result['lost']} lost, {result['changed']} "
        f"changed; {result['refused']} new requests refused with 503, {result['asked_again']} cut-off "
        "requests retried with their key"
    )
    for kind, times in result["kinds"].items():
        told = ", ".join(
            f"{what} p50 {spread['p50']:.2f}, p99 {spread['p99']:.2f}"
            for what, spread in (
                ("seen after", times["detected_s"]),
                ("streams pause", times["pauses_s"]),
                ("whole after", times["whole_s"]),
            )
            if spread
        )
        print(f"{kind:>32} ({times['faults']}), seconds: {told}")
    told = ", ".join(
        f"{name} {first:g} -> {result['after'][name]:g}" for name, first in result["before"].items()
    )
    print(f"   before the first fault and after the last: {told}")
    for problem in result["problems"]:
        print(f"   WRONG: {problem}")
    for name, (first, last) in result["left_behind"].items():
        print(f"   LEFT BEHIND: {name} {first:g} -> {last:g}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
