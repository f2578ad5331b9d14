"""The flags of `wideep experts VERB`; `offline` and, for a running service, `live` and `change` run them.

It has no heavy imports, because `wideep --help` needs it.
"""

import argparse
from pathlib import Path
from typing import Any

from server.clients.url_flag import add_pool, add_url
from server.options.command import USING, Command

_LOADS_HELP = (
    "recorded loads in order of time: SGLang's expert distribution JSON ('logical_count'), 'load_history' JSON, "
    "or .npz with 'load'; [layers, experts] or [windows, layers, experts]"
)
_SIMULATE_EXAMPLE = """\
example:
  wideep experts simulate decode.json --ranks 32 64 --slots 288 320 --policy even shares repair
policies:
"""
_MOST_SECONDS = 604_800  # a week
POLICIES = {
    "linear": "experts in order, no copies, no moves",
    "even": "a new plan for every window, tokens split evenly among copies",
    "plan": "a new plan for every window, with shares",
    "pinned": "like plan, with the first copies of a group of experts on the group's node",
    "shares": "planned once; later only the shares change",
    "repair": "planned once; later repaired with few moves",
}
_PLAN_EXAMPLE = """\
examples:
  wideep experts plan decode.json --ranks 32 --slots 288 --out placement.json
  wideep experts plan today.json --current placement.json --max-moved 0.06 --expert-mb 44 --link-gbps 400
"""


def _load_file(text: str) -> Path:
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL; `wideep experts record {text} --out load.npz` records the load of a running service to a "
            "file, and `wideep experts apply` plans and moves its experts directly"
        )
    return Path(text)


def _add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True)
    _add_live_verbs(verbs)
    _add_change_verbs(verbs)
    for parser in (_add_simulate(verbs), _add_plan(verbs)):
        _add_rules(parser)


