"""The flags of `wideep bench` and their checks; `run_bench` runs it. It has no heavy imports, because `wideep --help` needs it."""

import argparse
import json
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from server.clients.url_flag import add_url
from server.options.command import USING, Command
from server.options.flag import OptionsError

OBJECTIVES = ("ttft", "tpot", "e2e")  # allowed in --slo, in milliseconds
STDOUT = "-"
DEFAULT_LEVELS = "1,4,16"
DEFAULT_TOKENS = {"prompt": 128, "output": 64}
OPEN_DURATION_S = 60.0  # of an open loop without another limit
REQUESTS_PER_CLIENT, LEAST_REQUESTS = 4, 10  # of a closed loop without another limit
_MOST_CLIENTS = 1 << 14
_OWN_FIELDS = (
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "n",
)
_EXAMPLES = """\
examples:
  wideep bench http://127.0.0.1:8000                            1, 4 and 16 clients
  wideep bench http://127.0.0.1:8000 --rate 1,2,4 --duration 60 --slo ttft:2000,tpot:50 --plot rates.png
  wideep bench http://127.0.0.1:8000 --trace conversations.csv --num-requests 200 --trace-scale 0.5,1,2 --ignore-eos

docs/bench.md defines the figures. Ctrl-C ends the run and keeps the measurements so far.
"""


class Load(StrEnum):
    """The meaning of a level's number; the values are the names of the flags."""

    CONCURRENCY = "concurrency"  # clients
    RATE = "rate"  # requests per second
    TRACE = "trace-scale"  # factor for a trace's own rate


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Checked options of a measurement."""

    url: str
    api_keys: tuple[str, ...]
    model: str | None
    is_chat: bool
    load: Load
    levels: tuple[float, ...]
    trace: Path | None
    token_scale: float
    num_requests: int | None
    duration_s: float | None
    num_warmup: int
    prompts: Path | None
    prompt_tokens: int | None  # None for a trace's lengths, or for whole prompts
    output_tokens: int  # ignored with a trace
    tokenizer: str | None
    ignore_eos: bool
    extra_body: dict[str, Any]
    counts_chunks: bool
    seed: int
    objectives: dict[str, float]  # milliseconds by name
    json_to: str | None  # a file, or STDOUT
    plot_to: Path | None

    @property
    def is_cut(self) -> bool:
        """Return whether prompts are cut to a number of tokens."""
        return self.trace is not None or self.prompt_tokens is not None

    @property
    def cuts_while_measuring(self) -> bool:
        """Return whether the service tokenizes chat prompts during the measurement, because their number is not known before."""
        is_open_ended = (
            self.load is Load.CONCURRENCY and self.duration_s is not None and self.num_requests is None
        )
        return is_open_ended and self.is_chat and self.is_cut and self.tokenizer is None


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add = parser.add_argument
    add("--model", metavar="NAME", help="name of the served model (default: the first)")
    add("--api-key", metavar="KEY", help="API key (default: WIDEEP_API_KEY, then OPENAI_API_KEY)")
    add(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="endpoint to measure (default: %(default)s)",
    )
    _add_load_flags(parser.add_argument_group("the load"))
    _add_request_flags(parser.add_argument_group("the requests"))
    _add_result_flags(parser.add_argument_group("the results"))


def _add_load_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        metavar="N,N",
        help=f"closed loop: numbers of concurrent clients (default: {DEFAULT_LEVELS})",
    )
    add("--rate", metavar="R,R", help="open loop: requests per second, with Poisson arrivals")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths, shared prefixes and arrival times from a trace (Azure's CSV, Mooncake's JSON lines)",
    )
    add(
        "--trace-scale",
        metavar="X,X",
        help="factors for a trace's own rate: 2 is twice as many requests per second (default: 1)",
    )
    add("--num-requests", type=whole, metavar="N", help="number of requests per level")
    add("--duration", type=positive, metavar="S", help="seconds during which each level sends requests")
    add(
        "--warmup",
        type=whole_or_none,
        default=0,
        metavar="N",
        help="number of uncounted requests before each level (default: 0)",
    )


def _add_request_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts as JSON lines or text (default: Python's documentation); sent whole unless a length is given",
    )
    add("--prompt-tokens", type=whole, metavar="N", help="tokens per prompt (default: 128 without --prompts)")
    add("--output-tokens", type=whole, metavar="N", help="maximum number of tokens per answer (default: 64)")
    add(
        "--token-scale",
        type=positive,
        metavar="X",
        help="factor for the lengths in a trace, for a small machine (default: 1)",
    )
    add(
        "--tokenizer",
        metavar="DIRECTORY",
        help="directory of the checkpoint's tokenizer, for cutting prompts (default: the service's /tokenize)",
    )
    add("--ignore-eos", action="store_true", help="generate max_tokens in every answer")
    add(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="additional fields of every request, such as '{\"temperature\": 0}'",
    )
    add("--seed", type=whole_or_none, default=0, metavar="N", help="seed of the random load (default: 0)")


def _add_result_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--slo",
        type=objectives,
        default={},
        metavar="NAME:MS,...",
        help="count requests within these limits in milliseconds: ttft, tpot, e2e, such as ttft:2000,tpot:50",
    )
    add(
        "--count-chunks",
        action="store_true",
        help="request the number of tokens per chunk (continuous_usage_stats), for exact ITL with drafts",
    )
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="write figures as JSON, to FILE or stdout")
    add("--plot", type=Path, metavar="FILE", help="plot latency over throughput: .png, .svg or .pdf")


def bench_options_from(args: argparse.Namespace) -> BenchOptions:
    """Check the flags together.

    Raises:
        OptionsError: A flag is invalid; the message names it.
    """
    load, levels = _levels(args)
    _check_lengths(args)
    _check_files(args)
    if "@" in args.url.rpartition("://")[2].partition("/")[0]:
        raise OptionsError("user names and passwords in the URL are not sent; give the key with --api-key")
    if own := [name for name in args.extra_body if name in _OWN_FIELDS]:
        raise OptionsError(
            f"--extra-body has {', '.join(own)}, which other flags set (--model, --output-tokens, --count-chunks); "
            "a request always has one streamed choice"
        )
    duration_s = args.duration
    if load is Load.RATE and duration_s is None and args.num_requests is None:
        duration_s = OPEN_DURATION_S
    prompt_tokens = args.prompt_tokens
    if prompt_tokens is None and args.prompts is None and args.trace is None:
        prompt_tokens = DEFAULT_TOKENS["prompt"]
    return BenchOptions(
        url=args.url,
        api_keys=(args.api_key,) if args.api_key else (),
        model=args.model,
        is_chat=args.endpoint == "chat",
        load=load,
        levels=levels,
        trace=args.trace,
        token_scale=args.token_scale or 1.0,
        num_requests=args.num_requests,
        duration_s=duration_s,
        num_warmup=args.warmup,
        prompts=args.prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=args.output_tokens or DEFAULT_TOKENS["output"],
        tokenizer=args.tokenizer,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        counts_chunks=args.count_chunks,
        seed=args.seed,
        objectives=args.slo,
        json_to=args.json,
        plot_to=args.plot,
    )


def _levels(args: argparse.Namespace) -> tuple[Load, tuple[float, ...]]:
    """Return the kind of load, and its levels."""
    if args.concurrency is not None and args.rate is not None:
        raise OptionsError("--concurrency and --rate are different loads; give one of them")
    if args.trace_scale is not None and (args.trace is None or args.concurrency or args.rate):
        raise OptionsError(
            "--trace-scale scales a trace's own arrival times; use it with --trace FILE and without another load"
        )
    if args.rate is not None:
        return Load.RATE, _numbers("--rate", args.rate)
    if args.trace is not None and args.concurrency is None:
        return Load.TRACE, _numbers("--trace-scale", "1" if args.trace_scale is None else args.trace_scale)
    clients = _numbers("--concurrency", DEFAULT_LEVELS if args.concurrency is None else args.concurrency)
    for each in clients:
        if each != int(each) or each > _MOST_CLIENTS:
            raise OptionsError(f"--concurrency has {each:g}; give whole numbers from 1 to {_MOST_CLIENTS}")
    return Load.CONCURRENCY, clients


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    """Read numbers above 0."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < each < math.inf for each in values):
        raise OptionsError(f"{flag} is {text!r}; give numbers above 0, separated by commas")
    return values


