"""The flags of `wideep autoscale`; `run` runs it. It has no heavy imports, because `wideep --help` needs it."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from server.clients.url_flag import add_url
from server.options.command import USING, Command
from server.options.flag import OptionsError

_EXAMPLES = """\
examples:
  wideep autoscale --dry-run                      what it would have done in the last hour
  wideep autoscale --dry-run --target-ttft-ms 2000 --max-ranks 8
  wideep autoscale --min-ranks 2 --max-ranks 8    resize the service from now on
"""


def _number(is_allowed: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and is_allowed(value)):
            raise argparse.ArgumentTypeError(f"{text!r} must be {allowed}")
        return value

    return read


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of ranks of at least 1")
    return int(text)


_SHARE = _number(lambda value: 0 < value <= 1, "a number above 0 and at most 1")
_MARGIN = _number(lambda value: 0 <= value < 1, "a number from 0 to below 1")
_ABOVE_0 = _number(lambda value: value > 0, "a number above 0")
_SECONDS = _number(lambda value: value >= 0, "a number of seconds of at least 0")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_url(parser)
    add("--dry-run", action="store_true", help="change nothing: print the decisions for the last hour")
    add(
        "--min-ranks",
        type=_ranks,
        default=1,
        metavar="N",
        help="smallest number of ranks (default: %(default)s)",
    )
    add(
        "--max-ranks", type=_ranks, default=16, metavar="N",
        help="largest number of ranks, if the service accepts it (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-step", type=_ranks, default=4, metavar="N",
        help="most ranks to add or remove at once (default: %(default)s)",
    )  # fmt: skip
    add(
        "--target-use", type=_SHARE, default=0.7, metavar="SHARE",
        help="share of the seats (--max-num-seqs of each rank) and of the KV cache to use (default: %(default)g)",
    )  # fmt: skip
    add(
        "--target-wait-ms", type=_ABOVE_0, default=5000.0, metavar="MS",
        help="longest predicted wait for the first step of a request (default: %(default)g)",
    )  # fmt: skip
    add(
        "--target-ttft-ms",
        type=_ABOVE_0,
        metavar="MS",
        help="time to the first token that 99 %% of requests should meet (default: none)",
    )
    add(
        "--target-itl-ms",
        type=_ABOVE_0,
        metavar="MS",
        help="time between tokens that 99 %% of tokens should meet (default: none)",
    )
    add(
        "--margin", type=_MARGIN, default=0.2, metavar="SHARE",
        help="share of a smaller number of ranks that must stay free, so that sizes do not alternate (default: %(default)g)",
    )  # fmt: skip
    add(
        "--up-after", type=_SECONDS, default=30.0, metavar="SECONDS",
        help="grow if the ranks were too few for this long, and no sooner after a change (default: %(default)g)",
    )  # fmt: skip
    add(
        "--down-after", type=_SECONDS, default=300.0, metavar="SECONDS",
        help="shrink if fewer ranks were enough for this long, and no sooner after a change (default: %(default)g)",
    )  # fmt: skip
    add("--json", action="store_true", help="print JSON; without --dry-run, one line per decision")


def _prepare(args: argparse.Namespace) -> tuple[Any, ...]:
    if args.min_ranks > args.max_ranks:
        raise OptionsError(
            f"--min-ranks is {args.min_ranks}, which is more than --max-ranks, {args.max_ranks}"
        )
    return (args,)


AUTOSCALE = Command(
    name="autoscale",
    group=USING,
    help="resize a service with its load, or show what that would have done",
    description="Change the number of ranks of a running service with its load, until interrupted.\nWith --dry-run, change nothing, "
    "and print the decisions for the last hour.",
    examples=_EXAMPLES,
    add_flags=_add_flags,
    prepare=_prepare,
    run="server.clients.autoscale.run:run_autoscale",
)
