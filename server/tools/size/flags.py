"""The flags of `wideep size`; `size` runs it. It has no heavy imports, because `wideep --help` needs it.

The options of the service (ranks, lengths, limits, memory) come from the table of options, with the same names, aliases
and checks.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.options.command import PLANNING, Command, run_named
from server.options.flag import OptionsError, add_flags, number, tokens, whole
from server.options.table import OPTIONS

_SERVED = (
    "data_parallel_size", "pools", "dtype", "quantization", "enable_eplb", "eplb_config", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_memory", "kv_cache_dtype", "gpu_memory_utilization", "mamba_cache_mode",
    "kv_offloading_size", "kv_offloading_dir", "kv_offloading_disk_size",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules",
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="directory of a model, or a single config.json"
    )
    parser.add_argument(
        "--device", default="this", metavar="NAME",
        help="h100, h200, h800, b200, gb200, gb300, mi300x, cpu and others, or this, which measures this machine's GPU, "
        "or its processor if it has none (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--users", "--max-concurrency", metavar="N", help="concurrent requests (default: as many as fit)"
    )
    parser.add_argument(
        "--input", "--input-len", "--random-input-len", default="1000", metavar="TOKENS", help="tokens of a prompt (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--output", "--output-len", "--random-output-len", default="250", metavar="TOKENS",
        help="tokens of an answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--tpot-ms", metavar="MS", help="target: mean time per output token")
    parser.add_argument("--ttft-ms", metavar="MS", help="target: mean time to the first token")
    parser.add_argument(
        "--published", action="store_true", help="compare published deployments with their predictions"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    # Other names for flags of the table, common in sizing.
    parser.add_argument(
        "--ranks", dest="data_parallel_size", default=argparse.SUPPRESS, metavar="N", help="same as -dp"
    )
    parser.add_argument(
        "--context",
        dest="max_model_len",
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="same as --max-model-len",
    )
    add_flags(parser, SERVED_OPTIONS, {"data_parallel_size": "the fewest that fit or meet the targets"})


def served_keywords(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the service's options on the command line, by keyword."""
    return {name: vars(args)[name] for name in _SERVED if name in vars(args)}


class SizeOptions(NamedTuple):
    """The other options on the command line.

    Attributes:
        users: Number of concurrent requests. None means as many as fit.
        tpot_s, ttft_s: Targets in seconds, or None.
    """

    users: int | None
    input_tokens: int
    output_tokens: int
    tpot_s: float | None
    ttft_s: float | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> "SizeOptions":
        """Read and check the options.

        Raises:
            OptionsError: An option is invalid; the message names the flag, the value and the allowed values.
        """
        if args.model is None and not args.published:
            raise OptionsError("MODEL is missing; give a model's directory, a config.json, or --published")
        return cls(
            users=None if args.users is None else _USERS("--users", args.users),
            input_tokens=_LENGTH("--input", args.input),
            output_tokens=_LENGTH("--output", args.output),
            tpot_s=None if args.tpot_ms is None else _POSITIVE("--tpot-ms", args.tpot_ms) / 1000,
            ttft_s=None if args.ttft_ms is None else _POSITIVE("--ttft-ms", args.ttft_ms) / 1000,
        )


SIZE = Command(
    name="size",
    help="estimate memory, latency and throughput of a model on a device",
    description="Estimate a deployment before you rent or load anything: memory, step times, the ranks that a target "
    "needs, whether expert parallelism pays, and the flags to use. Needs only a config.json.",
    examples=_EXAMPLE,
    add_flags=_add_flags,
    group=PLANNING,
    prepare=lambda args: (run_named("server.tools.size.inputs:resolve_inputs", args),),
    run="server.tools.size.size:run_size",
    needs_transformers=True,
)
