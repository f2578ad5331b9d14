"""`wideep doctor`: check this node, then the links to the other nodes' doctors; one line per check, as soon as it is done.

A problem becomes a line of the report, and the other checks continue if they can. Only an invalid command line
ends the doctor immediately.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from server.machine.interfaces import Taken, gloo_takes, other_interface
from server.machine.lines import say
from server.machine.report import Check, CheckReport, failure, not_here, ok, warning
from server.options.flag import OptionsError
from server.options.pools import Pool, num_ranks_of, rank_pool_sizes, single_pool
from server.options.reading import said_in
from server.options.table import Options
from server.serve.preflight.checkpoint import with_checkpoint
from server.serve.preflight.device import NO_FACTS, ChosenDevice, choose_device, on_device
from server.serve.preflight.equal import facts_to_compare
from server.serve.preflight.machine import Machine, check_machine, check_model
from server.serve.preflight.model import PreflightError
from server.serve.preflight.tiers import with_hand_over
from server.serve.store.links import Gathers
from server.serve.store.meeting import Endpoint, Meeting, MeetingError, meet
from server.tools.doctor.between_nodes import DispatchTrial, check_together, check_ways, sizes_of, tokens_of
from server.tools.gpu_rates import GpuRates, measure_gpu
from server.tools.size.costs.device_table import sheet_of

_END_S = 30.0
_LEAST_SHARE = 0.7  # of the data sheet's bandwidth: a copy on an H200 alone reaches 0.88


class _Node(NamedTuple):
    """What is known about this node."""

    options: Options  # `model` is a directory if a model was found
    device: ChosenDevice
    num_ranks: int  # on this node
    pools: tuple[Pool, ...]  # of all nodes
    directory: Path | None  # of the model
    checks: tuple[Check, ...]  # failures so far

    @property
    def pool_sizes(self) -> list[int]:
        """For each rank on a node, the number of ranks of its pool. It is unknown which node this is, so the one that
        needs the most memory: ranks of small pools hold the most experts."""
        sizes = rank_pool_sizes(self.pools, range(num_ranks_of(self.pools)))
        nodes = [sizes[first : first + self.num_ranks] for first in range(0, len(sizes), self.num_ranks)]
        return max(nodes, key=lambda node: sum(1 / size for size in node))


def run_doctor(args: argparse.Namespace, options: Options, machine: Machine | None = None) -> int:
    """Run all checks, report them, and return the exit status: 1 if a check failed."""
    begun_s, machine = time.monotonic(), machine or Machine()
    try:
        endpoint = None if args.rdzv_endpoint is None else Endpoint.parse(args.rdzv_endpoint)
    except MeetingError as error:
        say(f"wideep doctor: {error}", error=True)
        return 2
    report = CheckReport(as_json=args.json)
    with contextlib.ExitStack() as ending:
        trial = None if endpoint is None else ending.enter_context(DispatchTrial())
        node = _find_node(args, options)
        own: list[Check] = []
        has_front = endpoint is None or bool(machine.resolve(endpoint.host))
        for check in _check_alone(args, node, machine, has_front=has_front):
            own.append(check)
            report.add([check])
        if endpoint is not None and trial is not None:
            _check_between(args, endpoint, node, machine, trial, own, report)
    return report.end(time.monotonic() - begun_s)


def _find_node(args: argparse.Namespace, options: Options) -> _Node:
    """Choose the device and resolve the model, as at a start."""
    checks, directory = [], None
    try:
        device = choose_device(options.device)
    except PreflightError as error:
        checks.append(failure("device", str(error)))
        device = ChosenDevice(name="cpu", reason=str(error), facts=NO_FACTS)
    of_pools = 0 if options.pools is None else max(1, (options.given_ranks or 1) // args.nnodes)
    num_ranks = args.nproc_per_node or options.data_parallel_size or of_pools or device.ranks
    try:
        pools = options.pools_among(num_ranks * args.nnodes)
    except OptionsError as error:
        checks.append(failure("pools", str(error)))
        pools = single_pool(num_ranks * args.nnodes)
    try:
        options = on_device(with_hand_over(options), device, num_local_ranks=num_ranks)
    except PreflightError as error:
        checks.append(failure("device", str(error)))
        options = on_device(options, device, num_local_ranks=device.ranks)
    if "model" in said_in(args):
        try:
            options = with_checkpoint(options)
            directory = Path(options.model)
        except PreflightError as error:
            checks.append(failure("model files", str(error)))
    options = replace(options, data_parallel_size=num_ranks)
    return _Node(options, device, num_ranks, pools, directory, tuple(checks))


def _check_alone(
    args: argparse.Namespace, node: _Node, machine: Machine, *, has_front: bool
) -> Iterator[Check]:
    yield from node.checks
    if node.device.name == "cuda":
        yield check_speed(node.device)
    yield from check_machine(
        machine,
        node.device,
        node.options,
        num_ranks=node.num_ranks,
        num_nodes=args.nnodes,
        has_front=has_front,
    )
    if node.directory is not None:
        yield from check_model(
            node.options,
            pool_sizes=node.pool_sizes,
            num_ranks=node.num_ranks * args.nnodes,
            gpu_bytes=node.device.free_bytes,
        )
    elif not any(check.name == "model files" for check in node.checks):
        yield not_here("model files", "no MODEL was given")


def check_speed(device: ChosenDevice, measure: Callable[[], GpuRates] = measure_gpu) -> Check:
    """Measure the first GPU and compare it with the data sheet, if there is one in the table of `wideep size`."""
    try:
        rates = measure()
    except PreflightError as error:
        return failure("GPU speed", str(error))
    name = device.facts.devices[0].name
    copied, multiplied = rates.copy_bytes_per_s / 1e12, rates.bfloat16_per_s / 1e12
    text = f"{name} copies {copied:.2f} TB/s and multiplies {multiplied:.0f} TFLOP/s in bfloat16"
    figures = {"copy_tb_per_s": round(copied, 3), "bfloat16_tflops": round(multiplied, 1)}
    sheet = sheet_of(name)
    if sheet is not None and rates.copy_bytes_per_s < _LEAST_SHARE * sheet.memory_bytes_per_s:
        return warning(
            "GPU speed",
            f"{text}; its data sheet says {sheet.memory_bytes_per_s / 1e12:.2f} TB/s",
            "see what else uses the GPU, and its clocks and power limit, with nvidia-smi",
            **figures,
        )
    return ok("GPU speed", text, **figures)


def _check_between(
    args: argparse.Namespace,
    endpoint: Endpoint,
    node: _Node,
    machine: Machine,
    trial: DispatchTrial,
    own: list[Check],
    report: CheckReport,
) -> None:
    interfaces = machine.interfaces()
    taken = gloo_takes(machine.environment, interfaces, machine.host, machine.resolve)
    better = other_interface(interfaces)
    address = better.addresses[0] if better and (taken.is_loopback or not taken.address) else taken.address
    name = f"{machine.host} ({address})"
    try:
        with meet(endpoint, args.nnodes, name, timeout_s=args.wait_seconds, say=_say) as meeting:
            report.add([ok("nodes", f"all {args.nnodes} have joined: {', '.join(meeting.names)}")])
            _check_met(meeting, node, taken, trial, own, report)
    except MeetingError as error:
        report.add([failure("nodes", str(error))])


def _check_met(
    meeting: Meeting, node: _Node, taken: Taken, trial: DispatchTrial, own: list[Check], report: CheckReport
) -> None:
    facts = _facts(node, own)
    for name, check in check_together(meeting, own, facts):
        report.add([check], node=name)
    sizes = _agreed_sizes(meeting, node)
    tokens = tokens_of(node.options.engine.max_num_batched_tokens)
    for check in check_ways(meeting, taken, trial, sizes, tokens):
        report.add([check])
    meeting.gather("end", None, _END_S)


def _facts(node: _Node, own: list[Check]) -> dict[str, object]:
    key = node.options.cluster_key
    try:
        return facts_to_compare(node.directory, key, node.device.facts)
    except PreflightError:  # the check of the files has reported it
        return facts_to_compare(None, key, node.device.facts)


def _agreed_sizes(meeting: Gathers, node: _Node) -> dict[str, int]:
    """Return the sizes of the endpoint's node, because all nodes must dispatch the same shape."""
    try:
        own = sizes_of(node.directory)
    except PreflightError:
        own = sizes_of(None)
    return dict(meeting.gather("sizes", own, _END_S)[0])


def _say(text: str) -> None:
    say(f"wideep doctor: {text}", error=True)
