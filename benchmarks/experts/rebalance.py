"""How much longer do steps take while experts move?

Ranks serve a batch of decoding requests through their engines (no HTTP) and go through random placements: move, switch, run
as many quiet steps, move again. Steps during a move and quiet steps alternate in one run, so that noise of the machine affects
both. Their numbers are equal, so that their p99 are comparable. Greedy tokens are first checked against a run without moves.
The goal: p99 of steps during a move at most 1.1 times that of quiet ones.

Expected bound: a second thread of each rank copies, hashes and tests experts for at most 4 % of a step, and the kernel
copies the data that it sends. On idle cores that costs nothing; on a machine with as many busy threads as cores it is taken
from the steps.

Run: `python -m benchmarks.experts.rebalance [DIRECTORY] [--ranks 2] [--batch 8] [--tokens 900] [--moves 6] [--bytes-per-step N]
[--save]`. DIRECTORY defaults to the random model of `benchmarks.serve`.
"""

import argparse
import multiprocessing
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import ensure_random_model
from dispatch.ports import free_port
from expert_placement.config import EplbConfig
from expert_placement.moves import align
from expert_placement.placement import Placement
from scheduler.assembly import assemble
from scheduler.engine import Engine
from scheduler.moves.reports import MoveState, PlacementReport
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, Request, RequestOutput, SamplingParams

GOAL = 1.1  # p99 during a move over p99 without
PROMPT_TOKENS = 16
TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 1800.0


@dataclass
class Run:
    """Measurements and tokens of one rank."""

    quiet_s: list[float] = field(default_factory=list)  # steps without a move
    moving_s: list[float] = field(default_factory=list)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_moves: int = 0
    num_bytes: int = 0
    placements: int = 0


class EndWhenIdle:
    """Doorbell that ends a run when its requests have ended."""

    engine: Engine

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        """Stop instead of sleeping."""
        self.engine.stop()


def shuffled(placement: Placement, seed: int) -> Placement:
    """Return the experts in other slots: they are dealt again, with no rank getting an expert twice."""
    generator = np.random.default_rng(seed)
    ranks = placement.num_ranks
    rows = placement.slot_expert.reshape(placement.num_layers, ranks, -1)
    swapped = np.roll(rows, 1, axis=1)
    keep = generator.random(rows.shape[0]) < 0.5  # layers that do not change
    mixed = np.where(keep[:, None, None], rows, swapped).reshape(placement.slot_expert.shape)
    new = Placement(mixed, placement.num_experts, ranks)
    return align(new, placement).with_version(placement.version + 1)


def serve(rank: int, config: EngineConfig, batch: int, tokens: int, moves: int, quiet_steps: int) -> Run:
    """Serve one batch to its end, moving to up to `moves` placements meanwhile."""
    doorbell, run = EndWhenIdle(), Run()
    built = assemble(config, doorbell)
    doorbell.engine = built.engine
    relocation, left, since, begun = built.relocation, deque(range(moves)), [0], [time.perf_counter()]
    under_way: list[int] = []
    lasted = [0]  # steps of the last move; the same number of quiet ones follows
    verified = threading.Event()

    def on_report(report: PlacementReport) -> None:
        assert report.state in (MoveState.VERIFIED, MoveState.SERVING), report
        verified.set()
        if report.state is MoveState.SERVING:
            under_way.clear()
            run.num_moves += report.num_moves
            run.num_bytes += report.num_bytes
            run.placements += 1

    def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
        now = time.perf_counter()
        (run.moving_s if under_way else run.quiet_s).append(now - begun[0])
        for output in outputs:
            run.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
        lasted[0] += bool(under_way)
        since[0] = 0 if under_way else since[0] + 1
        if left and since[0] >= max(quiet_steps, lasted[0]):
            left.popleft()
            lasted[0] = 0
            verified.clear()
            target = shuffled(relocation.placement, seed=relocation.placement.version)
            under_way.append(target.version)
            relocation.prepare(target)
        begun[0] = time.perf_counter()

    relocation.on_report = on_report
    generator = torch.Generator().manual_seed(rank)
    for index in range(batch):
        prompt = torch.randint(10, 20_000, (PROMPT_TOKENS,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens)
        built.engine.submit(
            Request(request_id=f"{rank}-{index}", prompt_ids=tuple(prompt), params=params, arrival_s=0.0)
        )
    built.engine.run(on_step)
    assert not under_way or verified.wait(TIMEOUT_S), "the last move does not end"
    run.quiet_s = run.quiet_s[quiet_steps:]  # without prompts and warm-up
    return run


def _rank(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    """Run one rank's process: once without moves, once with."""
    if args.ranks > 1:
        store = TCPStore("127.0.0.1", port, args.ranks, rank == 0, timedelta(seconds=TIMEOUT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    config = EngineConfig(
        directory=args.directory,
        kv_cache_bytes=256 << 20,
        rank=rank,
        world_size=args.ranks,
        max_model_len=PROMPT_TOKENS + args.tokens + 1,
        eplb_config=EplbConfig(num_redundant_experts=args.redundant, max_bytes_per_step=args.bytes_per_step),
    )
    still = serve(rank, config, args.batch, args.tokens, 0, args.quiet)
    moved = serve(rank, config, args.batch, args.tokens, args.moves, args.quiet)
    assert still.token_ids == moved.token_ids, "a request's tokens changed while experts moved"
    results.put((rank, still, moved))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description="Step times while experts move")
    parser.add_argument("directory", nargs="?", type=Path)
    for flag, default in (
        ("--ranks", 2), ("--batch", 8), ("--tokens", 900), ("--moves", 6), ("--quiet", 60), ("--redundant", 8),
        ("--bytes-per-step", 1 << 20),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(arguments)
    args.directory = args.directory or ensure_random_model()
    card = environment_card()
    print_card(card)
    port = free_port()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, args, port, results), daemon=True)
        for rank in range(args.ranks)
    ]
    for process in processes:
        process.start()
    runs = [results.get(timeout=RUN_TIMEOUT_S) for _ in processes]
    for process in processes:
        process.join()
    first = next(entry for entry in runs if entry[0] == 0)
    result = {
        "benchmark": "rebalance",
        "environment": card,
        **summary(first[1], first[2], [entry[2] for entry in runs]),
    }
    print_tail(result)
    if args.save:
        save_result("rebalance", result)
    return 0


def summary(still: Run, moved: Run, all_ranks: list[Run]) -> dict[str, Any]:
    """Return rank 0's figures; steps are the same on all ranks."""
    figures: dict[str, Any] = {}
    for name, values in (("still", still.quiet_s), ("quiet", moved.quiet_s), ("moving", moved.moving_s)):
        times = np.array(values or [np.nan]) * 1e3
        figures[name] = {
            "steps": len(values),
            "p50_ms": round(float(np.percentile(times, 50)), 3),
            "p99_ms": round(float(np.percentile(times, 99)), 3),
        }
        print(f"{name:7} {figures[name]}", file=sys.stderr)
    figures["p99_ratio"] = round(figures["moving"]["p99_ms"] / figures["quiet"]["p99_ms"], 3)
    figures["p50_ratio"] = round(figures["moving"]["p50_ms"] / figures["quiet"]["p50_ms"], 3)
    figures["goal_met"] = figures["p99_ratio"] <= GOAL
    figures["placements"] = moved.placements
    figures["moves"] = sum(run.num_moves for run in all_ranks)
    figures["moved_bytes"] = sum(run.num_bytes for run in all_ranks)
    return figures


if __name__ == "__main__":
    sys.exit(main())
