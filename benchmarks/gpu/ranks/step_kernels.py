"""Kernels of whole steps: which ones take the device's time, how often each is launched, and how long a launch takes.

Decodes have contexts of the given length, of random keys and values. Each kind of step has a row for each of its longest kernels and one for
the rest. The sum excludes the time between kernels, in which the device waits.
"""

import functools
import re
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.decode_steps import fill_cache
from benchmarks.gpu.ranks.models import Silent, config_of, engine_config, timed_models
from benchmarks.gpu.ranks.parity import is_eager
from benchmarks.gpu.ranks.prompt_steps import CONTEXT, TINY_CONTEXT, KernelTime, Mix, kernel_times, mixed
from benchmarks.gpu.results import Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.assembly import Assembled, assemble

_MIXES = (Mix(0, 0, 1), Mix(0, 0, 8), Mix(0, 0, 32), Mix(0, 0, 256), Mix(1, 128), Mix(4, 2048), Mix(1, 8192))
_TINY_MIXES = (Mix(0, 0, 2), Mix(1, 5))
_SHOWN = 12
_LONGEST_NAME = 56
_ARGUMENTS = re.compile(r"<.*|\(.*")


def units(setting: Setting) -> list[str]:
    """Return one unit per model."""
    return [f"launches {name}" for name in timed_models(setting)]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Profile all kinds of steps through one engine."""
    name, bench = unit.removeprefix("launches "), Bench.of(setting)
    mixes, context = (_TINY_MIXES, TINY_CONTEXT) if setting.is_tiny else (_MIXES, CONTEXT)
    sequences = max(mix.decodes + mix.prompts for mix in mixes)
    tokens = max(sequences, *(mix.prompts * mix.length + mix.decodes for mix in mixes))
    with engine_config(
        config_of(name, setting), setting, max_num_seqs=sequences,
        max_model_len=max(context, *(mix.length for mix in mixes)), max_num_batched_tokens=tokens,
        enable_prefix_caching=False, enforce_eager=is_eager(setting, name),
    ) as about:  # fmt: skip
        assembled = assemble(about, Silent())
    fill_cache(bench, assembled)
    for mix in mixes:
        if mix.decodes * -(-context // BLOCK_TOKENS) > assembled.num_blocks:
            yield Row(name=f"{name} {mix.words}", figures={}, note="does not fit into the memory")
        elif setting.is_interpreted:
            _step(assembled, mix, context)
            yield Row(name=f"{name} {mix.words}", figures={}, note="the interpreter launches nothing")
        else:
            _step(assembled, mix, context)  # compiles and records
            times = kernel_times(functools.partial(_step, assembled, mix, context))
            yield from _rows(f"{name} {mix.words}", times)


def _step(assembled: Assembled, mix: Mix, context: int) -> None:
    batch = mixed(mix, context, int(assembled.model.lm_head.shape[0]))
    assembled.runner.run(batch, has_prefill=mix.prompts > 0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rows(step: str, times: list[KernelTime]) -> Iterator[Row]:
    """Yield the longest kernels, and the sum of the others."""
    times = sorted(times, key=lambda each: -each.seconds)
    shown, others = times[:_SHOWN], times[_SHOWN:]
    all_s = sum(each.seconds for each in times)
    rest = KernelTime("others", sum(each.launches for each in others), sum(each.seconds for each in others))
    for each in (*shown, rest):
        yield Row(
            name=f"{step}: {short_name(each.name)}",
            figures={
                "ms": each.seconds * 1e3,
                "share": each.seconds / all_s if all_s else None,
                "launches": each.launches,
                "us": each.seconds / each.launches * 1e6 if each.launches else None,
            },
        )


def short_name(name: str) -> str:
    """Return a kernel's name without types, namespaces and arguments."""
    words = name.removeprefix("void ").removeprefix("at::native::")
    return _ARGUMENTS.sub("", words).strip()[:_LONGEST_NAME] or name[:_LONGEST_NAME]
