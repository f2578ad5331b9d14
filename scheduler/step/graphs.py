"""CUDA graphs for decode-only steps: one graph per padded size, all in one memory pool.

Graphs are captured at start from a step that has only padded rows, so capturing caches and counts nothing. Before a
replay, the step is copied to the same addresses (`kvcache.gpu.step`), so a replay needs no arguments. The largest sizes
are captured first, so that smaller ones find memory in the pool. Steps with prompts on any rank, and those whose hidden
states are needed, run without a graph. Several ranks capture and replay the same sizes in the same order, because they
agree on each step's size before it. Rejected: capturing when a size first occurs, which would stall a running service
and count a step twice.

`Recorder` hides CUDA, so that the policy is tested without a GPU.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcache.gpu.step import DeviceStep
from kvcache.paged_cache import PagedCache
from scheduler.step.runner import Forward

Run = Callable[[], Tensor]
WARM_UPS = 2  # runs before a capture; the first compiles kernels and allocates scratch memory


class GraphError(RuntimeError):
    """A step does something that a CUDA graph does not support."""


class Recorder(Protocol):
    """Captures the kernels that a function launches."""

    def capture(self, run: Run) -> Run:
        """Return a function that replays `run`. Its result is the same memory every time."""
        ...


class CudaRecorder:
    """CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Run:
        """Capture as `Recorder` does. Other threads may use CUDA meanwhile.

        Raises:
            GraphError: The function does something that a graph does not support.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a collection may free objects that this thread must not free during a capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:
            # The end of a failed capture raises a second, less useful error. Report the first one.
            why = str(error.__context__ or error).strip().partition("\n")[0]
            raise GraphError(
                f"a decode step cannot be captured ({why}); serve with --enforce-eager"
            ) from error
        finally:
            if collects:
                gc.enable()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """A model's `forward`, replayed from a graph if one exists for the step's size.

    Attributes:
        num_replays: Counter.
    """

    def __init__(self, forward: Forward, step: DeviceStep, cache: PagedCache) -> None:
        """Take a model's forward, step and cache. Captures nothing yet."""
        self._forward, self._step, self._cache = forward, step, cache
        self._replays: dict[int, Run] = {}
        self.num_replays = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Padded sizes that have a graph, smallest first."""
        return tuple(sorted(self._replays))

    def capture(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        report: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """Capture graphs for these sizes.

        Args:
            sizes: Some or all of `DeviceStep.graph_sizes`.
            report: Called with (done, total) after each graph.
        """
        for done, size in enumerate(sorted(sizes, reverse=True)):
            inputs = self._step.idle(size)

            def run(token_T: Tensor = inputs.token_T, row_R: Tensor = inputs.row_R) -> Tensor:
                return self._forward(token_T, self._cache, row_R)

            self._replays[size] = recorder.capture(run)
            report(done + 1, len(sizes))

    def __call__(
        self, token_T: Tensor, cache: PagedCache, logits_R: Tensor, *, keeps_hidden: bool = False
    ) -> Tensor:
        """Run the step, as `moe.model.Model.forward`. The next replay overwrites the logits of a replay."""
        replay = self._replays.get(self._step.num_padded)
        if replay is None or keeps_hidden or not self._step.has_fixed_shape:
            return self._forward(token_T, cache, logits_R, keeps_hidden=keeps_hidden)
        self.num_replays += 1
        return replay()
