"""How much time does counting experts' load add to a step?

Decode steps of a model (no HTTP, no scheduler), with and without counting in turn in one process, so that noise of the
machine affects both. With counting, a report is made once a second, as in the engine. The parts are also timed alone,
because a difference of 1 % is lost in the noise of a shared machine: one layer's count, the clock readings (which the steps
without counting include), one report. The goal is below 1 % of a step in total.

Expected bound: a pass over T x K ids per layer (about a nanosecond each) plus the call of a compiled function.

The front's part is measured too: one report of 58 layers x 256 experts on 32 ranks, decoded and added to window and recorder.

Run: `python -m benchmarks.experts.telemetry [DIRECTORY] [--batch 1,16,32] [--threads 1] [--context 150] [--rounds 30] [--save]`.
DIRECTORY defaults to the random model of `benchmarks.serve`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import ensure_random_model
from benchmarks.profile import NoDoorbell, decode
from dispatch.exchange import ExchangeClock
from expert_placement.load import no_figures
from kvcache.paged_cache import PagedCache
from moe.load_counts import LoadCounts
from scheduler.assembly import Assembled, assemble
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.moves.telemetry import REPORT_EVERY_S
from scheduler.policy.config import EngineConfig
from server.experts.answer import answer
from server.experts.load import ExpertsLoad
from server.http.json_writer import long_json_bytes
from server.link import messages

GOAL = 0.01  # of a step's time
CLOCK_READINGS, EXCHANGES = 6, 2  # per layer: around the exchanges of dispatch and combine, and the experts
CALLS = 2000  # for functions that take microseconds
FRONT = {"num_layers": 58, "num_experts": 256, "num_ranks": 32, "slots_per_rank": 9}


def seconds_per_call(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the median over five runs of many calls."""
    runs = []
    for _ in range(5):
        begun_s = time.perf_counter()
        for _ in range(calls):
            call()
        runs.append((time.perf_counter() - begun_s) / calls)
    return statistics.median(runs)


def step_times(built: Assembled, run: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps with and without counting, in turn; the order changes every round."""
    layers = built.model.layers
    times: dict[bool, list[float]] = {True: [], False: []}
    counters = [layer.counts for layer in layers]
    reported_s = time.perf_counter()
    for number in range(rounds):
        for counts_it in (number % 2 == 0, number % 2 == 1):
            for layer, counter in zip(layers, counters, strict=True):
                layer.counts = counter if counts_it else None
            begun_s = time.perf_counter()
            run()
            if counts_it and begun_s - reported_s > REPORT_EVERY_S:
                messages.encode(built.telemetry.report(number, 0, begun_s))
                reported_s = begun_s
            times[counts_it].append(time.perf_counter() - begun_s)
    for layer, counter in zip(layers, counters, strict=True):
        layer.counts = counter
    return times[True], times[False]


def parts(built: Assembled, batch: int) -> dict[str, float]:
    """Return the seconds of the parts of counting: a layer's count, its clock readings, a report."""
    experts, choices = built.experts.num_experts, int(built.model.skeleton.model.config.num_experts_per_tok)
    slots = built.experts.slot_expert.shape[1]
    counts = LoadCounts(1, num_experts=experts, num_ranks=1, slots_per_rank=slots).layers[0]
    ids = torch.randint(experts, (batch, choices))
    counting = seconds_per_call(lambda: counts.add(ids, ids, batch))
    clock, exchange = seconds_per_call(time.perf_counter_ns), ExchangeClock()
    added = seconds_per_call(lambda: exchange.add(1))
    report = seconds_per_call(lambda: messages.encode(built.telemetry.report(0, 0, 0.0)), 200)
    return {"count_s": counting, "clocks_s": CLOCK_READINGS * clock + EXCHANGES * added, "report_s": report}


def measure(built: Assembled, cache: PagedCache, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one batch size."""
    run = decode(built, cache, batch, options.context)
    run()
    with_s, without_s = step_times(built, run, options.rounds)
    found, step_s = parts(built, batch), statistics.median(without_s)
    layers = len(built.model.layers)
    share = layers * (found["count_s"] + found["clocks_s"]) / step_s + found["report_s"] / REPORT_EVERY_S
    return {
        "step_ms": step_s * 1e3,
        "step_with_ms": statistics.median(with_s) * 1e3,
        "measured_ratio": statistics.median(w / o for w, o in zip(with_s, without_s, strict=True)),
        "rounds": options.rounds,
        **{name.replace("_s", "_us"): value * 1e6 for name, value in found.items()},
        "share_by_parts": share,
        "goal_met": share < GOAL,
    }


def front_part() -> dict[str, float]:
    """Return the front's milliseconds per report of a large service, with the recorder on, and per answer."""
    table = LoadCounts(**FRONT).table
    slots = FRONT["num_ranks"] * FRONT["slots_per_rank"]
    placement = np.tile(np.arange(slots) % FRONT["num_experts"], (FRONT["num_layers"], 1))
    experts = ExpertMap(
        0, FRONT["num_experts"], FRONT["num_ranks"], tuple(range(FRONT["num_layers"])), 61, placement
    )
    load = ExpertsLoad("m")
    load.take_experts(experts)
    load.recorder.start()
    figures = no_figures(FRONT["num_ranks"])._replace(steps=1, step_s=1.0)
    report = LoadReport(rank=0, step=1, placement_version=0, counts=table.astype(np.uint32), figures=figures)
    message = messages.encode(report)
    taken = seconds_per_call(lambda: load.take_load(messages.decode(message)), 100)
    return {
        "report_bytes": len(message),
        "take_ms": taken * 1e3,
        "answer_loop_ms": seconds_per_call(load.snapshot, 20) * 1e3,
        "answer_thread_ms": seconds_per_call(lambda: long_json_bytes(answer(load.snapshot())), 3) * 1e3,
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a table and one JSON line; return the exit status: 1 if the goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts.telemetry", description="The cost of counting load."
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--batch", default="1,16,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results/")
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    batches = [int(text) for text in options.batch.split(",")]
    config = EngineConfig(
        directory=options.directory or ensure_random_model(),
        kv_cache_bytes=1 << 30,
        max_model_len=options.context + 1,
        max_num_seqs=max(batches),
        threads=options.threads,
    )
    built = assemble(config, NoDoorbell())
    cache = PagedCache(built.model.skeleton.cache_shapes, max(batches) * (options.context // 16 + 1))
    results = {batch: measure(built, cache, batch, options) for batch in batches}
    print(
        f"{'batch':>5} {'step ms':>8} {'with/without':>13} {'count us':>9} {'clocks us':>10} {'report us':>10} {'share':>7}"
    )
    for batch, found in results.items():
        print(
            f"{batch:5} {found['step_ms']:8.2f} {found['measured_ratio']:13.4f} {found['count_us']:9.2f} "
            f"{found['clocks_us']:10.2f} {found['report_us']:10.1f} {found['share_by_parts']:7.2%}"
            f"{'' if found['goal_met'] else '  goal of 1 % missed'}"
        )
    front = front_part()
    print(
        f"front: {front['take_ms']:.2f} ms per report of {front['report_bytes']} bytes, {front['answer_loop_ms']:.1f} ms of the event loop "
        f"and {front['answer_thread_ms']:.0f} of a thread per answer"
    )
    result = {"environment": card, "model": config.directory.name, "batches": results, "front": front}
    if options.save:
        print(f"saved {save_result('telemetry', result).name}")
    print_tail(result)
    return 0 if all(found["goal_met"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
