"""Decode steps of a whole model compared with their floor, replayed from a CUDA graph and without.

The floor of a step is the bytes that it must read (the cache of all contexts and every weight except those of experts that no
row chose) over the copy's bandwidth. `of_floor` is that floor over the device's time for the model's forward, `eager` the
same without a graph. `step ms` is the time from one step's tokens to the next one's in the engine's own loop, which overlaps
steps on a GPU: planning, filling, copying, the forward, sampling, commit, hand-out. `gap` is the share of it in which the device
does not run the forward. `alone ms` is a step without overlap: filling, copying, the forward, sampling, tokens to the host.
Contexts have the given length and hold random keys and values: nothing was prefilled. In the last row, streams decode while
five prompts arrive per second. It has the time to each prompt's first token, and the streams' time between tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, bytes_of, time_queued
from benchmarks.gpu.ranks.engine_loop import EngineLoop, room
from benchmarks.gpu.ranks.models import config_of, engine_config, sequence_of, timed_models
from benchmarks.gpu.ranks.parity import COMPILED, compiler_of, is_eager
from benchmarks.gpu.results import Figure, Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.assembly import Assembled
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.request import SamplingParams
from scheduler.step.runner import fill_step

_BATCHES, _CONTEXT = (1, 8, 32, 128, 256), 2048
_TINY_BATCHES, _TINY_CONTEXT = (2,), 20
_GOALS = {"of_floor": 0.8}
_STEPS = 20
_INVARIANT = " batch-invariant"
_LOOP_STEPS, _TINY_LOOP_STEPS = 40, 3
_BATCH_TOKENS, _TINY_BATCH_TOKENS = 8192, 64  # of a step


def units(setting: Setting) -> list[str]:
    """Return the units: the model with goals first, a compiled one last."""
    return [
        f"steps {name}" for name in (*timed_models(setting), f"qwen3{_INVARIANT}", f"{COMPILED} compiled")
    ]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Run one unit."""
    yield from steps(setting, Bench.of(setting), unit.removeprefix("steps "))


