"""The flags of `wideep simulate`; `run` runs it. It has no heavy imports, because `wideep --help` needs it.

The options of the service (ranks, lengths, limits, memory) come from the table of options, with the same names, aliases
and checks.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.options.command import PLANNING, Command, run_named
from server.options.flag import OptionsError, add_flags, number, whole
from server.options.reading import nearest
from server.options.table import OPTIONS, ROUTER_NAMES
from server.tools.bench.flags import objectives

TRANSFER_TOKENS_PER_S = 200_000.0  # of a hand-over, from host memory to a rank
PLACEMENT_NAMES = ("linear", "even", "repair")
_SERVED = (
    "data_parallel_size", "pools", "prefill_threshold", "dtype", "quantization", "eplb_config", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "target_itl_ms", "kv_cache_memory", "kv_cache_dtype", "gpu_memory_utilization", "enable_prefix_caching",
)  # fmt: skip
_OF_A_ROOFLINE = ("dtype", "quantization", "kv_cache_memory", "kv_cache_dtype", "gpu_memory_utilization")
SERVED_OPTIONS = tuple(option for option in OPTIONS if option.keyword in _SERVED)
_EXAMPLE = """\
examples:
  wideep simulate conv.csv --model ./DeepSeek-V3/config.json --device h200 -dp 256 --rate-scale 20 --slo ttft:2000,tpot:50
  wideep simulate mooncake.jsonl --model ./Qwen3-235B-A22B --device h100 -dp 16 --routers all --placements all --hours 0.5
  wideep simulate conv.csv --calibrate http://127.0.0.1:8000 --rate-scale 0.1
  wideep simulate conv.csv --model ./DeepSeek-V3/config.json --pools prefill:32,decode:96
routers:
  prefix       as in the service: fewest outstanding tokens plus prompt tokens that the rank does not hold
  fewest       fewest outstanding tokens
  round-robin  one rank after the other
