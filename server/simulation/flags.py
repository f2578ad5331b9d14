"""The flags of `wideep simulate`; `run` runs it. Nothing heavy is imported here, because `wideep --help` needs it.

What a service is started with (ranks, lengths, limits, memory) comes from the table of options, so that these flags have
their names, aliases and checks here too.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.clients.bench.flags import objectives
from server.options.flag import OptionsError, add_flags, number, whole
from server.options.reading import nearest
from server.options.table import OPTIONS, ROUTER_NAMES

PLACEMENT_NAMES = ("linear", "even", "repair")
_SERVED = (
    "data_parallel_size", "dtype", "quantization", "eplb_config", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "target_itl_ms", "kv_cache_memory", "gpu_memory_utilization", "enable_prefix_caching",
)  # fmt: skip
SERVED_OPTIONS = tuple(option for option in OPTIONS if option.keyword in _SERVED)
_EXAMPLE = """\
examples:
  wideep simulate conv.csv --model ./DeepSeek-V3/config.json --device h200 -dp 256 --rate-scale 20 --slo ttft:2000,tpot:50
  wideep simulate mooncake.jsonl --model ./Qwen3-235B-A22B --device h100 -dp 16 --routers all --placements all --hours 0.5
  wideep simulate conv.csv --calibrate http://127.0.0.1:8000 --rate-scale 0.1
routers:
  prefix       what the service does: outstanding tokens less the prefix that a rank holds
  fewest       outstanding tokens alone
  round-robin  one rank after the other
placements of experts:
  linear       in order, no redundant experts
  even         redundant experts, planned anew at every decision, copies share evenly (as DeepSeek's EPLB)
  repair       what the service does: other shares, then few moves, where they pay
"""
_POSITIVE = number(lambda given: given > 0, "above 0")
_NOT_NEGATIVE = number(lambda given: given >= 0, "0 or more")
_SEED = whole(0)


def add_simulate_parser(commands: Any) -> None:
    """Add `simulate` to the command line's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="what a service of many ranks would make of a trace of requests: latencies, goodput, waits, caches",
        description="Serve a trace in simulated time: the real router, schedulers, lock-step and placement, with step "
        "times from a roofline or measured on a running service. 8 to 1,024 ranks on one core.",
        epilog=_EXAMPLE,
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="requests: Azure's CSV or Mooncake's JSON lines"
    )
    times = parser.add_argument_group("step times")
    times.add_argument(
        "--model", type=Path, metavar="MODEL", help="a model's directory, or a config.json alone"
    )
    times.add_argument("--device", metavar="NAME", help="of the ranks, as in `wideep size` (default: h100)")
    times.add_argument(
        "--calibrate", metavar="URL", help="take step times, caches and limits from a running service"
    )
    times.add_argument(
        "--calibrate-seconds", default="30", metavar="S", help="watch it for so long (default: %(default)s)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate-scale", default="1", metavar="X", help="so many times as many requests (default: 1)"
    )
    load.add_argument("--duration", metavar="S", help="seconds of arrivals; a shorter trace is repeated")
    load.add_argument("--hours", metavar="H", help="likewise, in hours (default: the trace once)")
    load.add_argument(
        "--slo", type=objectives, default="ttft:2000,tpot:50", metavar="NAME:MS,...",
        help="what a good request keeps to; names: ttft, tpot, e2e (default: %(default)s)",
    )  # fmt: skip
    compared = parser.add_argument_group("compare")
    compared.add_argument(
        "--routers", default="prefix", metavar="NAME,...", help="or all (default: %(default)s)"
    )
    compared.add_argument(
        "--placements", default="repair", metavar="NAME,...", help="or all (default: %(default)s)"
    )
    experts = parser.add_argument_group("load of experts")
    experts.add_argument(
        "--expert-load",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="recorded windows, as `wideep experts simulate` takes",
    )
    experts.add_argument(
        "--expert-skew",
        default="0.7",
        metavar="SIGMA",
        help="else drawn, lognormal over experts; 0: all alike (default: %(default)s)",
    )
    experts.add_argument(
        "--expert-drift", default="0.1", metavar="SIGMA",
        help="of it from window to window, lognormal (default: %(default)s)",
    )  # fmt: skip
    experts.add_argument(
        "--load-window", default="600", metavar="S", help="length of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", default="0", metavar="N", help="of all that is drawn (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, SERVED_OPTIONS, {})


class SimulateOptions:
    """The command line, read.

    Attributes:
        served: flags of a service, by keyword.
        duration_s: None: the trace once.
        slo_ms: bounds by name.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Read.

        Raises:
            OptionsError: naming the flag, the value seen and the values allowed.
        """
        self.trace: Path = args.trace
        self.model: Path | None = args.model
        self.calibrate: str | None = args.calibrate
        if (self.model is None) == (self.calibrate is None):
            raise OptionsError(
                "give --model, for step times from a roofline, or --calibrate, from a running service"
            )
        if self.calibrate is not None and args.device is not None:
            raise OptionsError("--device says what a roofline is of; with --calibrate leave it out")
        self.device: str = args.device or "h100"
        self.served: Mapping[str, Any] = {name: vars(args)[name] for name in _SERVED if name in vars(args)}
        self.calibrate_s: float = _POSITIVE("--calibrate-seconds", args.calibrate_seconds)
        self.rate_scale: float = _POSITIVE("--rate-scale", args.rate_scale)
        if args.duration is not None and args.hours is not None:
            raise OptionsError("--duration and --hours say the same; give one of them")
        self.duration_s: float | None = None
        if args.duration is not None:
            self.duration_s = _POSITIVE("--duration", args.duration)
        elif args.hours is not None:
            self.duration_s = 3600 * _POSITIVE("--hours", args.hours)
        self.slo_ms: dict[str, float] = args.slo
        self.routers = _names("--routers", args.routers, ROUTER_NAMES)
        self.placements = _names("--placements", args.placements, PLACEMENT_NAMES)
        self.expert_load: list[Path] = args.expert_load or []
        self.expert_skew: float = _NOT_NEGATIVE("--expert-skew", args.expert_skew)
        self.expert_drift: float = _NOT_NEGATIVE("--expert-drift", args.expert_drift)
        self.load_window_s: float = _POSITIVE("--load-window", args.load_window)
        self.seed: int = _SEED("--seed", args.seed)


def _names(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of names, each once."""
    names = known if text == "all" else tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for name in names:
        if name not in known:
            raise OptionsError(
                f"{flag}: {name!r} is none{nearest(name, known)}; there are {', '.join(known)}, and all for all of them"
            )
    return names
