"""Steps that only decode, replayed from CUDA graphs: one graph per padded size, all in one pool of memory.

A graph is captured at the start, with a step of padded rows only: nothing is cached or counted by it. A later step
of that size has been copied to the same addresses by the time it is replayed (`kvcache.gpu.step`), so a replay needs
no arguments. Largest sizes are captured first, so that smaller ones find their memory in the pool.
Steps with prompts on any rank, and those whose hidden states are asked for, run as they are. Where several ranks run
together they capture and replay the same sizes in the same order, because they agree on each step's before it.
Rejected: capturing when a size first occurs, which would stall a service amid its work and count a step twice.

What CUDA does is behind `Recorder`; the policy is tested without a GPU.
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
WARM_UPS = 2  # runs before a capture: kernels are compiled and scratch memory is made in the first


class GraphError(RuntimeError):
    """A step does something that a CUDA graph cannot hold."""


class Recorder(Protocol):
    """Captures what a function launches."""

    def capture(self, run: Run) -> Run:
        """Return what replays it; the result is the same memory every time."""
        ...


class CudaRecorder:
    """CUDA graphs that share a pool."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Run:
        """See `Recorder`. Other threads may go on using CUDA meanwhile.

        Raises:
            GraphError: the function does what a graph cannot hold.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what a collection frees may be what this thread must not free while it captures
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:
            # The end of a capture that has failed raises once more, and says less than what came first.
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
    """A model's `forward`, replayed where a graph is at hand.

    Attributes:
        num_replays: counter.
    """

    def __init__(self, forward: Forward, step: DeviceStep, cache: PagedCache) -> None:
        """Take a model's forward, its step and its cache. Nothing is captured yet."""
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
            sizes: of `DeviceStep.graph_sizes`.
            report: called with how many are done, of how many.
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
        """Run the step; see `moe.model.Model.forward`. A replay's logits are overwritten by the next one's."""
        replay = self._replays.get(self._step.num_padded)
        if replay is None or keeps_hidden or not self._step.has_fixed_shape:
            return self._forward(token_T, cache, logits_R, keeps_hidden=keeps_hidden)
        self.num_replays += 1
        return replay()
