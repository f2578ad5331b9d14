"""How evenly, how fast and with how few moves does the planner spread experts, compared with policies of other programs?

Figures are the fullest rank over the mean rank of a layer (1 is ideal), mean and worst over layers and windows. Peers
(DeepSeek EPLB global and hierarchical, ADRS's zigzag, vllm-ascend's Swift balancer) are re-implemented from their
descriptions in tests/support and run on the same loads in the same process. Bounds: 1.0 if an expert's copies can take any
share; `bound` in the table if the hottest expert limits the result because there are few slots, and after a drift, if no
shares of the previously planned slots can do better.

Run: `python -m benchmarks.experts.placement [--loads FILE...] [--quick] [--save]`, with recorded loads in the format of
`wideep experts simulate` (names of one phase share the part before the first underscore), or with generated loads only.
A missed goal is printed; the exit status is still 0.

Batches: 128 tokens of 8 choices on each of 32 ranks, drawn independently by the window's load, which is the least variation
that a batch can have. Choices are made by `ReplicaChoice`, as in the service.

Generated loads are fitted to DeepSeek-V3 windows recorded with SGLang (its issue 6017; their licence is not stated, so
they are not in the repository): within a layer the loads vary by 0.73 to 1.07 of the mean, the hottest expert has 5.6
to 8.1 times the mean (13.7 in the worst layer), groups of 32 experts differ by 1.5 to 2.1 times, no load is zero. A
load drifts by a lognormal factor per expert: sigma 0.07 to 0.30 between windows of a phase, 0.47 between phases.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.card import environment_card, print_card, print_tail, save_result
from expert_placement.choose import ReplicaChoice
from expert_placement.files import read_loads
from expert_placement.nodes import Cluster, Rules, group_homes
from expert_placement.placement import Placement, imbalance
from expert_placement.plan import fill_layers, plan, refresh, repair
from expert_placement.tools.simulate import away_share
from tests.support.placement import peers
from tests.support.placement.bounds import least_by_shares, least_imbalance

SHAPES = ((32, 9), (64, 5), (72, 4), (128, 3), (144, 2))
QWEN_SHAPES = ((16, 9), (32, 5), (64, 3))
GROUPED_SHAPES = ((32, 9, 4), (64, 5, 8))  # ranks, slots per rank, nodes
GROUPS = 8
DRIFT = 0.3
BATCH_RANKS, BATCH_TOKENS, BATCH_CHOICES = 32, 128, 8
LAYER_TOKENS = 100e6  # choices per layer and window
GROUP_SIGMA, EXPERT_SIGMA = (0.25, 0.5), (0.5, 0.8)  # of the logarithm, drawn for each layer
HOT_FACTOR = 1.7  # the hottest expert of a layer exceeds the distribution by up to this factor
Windows = dict[str, np.ndarray]


def generate(layers: int, experts: int, seed: int) -> np.ndarray:
    """Return a load [layers, experts] float64 that depends only on the seed."""
    rng = np.random.default_rng(seed)
    group_sigma = rng.uniform(*GROUP_SIGMA, size=(layers, 1))
    expert_sigma = rng.uniform(*EXPERT_SIGMA, size=(layers, 1))
    logs = np.repeat(rng.normal(size=(layers, GROUPS)) * group_sigma, experts // GROUPS, axis=1)
    load = np.exp(logs + rng.normal(size=(layers, experts)) * expert_sigma)
    hottest = load.argmax(axis=1)
    load[np.arange(layers), hottest] *= rng.uniform(1.0, HOT_FACTOR, size=layers)
    result: np.ndarray = load / load.sum(axis=1, keepdims=True) * LAYER_TOKENS
    return result


def drift(load: np.ndarray, sigma: float, seed: int) -> np.ndarray:
    """Return the load after a lognormal drift of every expert, with the same total in each layer."""
    moved = load * np.exp(np.random.default_rng(seed).normal(0.0, sigma, size=load.shape))
    result: np.ndarray = moved * (load.sum(axis=1) / moved.sum(axis=1))[:, None]
    return result


def read_windows(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return recorded windows [layers, experts] by file name; for a file with several windows, the last one."""
    return {path.stem: read_loads([path]).load[-1] for path in paths}


