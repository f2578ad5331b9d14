"""Measure what a GPU's memory holds in addition to the KV cache, before the cache gets the rest.

After the weights are loaded, the largest step runs on a temporary cache: prompts of as many tokens as a step may have,
logits of as many rows, sampled with filters, penalties and logprobs, and drafts. It runs twice, and the first result stays in
use, as it does while steps overlap. The most memory that torch reserves meanwhile is the step's. A few graphs are then captured
on the same cache, the largest first. All graphs share a pool, so that the others add little: their share is taken from the
captured ones. The temporary cache and graphs are freed before the real ones are made.

What a step of other ranks may send to this one's experts is not part of the measurement: the tokens of all ranks could choose
experts of one rank. `MARGIN_BYTES` is for that, for fragmentation, and for what the driver keeps for new kernels.

`DeviceMemory` hides torch's counters, so that the policy is tested without a GPU.
Idea: the profiling run before vLLM sizes its cache (vllm/v1/worker/gpu_worker.py, Apache-2.0); the graphs are captured there
without being counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from attention.gpu.limits import EXPANDED_BYTES
from kvcache.paged_cache import LayerShape, PagedCache
from moe.model import Model
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.sequence import Sequence as Text
from scheduler.sampling.sampler import Sampler
from scheduler.step.runner import SCORED_ROWS
from scheduler.step.sizing import KVMemoryError

MARGIN_BYTES = 256 << 20
_RUNS = 2  # the second one finds the results of the first in use
_NUM_LOGPROBS = 20
# Every part of sampling: rules, penalties, filters, logprobs.
_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.95,
    top_k=_NUM_LOGPROBS,
    presence_penalty=1.0,
    allowed_token_ids=(0, 1),
    num_logprobs=_NUM_LOGPROBS,
)
_MOST_DRIVER_BYTES = 64 << 20  # of a graph, outside torch's memory; more is another process's


class DeviceMemory(Protocol):
    """The counters of one GPU's memory, in bytes."""

    def free(self) -> int:
        """Return what no process uses."""

    def reserved(self) -> int:
        """Return what this process's tensors and torch's free blocks take."""

    def most_reserved(self) -> int:
        """Return the largest value of `reserved` since `restart`."""

    def restart(self) -> None:
        """Wait for the device, free unused blocks, and begin to look for the largest value."""


def free_bytes(memory: DeviceMemory) -> int:
    """Return what new tensors may take. Waits for the device."""
    memory.restart()  # blocks that torch keeps for later tensors count as free
    return memory.free()


class CudaMemory:
    """torch's counters of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def most_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def restart(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return a GPU's counters; None on a CPU."""
    return CudaMemory(device) if device.type == "cuda" else None


class Measured(NamedTuple):
    """What a rank's memory holds in addition to its cache, in bytes."""

    free_at_start: int  # before anything was loaded
    free: int  # with the weights only
    weights: int  # and all else that stays
    step: int
    graphs: int

    @property
    def left(self) -> int:
        """Free bytes after the largest step and the graphs."""
        return self.free - self.step - self.graphs

    def cache_bytes(self, budget: int) -> int:
        """Return what remains for the cache.

        Args:
            budget: Bytes of `free_at_start` that the rank may take.

        Raises:
            KVMemoryError: Nothing remains.
        """
        left = budget - self.weights - self.step - self.graphs - MARGIN_BYTES
        if left <= 0:
            raise KVMemoryError(
                f"the GPU had {_gib(self.free_at_start)} free, of which the rank may take {_gib(budget)} "
                f"(--gpu-memory-utilization); measured: {self.in_words}, which leaves nothing for the KV cache; use more ranks, "
                f"fewer redundant experts, a smaller --max-num-batched-tokens or --max-num-seqs, or --enforce-eager"
            )
        return left

    def check(self, cache_bytes: int) -> None:
        """Raise if a cache of a given size does not fit.

        Raises:
            KVMemoryError: The message has the measured sizes.
        """
        if cache_bytes > self.left:
            raise KVMemoryError(
                f"--kv-cache-memory is {_gib(cache_bytes)}, but {_gib(max(0, self.left))} is left of the GPU's "
                f"{_gib(self.free_at_start)} that were free at the start; measured: {self.in_words}; give less, or remove the flag"
            )

    @property
    def in_words(self) -> str:
        """The parts, for people."""
        return (
            f"weights {_gib(self.weights)}, largest step {_gib(self.step)}, CUDA graphs {_gib(self.graphs)}"
        )


