"""How long kernels take on a device, without the host's share and without their inputs in the cache.

Calls over different inputs, so many that together they are several times the L2, are captured in one CUDA graph, and its
replays are timed by events: launches are then as close together as in a served decode step. What cannot be captured is
timed call by call behind a flush of the cache, which also gives the host time to be ahead; its name says "eager".
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench

_L2_TIMES = 4
_MOST_COPIES = 32
_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 10, 100
_ENOUGH_S = 0.05
_FLUSH_BYTES = 256 << 20

Function = Callable[[], object]


class Timed(NamedTuple):
    """Median seconds of one call, the runs behind it, and how they were made: graph, eager or interpreted."""

    seconds: float
    num_runs: int
    how: str


def num_copies(bench: Bench, num_bytes: int) -> int:
    """How many sets of inputs it takes, so that a call finds nothing of its own in the cache."""
    if bench.device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(bench.device).L2_cache_size
    return max(1, min(_MOST_COPIES, -(-_L2_TIMES * l2_bytes // max(num_bytes, 1))))


def time_calls(bench: Bench, calls: Sequence[Function]) -> Timed:
    """Time calls that do the same on different inputs; each one's share."""
    if bench.device.type != "cuda":
        begun_s = time.perf_counter()
        calls[0]()
        return Timed(time.perf_counter() - begun_s, 1, "interpreted")
    for call in (*[calls[0]] * _WARM_UPS, *calls):
        call()
    torch.cuda.synchronize()
    try:
        graph = capture(calls)
    except RuntimeError:  # torch's word for what a graph cannot hold
        # A capture that failed leaves its stream the current one (torch.cuda.graph ends the capture first, which raises).
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        return _time_eagerly(calls)
    graph.replay()
    return time_replays(graph, len(calls))


def capture(calls: Sequence[Function]) -> torch.cuda.CUDAGraph:
    """Capture calls one after another; they have run before.

    Raises:
        RuntimeError: one of them does what a graph cannot hold.
    """
    gc.collect()  # what a collection would free in the middle of a capture breaks it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, num_calls: int = 1) -> Timed:
    """Time a graph's replays; a call's share of it."""
    seconds = _event_seconds(graph.replay, _num_runs(graph.replay))
    return Timed(statistics.median(seconds) / num_calls, len(seconds), "graph")


def time_queued(bench: Bench, call: Function) -> float:
    """Seconds per call of calls that follow each other as fast as the host can launch them."""
    call()
    if bench.device.type != "cuda":
        begun_s = time.perf_counter()
        call()
        return time.perf_counter() - begun_s
    runs = _num_runs(call)

    def all_of_them() -> None:
        for _ in range(runs):
            call()

    (seconds,) = _event_seconds(all_of_them, 1)
    return seconds / runs


def _time_eagerly(calls: Sequence[Function]) -> Timed:
    room = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    runs = max(1, _num_runs(calls[0]) // len(calls))
    seconds = [part for call in calls for part in _event_seconds(call, runs, before=room.zero_)]
    return Timed(statistics.median(seconds), len(seconds), "eager")


def _num_runs(call: Function) -> int:
    """So many that they take long enough together."""
    (first_s,) = _event_seconds(call, 1)
    return int(min(_MOST_RUNS, max(_LEAST_RUNS, _ENOUGH_S / max(first_s, 1e-6))))


def _event_seconds(call: Function, runs: int, before: Function | None = None) -> list[float]:
    event: Callable[..., Any] = torch.cuda.Event
    pairs = [[event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in pairs:
        if before is not None:
            before()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
