"""CUDA graphs of steps: one graph per padded size of decode-only steps and of short steps with prompts, in one memory pool.

Graphs are captured at start from steps that have only padded rows, so capturing caches and counts nothing. Before a
replay, the step is copied to the same addresses (`kvcache.gpu.step`), so a replay needs no arguments. The largest sizes
are captured first, so that smaller ones find memory in the pool. All graphs write their logits into the same memory: one
tensor per graph would take gigabytes. Larger steps with prompts, and those whose hidden states are needed, run without a
graph. If steps with prompts cannot be captured, they run without graphs as well, and `why_no_prompts` has the reason.

A service with adapters has two graphs for each size. One of them launches the products of any adapters: tables at fixed addresses have
the adapter of each place, so it serves later ones without another capture. Steps without adapters replay the other.

Several ranks capture and replay the same sizes of decode-only steps in the same order, because they agree on each step's
size before it. Rejected: capturing when a size first occurs, which would stall a running service and count a step
twice.

`Recorder` hides CUDA, so that the policy is tested without a GPU.
"""

import gc
from collections.abc import Callable, Sequence
from itertools import count, product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcache.gpu.prompts import PromptShape
from kvcache.gpu.step import DeviceStep
from kvcache.paged_cache import PagedCache
from kvcache.step import Inputs

Run = Callable[[], Tensor]
Report = Callable[[int, int], None]
WARM_UPS = 2  # runs before a capture; the first compiles kernels and allocates scratch memory


class ModelForward(Protocol):
    """Runs a step, as `moe.model.Model.forward`."""

    def __call__(
        self,
        token_T: Tensor,
        cache: PagedCache,
        logits_R: Tensor,
        *,
        keeps_hidden: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, V], in `out` if given."""


class GraphError(RuntimeError):
    """A step does something that a CUDA graph does not support.

    Attributes:
        why: The first error of the capture, one line.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"a decode step cannot be captured ({why}); serve with --enforce-eager")
        self.why = why


class Recorder(Protocol):
    """Captures the kernels that a function launches."""

    def capture(self, run: Run) -> Run:
        """Return a function that replays `run`. Its result is the same memory every time."""

    def finish(self) -> int:
        """Free the memory of warm-ups. Return the bytes that this process's tensors took since the recorder was made: other
        processes on the device and the driver's own memory do not count."""


class CudaRecorder:
    """CUDA graphs that share a memory pool.

    One stream serves all warm-ups and captures: each stream would keep its own workspace of cuBLAS and its own free memory.
    """

    def __init__(self) -> None:
        self._begin()
        torch.cuda.empty_cache()
        self._reserved_bytes = torch.cuda.memory_reserved()

    def _begin(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Run) -> Run:
        """Capture as `Recorder` does. Other threads may use CUDA meanwhile.

        Raises:
            GraphError: The function does something that a graph does not support.
        """
        side, current = self._side, torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a collection may free objects that this thread must not free during a capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:
            # The end of a failed capture raises a second, less useful error, which also leaves the side stream current and
            # its pool in use. Report the first one, and let a later capture use others.
            torch.cuda.set_stream(current)
            self._begin()
            raise GraphError(_first_line(error.__context__ or error)) from error
        finally:
            if collects:
                gc.enable()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def finish(self) -> int:
        torch.cuda.empty_cache()
        return max(0, torch.cuda.memory_reserved() - self._reserved_bytes)


class _Key(NamedTuple):
    """What determines a graph."""

    has_prompts: bool
    rows: int
    has_adapters: bool  # the step runs adapters


