"""Is any answer lost or changed when engines are killed, links break or disks fail under load, and how long do streams pause?

`wideep serve` on several ranks, with a constant number of open requests: greedy, seeded, with penalties, logprobs, several
choices or a form, streamed and whole. Half of them find no cached prefix. Faults occur one after the other, each kind in
turn or (`--random`) drawn with a seed; a kind that cannot occur is left out, with the reason. A client that is cut off when
a front ends retries with its Idempotency-Key. Each answer is compared with the answer to the same request before the first
fault. After the last fault the service must be in its initial state: no running request, no block in use, no leaked descriptor.

With --tiers, the service keeps blocks in host memory and on a disk, its KV cache holds little more than the open requests, and
the disk fails too. With --nodes 2, half of the ranks run on a second node: it is on the same machine, but shares no memory
with the first one. As a control, bits change in transit: the service must notice each changed record.

Expected bound: the kernel closes a dead process' connections at once (some ms), a step takes as long as before, new
groups take some 10 ms, lost experts are read from the page cache (1 s per GB), replayed requests are prefilled again:
tenths of a second. A hung engine is suspected after two seconds. All engines at once: the time of a start. While some rank serves,
no stream pauses for more than 3 seconds beyond its usual gaps.

With --resizes N, the service changes its number of ranks in N cycles and has drafts (`benchmarks.faults.resizes`). In every
second cycle, an engine is killed during each resize. Expected bound: ranks meet as after a loss, so no stream pauses for more
than a second beyond its usual gaps, and no request gets status 503.

With --fronts N, the kind "kill a front" kills one of several fronts. Its clients retry with their key.

Run: `python -m benchmarks.faults [MODEL] [--ranks 3 | --pools POOLS] [--nodes 2] [--fronts 2] [--tiers] [--open 10]
[--random N | --resizes N] [--seed S] [--save]`. MODEL is a directory or `demo` (default). The exit status is 1 if an answer was
lost or changed, if a stream paused too long, if a changed record was not noticed, if something was left behind, or if a resize
without a kill failed or a request was refused.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.faults.campaign import MOST_PAUSE_S, Campaign, Fault
from benchmarks.faults.kinds import (
    AUTOMATIC_MOVE,
    FAULTS,
    KILL_A_FRONT,
    OF_NODES,
    OF_RESIZES,
    OF_TIERS,
    OUTAGES,
    SUPERVISOR,
)
from benchmarks.faults.nodes import TwoNodes
from benchmarks.faults.orders import FaultOrders
from benchmarks.faults.resizes import MOST_RESIZE_PAUSE_S, ResizeCycles
from benchmarks.serving.closed_loop import ExactPrompts
from benchmarks.serving.service import BenchServiceError, Server, Service
from kvcache.paged_cache import BLOCK_TOKENS
from server.front.tokenizer import Tokenizer
from server.serve.preflight.model import resolve_model
from server.tools.size.costs.read_model import read_model

_EAGER = (  # rebalances often and moves slowly
    "--enable-eplb",
    '--eplb-config={"num_redundant_experts": 4, "window_size": 20, "step_interval": 40, "min_gain": 0.0, '
    '"max_bytes_per_step": 65536}',
)
_DRAFTS = ('--speculative-config={"method": "ngram", "num_speculative_tokens": 4}',)
_PROMPT_TOKENS = 48
# Each prompt without a cached prefix is handed over.
_HAND_OVER = f"--prefill-threshold={_PROMPT_TOKENS}"
# Figures that must be 0 or empty. The last two are of a campaign of resizes.
_WRONG = (
    "lost",
    "changed",
    "late",
    "unseen_flips",
    "left_behind",
    "failed_resizes",
    "refused_while_resizing",
)
_OF_RESIZES = ("resize_s", "tokens_per_s", "kills", "failed_resizes", "refused_while_resizing")
_DISK_BYTES = 128 << 20
_MOST_DRAWN = 3  # drawn kinds per fault
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
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.resizes and (args.random or args.kinds or args.pools or args.nodes > 1):
        parser.error("--resizes excludes --random, --kinds, --pools and --nodes")
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
        save_result(_result_name(args), result)
    print_tail(result)
    return 1 if any(result.get(wrong) for wrong in _WRONG) else 0


def _result_name(args: argparse.Namespace) -> str:
    return "faults" + ("-resizes" if args.resizes else "") + ("-fronts" if args.fronts > 1 else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="demo", help="a directory or 'demo' (default)")
    parser.add_argument("--ranks", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--pools", help="pools of ranks, as for `wideep serve`, instead of --ranks")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--fronts", type=int, default=1, help="front processes (default: %(default)s)")
    parser.add_argument("--tiers", action="store_true", help="a small KV cache with tiers below it")
    parser.add_argument("--open", type=int, default=10, help="open requests at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per answer (default: %(default)s)")
    parser.add_argument(
        "--resizes",
        type=int,
        metavar="N",
        help="N cycles of resizes: to two ranks more, to one more, and to the former number",
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw N faults (default: each kind once)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices (default: %(default)s)")
    parser.add_argument(
        "--kinds",
        help=f"only these kinds, separated by commas: {', '.join((*FAULTS, *OF_RESIZES))}; with --tiers: {', '.join(OF_TIERS)}; with --tiers "
        f"and --nodes 2: {', '.join(OF_NODES)}",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/faults-<date>-<cpu>.json; -resizes and -fronts are added for a campaign of these",
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the service, run the campaign, and return its result."""
    model = resolve_model(args.model)
    tokenizer = Tokenizer(str(model))
    prompts = ExactPrompts(lambda text: tokenizer.encode(text, add_special_tokens=False), _PROMPT_TOKENS)
    bodies = [
        {"prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, **options}
        for prompt, options in zip(
            prompts.take(2 * len(_KINDS_OF_REQUESTS)), [*_KINDS_OF_REQUESTS, *_KINDS_OF_REQUESTS], strict=True
        )
    ]
    drawn = random.Random(args.seed)
    cycles = ResizeCycles()
    kinds = list(cycles.plan(args.ranks, args.resizes)) if args.resizes else _drawn_kinds(args, drawn)
    num_faults = args.random or len(kinds)
    num_ranks = args.ranks
    if args.pools:
        num_ranks = sum(int(pool.rpartition(":")[2]) for pool in args.pools.split(","))
    with (
        tempfile.TemporaryDirectory(prefix="wideep_faults_") as folder,
        tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
    ):
        orders = FaultOrders(Path(folder))
        flags = [
            *([f"--pools={args.pools}", _HAND_OVER] if args.pools else []),
            f"--max-rank-restarts={3 * num_faults + 3}",
            "--disable-access-log",
            f"--api-server-count={args.fronts}",
            *(_EAGER if any(kind == AUTOMATIC_MOVE for kind, _ in kinds) else ()),
            *(_DRAFTS if args.resizes else ()),
        ]
        with _service(args, model, num_ranks, flags, orders, log) as service:
            campaign = Campaign(
                service,
                bodies,
                num_ranks=num_ranks,
                num_open=args.open,
                drawn=drawn,
                orders=orders,
                outages=OUTAGES,
                most_pause_s=MOST_RESIZE_PAUSE_S if args.resizes else MOST_PAUSE_S,
            )
            result = _run(campaign, kinds, num_faults, Path(log.name))
            return {**result, **(cycles.figures(result["refused"]) if args.resizes else {})}


def _drawn_kinds(args: argparse.Namespace, drawn: random.Random) -> list[tuple[str, Fault]]:
    """Return the faults of `--kinds`, or those that `--random` draws."""
    faults = _possible(args)
    names = args.kinds.split(",") if args.kinds else list(faults)
    if unknown := [name for name in names if name not in faults]:
        raise BenchServiceError(f"--kinds has {', '.join(unknown)}; possible are {', '.join(faults)}")
    # More than needed, because a kind that is left out once is not injected again.
    drawn_names = drawn.choices(names, k=_MOST_DRAWN * args.random) if args.random else names
    return [(name, faults[name]) for name in drawn_names]


def _possible(args: argparse.Namespace) -> dict[str, Fault]:
    """Return the kinds of faults that these options permit. Print those that are left out."""
    faults = {**FAULTS, **OF_RESIZES, **OF_TIERS, **OF_NODES}
    reasons: dict[str, str] = {}
    if not args.tiers:
        reasons |= dict.fromkeys([*OF_TIERS, *OF_NODES], "the service has no tiers (--tiers)")
    elif args.nodes == 1:
        reasons |= dict.fromkeys(OF_NODES, "all ranks share the memory of one node (--nodes 2)")
    if args.pools or args.nodes == 2:
        reasons |= dict.fromkeys(OF_RESIZES, "the service has pools or nodes")
    if args.fronts == 1:
        reasons[KILL_A_FRONT] = "the service has one front (--fronts)"
    if args.nodes == 2:
        reasons[SUPERVISOR] = "a torchrun ends with its first worker"
    for kind, reason in reasons.items():
        print(f"   {kind}: left out, because {reason}")
    return {kind: fault for kind, fault in faults.items() if kind not in reasons}


def _service(
    args: argparse.Namespace,
    model: Path,
    num_ranks: int,
    flags: list[str],
    orders: FaultOrders,
    log: IO[bytes],
) -> Server:
    """Start the service on one node, or on two. Each node has its own folder on the disk."""
    folders = [orders.disk / str(node) for node in range(args.nodes)]
    orders.disk.mkdir()
    own = [[*flags, *(_tier_flags(args, model, folder) if args.tiers else ())] for folder in folders]
    if args.nodes == 2:
        over_tcp = [[*flags, "--all2all-backend=gloo"] for flags in own]  # so that ranks need their links
        return TwoNodes(str(model), num_ranks // 2, over_tcp, log, environment=orders.environment)
    [single] = own
    ranks = [] if args.pools else [f"--data-parallel-size={num_ranks}"]
    return Service(str(model), [*ranks, *single], log, environment=orders.environment)


def _tier_flags(args: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """Return flags for tiers below a KV cache that holds little more than the open requests. Host memory holds half of that."""
    tokens = _PROMPT_TOKENS + args.tokens + BLOCK_TOKENS
    token_bytes = sum(shape.token_bytes for shape in read_model(model, on_gpu=False, float_bytes=None).shapes)
    cache_bytes = token_bytes * tokens * (args.open + 4)
    return [
        f"--max-model-len={2 * tokens}",
        f"--kv-cache-memory={cache_bytes}B",
        f"--kv-offloading-size={cache_bytes // 2}B",
        f"--kv-offloading-dir={folder}",
        f"--kv-offloading-disk-size={_DISK_BYTES}B",
    ]


def _run(campaign: Campaign, faults: Sequence[tuple[str, Fault]], most: int, log: Path) -> dict[str, Any]:
    try:
        return asyncio.run(campaign.run(faults, most=most))
    except BenchServiceError as error:
        last = log.read_text(errors="replace").splitlines()[-30:]
        raise BenchServiceError("\n".join([str(error), "Last log lines:", *last])) from error


def _print_summary(result: dict[str, Any]) -> None:
    print(
        f"\n   {result['faults']} faults, {result['answers']} answers: {result['lost']} lost, {result['changed']} "
        f"changed; {result['refused']} new requests refused with 503, {result['asked_again']} cut-off "
        f"requests retried with their key; {result['moves']:g} moves, {result['hand_overs']:g} of them hand-overs; "
        f"{result['accepted_drafts']:g} draft tokens accepted; {result['tier_faults']:g} damaged records found; of {result['flips']} records changed in transit, "
        f"{result['unseen_flips']} were not noticed"
    )
    for what in ("waits_s", "first_token_s", "usual_gaps_s", "load", *_OF_RESIZES):
        if what in result:
            print(f"   {what}: {result[what]}")
    for kind, times in result["kinds"].items():
        told = ", ".join(
            f"{what} p50 {spread['p50']:.2f}, p99 {spread['p99']:.2f}"
            for what, spread in (
                ("seen after", times["detected_s"]),
                ("streams pause", times["pauses_s"]),
                ("cut off for", times["cut_off_s"]),
                ("first token after", times["first_token_s"]),
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
    for kind, num_late in result["late"].items():
        print(f"   LATE: {num_late} streams paused for more than {result['most_pause_s']:.2f} s after {kind}")
    for name, (first, last) in result["left_behind"].items():
        print(f"   LEFT BEHIND: {name} {first:g} -> {last:g}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
