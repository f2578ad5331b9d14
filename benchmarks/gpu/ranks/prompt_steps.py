"""Steps with prompts of a whole model: the time that the service sees, and the time of the kernels in it.

`step ms` is the step on the host's clock: filling, copying, the forward, sampling, tokens to the host. `kernels ms` is the sum of
the device's time for all launches. `busy` is the second over the first; what is missing to 1 is time in which the device waits
for the host. Decodes in a mixed step have contexts of the given length, of random keys and values.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.decode_steps import decodes, fill_cache, median_s
from benchmarks.gpu.ranks.models import Silent, config_of, engine_config, sequence_of, timed_models
from benchmarks.gpu.ranks.parity import is_eager
from benchmarks.gpu.results import Figure, Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.assembly import Assembled, assemble
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.request import SamplingParams


class Mix(NamedTuple):
    """Prompts, each from its first token, and decodes in the same step."""

    prompts: int
    length: int
    decodes: int = 0

    @property
    def words(self) -> str:
        """Name of a row."""
        prompts = [f"{self.prompts} x {self.length}"] if self.prompts else []
        return " + ".join([*prompts, *([f"{self.decodes} decodes"] if self.decodes else [])])


class KernelTime(NamedTuple):
    """A kernel's launches in a step, and their time together."""

    name: str
    launches: int
    seconds: float


_MIXES = (Mix(1, 128), Mix(1, 128, 8), Mix(1, 100, 31), Mix(1, 512), Mix(1, 1024), Mix(4, 2048), Mix(1, 8192))
_TINY_MIXES = (Mix(1, 5), Mix(2, 3, 1))
CONTEXT, TINY_CONTEXT = 2048, 20
_GOALS = {"busy": 0.9}
_STEPS = 12


def units(setting: Setting) -> list[str]:
    """Return one unit per model."""
    return [f"prompts {name}" for name in timed_models(setting)]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Time all mixes through one engine."""
    name, bench = unit.removeprefix("prompts "), Bench.of(setting)
    mixes, context = (_TINY_MIXES, TINY_CONTEXT) if setting.is_tiny else (_MIXES, CONTEXT)
    tokens = max(mix.prompts * mix.length + mix.decodes for mix in mixes)
    with engine_config(
        config_of(name, setting), setting, max_num_seqs=4 if setting.is_tiny else 64, max_model_len=max(context, tokens),
        max_num_batched_tokens=tokens, enforce_eager=is_eager(setting, name),
    ) as about:  # fmt: skip
        assembled = assemble(about, Silent())
    fill_cache(bench, assembled)
    for mix in mixes:
        yield Row(
            name=f"{name} {mix.words}", figures=_figures(setting, assembled, mix, context), goals=_GOALS
        )


def _figures(setting: Setting, assembled: Assembled, mix: Mix, context: int) -> dict[str, Figure]:
    batch = mixed(mix, context, int(assembled.model.lm_head.shape[0]))

    def step() -> None:
        assembled.runner.run(batch, has_prefill=True)

    step_s = median_s(step, 3 if setting.is_tiny else _STEPS)
    figures: dict[str, Figure] = {"step ms": step_s * 1e3, "tokens/s": batch.num_tokens / step_s}
    if setting.is_interpreted:
        return figures | {"kernels ms": None, "launches": None, "busy": None}
    kernels = kernel_times(step)
    kernels_s = sum(each.seconds for each in kernels)
    return figures | {
        "kernels ms": kernels_s * 1e3,
        "launches": sum(each.launches for each in kernels),
        "busy": kernels_s / step_s,
    }


def kernel_times(step: Callable[[], object]) -> list[KernelTime]:
    """Run a step once and return the time of each kernel on the device."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.device_time_total > 0]
    return [KernelTime(event.key, event.count, event.device_time_total / 1e6) for event in events]


def mixed(mix: Mix, context: int, vocabulary: int) -> StepBatch:
    """Return a batch of decodes and whole prompts, all on separate blocks."""
    beside, first = decodes(mix.decodes, context, vocabulary), mix.decodes * -(-context // BLOCK_TOKENS)
    blocks = -(-mix.length // BLOCK_TOKENS)
    drawn = torch.randint(
        0, vocabulary, (mix.prompts, mix.length), generator=torch.Generator().manual_seed(1)
    )
    prompts = [
        Scheduled(
            sequence_of(ids, range(first + at * blocks, first + (at + 1) * blocks), SamplingParams(max_tokens=1, temperature=0.0)),
            0,
            mix.length,
            True,
        )
        for at, ids in enumerate(drawn.tolist())
    ]  # fmt: skip
    num_prefill = mix.prompts * mix.length
    return StepBatch([*beside.items, *prompts], mix.decodes + num_prefill, num_prefill)