placements of experts:
  linear       in order, no redundant experts
  even         redundant experts, a new plan at every decision, tokens split evenly among copies (as in DeepSeek's EPLB)
  repair       as in the service: first new shares, then a few moves if they are worthwhile
"""
_POSITIVE = number(lambda given: 0 < given < math.inf, "above 0")
_SECONDS = number(lambda given: 1 <= given <= 1e6, "1 to 1000000")
_SIGMA = number(lambda given: 0 <= given <= 10, "0 to 10")
_SEED = whole(0)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="file of requests: Azure's CSV or Mooncake's JSON lines"
    )
    times = parser.add_argument_group("step times")
    times.add_argument(
        "--model", type=Path, metavar="MODEL", help="directory of a model, or a single config.json"
    )
    times.add_argument("--device", metavar="NAME", help="device, as in `wideep size` (default: h100)")
    times.add_argument(
        "--calibrate", metavar="URL", help="take step times, caches and limits from a running service"
    )
    times.add_argument(
        "--calibrate-seconds", default="30", metavar="S", help="seconds to measure (default: %(default)s)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate-scale", default="1", metavar="X", help="factor for the request rate (default: 1)"
    )
    load.add_argument("--duration", metavar="S", help="seconds of arrivals; a shorter trace is repeated")
    load.add_argument("--hours", metavar="H", help="the same in hours (default: the trace once)")
    load.add_argument(
        "--slo", type=objectives, default="ttft:2000,tpot:50", metavar="NAME:MS,...",
        help="limits of a good request in milliseconds: ttft, tpot, e2e (default: %(default)s)",
    )  # fmt: skip
    compared = parser.add_argument_group("compare")
    compared.add_argument(
        "--routers", default="prefix", metavar="NAME,...", help="routers, or all (default: %(default)s)"
    )
    compared.add_argument(
        "--placements", default="repair", metavar="NAME,...", help="placements, or all (default: %(default)s)"
    )
    compared.add_argument(
        "--transfer-rate", metavar="N",
        help=f"tokens per second that a hand-over between pools loads (default: {TRANSFER_TOKENS_PER_S:,.0f})",
    )  # fmt: skip
    experts = parser.add_argument_group("load of experts")
    experts.add_argument(
        "--expert-load",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="recorded windows, in the formats of `wideep experts simulate`",
    )
    experts.add_argument(
        "--expert-skew",
        default="0.7",
        metavar="SIGMA",
        help="without --expert-load, sigma of lognormal loads; 0 makes experts equal (default: %(default)s)",
    )
    experts.add_argument(
        "--expert-drift", default="0.1", metavar="SIGMA",
        help="sigma of the lognormal change from window to window (default: %(default)s)",
    )  # fmt: skip
    experts.add_argument(
        "--load-window", default="600", metavar="S", help="duration of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", default="0", metavar="N", help="seed of all random numbers (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(
        parser, SERVED_OPTIONS, {"data_parallel_size": 8, "eplb_config": "one redundant expert per rank"}
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options on the command line.

    Attributes:
        served: Flags of a service, by keyword.
        duration_s: Seconds of arrivals. None serves the trace once.
        slo_ms: Limits by name.
    """

    trace: Path
    model: Path | None  # either this or `calibrate` is given
    calibrate: str | None
    device: str
    served: Mapping[str, Any]
    calibrate_s: float
    rate_scale: float
    duration_s: float | None
    slo_ms: Mapping[str, float]
    routers: tuple[str, ...]
    placements: tuple[str, ...]
    transfer_tokens_per_s: float
    expert_load: tuple[Path, ...]
    expert_skew: float
    expert_drift: float
    load_window_s: float
    seed: int

    @property
    def says_redundancy(self) -> bool:
        """Return whether --eplb-config has num_redundant_experts."""
        return '"num_redundant_experts"' in str(self.served.get("eplb_config", ""))

    @classmethod
    def of(cls, args: argparse.Namespace) -> "SimulateOptions":
        """Read and check the options.

        Raises:
            OptionsError: An option is invalid; the message names the flag, the value and the allowed values.
        """
        served = {name: vars(args)[name] for name in _SERVED if name in vars(args)}
        _check_times(args, served)
        return cls(
            trace=args.trace,
            model=args.model,
            calibrate=args.calibrate,
            device=args.device or "h100",
            served=served,
            calibrate_s=_SECONDS("--calibrate-seconds", args.calibrate_seconds),
            rate_scale=_POSITIVE("--rate-scale", args.rate_scale),
            duration_s=_duration_s(args),
            slo_ms=args.slo,
            routers=_names("--routers", args.routers, ROUTER_NAMES),
            placements=_names("--placements", args.placements, PLACEMENT_NAMES),
            transfer_tokens_per_s=(
                TRANSFER_TOKENS_PER_S
                if args.transfer_rate is None
                else _POSITIVE("--transfer-rate", args.transfer_rate)
            ),
            expert_load=tuple(args.expert_load or ()),
            expert_skew=_SIGMA("--expert-skew", args.expert_skew),
            expert_drift=_SIGMA("--expert-drift", args.expert_drift),
            load_window_s=_SECONDS("--load-window", args.load_window),
            seed=_SEED("--seed", args.seed),
        )


def _check_times(args: argparse.Namespace, served: Mapping[str, Any]) -> None:
    """Refuse flags that give no source of step times, or two."""
    if (args.model is None) == (args.calibrate is None):
        raise OptionsError(
            "give --model, for step times from a roofline, or --calibrate, from a running service"
        )
    if args.calibrate is None:
        return
    if args.device is not None:
        raise OptionsError("--device is for a roofline; leave it out with --calibrate")
    for option in SERVED_OPTIONS:
        if option.keyword in _OF_A_ROOFLINE and option.keyword in served:
            raise OptionsError(
                f"{option.flag.names[0]} is for a roofline; with --calibrate the running service determines it: leave it out"
            )


def _duration_s(args: argparse.Namespace) -> float | None:
    if args.duration is not None and args.hours is not None:
        raise OptionsError("--duration and --hours set the same value; give one of them")
    if args.duration is None and args.hours is None:
        return None
    return float(
        3600 * _POSITIVE("--hours", args.hours)
        if args.duration is None
        else _POSITIVE("--duration", args.duration)
    )


def _names(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of names, without repetitions."""
    names = known if text == "all" else tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for name in names:
        if name not in known:
            raise OptionsError(
                f"{flag}: {name!r} is unknown{nearest(name, known)}; give some of {', '.join(known)}, or all"
            )
    return names


def _prepare(args: argparse.Namespace) -> tuple[Any, ...]:
    if not args.trace.is_file():
        raise OptionsError(f"the trace {args.trace} is not a file")
    return (run_named("server.tools.size.inputs:resolve_inputs", args),)


SIMULATE = Command(
    name="simulate",
    help="simulate a service of many ranks on a request trace: latencies, goodput, waits, caches",
    description="Serve a trace in simulated time with the real router, schedulers, lock-step and placement, and with "
    "step times from a roofline or measured on a running service. 8 to 1,024 ranks on one core.",
    examples=_EXAMPLE,
    add_flags=_add_flags,
    group=PLANNING,
    prepare=_prepare,
    run="server.tools.simulate.run:run_simulate",
    needs_transformers=True,
)
