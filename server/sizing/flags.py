"""The flags of `wideep size`; `size` runs it. Nothing heavy is imported here, because `wideep --help` needs it.

What a service is started with (ranks, lengths, limits, memory) comes from the table of options, so that these flags have
their names, aliases and checks here too.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.options.flag import OptionsError, add_flags, number, tokens, whole
from server.options.table import OPTIONS

_SERVED = (
    "data_parallel_size", "dtype", "quantization", "enable_eplb", "eplb_config", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_memory", "gpu_memory_utilization", "mamba_cache_mode",
)  # fmt: skip
SERVED_OPTIONS = tuple(option for option in OPTIONS if option.keyword in _SERVED)
_EXAMPLE = """\
examples:
  wideep size ./DeepSeek-V3/config.json --device h200 -dp 16 --users 1024 --input 2000 --output 1000
  wideep size ./Qwen3-235B-A22B --device h100 --users 64 --tpot-ms 50 --ttft-ms 2000
  wideep size ./model --device this
  wideep size --published
"""
_POSITIVE = number(lambda given: 0 < given < math.inf, "above 0")
_USERS = whole(1)
_LENGTH = tokens(1)


def add_size_parser(commands: Any) -> None:
    """Add `size` to the command line's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "size",
        help="what a model takes and gives on some devices: memory, times, tokens per second, ranks, flags",
        description="Say of a model and a device, before anything is rented or loaded: what fits, what a step takes, how "
        "many ranks a target needs, whether expert parallelism pays, and which flags to use. From config.json alone.",
        epilog=_EXAMPLE,
    )
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="a model's directory, or a config.json alone"
    )
    parser.add_argument(
        "--device", default="this", metavar="NAME",
        help="h100, h200, h800, b200, gb200, gb300, mi300x, cpu and others, or this, which measures the processor of this "
        "machine (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--users", "--max-concurrency", metavar="N", help="requests at any time (default: what fits)"
    )
    parser.add_argument(
        "--input", "--input-len", "--random-input-len", default="1000", metavar="TOKENS", help="of a prompt (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--output", "--output-len", "--random-output-len", default="250", metavar="TOKENS",
        help="of an answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--tpot-ms", metavar="MS", help="target: time per output token, on average")
    parser.add_argument("--ttft-ms", metavar="MS", help="target: time to the first token, on average")
    parser.add_argument(
        "--published", action="store_true", help="published deployments, each beside what is foretold of it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    # Other names of what the table has, for who says what they want and not how it is served.
    parser.add_argument(
        "--ranks", dest="data_parallel_size", default=argparse.SUPPRESS, metavar="N", help="as -dp"
    )
    parser.add_argument(
        "--context",
        dest="max_model_len",
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="as --max-model-len",
    )
    add_flags(parser, SERVED_OPTIONS, {})


def served_keywords(args: argparse.Namespace) -> Mapping[str, Any]:
    """What the command line says of a service, by keyword."""
    return {name: vars(args)[name] for name in _SERVED if name in vars(args)}


class SizeOptions(NamedTuple):
    """What else it says, read.

    Attributes:
        users: None: as many as there is room for.
        tpot_s, ttft_s: targets; None: there is none.
    """

    users: int | None
    input_tokens: int
    output_tokens: int
    tpot_s: float | None
    ttft_s: float | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> "SizeOptions":
        """Read it.

        Raises:
            OptionsError: naming the flag, the value seen and the values allowed.
        """
        if args.model is None and not args.published:
            raise OptionsError("MODEL is missing; give a model's directory or a config.json, or --published")
        return cls(
            users=None if args.users is None else _USERS("--users", args.users),
            input_tokens=_LENGTH("--input", args.input),
            output_tokens=_LENGTH("--output", args.output),
            tpot_s=None if args.tpot_ms is None else _POSITIVE("--tpot-ms", args.tpot_ms) / 1000,
            ttft_s=None if args.ttft_ms is None else _POSITIVE("--ttft-ms", args.ttft_ms) / 1000,
        )