def phase_pairs(windows: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Return pairs of recorded windows of one phase: their names share the part before the first underscore."""
    names = list(windows)
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a.split("_")[0] == b.split("_")[0]]


class Report:
    """Measured rows, and goals with their results."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []

    def section(self, title: str) -> None:
        """Print a heading."""
        print(f"\n== {title}", flush=True)

    def row(self, section: str, name: str, **values: Any) -> None:
        """Print and store one row."""
        self.rows.append({"section": section, "name": name, **values})
        shown = "  ".join(f"{key} {_shown(value)}" for key, value in values.items())
        print(f"   {name:42} {shown}", flush=True)

    def goal(self, name: str, value: float, most: float) -> None:
        """Store whether a figure is within its goal."""
        self.goals.append({"name": name, "value": float(value), "goal": most, "met": bool(value <= most)})

    def print_goals(self) -> None:
        """Print all goals."""
        self.section("goals")
        for goal in self.goals:
            mark = "met   " if goal["met"] else "MISSED"
            print(f"   {mark} {goal['name']:60} {goal['value']:.5g} (at most {goal['goal']:g})")


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _rules(ranks: int, **more: Any) -> Rules:
    return Rules(cluster=Cluster(num_ranks=ranks, num_nodes=more.pop("nodes", 1)), **more)


def _spread(values: Sequence[np.ndarray]) -> dict[str, float]:
    """Return mean and worst over layers and windows."""
    return {"mean": float(np.mean(values)), "worst": float(np.max(values))}


def measure_windows(report: Report, what: str, windows: Windows, shapes: Sequence[tuple[int, int]]) -> None:
    """Plan for each window and measure the plan on it."""
    report.section(f"window: {what}")
    limits = {(32, 9): (1.0005, 1.001), (64, 5): (1.002, 1.005), (72, 4): (1.005, 1.01)}
    for ranks, width in shapes:
        slots, loads = ranks * width, list(windows.values())
        shares = _spread([plan(load, width, _rules(ranks)).imbalance for load in loads])
        even = _spread([plan(load, width, _rules(ranks, even=True)).imbalance for load in loads])
        own = _spread([peers.even_imbalance(x, peers.eplb_global(x, slots, ranks), ranks) for x in loads])
        zigzag = _spread([peers.even_imbalance(x, peers.zigzag(x, slots, ranks), ranks) for x in loads])
        bound = _spread([least_imbalance(load, ranks, width) for load in loads])
        section = f"window {what} {ranks}x{width}"
        for name, values in (
            ("with shares", shares), ("even shares", even), ("EPLB global", own), ("ADRS zigzag", zigzag),
            ("bound", bound),
        ):  # fmt: skip
            report.row(section, f"{ranks}x{width} {name}", **values)
        if what == "recorded" and (ranks, width) in limits:
            mean, worst = limits[ranks, width]
            report.goal(f"{ranks}x{width} recorded, with shares, mean", shares["mean"], mean)
            report.goal(f"{ranks}x{width} recorded, with shares, worst layer", shares["worst"], worst)


def measure_groups(report: Report, windows: Windows) -> None:
    """Pin the first copies of groups to nodes."""
    report.section("groups pinned to nodes")
    for ranks, width, nodes in GROUPED_SHAPES:
        reached, away, theirs = [], [], []
        for load in windows.values():
            home = group_homes(load, GROUPS, nodes)
            rules = _rules(ranks, nodes=nodes, home=home)
            made = plan(load, width, rules)
            reached.append(made.imbalance)
            away.append(away_share(made.placement, load, home, rules.cluster.node_of_rank))
            slots = peers.eplb_hierarchical(load, ranks * width, GROUPS, nodes, ranks)
            theirs.append(peers.even_imbalance(load, slots, ranks))
        values = _spread(reached)
        report.row(
            "groups", f"{ranks}x{width}, {nodes} nodes, pinned", **values, off_home=float(np.mean(away))
        )
        report.row("groups", f"{ranks}x{width}, {nodes} nodes, EPLB hierarchical", **_spread(theirs))
        report.goal(f"{ranks}x{width} groups pinned, mean", values["mean"], 1.002)
        report.goal(f"{ranks}x{width} groups pinned, worst layer", values["worst"], 1.015)


def _timed(function: Callable[[], Any], runs: int) -> float:
    """Return the median CPU milliseconds of this process, excluding numba's compilation."""
    function()
    taken = []
    for _ in range(runs):
        begin = time.process_time()
        function()
        taken.append(1000 * (time.process_time() - begin))
    return float(np.median(taken))


def measure_time(report: Report, windows: Windows, runs: int) -> None:
    """Measure the CPU time of a plan without a previous placement."""
    report.section(f"CPU time of a plan of all layers, one thread, median of {runs}")
    load = next(iter(windows.values()))
    for ranks, width in SHAPES[:3]:
        slots = ranks * width
        bound = least_imbalance(load, ranks, width)
        reached = plan(load, width, _rules(ranks)).imbalance
        took = _timed(lambda r=ranks, w=width: plan(load, w, _rules(r)), runs)  # type: ignore[misc]
        gap = float((reached / bound).max())
        report.row("time", f"{ranks}x{width} plan with shares", ms=took, over_bound=gap)
        theirs = _timed(lambda r=ranks, s=slots: peers.eplb_global(load, s, r), 1)  # type: ignore[misc]
        report.row("time", f"{ranks}x{width} EPLB global (re-implemented)", ms=theirs)
        if (ranks, width) == (32, 9):
            report.goal("32x9 plan from nothing, CPU ms", took, 100.0)
            report.goal("32x9 plan from nothing, worst layer over bound", gap, 1.005)
    placement = plan(load, 9, _rules(32)).placement
    later = drift(load, DRIFT, 1)
    report.row("time", "32x9 refresh of shares", ms=_timed(lambda: refresh(later, placement), runs))
    report.row(
        "time",
        "32x9 repair to 1.02",
        ms=_timed(lambda: repair(later, placement, _rules(32), target=1.02), runs),
    )


def measure_drift(report: Report, pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Plan for one load and measure on another."""
    for name, loads in pairs.items():
        report.section(f"drift at 32x9: {name}")
        rules = _rules(32)
        tried: dict[str, list[np.ndarray]] = {}
        moved: dict[str, list[float]] = {}

        def note(policy: str, reached: np.ndarray, part: float, tried=tried, moved=moved) -> None:  # type: ignore[no-untyped-def]
            tried.setdefault(policy, []).append(reached)
            moved.setdefault(policy, []).append(part)

        for base, later in loads:
            placement = plan(base, 9, rules).placement
            note("nothing done", imbalance(placement, later), 0.0)
            shares = refresh(later, placement)
            note("shares only", imbalance(shares, later), 0.0)
            note("shares only, bound", least_by_shares(shares, later), 0.0)
            for target in (1.02, 1.001):
                made = repair(later, placement, rules, target=target)
                note(f"repair to {target}", made.imbalance, made.moved.sum() / placement.slot_expert.size)
            _drift_of_peers(base, later, note)
        for policy, values in tried.items():
            report.row(f"drift {name}", policy, **_spread(values), moved=float(np.mean(moved[policy])))
        for policy, most, most_moved in (("repair to 1.02", 1.02, 0.06), ("repair to 1.001", 1.001, 0.112)):
            report.goal(f"drift {name}, {policy}, mean", float(np.mean(tried[policy])), most)
            report.goal(
                f"drift {name}, {policy}, part of slots moved", float(np.mean(moved[policy])), most_moved
            )
        report.goal(f"drift {name}, shares only, mean", float(np.mean(tried["shares only"])), 1.08)


def _drift_of_peers(
    base: np.ndarray, later: np.ndarray, note: Callable[[str, np.ndarray, float], None]
) -> None:
    old, new = peers.eplb_global(base, 288, 32), peers.eplb_global(later, 288, 32)
    note("EPLB, nothing done", peers.even_imbalance(later, old, 32), 0.0)
    note("EPLB, shares only", filled_imbalance(later, old, 32), 0.0)
    note("EPLB, planned anew", peers.even_imbalance(later, new, 32), peers.moved_part(old, new, 32))
    swift = peers.swift(later, old, 32)
    note("Swift", peers.even_imbalance(later, swift, 32), peers.moved_part(old, swift, 32))


def filled_imbalance(load: np.ndarray, slots: np.ndarray, ranks: int) -> np.ndarray:
    """Return the imbalance of our shares on another program's slots."""
    x = np.zeros(slots.shape)
    fill_layers(load, slots, slots.shape[1] // ranks, 300, 1e-6, x)
    by_rank = x.reshape(len(load), ranks, -1).sum(axis=2)
    result: np.ndarray = by_rank.max(axis=1) / by_rank.mean(axis=1)
    return result


def measure_batches(report: Report, windows: dict[str, np.ndarray], rounds: int) -> None:
    """Run `rounds` batches of every layer and window, with 288 and 320 slots."""
    report.section(f"batches of {BATCH_TOKENS} tokens per rank on {BATCH_RANKS} ranks, top {BATCH_CHOICES}")
    rng = np.random.default_rng(7)
    for width in (9, 10):
        tried: dict[str, list[float]] = {}
        for load in windows.values():
            placement = plan(load, width, Rules(cluster=Cluster(num_ranks=BATCH_RANKS))).placement
            choices = [ReplicaChoice(placement, rank) for rank in range(BATCH_RANKS)]
            theirs = peers.eplb_global(load, BATCH_RANKS * width, BATCH_RANKS)
            for layer in range(len(load)):
                for _ in range(rounds):
                    counts = rng.multinomial(
                        BATCH_TOKENS * BATCH_CHOICES, load[layer] / load[layer].sum(), size=BATCH_RANKS
                    )
                    _play(placement, choices, theirs[layer], layer, counts, rng, tried)
        section = f"batches 32x{width}"
        for name, values in tried.items():
            report.row(
                section,
                f"32x{width} {name}",
                mean=float(np.mean(values)),
                p95=float(np.quantile(values, 0.95)),
            )
        served = tried["shares of the window"]
        goals = (1.007, 1.04) if width == 9 else (1.002, 1.002)
        report.goal(f"batches 32x{width}, shares of the window, mean", float(np.mean(served)), goals[0])
        report.goal(
            f"batches 32x{width}, shares of the window, p95", float(np.quantile(served, 0.95)), goals[1]
        )


def _play(
    placement: Placement,
    choices: list[ReplicaChoice],
    theirs: np.ndarray,
    layer: int,
    counts: np.ndarray,
    rng: np.random.Generator,
    tried: dict[str, list[float]],
) -> None:
    """Run one batch; `counts` is [ranks, experts]."""
    total = counts.sum(axis=0)
    experts = [np.repeat(np.arange(len(total)), row) for row in counts]
    alone = [choice.choose(layer, own) for choice, own in zip(choices, experts, strict=True)]
    width = placement.slots_per_rank

    def note(name: str, loads: np.ndarray) -> None:
        ranks = loads.reshape(BATCH_RANKS, -1).sum(axis=1)
        tried.setdefault(name, []).append(float(ranks.max() / ranks.mean()))

    slots = BATCH_RANKS * width
    note("shares of the window", np.bincount(np.concatenate(alone), minlength=slots))
    x = np.zeros((1, slots))
    fill_layers(total[None].astype(float), placement.slot_expert[layer : layer + 1], width, 100, 1e-6, x)
    note("bound: shares for the batch, tokens divisible", x[0])
    note("EPLB, random copies", _random_copies(theirs, total, rng))
    num = np.bincount(theirs, minlength=len(total))
    note("EPLB, exactly even copies", (total / num)[theirs])
    x = np.zeros((1, slots))
    fill_layers(total[None].astype(float), theirs[None], width, 100, 1e-6, x)
    note("EPLB, shares for the batch", x[0])


def _random_copies(slots: np.ndarray, total: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the tokens of each slot if every token takes a random copy of its expert."""
    carried = np.zeros(len(slots))
    for expert, tokens in enumerate(total):
        own = np.flatnonzero(slots == expert)
        carried[own] = rng.multinomial(tokens, np.full(len(own), 1 / len(own)))
    return carried


def measure_nodes(report: Report, windows: Windows) -> None:
    """Place copies of every expert on two nodes."""
    report.section("copies on two nodes")
    load = next(iter(windows.values()))
    twice = plan(load, 18, _rules(32, nodes=4, min_nodes=2)).imbalance
    report.row("nodes", "32x18 every expert on two of four nodes", **_spread([twice]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", nargs="+", type=Path, default=[], metavar="FILE", help="recorded loads")
    parser.add_argument("--quick", action="store_true", help="fewer layers and batches")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results/")
    args = parser.parse_args(arguments)
    card, report = environment_card(), Report()
    print_card(card)
    cut = 12 if args.quick else None
    recorded = {name: load[:cut] for name, load in read_windows(args.loads).items()}
    made = {f"generated_{seed}": generate(58, 256, seed)[:cut] for seed in (0, 1)}
    for what, windows in (("recorded", recorded), ("generated", made)):
        if windows:
            measure_windows(report, what, windows, SHAPES)
    qwen = {"generated": generate(94, 128, 2)[:cut]}
    measure_windows(report, "94 x 128 generated", qwen, QWEN_SHAPES)
    windows = recorded or made
    measure_groups(report, windows)
    measure_time(report, windows, 3 if args.quick else 7)
    pairs = {f"lognormal {DRIFT}": [(load, drift(load, DRIFT, i)) for i, load in enumerate(windows.values())]}
    for a, b in phase_pairs(recorded):
        pairs[f"{a} to {b}"] = [(recorded[a], recorded[b])]
    measure_drift(report, pairs)
    measure_batches(report, windows, rounds=1 if args.quick else 4)
    measure_nodes(report, windows)
    report.print_goals()
    result = {
        "benchmark": "placement",
        "environment": card,
        "loads": "recorded" if recorded else "generated",
        "rows": report.rows,
        "goals": report.goals,
    }
    if args.save:
        print(f"saved {save_result('placement', result).name}")
    print_tail(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
