"""The flags of `wideep doctor`; `run` implements it. `wideep --help` imports this module, so its imports must be cheap."""

import argparse
from typing import Any

from server.options.command import PLANNING, Command
from server.options.flag import OptionsError
from server.options.reading import add_options, options_from

WAIT_S = 120.0
_MOST_NODES = 4096
_EXAMPLES = """\
examples:
  wideep doctor                              check this machine
  wideep doctor ./Qwen3-30B-A3B -dp 2        check a model on two ranks too: pass the arguments of `wideep serve`
  wideep doctor ./DeepSeek-V3 --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HEAD:29400
                                             the same command on each of two nodes, one of which is HEAD

The exit status is 1 if a check failed and 0 otherwise, even with warnings.
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("doctor")
    add = group.add_argument
    add(
        "--nnodes",
        type=int,
        default=1,
        metavar="N",
        help="number of nodes, as for torchrun (default: %(default)s)",
    )
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks per node, as for torchrun (default: --data-parallel-size)",
    )
    add("--rdzv-endpoint", metavar="HEAD:PORT", help="address where the nodes meet, as for torchrun")
    add(
        "--wait-seconds", type=float, default=WAIT_S, metavar="S", help="maximum time to wait for the other nodes' doctors (default: %(default)g)"
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object at the end instead of lines")
    add_options(parser, own=("--nnodes",))


def _check(args: argparse.Namespace) -> None:
    """Check the doctor's own flags.

    Raises:
        OptionsError: A flag is invalid; the message names it.
    """
    if not 1 <= args.nnodes <= _MOST_NODES:
        raise OptionsError(f"--nnodes is {args.nnodes}; it must be 1 to {_MOST_NODES}")
    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        raise OptionsError(f"--nproc-per-node is {args.nproc_per_node}; it must be at least 1")
    ranks = vars(args).get("data_parallel_size")
    if None not in (args.nproc_per_node, ranks) and str(ranks) != str(args.nproc_per_node):
        raise OptionsError(
            f"--nproc-per-node is {args.nproc_per_node}, but --data-parallel-size is {ranks}; both mean the ranks of a node, as "
            "torchrun starts them: remove one"
        )
    if not 0 < args.wait_seconds <= 86_400:
        raise OptionsError(
            f"--wait-seconds is {args.wait_seconds:g}; it must be above 0 and at most 86400 (a day)"
        )
    if args.nnodes > 1 and args.rdzv_endpoint is None:
        raise OptionsError(
            f"--nnodes is {args.nnodes}, so --rdzv-endpoint HEAD:PORT is required: the address where the nodes meet"
        )
    if args.nnodes == 1 and args.rdzv_endpoint is not None:
        raise OptionsError("--rdzv-endpoint requires --nnodes, the number of nodes that meet there")


def _prepare(args: argparse.Namespace) -> tuple[Any, ...]:
    _check(args)
    return args, options_from(args)


DOCTOR = Command(
    name="doctor",
    help="check this machine, and the links between nodes, before a start",
    description="Check the requirements of a service on this machine and, with several nodes, between them. Prints a line per check.",
    examples=_EXAMPLES,
    usage="wideep doctor [MODEL] [FLAGS]",
    add_flags=_add_flags,
    group=PLANNING,
    prepare=_prepare,
    run="server.tools.doctor.run:run_doctor",
    takes_options=True,
)