def _check_lengths(args: argparse.Namespace) -> None:
    """Refuse lengths that would be ignored."""
    if args.trace is not None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise OptionsError(
                    f"{flag} applies to a load without a trace; --token-scale scales a trace's lengths"
                )
    elif args.token_scale is not None:
        raise OptionsError("--token-scale scales the lengths in a trace; give --trace")
    elif args.tokenizer is not None and args.prompts is not None and args.prompt_tokens is None:
        raise OptionsError(
            "--tokenizer cuts prompts, but without --prompt-tokens the prompts of --prompts are sent whole"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Refuse files that cannot be read, and output files in missing folders."""
    for flag, path in (("--trace", args.trace), ("--prompts", args.prompts)):
        if path is not None and not path.is_file():
            raise OptionsError(f"{flag} {path} is not a file")
    if args.json is not None and ("://" in args.json or re.fullmatch(r"[\w.-]+:\d+", args.json)):
        raise OptionsError(
            f"--json {args.json} would be a file name; put the URL first: wideep bench URL --json"
        )
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path not in (None, STDOUT) and not Path(path).absolute().parent.is_dir():
            raise OptionsError(f"{flag} {path} is in a folder that does not exist")


def objectives(text: str) -> dict[str, float]:
    """Read --slo: milliseconds by name, as in ttft:2000,tpot:50."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, colon, most = part.partition(":")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        if name not in OBJECTIVES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not an objective; use {', '.join(OBJECTIVES)}, such as ttft:2000"
            )
        try:
            found[name] = float(most)
        except ValueError:
            found[name] = math.nan
        if not (colon and 0 < found[name] < math.inf):
            raise argparse.ArgumentTypeError(
                f"{part!r} must be a name and milliseconds above 0, such as {name}:2000"
            )
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be an object, such as {{"temperature": 0}}')
    return value


def whole(text: str) -> int:
    """Read a whole number above 0."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def whole_or_none(text: str) -> int:
    """Read a whole number of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


BENCH = Command(
    name="bench",
    help="measure a service's throughput and latency under load",
    description="Put a load on a service with OpenAI's endpoints, and measure throughput and latency.",
    examples=_EXAMPLES,
    usage="wideep bench [URL] [FLAGS]",
    add_flags=_add_flags,
    group=USING,
    run="server.tools.bench.run:run_bench",
)