class Measurement:
    """Measures a model once. Collective with several ranks, like every step."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Begin before anything is loaded."""
        self._memory, self._free_at_start, self._reserved_at_start = memory, memory.free(), memory.reserved()

    def measure(
        self,
        make_cache: Callable[[], PagedCache],
        run: Callable[[PagedCache], None],
        capture: Callable[[PagedCache], int],
    ) -> Measured:
        """Measure on a temporary cache.

        Args:
            make_cache: Makes it.
            run: Runs the largest steps.
            capture: Captures graphs. Returns the bytes that all graphs of the engine take, by estimate.

        Raises:
            KVMemoryError: The device has not enough memory for a step.
        """
        memory = self._memory
        memory.restart()
        with told_shortage(memory, "the largest step or its CUDA graphs"):
            before = memory.reserved()
            cache = make_cache()
            pages = memory.reserved() - before
            memory.restart()
            run(cache)
            most = memory.most_reserved()
            memory.restart()
            graphs = capture(cache)
        del cache
        memory.restart()
        kept, free = memory.reserved(), memory.free()
        return Measured(
            free_at_start=self._free_at_start,
            free=free,
            weights=max(self._free_at_start - free, kept - self._reserved_at_start),
            step=max(0, most - pages - kept),
            graphs=graphs,
        )


@contextmanager
def told_shortage(memory: DeviceMemory | None, what: str) -> Iterator[None]:
    """Turn a lack of a GPU's memory into an error that names its purpose. `memory` is None on a CPU.

    Raises:
        KVMemoryError: The device has not enough memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        taken = "" if memory is None else f", with {_gib(memory.reserved())} in use"
        raise KVMemoryError(
            f"the GPU has not enough memory for {what}{taken}: {str(error).partition('. ')[0]}; use more ranks, fewer redundant "
            f"experts, a smaller --max-num-batched-tokens, --max-num-seqs or --kv-cache-memory, or a smaller model"
        ) from error


@torch.inference_mode()
def run_largest(model: Model, cache: PagedCache, sampler: Sampler, num_rows: int) -> None:
    """Run the largest step with prompts, sample `num_rows` rows, score prompt tokens and draft. Counts are dropped."""
    vocabulary = int(model.lm_head.shape[0])
    step: Any = model.step  # the backend's `DeviceStep`
    underway = []
    for _ in range(_RUNS):
        inputs = step.fill_with_prompts(cache.num_blocks, vocabulary, num_rows)
        logits_RV = model.forward(inputs.token_T, cache, inputs.row_R, keeps_hidden=True)
        underway.append((logits_RV, sampler.begin(logits_RV, _contexts(len(logits_RV)))))
        scored = min(SCORED_ROWS, step.num_tokens)
        scored_CV = model.logits_of(torch.arange(scored, device=model.device))
        sampler.score(scored_CV, [0] * scored, _NUM_LOGPROBS)
        for depth in range(model.num_mtp_layers):
            model.draft(depth, inputs.token_T, cache, inputs.row_R, torch.zeros_like(inputs.token_T))
    for _, drawing in underway:
        drawing.read()
    model.load_counts.clear()
    for layer in model.layers:
        layer.sample_TD = None


def _contexts(count: int) -> list[Text]:
    texts = []
    for number in range(count):
        request = Request(request_id=str(number), prompt_ids=(0,), params=_PARAMS, arrival_s=0.0)
        texts.append(Text.from_request(request))
        texts[-1].token_ids.append(0)
    return texts


def expansion_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return what prompts behind long contexts take in addition to the largest step, which has none."""
    return EXPANDED_BYTES if any(shape.latent for shape in shapes) else 0


class GraphBytes:
    """Watches a capture of some graphs, and estimates the memory of all. Pass `note` as the capture's report."""

    def __init__(self, memory: DeviceMemory) -> None:
        memory.restart()
        self._memory = memory
        self._free, self._reserved = memory.free(), memory.reserved()
        self._taken: list[int] = []  # after each graph

    def note(self, _done: int, _total: int) -> None:
        """Note what is taken after a graph."""
        self._taken.append(self._now())

    def of_all(self, count: int) -> int:
        """Return the bytes of `count` graphs, of which some are captured, the largest among them."""
        if not self._taken:
            return 0
        captured = len(self._taken)
        added = max(0, self._taken[-1] - self._taken[0])
        each = added / (captured - 1) if captured > 1 else 0
        self._memory.restart()  # frees what only the warm-ups used
        return self._now() + int(each * max(0, count - captured))

    def _now(self) -> int:
        reserved = self._memory.reserved() - self._reserved
        outside = self._free - self._memory.free() - reserved
        return max(0, reserved) + min(max(0, outside), _MOST_DRIVER_BYTES * (len(self._taken) + 1))


def some_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes whose graphs are captured for the measurement: the largest two and the smallest."""
    return tuple(sorted({*sizes[:1], *sizes[-2:]}))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