def _add_simulate(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb that compares policies on a recorded load."""
    lines = "".join(f"  {name:8}{what}\n" for name, what in POLICIES.items())
    simulation: argparse.ArgumentParser = verbs.add_parser(
        "simulate",
        help="compare policies, redundancy and numbers of ranks on a recorded load",
        description="Run policies over recorded windows. Each placement is evaluated on the window that it was planned for "
        "(known) and on the following one (next), also by phase if prefill and decode were recorded separately.",
        epilog=_SIMULATE_EXAMPLE + lines,
    )
    simulation.add_argument("loads", nargs="+", type=_load_file, metavar="LOADFILE", help=_LOADS_HELP)
    simulation.add_argument("--ranks", nargs="+", type=int, required=True, metavar="R", help="ranks to try")
    simulation.add_argument(
        "--slots",
        nargs="+",
        type=int,
        required=True,
        metavar="S",
        help="numbers of slots per layer, on all ranks together, to try",
    )
    simulation.add_argument(
        "--policy", nargs="+", choices=list(POLICIES), default=["even", "plan", "shares", "repair"], metavar="P",
        help="policies to compare, see below (default: even plan shares repair)",
    )  # fmt: skip
    return simulation


def _add_plan(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb that plans or repairs a placement."""
    planning: argparse.ArgumentParser = verbs.add_parser(
        "plan",
        help="plan or repair a placement, and show the expected balance",
        description="Plan a placement for a recorded load, the sum of all its windows, or repair --current. "
        "No service is involved.",
        epilog=_PLAN_EXAMPLE,
    )
    planning.add_argument("loads", nargs="+", type=_load_file, metavar="LOADFILE", help=_LOADS_HELP)
    planning.add_argument("--ranks", type=int, metavar="R", help="ranks (default: those of --current)")
    planning.add_argument("--slots", type=int, metavar="S", help="slots per layer, on all ranks together")
    planning.add_argument("--current", type=Path, metavar="FILE", help="placement to repair")
    planning.add_argument("--out", type=Path, metavar="FILE", help="file to write the placement to, as JSON")
    planning.add_argument("--expert-mb", type=float, metavar="MB", help="size of one expert, 10^6 bytes")
    planning.add_argument(
        "--link-gbps", type=float, metavar="GBPS", help="rate of a rank's link, 10^9 bits/s"
    )
    return planning


def _seconds(text: str) -> float:
    """Read a flag's value in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most {_MOST_SECONDS} seconds")
    return value


def _rows(text: str) -> int:
    """Read a flag's number of rows."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _add_live_verbs(verbs: Any) -> None:
    """Add the verbs that query a running service; `live` runs them."""
    load = verbs.add_parser(
        "load",
        help="show the load of a running service: layers, ranks, the hottest experts",
        description="Show the load of the last steps; on a terminal, refresh it until Ctrl-C.",
    )
    load.add_argument("--every", type=_seconds, default=2.0, metavar="SECONDS", help="refresh interval (default: %(default)s)")  # fmt: skip
    load.add_argument("--once", action="store_true", help="show the load only once, even on a terminal")
    load.add_argument(
        "--rows",
        type=_rows,
        default=8,
        metavar="N",
        help="number of layers, ranks and experts to show (default: %(default)s)",
    )
    load.add_argument("--json", action="store_true", help="print the response of GET /experts/load")
    record = verbs.add_parser(
        "record",
        help="record a running service's load to a file, for simulate and plan",
        description="Record how often experts are chosen, for each second, and write it as .npz.",
        epilog="example:\n  wideep experts record --seconds 60 --out load.npz\n",
    )
    record.add_argument(
        "--seconds", type=_seconds, default=30.0, metavar="S", help="duration (default: %(default)s)"
    )
    record.add_argument(
        "--out", type=Path, default=Path("load.npz"), metavar="FILE", help="output (default: %(default)s)"
    )
    for parser in (load, record):
        parser.set_defaults(run="server.clients.experts.live:run_live")
        add_url(parser)
        add_pool(parser)


def _add_change_verbs(verbs: Any) -> None:
    """Add the verbs that change a running service's placement or list changes; `change` runs them."""
    apply = verbs.add_parser(
        "apply",
        help="move a running service's experts to a planned placement, or to one from a file",
        description="Move experts during operation, and wait until the new placement serves or is dropped.",
        epilog="examples:\n  wideep experts apply --dry-run\n  wideep experts apply --placement placement.json\n",
    )
    target = apply.add_mutually_exclusive_group()
    target.add_argument("--placement", type=Path, metavar="FILE", help="file with the new placement")
    target.add_argument(
        "--policy",
        choices=("repair", "shares", "plan"),
        default="repair",
        help="plan for the observed load: few moves, no moves, or a new plan (default: %(default)s)",
    )
    apply.add_argument("--dry-run", action="store_true", help="show the planned change without making it")
    rollback = verbs.add_parser(
        "rollback",
        help="restore the placement before a running service's last change",
        description="Restore the placement before the last change.",
    )
    history = verbs.add_parser(
        "history",
        help="list a running service's decisions and moves, with reasons",
        description="List decisions and moves, oldest first.",
    )
    history.add_argument(
        "--rows", type=_rows, default=20, metavar="N", help="show the last N (default: %(default)s)"
    )
    for parser in (apply, rollback, history):
        parser.set_defaults(run="server.clients.experts.change:run_change")
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_url(parser)
        add_pool(parser)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes of the ranks (default: 1)"
    )
    parser.add_argument(
        "--groups", type=int, metavar="G", help="groups of experts; a group's first copies are on one node"
    )
    parser.add_argument(
        "--min-nodes", type=int, default=1, metavar="K", help="minimum nodes for each expert (default: 1)"
    )
    parser.add_argument("--spread-nodes", action="store_true", help="spread an expert's copies over nodes")
    parser.add_argument(
        "--target",
        type=float,
        default=1.02,
        help="fullest rank / mean at which a repair stops (default: %(default)s)",
    )
    parser.add_argument(
        "--max-moved",
        type=float,
        default=0.1,
        metavar="PART",
        help="maximum part of all slots that a repair may fill (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


EXPERTS = Command(
    name="experts",
    help="show the load of experts, plan their placement, compare policies on recorded loads",
    description="Show the load of experts, plan their placement, compare policies on recorded loads.",
    add_flags=_add_verbs,
    group=USING,
    run="server.clients.experts.offline:run_experts",
)
