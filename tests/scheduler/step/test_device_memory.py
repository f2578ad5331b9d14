"""The arithmetic of measured memory: temporary caches, what stays, all graphs by a few, one error for every rank."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvcache.gpu.step import DeviceStep
from scheduler.step.device_memory import (
    MARGIN_BYTES,
    GraphBytes,
    Measured,
    Measurement,
    some_sizes,
    told_shortage,
)
from scheduler.step.graphs import Run, StepGraphs
from scheduler.step.groups import first_problem
from scheduler.step.parts import estimate_captures
from scheduler.step.sizing import KVMemoryError
from tests.scheduler.step.test_graphs import FakeModel, FakeRecorder
from tests.support.gpu.memory import FakeMemory
from tests.support.ranks import RankPool

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Blocks:
    """A device on which blocks are taken and freed by name, as by the allocator of torch."""

    total: int
    taken: dict[str, int] = field(default_factory=dict)
    outside: int = 0  # what the driver or other processes use
    most: int = 0

    def take(self, name: str, size: int) -> None:
        self.taken[name] = self.taken.get(name, 0) + size
        self.most = max(self.most, self.reserved())

    def free(self) -> int:
        return self.total - self.reserved() - self.outside

    def reserved(self) -> int:
        return sum(self.taken.values())

    def most_reserved(self) -> int:
        return self.most

    def restart(self) -> None:
        self.taken.pop("unused", None)
        self.most = self.reserved()


class Pages:
    """A temporary cache that gives its memory back when it is dropped."""

    def __init__(self, device: Blocks, size: int) -> None:
        self._device = device
        device.take("pages", size)

    def __del__(self) -> None:
        self._device.taken.pop("pages", None)


def test_a_step_is_what_it_takes_beside_weights_and_the_temporary_cache() -> None:
    device = Blocks(total=100 * GIB)
    measurement = Measurement(device)
    device.take("weights", 40 * GIB)
    device.take("unused", 7 * GIB)  # from loading
    device.outside = GIB  # kernels and NCCL

    def run(_cache: Any) -> None:
        device.take("unused", 3 * GIB)
        device.take("scratch that stays", GIB)

    found = measurement.measure(lambda: Pages(device, 2 * GIB), run, lambda _cache: 5 * MIB)  # type: ignore[arg-type,return-value]
    assert found == Measured(100 * GIB, free=58 * GIB, weights=42 * GIB, step=3 * GIB, graphs=5 * MIB)
    assert found.left == 55 * GIB - 5 * MIB
    assert found.cache_bytes(90 * GIB) == 45 * GIB - 5 * MIB - MARGIN_BYTES


def test_the_measured_parts_are_told_when_nothing_is_left_for_the_cache() -> None:
    found = Measured(10 * GIB, free=3 * GIB, weights=7 * GIB, step=2 * GIB, graphs=256 * MIB)
    with pytest.raises(
        KVMemoryError,
        match=r"may take 9.50 GiB .*weights 7.00 GiB, largest step 2.00 GiB, CUDA graphs 0.25 GiB",
    ):
        found.cache_bytes(int(9.5 * GIB))
    assert found.cache_bytes(int(9.5 * GIB) + 1) == 1


def test_a_given_size_must_fit_beside_the_measured_parts() -> None:
    found = Measured(10 * GIB, free=3 * GIB, weights=7 * GIB, step=2 * GIB, graphs=256 * MIB)
    found.check(768 * MIB)
    with pytest.raises(
        KVMemoryError, match=r"--kv-cache-memory is 0.75 GiB, but 0.75 GiB is left .*weights 7.00"
    ):
        found.check(768 * MIB + 1)


def test_a_lack_of_memory_names_what_needed_it() -> None:
    device = FakeMemory(total=10 * GIB, weights=9 * GIB, num_restarts=1)
    with (
        pytest.raises(
            KVMemoryError,
            match=r"not enough memory for the weights, with 9.00 GiB in use: CUDA out of memory; ",
        ),
        told_shortage(device, "the weights"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


class Recorder(FakeRecorder):
    """The first graph takes a pool, every graph 2 MiB of it and 1 MiB of the driver's memory."""

    def __init__(self, device: Blocks) -> None:
        super().__init__()
        self._device = device

    def capture(self, run: Run) -> Run:
        if not self.captured:
            self._device.take("graphs", 100 * MIB)
            self._device.take("unused", 300 * MIB)  # warm-ups
        self._device.take("graphs", 2 * MIB)
        self._device.outside += MIB
        return super().capture(run)


def test_all_graphs_are_estimated_by_a_few() -> None:
    step = DeviceStep(
        max_tokens=2048, max_sequences=64, max_blocks=2, block_tokens=16, device=torch.device("cpu")
    )
    device, model = Blocks(total=GIB), FakeModel(step)
    recorder = Recorder(device)
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    estimate = estimate_captures(graphs, step, recorder, device)
    assert recorder.captured == [64, 64, 64, 64, 56, 1], (
        "rows of logits: prompts of 1,024, 768 and 64, and decodes"
    )
    count = len(step.graph_sizes) + len(step.replayable_prompts)
    assert count == 11 + 8 and estimate == (100 + 3 * count) * MIB
    assert step.prompt_shapes == ()


def test_what_other_processes_take_during_a_capture_does_not_count_as_graphs() -> None:
    device = Blocks(total=100 * GIB)
    taken = GraphBytes(device)
    device.outside = 50 * GIB
    taken.note(1, 1)
    assert taken.of_all(1) <= 128 * MIB


def test_some_sizes_are_the_largest_two_and_the_smallest() -> None:
    assert some_sizes((1, 2, 4, 8)) == (1, 4, 8)
    assert some_sizes((5,)) == (5,)


def problem_on(rank: int) -> str | None:
    own = "it is full" if dist.get_rank() == rank else None
    return first_problem(own, dist.new_group([0, 1], backend="gloo"))


def test_a_problem_of_one_rank_ends_all(pool_of: Any) -> None:
    pool: RankPool = pool_of(2)
    assert pool.run(problem_on, 1) == ["rank 1: it is full"] * 2
    assert pool.run(problem_on, 7) == [None, None]
    assert first_problem("it is full", None) == "it is full"
