"""Kernel times compared with the limits of memory or matrix units, and with other kernels for the same work.

A kernel's floor is the larger of its bytes over the copy's bandwidth and its operations over the matrix rate, both
measured in this run; `of_floor` is the floor over its time. `x NAME` is the peer's time over ours.
"""

import gc
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench, Call, num_copies, time_calls
from benchmarks.gpu.kernels.cases import TimedCase, timed_cases
from benchmarks.gpu.results import Figure, Row, Setting


def units(setting: Setting) -> list[str]:
    """Return the groups of cases."""
    return list(timed_cases(setting))


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Time one group."""
    bench = Bench.of(setting)
    for case in timed_cases(setting)[unit]:
        yield time_case(bench, case, setting)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def time_case(bench: Bench, case: TimedCase, setting: Setting) -> Row:
    """Time a kernel and its peers on the same inputs."""
    calls = [case.make(bench, 0)]
    calls += [case.make(bench, seed) for seed in range(1, num_copies(bench, calls[0].num_bytes))]
    timed = time_calls(bench, [call.run for call in calls])
    figures: dict[str, Figure] = {
        "us": timed.seconds * 1e6,
        **_fractions(calls[0], timed.seconds, setting),
    }
    notes = [] if timed.how == "graph" else [timed.how]
    for name in calls[0].peers:
        try:
            peer_s = time_calls(bench, [call.peers[name] for call in calls]).seconds
            figures[f"x {name}"] = peer_s / timed.seconds
        except (RuntimeError, TypeError, ValueError) as error:  # torch's errors for unsupported cases
            figures[f"x {name}"] = None
            notes.append(f"{name}: {str(error).strip().partition(chr(10))[0]}")
    return Row(name=case.name, figures=figures, goals=case.goals, note="; ".join(notes))


def _fractions(call: Call, seconds: float, setting: Setting) -> dict[str, Figure]:
    """Return the fractions of the ceilings that a call reaches, or None if they were not measured."""
    copy, rate = setting.ceiling("copy_tb_per_s"), setting.ceiling(call.rate)
    if copy is None or rate is None:
        return {"of_copy": None, "of_rate": None, "of_floor": None}
    by_bytes, by_operations = call.num_bytes / (copy * 1e12), call.operations / (rate * 1e12)
    return {
        "of_copy": by_bytes / seconds,
        "of_rate": by_operations / seconds,
        "of_floor": max(by_bytes, by_operations) / seconds,
    }
