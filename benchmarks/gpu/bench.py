"""The device of a day, a kernel with its inputs (`Call`, created again from a seed for every use), its time, and the check of
its answer: close to the oracle's, far from the control's, the same bits twice.

Inputs are random, drawn on the device. The interpreter uses float32 instead of bfloat16, which it multiplies wrongly.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.interpreter import patch_once
from benchmarks.gpu.results import Row, Setting

_L2_TIMES = 4
_MOST_COPIES = 32
_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 10, 100
_ENOUGH_S = 0.05
_FLUSH_BYTES = 256 << 20

Function = Callable[[], object]


class Bench(NamedTuple):
    """A device and the type of its activations."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, setting: Setting) -> "Bench":
        """Open the day's device."""
        if setting.is_interpreted:
            patch_once()
            return cls(torch.device("cpu"), torch.float32)
        return cls(torch.device("cuda", 0), torch.bfloat16)

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, generator: torch.Generator, *shape: int, spread: float = 1.0) -> Tensor:
        """Draw activations or weights."""
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return drawn if spread == 1.0 else drawn.mul_(spread)

    def integers(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy numbers to the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Timed(NamedTuple):
    """Median seconds of one call, the number of runs, and the way they were made: graph, eager or interpreted."""

    seconds: float
    num_runs: int
    how: str


def num_copies(bench: Bench, num_bytes: int) -> int:
    """Return how many sets of inputs are needed so that a call finds none of its inputs in the cache."""
    if bench.device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(bench.device).L2_cache_size
    return max(1, min(_MOST_COPIES, -(-_L2_TIMES * l2_bytes // max(num_bytes, 1))))


def time_calls(bench: Bench, calls: Sequence[Function]) -> Timed:
    """Time calls that do the same work on different inputs. Return the time per call."""
    if bench.device.type != "cuda":
        begun_s = time.perf_counter()
        calls[0]()
        return Timed(time.perf_counter() - begun_s, 1, "interpreted")
    for call in (*[calls[0]] * _WARM_UPS, *calls):
        call()
    torch.cuda.synchronize()
    try:
        graph = capture(calls)
    except RuntimeError:  # raised by torch for operations that a graph cannot capture
        # A capture that failed leaves its stream the current one (torch.cuda.graph ends the capture first, which raises).
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        return _time_eagerly(calls)
    graph.replay()
    return time_replays(graph, len(calls))


def capture(calls: Sequence[Function]) -> torch.cuda.CUDAGraph:
    """Capture calls one after another. They must have run before.

    Raises:
        RuntimeError: A graph cannot capture one of them.
    """
    gc.collect()  # a collection that frees memory during a capture would break it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, num_calls: int = 1) -> Timed:
    """Time a graph's replays. Return the time per call."""
    seconds = _event_seconds(graph.replay, _num_runs(graph.replay))
    return Timed(statistics.median(seconds) / num_calls, len(seconds), "graph")


def time_queued(bench: Bench, call: Function) -> float:
    """Return the seconds per call for calls that are launched as fast as the host can."""
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
    """Return the number of runs that together take long enough to time."""
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


@dataclass(frozen=True, kw_only=True)
class Call:
    """A kernel and its inputs.

    Attributes:
        run: The kernel. prepare: restores inputs that a run changes in place, and overwrites its output, before a checked run.
        result: The part of a run's outcome to check.
        oracle: The same in float32 and plain torch. control: the answer for other inputs; the kernel's must be far from it.
        num_bytes: Bytes that must at least move through memory. operations: operations of the matrix units.
        peers: Other kernels for the same inputs, by name.
        bounds: Allowed error and worst difference, of quantised results. None: those of the activations' type.
    """

    run: Callable[[], Any]
    oracle: Callable[[], Tensor]
    control: Callable[[], Tensor]
    num_bytes: int
    operations: int = 0
    rate: str = "bf16_tflops"  # the ceiling for operations
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    prepare: Callable[[], object] = bool  # does nothing
    result: Callable[[Any], Tensor] = torch.Tensor.detach  # the outcome itself


MakeCall = Callable[[Bench, int], Call]  # from a seed


def bytes_of(*tensors: Tensor | None) -> int:
    """Return the bytes of whole tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def spoiling(out: Tensor) -> Callable[[], object]:
    """Return a function that fills a kernel's output with NaN before a checked run."""
    return functools.partial(out.fill_, float("nan"))


ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-5}  # |ours - oracle| / |oracle|, euclidean
WORST = {torch.bfloat16: 0.08, torch.float32: 2e-4}  # largest difference over the oracle's root mean square
CONTROL_TIMES = 5.0  # the control's error over the bound


def check(bench: Bench, name: str, make: MakeCall) -> Row:
    """Run a kernel twice and compare the results."""
    call = make(bench, 0)
    call.prepare()
    first = call.result(call.run()).clone()
    poison(first)
    call.prepare()
    second = call.result(call.run())
    repeats = torch.equal(first, second)
    error, worst = distance(second, call.oracle())
    control, _ = distance(second, call.control())
    bound, worst_bound = call.bounds or (ERROR[bench.dtype], WORST[bench.dtype])
    is_right = repeats and error <= bound and worst <= worst_bound and control >= CONTROL_TIMES * bound
    figures = {"error": error, "bound": bound, "worst": worst, "worst bound": worst_bound, "control": control}
    return Row(
        name=name, figures=figures, is_right=is_right, note="" if repeats else "bits differ between runs"
    )


def distance(ours: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the relative euclidean error and the worst difference over the root mean square; NaN if a value is NaN."""
    ours, other = ours.double(), other.double()
    size = other.norm().item() or 1.0
    difference = (ours - other).abs()
    return difference.norm().item() / size, difference.max().item() / (size / other.numel() ** 0.5)


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the allocator returns next for a tensor of this size."""
    if like.is_floating_point():
        torch.full_like(like, float("nan"))
