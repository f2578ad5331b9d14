"""The flags of `wideep doctor`; `run` runs it. Nothing heavy is imported here: `wideep --help` needs it."""

import argparse
from typing import Any

from server.options.flag import OptionsError
from server.options.reading import add_options

WAIT_S = 120.0
_MOST_NODES = 4096
_EXAMPLES = """\
examples:
  wideep doctor                              this machine
  wideep doctor ./Qwen3-30B-A3B -dp 2        and a model on two ranks of it: give the line of `wideep serve`
  wideep doctor ./DeepSeek-V3 --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HEAD:29400
                                             the same line on each of two nodes, of which HEAD is one

The exit status is 0, or 1 where a check failed; warnings do not count.
"""


def add_doctor_parser(commands: Any) -> None:
    """Add `doctor` to the command line's parser."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and the links between nodes, before a start",
        description="Check what a service needs of this machine and, on several nodes, of what is between them: a line per check.",
        epilog=_EXAMPLES,
    )
    doctor.usage = "wideep doctor [MODEL] [FLAGS]"
    group = doctor.add_argument_group("doctor")
    add = group.add_argument
    add(
        "--nnodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes, as torchrun will be told (default: %(default)s)",
    )
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks of a node, as torchrun will be told (default: -dp's)",
    )
    add("--rdzv-endpoint", metavar="HEAD:PORT", help="where nodes meet, as torchrun will be told")
    add(
        "--wait-seconds", type=float, default=WAIT_S, metavar="S", help="for the other nodes' doctors to come (default: %(default)g)"
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object at the end, and no lines")
    add_options(doctor, own=("--nnodes",))


def check_doctor_arguments(args: argparse.Namespace) -> None:
    """Check what concerns the doctor alone.

    Raises:
        OptionsError: naming the flag.
    """
    if not 1 <= args.nnodes <= _MOST_NODES:
        raise OptionsError(f"--nnodes is {args.nnodes}; it must be 1 to {_MOST_NODES}")
    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        raise OptionsError(f"--nproc-per-node is {args.nproc_per_node}; it must be at least 1")
    ranks = vars(args).get("data_parallel_size")
    if None not in (args.nproc_per_node, ranks) and str(ranks) != str(args.nproc_per_node):
        raise OptionsError(
            f"--nproc-per-node is {args.nproc_per_node} and --data-parallel-size {ranks}; both are the ranks of a node, as "
            "torchrun starts them: leave one out"
        )
    if not 0 < args.wait_seconds <= 86_400:
        raise OptionsError(
            f"--wait-seconds is {args.wait_seconds:g}; it must be above 0 and at most 86400 (a day)"
        )
    if args.nnodes > 1 and args.rdzv_endpoint is None:
        raise OptionsError(
            f"--nnodes is {args.nnodes}: give --rdzv-endpoint HEAD:PORT too, where the nodes meet"
        )
    if args.nnodes == 1 and args.rdzv_endpoint is not None:
        raise OptionsError("--rdzv-endpoint is where several nodes meet: give --nnodes too, their number")
