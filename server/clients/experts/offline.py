"""Run `wideep experts plan` and `wideep experts simulate`: placements from recorded loads, without a service.

The output is a table by default, and JSON for scripts with `--json`. `expert_placement` does the computation; this file
reads files and prints.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from expert_placement.files import (
    LoadFileError,
    PlacementFileError,
    load_placement,
    read_loads,
    save_placement,
)
from expert_placement.nodes import Cluster, Rules, group_homes, present_homes
from expert_placement.placement import imbalance
from expert_placement.plan import Plan, plan, repair
from expert_placement.tools.simulate import PlacementFigures, PolicyResult, SimulationSetting, simulate


def run_experts(args: argparse.Namespace) -> int:
    """Run `wideep experts VERB` and return the exit status."""
    try:
        return _run_simulate(args) if args.verb == "simulate" else _run_plan(args)
    except (LoadFileError, PlacementFileError, ValueError, OSError) as error:
        print(f"wideep experts {args.verb}: {error}", file=sys.stderr)
        return 2


def _run_simulate(args: argparse.Namespace) -> int:
    trace = read_loads(args.loads)
    outcomes = []
    for ranks in args.ranks:
        for slots in args.slots:
            setting = SimulationSetting(
                rules=_rules(args, ranks),
                slots_per_rank=_slots_per_rank(slots, ranks),
                target=args.target,
                max_moved=args.max_moved,
                num_groups=args.groups or 1,
            )
            outcomes += [simulate(policy, trace.load, setting, trace.phases) for policy in args.policy]
    if args.json:
        print(json.dumps([outcome.to_json() for outcome in outcomes]))
        return 0
    windows, layers, experts = trace.load.shape
    print(f"{windows} windows, {layers} layers of {experts} experts; figures are fullest rank / mean rank")
    print(
        f"{'ranks':>6} {'slots':>6} {'policy':8} {'known':>8} {'worst':>8} {'next':>8} {'worst':>8} {'moved':>7} "
        f"{'off home':>8} {'plan ms':>8}"
    )
    for outcome in outcomes:
        print(_row(outcome))
        for phase, figures in outcome.phases.items():
            print(f"{'':14}  {phase:7}{_figures(figures)}")
    return 0


def _row(outcome: PolicyResult) -> str:
    return (
        f"{outcome.ranks:6} {outcome.slots:6} {outcome.policy:8}{_figures(outcome)} {outcome.moved:7.1%} "
        f"{outcome.away:8.1%} {outcome.plan_ms:8.1f}"
    )


def _figures(figures: PlacementFigures) -> str:
    values = (figures.known_mean, figures.known_worst, figures.next_mean, figures.next_worst)
    return "".join(f" {value:8.4f}" if value is not None else f" {'-':>8}" for value in values)


def _rules(args: argparse.Namespace, ranks: int, home: np.ndarray | None = None) -> Rules:
    cluster = Cluster(num_ranks=ranks, num_nodes=args.nodes)
    return Rules(cluster=cluster, home=home, min_nodes=args.min_nodes, spread=args.spread_nodes)


def _slots_per_rank(slots: int, ranks: int) -> int:
    if ranks < 1 or slots % ranks:
        raise ValueError(f"{slots} slots on {ranks} ranks: --slots must be a multiple of --ranks")
    return slots // ranks


def _run_plan(args: argparse.Namespace) -> int:
    load = read_loads(args.loads).load.sum(axis=0)  # a window of a recording is one second, and may be empty
    current = load_placement(args.current) if args.current else None
    before = None if current is None else imbalance(current, load)
    if current is not None:
        if args.slots not in (None, current.slot_expert.shape[1]) or args.ranks not in (
            None,
            current.num_ranks,
        ):
            raise ValueError(
                f"--current has {current.slot_expert.shape[1]} slots on {current.num_ranks} ranks; a repair keeps "
                f"them: leave out --slots and --ranks"
            )
        home = present_homes(current, args.groups, args.nodes) if args.groups else None
        budget = int(args.max_moved * current.slot_expert.size)
        rules = _rules(args, current.num_ranks, home)
        made = repair(load, current, rules, target=args.target, max_moves=budget)
    else:
        if args.ranks is None or args.slots is None:
            raise ValueError("a new plan needs --ranks and --slots; for a repair, give --current")
        home = group_homes(load, args.groups, args.nodes) if args.groups else None
        made = plan(load, _slots_per_rank(args.slots, args.ranks), _rules(args, args.ranks, home))
    if args.out:
        save_placement(made.placement, args.out)
    report = _report(made, before, args)
    print(json.dumps(report) if args.json else _table(report, args.out))
    return 0


def _report(made: Plan, before: np.ndarray | None, args: argparse.Namespace) -> dict[str, Any]:
    placement = made.placement
    ranks, layers = placement.num_ranks, placement.num_layers
    report: dict[str, Any] = {
        "layers": layers,
        "ranks": ranks,
        "slots": int(placement.slot_expert.shape[1]),
        "digest": placement.digest(),
        "imbalance_before_mean": None if before is None else float(before.mean()),
        "imbalance_before_worst": None if before is None else float(before.max()),
        "imbalance_mean": float(made.imbalance.mean()),
        "imbalance_worst": float(made.imbalance.max()),
        "worst_layer": int(made.imbalance.argmax()),
        "moves": int(made.moved.sum()),
        "moved": float(made.moved.sum() / max((placement.slot_expert >= 0).sum(), 1)),
        "bytes": None,
        "seconds": None,
    }
    if args.expert_mb is not None:
        report["bytes"] = report["moves"] * args.expert_mb * 1e6
    if args.expert_mb is not None and args.link_gbps:
        report["seconds"] = report["bytes"] / ranks * 8 / (args.link_gbps * 1e9)
    return report


def _table(report: dict[str, Any], out: Path | None) -> str:
    lines = [f"{report['layers']} layers, {report['slots']} slots on {report['ranks']} ranks"]
    if report["imbalance_before_mean"] is not None:
        lines.append(
            f"now      fullest rank / mean {report['imbalance_before_mean']:.4f}, worst layer "
            f"{report['imbalance_before_worst']:.4f}"
        )
    lines.append(
        f"planned  fullest rank / mean {report['imbalance_mean']:.4f}, worst layer {report['imbalance_worst']:.4f} "
        f"(layer {report['worst_layer']})"
    )
    lines.append(f"moves    {report['moves']} slots ({report['moved']:.1%})")
    if report["bytes"] is not None:
        lines.append(f"bytes    {report['bytes'] / 1e9:.2f} GB")
    if report["seconds"] is not None:
        lines.append(f"seconds  {report['seconds']:.3f} of transfer, with all ranks in parallel")
    if out is not None:
        lines.append(f"written  {out} (digest {report['digest']})")
    return "\n".join(lines)
