"""The commands `chat`, `status`, `drain`, `scale`, `pools`, `lora` and `models`. Nothing heavy is imported here, because `wideep --help` needs it."""

import argparse
import math
from typing import Any

from server.clients.url_flag import add_url
from server.options.command import PLANNING, USING, Command
from server.options.flag import OptionsError
from server.options.pools import Role

_MOST_TEMPERATURE = 2.0  # OpenAI's limit, and the service's
_CHAT_EXAMPLE = """\
example:
  wideep chat http://127.0.0.1:8000
  wideep chat --system "You answer in one sentence." --temperature 0
"""
_DRAIN_EXAMPLE = """\
examples:
  wideep drain 1               wait until rank 1 has no requests
  wideep drain 1 --undo        let it take requests again
"""
_SCALE_EXAMPLE = """\
examples:
  wideep scale 4               serve with 4 ranks from now on
  wideep scale                 show the number of ranks, and the resize that runs
  wideep scale --abort         end the resize that runs, and leave the service as it was
"""
_POOLS_EXAMPLE = """\
examples:
  wideep pools                 show the pools, their roles and their loads
  wideep pools decode-1 prefill   let the pool decode-1 run prompts only
"""
_LORA_EXAMPLE = """\
examples:
  wideep lora                          show the adapters, and which of them have an adapter slot
  wideep lora load sql /adapters/sql   check an adapter on all ranks, and serve it as model sql
  wideep lora unload sql               remove it; its open requests end as usual
"""


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key (default: WIDEEP_API_KEY, then OPENAI_API_KEY)"
    )
    parser.add_argument("--model", metavar="NAME", help="name of the served model (default: the first)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T", help="0 to 2 (default: the service's)"
    )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to {_MOST_TEMPERATURE:g}")
    return value


def _add_status_flags(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the response of GET /v1/fault_tolerance/status"
    )


def _add_seconds(parser: argparse.ArgumentParser, flag: str, default: float | None, text: str) -> None:
    parser.add_argument(flag, type=_timeout, default=default, metavar="SECONDS", help=text)


def _add_drain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rank", type=_rank, metavar="RANK", help="number of the rank")
    add_url(parser)
    parser.add_argument("--undo", action="store_true", help="let the rank take requests again")
    _add_seconds(
        parser,
        "--timeout",
        300.0,
        "longest wait; the drain continues after it, and 0 only begins it (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print the state as JSON")


def _add_scale_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ranks",
        nargs="?",
        metavar="RANKS",
        help="number of ranks to serve with (default: show the present one)",
    )
    add_url(parser)
    parser.add_argument("--abort", action="store_true", help="end the resize that runs, while it prepares")
    _add_seconds(
        parser,
        "--drain-timeout",
        120.0,
        "time for requests of leaving ranks to move; others compute the rest again (default: %(default)g)",
    )
    _add_seconds(
        parser,
        "--timeout",
        None,
        "deadline, after which the service stays as it was (default: the service's --resize-timeout-seconds)",
    )
    parser.add_argument(
        "--id", metavar="ID", help="id of the operation; the same id again waits for the same operation"
    )
    parser.add_argument("--json", action="store_true", help="print the state as JSON")


def _prepare_scale(args: argparse.Namespace) -> tuple[Any, ...]:
    if args.ranks is not None and ":" in args.ranks:  # `wideep scale URL`
        args.ranks, args.url = None, args.ranks
    if args.ranks is not None and (not args.ranks.isdecimal() or int(args.ranks) < 1):
        raise OptionsError(f"{args.ranks!r} must be a number of ranks of at least 1")
    if args.ranks is not None and args.abort:
        raise OptionsError("give a number of ranks, or --abort")
    args.ranks = None if args.ranks is None else int(args.ranks)
    return (args,)


def _add_pools_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="pool that gets another role")
    parser.add_argument(
        "role",
        nargs="?",
        choices=[role.value for role in Role],
        metavar="ROLE",
        help="prefill, decode or both",
    )
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print the response of GET /pools")