class StepGraphs:
    """A model's `forward`, replayed from a graph if one exists for the step's size.

    Attributes:
        num_replays: Counter.
        num_bytes: Memory that the captures took: the graphs, their logits and what warm-ups allocated for good.
        why_no_prompts: Why steps with prompts could not be captured; None if they were, or were not wanted.
    """

    def __init__(self, forward: ModelForward, step: DeviceStep, cache: PagedCache) -> None:
        """Take a model's forward, step and cache. Captures nothing yet."""
        self._forward, self._step, self._cache = forward, step, cache
        self._replays: dict[_Key, Run] = {}
        self._logits_RV = torch.empty(0, 0)
        self.num_replays = self.num_bytes = 0
        self.why_no_prompts: str | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Padded sizes of decode-only steps that have a graph, smallest first."""
        return tuple(sorted({key.rows for key in self._replays if not key.has_prompts}))

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._replays)

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Padded sizes of steps with prompts that have a graph, smallest first."""
        return tuple(sorted({key.rows for key in self._replays if key.has_prompts}))

    def capture(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        report: Report = lambda _done, _total: None,
        *,
        prompt_sizes: Sequence[int] = (),
    ) -> None:
        """Capture graphs for these sizes, and let the step pad to them.

        Args:
            sizes: Of decode-only steps: some or all of `DeviceStep.graph_sizes`.
            report: Called with (done, total) after each graph.
            prompt_sizes: Of steps with prompts; see `DeviceStep.fix_prompts`. Empty with several ranks.
        """
        self._replays.clear()
        self._step.fix_prompts(prompt_sizes)
        shapes = self._step.prompt_shapes
        kinds = adapter_kinds(self._step)
        done, total = count(1), (len(sizes) + len(shapes)) * len(kinds)

        def tell() -> None:
            report(next(done), total)

        self._make_room(self._step.idle(max(sizes)), [*sizes, *(shape.sequences for shape in shapes)])
        self._capture_prompts(shapes, kinds, recorder, tell)
        for size in sorted(sizes, reverse=True):
            for has_adapters in kinds:
                run = self._run_of(self._step.idle(size), has_adapters)
                self._replays[_Key(False, size, has_adapters)] = recorder.capture(run)
                tell()
        self.num_bytes = recorder.finish()

    def _capture_prompts(
        self,
        shapes: Sequence[PromptShape],
        kinds: Sequence[bool],
        recorder: Recorder,
        tell: Callable[[], None],
    ) -> None:
        """Capture steps with prompts, or note why that fails and let them run as without graphs."""
        try:
            for shape, has_adapters in product(sorted(shapes, reverse=True), kinds):
                run = self._run_of(self._step.idle_prompts(shape), has_adapters)
                self._replays[_Key(True, shape.rows, has_adapters)] = recorder.capture(run)
                tell()
        except (GraphError, torch.OutOfMemoryError) as error:
            self.why_no_prompts = error.why if isinstance(error, GraphError) else _first_line(error)
            self._replays.clear()
            self._step.fix_prompts(())

    def _make_room(self, inputs: Inputs, rows: Sequence[int]) -> None:
        """Allocate logits for the largest number of rows, as wide as those of a step."""
        logits_RV = self._forward(inputs.token_T, self._cache, inputs.row_R)
        logits_RV[:1, 0].tolist()  # wait: the next step is written to the memory that this one is copied from
        self._logits_RV = logits_RV.new_empty(max(rows), logits_RV.shape[1])

    def _run_of(self, inputs: Inputs, has_adapters: bool) -> Run:
        def run() -> Tensor:
            self._step.forget_derived()
            out_RV = self._logits_RV[: len(inputs.row_R)]
            self._step.records_adapters = has_adapters
            try:
                return self._forward(inputs.token_T, self._cache, inputs.row_R, out=out_RV)
            finally:
                self._step.records_adapters = False

        return run

    def __call__(
        self, token_T: Tensor, cache: PagedCache, logits_R: Tensor, *, keeps_hidden: bool = False
    ) -> Tensor:
        """Run the step, as `moe.model.Model.forward`. The next replay overwrites the logits of a replay."""
        step = self._step
        key = _Key(step.prompt_shape is not None, step.num_padded, step.runs_adapters)
        replay = self._replays.get(key)
        if replay is None or keeps_hidden or not step.has_fixed_shape:
            return self._forward(token_T, cache, logits_R, keeps_hidden=keeps_hidden)
        self.num_replays += 1
        if key.has_adapters:
            step.copy_tables()
        return replay()


def adapter_kinds(step: DeviceStep) -> tuple[bool, ...]:
    """Return whether the graphs of a size run adapters: there is one for steps without, and one for any adapters."""
    return (False, True) if step.num_adapters else (False,)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
