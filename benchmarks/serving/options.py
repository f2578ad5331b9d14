"""Options of `benchmarks.serve` as one frozen value."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.serving.transformers_peer import PeerSetting

MODELS = ("demo", "random")
REQUESTS_PER_CLIENT = 2
LEAST_REQUESTS, MOST_REQUESTS = 2, 16  # chosen so that the whole default run takes half an hour on two cores
ATTENTIONS = ("sdpa", "eager")
EXPERTS = ("grouped_mm", "eager")  # batched_mm copies every token's experts: 5 GB and minutes for a prefill


class BenchOptionsError(ValueError):
    """Invalid option; the message names the value and the values allowed."""


class ServedLayout(NamedTuple):
    """Number of ranks, and threads per rank."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"wideep {self.ranks}x{self.threads}"


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Settings of the benchmark."""

    models: tuple[str, ...]
    levels: tuple[tuple[int, int], ...]  # (concurrency, requests per round)
    rounds: int
    layouts: tuple[ServedLayout, ...]
    prompt_tokens: int
    output_tokens: int
    peer_settings: tuple[PeerSetting, ...]  # to try
    peer_threads: int
    static: bool  # also measure the peer's plain `generate`, once per level
    save: bool

    @property
    def max_num_seqs(self) -> int:
        return max(concurrency for concurrency, _ in self.levels)

    @property
    def max_model_len(self) -> int:
        """Length in whole blocks of 64 tokens, a multiple of every program's blocks."""
        return -(-(self.prompt_tokens + self.output_tokens) // 64) * 64


def parse_options(arguments: Sequence[str] | None = None) -> ServingOptions:
    """Parse the command line. `--quick` changes defaults; any flag overrides them.

    Raises:
        BenchOptionsError: Names the flag, the value seen and the values allowed.
    """
    args = _parser().parse_args(arguments)
    quick = args.quick
    models = _names("--models", args.models or ("random" if quick else "demo,random"), MODELS)
    concurrency = _numbers("--concurrency", args.concurrency or ("1,4" if quick else "1,4,16,32"))
    if args.requests_per_level is None:
        requests = tuple(_default_requests(each) for each in concurrency)
    else:
        requests = _numbers("--requests-per-level", args.requests_per_level)
    if len(requests) != len(concurrency):
        raise BenchOptionsError(
            f"--requests-per-level has {len(requests)} numbers and --concurrency {len(concurrency)}; "
            f"give one number per concurrency"
        )
    layouts = tuple(_layout(each) for each in args.ranks.split(","))
    attention = _names("--peer-attention", args.peer_attention, ATTENTIONS)
    experts = _names("--peer-experts", args.peer_experts, EXPERTS)
    batch_tokens = _numbers("--peer-batch-tokens", args.peer_batch_tokens or ("512" if quick else "512,4096"))
    (prompt_tokens,) = _numbers("--prompt-tokens", str(args.prompt_tokens))
    (output_tokens,) = _numbers("--output-tokens", str(args.output_tokens or (16 if quick else 64)))
    (rounds,) = _numbers("--rounds", str(args.rounds or (1 if quick else 3)))
    return ServingOptions(
        models=models,
        levels=tuple(zip(concurrency, requests, strict=True)),
        rounds=rounds,
        layouts=layouts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        peer_settings=tuple(
            PeerSetting(attention=a, experts=e, batch_tokens=b)
            for a in attention
            for e in experts
            for b in batch_tokens
        ),
        peer_threads=max(layout.ranks * layout.threads for layout in layouts),
        static=args.static,
        save=args.save,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description="Compare WideEP with transformers continuous batching, in a closed loop.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", metavar="NAMES", help="demo, random or both (default: both)")
    add("--concurrency", metavar="NUMBERS", help="concurrent clients (default: 1,4,16,32)")
    add("--rounds", type=int, metavar="N", help="rounds per program and level (default: 3)")
    add(
        "--requests-per-level",
        metavar="NUMBERS",
        help="requests per round, one number per concurrency (default: 2 per client up to 16, at least one per client)",
    )
    add("--ranks", default="1x2,2x1", metavar="LAYOUTS", help="ranks x threads (default: %(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--output-tokens", type=int, metavar="N", help="(default: 64)")
    add(
        "--peer-attention",
        default="sdpa",
        metavar="NAMES",
        help="sdpa, eager or both, tried at each level (default: sdpa)",
    )
    add(
        "--peer-experts",
        default="grouped_mm",
        metavar="NAMES",
        help="grouped_mm, eager or both, tried at each level (default: grouped_mm, measured 1.3 to 1.9 x eager)",
    )
    add(
        "--peer-batch-tokens",
        metavar="NUMBERS",
        help="largest numbers of tokens per step of the peer, tried at each level (default: 512,4096; ours is 512)",
    )
    add(
        "--static",
        action="store_true",
        help="also measure transformers' static `generate`, once per level (minutes if another program uses a core)",
    )
    add(
        "--quick",
        action="store_true",
        help="smoke test: random model, concurrency 1 and 4, one round of 16 tokens",
    )
    add("--save", action="store_true", help="write benchmarks/results/serve-<date>-<cpu>.json")
    return parser


def _names(flag: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise BenchOptionsError(
                f"{flag} has {name!r}; give names of {', '.join(allowed)}, separated by commas"
            )
    return names


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BenchOptionsError(f"{flag} is {text!r}; give whole numbers above 0, separated by commas")
    return tuple(map(int, parts))


def _default_requests(concurrency: int) -> int:
    return max(LEAST_REQUESTS, concurrency, min(REQUESTS_PER_CLIENT * concurrency, MOST_REQUESTS))


def _layout(text: str) -> ServedLayout:
    ranks, cross, threads = text.partition("x")
    if not (cross and ranks.isdecimal() and threads.isdecimal() and int(ranks) > 0 and int(threads) > 0):
        raise BenchOptionsError(
            f"--ranks has {text!r}; give ranks x threads such as 1x2, separated by commas"
        )
    return ServedLayout(int(ranks), int(threads))
