"""Where kernels run in a day, what a kernel with its inputs is (`Call`, made anew from a seed for every use), how long it
takes, and whether its answer is right: near the oracle's, far from the control's, the same bits twice.

Inputs are random, drawn on the device. In the interpreter float32 stands for bfloat16, which it multiplies wrongly.
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

from benchmarks.gpu.results import Row, Setting

_L2_TIMES = 4
_MOST_COPIES = 32
_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 10, 100
_ENOUGH_S = 0.05
_FLUSH_BYTES = 256 << 20

Function = Callable[[], object]


class Bench(NamedTuple):
    """A device and the type that activations have there."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, setting: Setting) -> "Bench":
        """The day's device, opened."""
        if setting.is_interpreted:
            return cls(torch.device("cpu"), torch.float32)
        return cls(torch.device("cuda", 0), torch.bfloat16)

    def generator(self, seed: int) -> torch.Generator:
        """A generator of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, generator: torch.Generator, *shape: int, spread: float = 1.0) -> Tensor:
        """Draw activations or weights."""
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return drawn if spread == 1.0 else drawn.mul_(spread)

    def integers(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Put numbers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


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


@dataclass(frozen=True, kw_only=True)
class Call:
    """A kernel and its inputs.

    Attributes:
        run: the kernel. prepare: puts back what a run changes in place, and spoils what it writes, before a run that is
            checked.
        result: what of a run's outcome is checked.
        oracle: the same in float32 and plain torch. control: the answer to another question, which the kernel's must
            not be near.
        num_bytes: that must move through memory at least. operations: of the matrix units.
        peers: others' kernels for the same inputs, by name.
    """

    run: Callable[[], Any]
    oracle: Callable[[], Tensor]
    control: Callable[[], Tensor]
    num_bytes: int
    operations: int = 0
    rate: str = "bf16_tflops"  # the ceiling that operations are held against
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    prepare: Callable[[], object] = bool  # nothing
    result: Callable[[Any], Tensor] = torch.Tensor.detach  # the outcome itself


MakeCall = Callable[[Bench, int], Call]  # from a seed


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes of whole tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def spoiling(out: Tensor) -> Callable[[], object]:
    """Return what fills a kernel's own memory with NaN, before a run that is checked."""
    return functools.partial(out.fill_, float("nan"))


ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-5}  # |ours - oracle| / |oracle|, euclidean
WORST = {torch.bfloat16: 0.08, torch.float32: 2e-4}  # greatest difference over the oracle's root mean square
CONTROL_TIMES = 5.0  # the control's error over the bound


def check(bench: Bench, name: str, make: MakeCall) -> Row:
    """Run a kernel twice, and compare."""
    call = make(bench, 0)
    call.prepare()
    first = call.result(call.run()).clone()
    poison(first)
    call.prepare()
    second = call.result(call.run())
    repeats = torch.equal(first, second)
    error, worst = distance(second, call.oracle())
    control, _ = distance(second, call.control())
    bound, worst_bound = ERROR[bench.dtype], WORST[bench.dtype]
    is_right = repeats and error <= bound and worst <= worst_bound and control >= CONTROL_TIMES * bound
    figures = {"error": error, "bound": bound, "worst": worst, "worst bound": worst_bound, "control": control}
    return Row(
        name=name, figures=figures, is_right=is_right, note="" if repeats else "other bits when run again"
    )


def distance(ours: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the relative euclidean error and the worst difference over the root mean square; NaN where one is."""
    ours, other = ours.double(), other.double()
    size = other.norm().item() or 1.0
    difference = (ours - other).abs()
    return difference.norm().item() / size, difference.max().item() / (size / other.numel() ** 0.5)


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next for a tensor of this size."""
    if like.is_floating_point():
        torch.full_like(like, float("nan"))