def steps(setting: Setting, bench: Bench, name: str) -> Iterator[Row]:
    """Time steps of all batches through one engine, of a model or of one named "... compiled" or "... batch-invariant"."""
    batches = _TINY_BATCHES if setting.is_tiny else _BATCHES
    context = _TINY_CONTEXT if setting.is_tiny else _CONTEXT
    model, eager = name.partition(" ")[0], is_eager(setting, name)
    num_steps = _TINY_LOOP_STEPS if setting.is_tiny else _LOOP_STEPS
    step_tokens = _TINY_BATCH_TOKENS if setting.is_tiny else _BATCH_TOKENS
    blocks = -(-(context + room(max(batches), context, num_steps, step_tokens)) // BLOCK_TOKENS)
    limits: dict[str, Any] = {
        "max_num_seqs": max(batches),
        "max_model_len": blocks * BLOCK_TOKENS,
        "max_num_batched_tokens": step_tokens,
        "enable_prefix_caching": False,
        "enable_torch_compile": bool(compiler_of(setting, name)),
        "compiler": compiler_of(setting, name),
        "batch_invariant": name.endswith(_INVARIANT),
        "enforce_eager": eager,
    }
    with engine_config(config_of(model, setting), setting, **limits) as about:
        loop = EngineLoop(about)
    fill_cache(bench, loop.assembled)
    goals, note = _GOALS if model == "qwen3" else {}, "without graphs" if eager else ""
    with loop:
        for batch in batches:
            row = f"{name} b{batch} at {context}"
            if batch * blocks > loop.assembled.num_blocks:
                yield Row(name=row, figures={}, note="does not fit into the memory")
                continue
            step_s = statistics.median(loop.decode_steps_s(batch, context, num_steps))
            figures = _figures(setting, bench, loop.assembled, batch, context, step_s)
            yield Row(name=row, figures=figures, goals=goals, note=note)
        yield _arrivals(setting, name, loop, context)


def _arrivals(setting: Setting, name: str, loop: EngineLoop, context: int) -> Row:
    """Measure streams and arriving prompts, without HTTP."""
    streams, prompt, count, every_s = (1, 5, 16, 0.0) if setting.is_tiny else (8, 128, 20, 0.2)
    ttft_s, itl_s = loop.arrivals_s(streams, context, prompt, count, every_s)
    p50_s, p99_s = statistics.median(itl_s), statistics.quantiles(itl_s, n=100)[98]
    return Row(
        name=f"{name} {streams} streams + prompts of {prompt}",
        figures={
            "TTFT p50 ms": statistics.median(ttft_s) * 1e3,
            "ITL p50 ms": p50_s * 1e3,
            "ITL p99 ms": p99_s * 1e3,
            "p50 x 2 / p99": 2 * p50_s / p99_s,
        },
    )


def _figures(
    setting: Setting, bench: Bench, assembled: Assembled, batch: int, context: int, step_s: float
) -> dict[str, Figure]:
    runner, model = assembled.runner, assembled.model
    vocab = int(model.lm_head.shape[0])
    work = decodes(batch, context, vocab)
    before = [layer.counts.expert_E.copy() for layer in model.layers if layer.counts is not None]
    runner.run(work)
    after = [layer.counts.expert_E for layer in model.layers if layer.counts is not None]
    touched = sum(int((now > then).sum()) for then, now in zip(before, after, strict=True))
    alone_s = median_s(lambda: runner.run(work), 3 if setting.is_tiny else _STEPS)
    forward = forward_of(assembled, work)
    replayed_s = time_queued(bench, lambda: forward(runner.forward))
    eager_s = time_queued(bench, lambda: forward(model.forward))
    num_bytes = step_bytes(assembled, touched, batch, context)
    copy = setting.ceiling("copy_tb_per_s")
    floor_s = None if copy is None else num_bytes / (copy * 1e12)
    return {
        "forward ms": replayed_s * 1e3,
        "of_floor": None if floor_s is None else floor_s / replayed_s,
        "eager": None if floor_s is None else floor_s / eager_s,
        "step ms": step_s * 1e3,
        "gap": 1 - replayed_s / step_s,
        "alone ms": alone_s * 1e3,
        "GB": num_bytes / 1e9,
        "experts": touched,
    }


def step_bytes(assembled: Assembled, touched: int, batch: int, context: int) -> int:
    """Return the bytes that a step reads: weights, except embeddings and unchosen experts, and the visible cache."""
    layer, skeleton = assembled.model.layers[0], assembled.model.skeleton
    embeddings = id(skeleton.model.get_input_embeddings().weight)
    plain = {id(weight): weight for weight in skeleton.model.parameters()}
    cached = sum(
        skeleton.backend.token_bytes(shape) * min(context, shape.window or context)
        for shape in skeleton.cache_shapes
    )
    experts: int = touched * (layer.up.slot_bytes + layer.down.slot_bytes)
    return (
        sum(bytes_of(weight) for key, weight in plain.items() if key != embeddings) + experts + batch * cached
    )


def decodes(batch: int, context: int, vocab: int) -> StepBatch:
    """Return a batch of sequences that are about to run the last token of `context`, each on separate blocks."""
    blocks = -(-context // BLOCK_TOKENS)
    ids = torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()
    items = [
        Scheduled(
            sequence_of(row, range(at * blocks, (at + 1) * blocks), SamplingParams(max_tokens=1, temperature=0.0)),
            context - 1,
            1,
            True,
        )
        for at, row in enumerate(ids)
    ]  # fmt: skip
    return StepBatch(items, batch, 0)


def fill_cache(bench: Bench, assembled: Assembled) -> None:
    """Fill all pages with random keys and values: zeros run faster than real data."""
    generator = bench.generator(0)
    for pages in (*assembled.runner.cache.keys, *assembled.runner.cache.values):
        pages.normal_(generator=generator)


def forward_of(assembled: Assembled, work: StepBatch) -> Callable[[Any], Tensor]:
    """Return a function that runs a batch's forward with a given function; its step is filled and copied once."""
    runner = assembled.runner
    inputs = fill_step(runner.step, work, 0)
    return lambda forward: forward(inputs.token_T, runner.cache, inputs.row_R)


def median_s(call: Callable[[], object], runs: int) -> float:
    """Return the median seconds on the host's clock without the first two runs; the call returns its tokens."""
    seconds = []
    for _ in range(runs):
        begun_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[2:])