def _add_lora_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["list", "load", "unload"], default="list", metavar="ACTION",
        help="list, load or unload (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the adapter, which requests use as `model`"
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="its directory, which every node has")
    add_url(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="load: give a name that is in use this adapter; its API keys and its pin stay",
    )
    parser.add_argument("--pin", action="store_true", help="load: never evict the adapter from its slot")
    parser.add_argument("--json", action="store_true", help="print the response of GET /adapters")


def _prepare_lora(args: argparse.Namespace) -> tuple[Any, ...]:
    needed = {"list": 0, "load": 2, "unload": 1}[args.action]
    given = [each for each in (args.name, args.path) if each is not None]
    if len(given) == needed + 1 and "://" in given[-1]:  # `wideep lora list URL`
        args.url = given.pop()
    if len(given) != needed:
        raise OptionsError(f"{args.action} takes {('no name', 'NAME', 'NAME and PATH')[needed]}")
    return (args,)


def _prepare_pools(args: argparse.Namespace) -> tuple[Any, ...]:
    if args.name is not None and args.role is None:
        if ":" not in args.name:
            raise OptionsError(f"give pool {args.name} a role: prefill, decode or both")
        args.name, args.url = None, args.name  # `wideep pools URL`
    return (args,)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be the number of a rank, such as 0")
    return int(text)


def _timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds of at least 0")
    return value


def _add_models_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="model types (default: all, which takes about two minutes)"
    )


CHAT = Command(
    name="chat",
    group=USING,
    help="chat with a served model in the terminal",
    description="Chat with a served model in the terminal.",
    examples=_CHAT_EXAMPLE,
    add_flags=_add_chat_flags,
    run="server.clients.chat:run_chat",
)
STATUS = Command(
    name="status",
    group=USING,
    help="show which ranks of a service serve, and which are missing and why",
    description="Show which ranks of a running service serve, and which are missing and why.\nThe exit status is 0 while the "
    "service serves, and otherwise 1.",
    add_flags=_add_status_flags,
    run="server.clients.status:run_status",
)
DRAIN = Command(
    name="drain",
    group=USING,
    help="move the requests of a rank to the other ranks, before maintenance for example",
    description="Move the requests of a rank to the other ranks, and give it no new ones. It still serves its experts.\nStreams "
    "continue, and answers do not change. The exit status is 0 when the rank has no requests left, and 1 at the time-out.",
    examples=_DRAIN_EXAMPLE,
    add_flags=_add_drain_flags,
    run="server.clients.drain:run_drain",
)
SCALE = Command(
    name="scale",
    group=USING,
    help="change the number of ranks of a service while it serves",
    description="Change the number of ranks of a running service. Streams continue, and answers do not change.\nThe exit status "
    "is 0 when the service has that number of ranks, and 1 if it stays as it was.",
    examples=_SCALE_EXAMPLE,
    add_flags=_add_scale_flags,
    prepare=_prepare_scale,
    run="server.clients.scale:run_scale",
)
POOLS = Command(
    name="pools",
    group=USING,
    help="show the pools of a service, or change the role of one",
    description="Show the pools of a running service with their roles and loads.\nWith NAME and ROLE, change a role first. Streams "
    "continue, and answers do not change.",
    examples=_POOLS_EXAMPLE,
    add_flags=_add_pools_flags,
    prepare=_prepare_pools,
    run="server.clients.pools:run_pools",
)
LORA = Command(
    name="lora",
    group=USING,
    help="list, load or unload the LoRA adapters of a service",
    description="List the LoRA adapters of a running service, after loading or unloading one if given.\nOther requests continue.",
    examples=_LORA_EXAMPLE,
    add_flags=_add_lora_flags,
    prepare=_prepare_lora,
    run="server.clients.lora:run_lora",
)
MODELS = Command(
    name="models",
    group=PLANNING,
    help="list the supported model types, and why others are not supported",
    description="Report for each Mixture-of-Experts type of the installed transformers whether a service would start with it.",
    add_flags=_add_models_flags,
    run="server.clients.models:run_models",
    needs_transformers=True,
)
