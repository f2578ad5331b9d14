"""The commands that are processes of a service. Nothing heavy is imported here, because `wideep --help` needs it."""

import argparse
from typing import Any

from server.options.command import SERVING, Command
from server.options.help import HelpAction
from server.options.reading import add_options, options_from

_SERVE_EXAMPLE = """\
example:
  wideep serve ./OLMoE-1B-7B --data-parallel-size 4 --port 8080 --served-model-name olmoe --max-model-len 4096
"""
_WORKER_EXAMPLE = """\
example, the same line on both of two nodes; HEAD is one of them and serves HTTP:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend wideep --rdzv-endpoint HEAD:29400 \\
      --no-python wideep worker ./Qwen3-30B-A3B --host 0.0.0.0 --api-key-file keys.txt --cluster-key-file cluster.key
"""


def _add_options_with_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action=HelpAction)
    add_options(parser)


def _add_front_flags(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks that will attach")
    parser.add_argument(
        "--ranks-host", default="127.0.0.1", help="address for ranks to attach to (default: %(default)s)"
    )
    parser.add_argument(
        "--front-number", type=int, default=0, metavar="N", help="number among several fronts; 0 leads"
    )
    parser.add_argument(
        "--stands-by", action="store_true", help="lead only after the node of the leading front is lost"
    )
    parser.add_argument("--has-other-nodes", action="store_true", help="other nodes have fronts, too")


def _options(args: argparse.Namespace) -> tuple[Any, ...]:
    return (options_from(args),)


def _front_arguments(args: argparse.Namespace) -> tuple[Any, ...]:
    place = args.front_number, args.stands_by, args.has_other_nodes
    return options_from(args), args.ranks, args.ranks_host, *place


SERVE = Command(
    name="serve",
    group=SERVING,
    help="serve a model on this machine",
    description="Serve a model on this machine: check it, start the ranks, report when they are ready, stop them.",
    examples=_SERVE_EXAMPLE,
    usage="wideep serve [MODEL] [FLAGS]",
    add_flags=_add_options_with_help,
    prepare=_options,
    run="server.serve.serve:run_serve",
    takes_options=True,
    has_own_help=True,
    needs_transformers=True,
)
WORKER = Command(
    name="worker",
    group=SERVING,
    help="run one rank of a multi-node service (started by torchrun)",
    description="Run one rank of a service on several nodes. torchrun starts it, once per device.",
    examples=_WORKER_EXAMPLE,
    usage="wideep worker [MODEL] [FLAGS]",
    add_flags=_add_options_with_help,
    prepare=_options,
    run="server.serve.worker:run_worker",
    takes_options=True,
    has_own_help=True,
    needs_transformers=True,
)
ENGINE = Command(
    name="engine",
    description="The engine of one rank; started by `wideep worker`.",
    usage="wideep engine [MODEL] [FLAGS]",
    add_flags=add_options,
    prepare=_options,
    run="server.serve.rank.engine:run_engine",
    takes_options=True,
)
FRONT = Command(
    name="front",
    description="HTTP and the router; started by `wideep worker`.",
    usage="wideep front [MODEL] [FLAGS]",
    add_flags=_add_front_flags,
    prepare=_front_arguments,
    run="server.serve.front.front_main:run_front",
    takes_options=True,
)
