"""A decode step of a whole model against its floor, replayed from a CUDA graph and without; and its answers.

The floor of a step is the bytes that it must read (every weight but the experts that no row chose, and the cache of
all contexts) over the copy's bandwidth. `of_floor` is that floor over the device's time for the model's forward, `eager`
the same without a graph. `step ms` is what the service sees: filling the step, copying it, the forward, sampling,
tokens to the host; `gap` is the share of it in which the device has nothing to do with the forward.
Contexts are as long as said and hold random keys and values: nothing was prefilled.
Parity runs a prompt in two chunks and then token by token through our engine, and compares logprobs with those of
transformers in float32: ours may be off as far as transformers' own in the same type, and a half more, on average (where
two experts are nearly equal, rounding chooses, in any program: the worst token says little).
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, bytes_of
from benchmarks.gpu.models import MODELS, config_of, engine_config, transformers_model
from benchmarks.gpu.rows import Figure, Row, Setting
from benchmarks.gpu.served import sequence_of
from benchmarks.gpu.timing import time_queued
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.assembly import Assembled, assemble
from scheduler.batch_step import fill_step
from scheduler.policy import Batch, Scheduled
from scheduler.request import SamplingParams

_BATCHES, _CONTEXT = (1, 32, 128, 256), 2048
_TINY_BATCHES, _TINY_CONTEXT = (1, 2), 20
_GOALS = {"of_floor": 0.8}
_COMPILED = "qwen3"  # measured with --enable-torch-compile too
_STEPS = 20
_CHUNK, _TAIL = 48, 4  # tokens of a parity prompt: half of them in each of two chunks, then one by one
_ALLOWED_TIMES, _ALLOWED = 1.5, 1e-3


class Silent:
    """A doorbell for an engine whose loop does not run."""

    def ring(self, step: int) -> None:
        """Nobody sleeps."""

    def wait(self, step: int) -> None:
        """Likewise."""


def units(setting: Setting) -> list[str]:
    """Answers of all models, then the times that goals speak of, then other models', then one model compiled."""
    plain = [f"parity {name}" for name in MODELS] + [f"steps {name}" for name in MODELS]
    return [*plain, f"parity {_COMPILED} compiled", f"steps {_COMPILED} compiled"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Run one."""
    kind, name, *compiled = unit.split()
    bench = Bench.of(setting)
    compiler = ("aot_eager" if setting.is_tiny else "inductor") if compiled else ""
    if kind == "parity":
        yield parity(setting, bench, name, compiler)
    else:
        yield from steps(setting, bench, name, compiler)


def steps(setting: Setting, bench: Bench, name: str, compiler: str = "") -> Iterator[Row]:
    """Time steps of all batches through one engine."""
    batches = _TINY_BATCHES if setting.is_tiny else _BATCHES
    context = _TINY_CONTEXT if setting.is_tiny else _CONTEXT
    config = config_of(name, setting)
    limits = {"max_num_seqs": max(batches), "max_model_len": -(-context // BLOCK_TOKENS) * BLOCK_TOKENS}
    with engine_config(config, setting, compiler=compiler, **limits) as about:
        assembled = assemble(about, Silent())
    fill_cache(bench, assembled)
    goals = _GOALS if name == "qwen3" else {}
    for batch in batches:
        figures = _figures(setting, bench, assembled, batch, context)
        yield Row(name=f"{_named(name, compiler)} b{batch} at {context}", figures=figures, goals=goals)


def _named(name: str, compiler: str) -> str:
    return f"{name} compiled" if compiler else name


def _figures(
    setting: Setting, bench: Bench, assembled: Assembled, batch: int, context: int
) -> dict[str, Figure]:
    runner, model = assembled.runner, assembled.model
    vocab = int(model.lm_head.shape[0])
    work = decodes(batch, context, vocab)
    before = [layer.counts.expert_E.copy() for layer in model.layers if layer.counts is not None]
    runner.run(work)
    after = [layer.counts.expert_E for layer in model.layers if layer.counts is not None]
    touched = sum(int((now > then).sum()) for then, now in zip(before, after, strict=True))
    step_s = _median_s(lambda: runner.run(work), 3 if setting.is_tiny else _STEPS)
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
        "GB": num_bytes / 1e9,
        "experts": touched,
    }


def step_bytes(assembled: Assembled, touched: int, batch: int, context: int) -> int:
    """Bytes that a step reads: weights but those of unchosen experts and the embeddings, and what of the cache is seen."""
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


def decodes(batch: int, context: int, vocab: int) -> Batch:
    """Sequences that are about to run their last token of `context`, on blocks of their own."""
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
    return Batch(items, batch, 0)


def fill_cache(bench: Bench, assembled: Assembled) -> None:
    """Put random keys and values into all pages: zeros run faster than what is served."""
    generator = bench.generator(0)
    for pages in (*assembled.runner.cache.keys, *assembled.runner.cache.values):
        pages.normal_(generator=generator)


def forward_of(assembled: Assembled, work: Batch) -> Callable[[Any], Tensor]:
    """Return what runs a batch's forward with a given function, its step filled and copied once."""
    runner = assembled.runner
    inputs = fill_step(runner.step, work, 0)
    return lambda forward: forward(inputs.token_T, runner.cache, inputs.row_R)


def _median_s(call: Callable[[], object], runs: int) -> float:
    """Seconds of the host's clock, the first two runs left out; the call returns when its tokens are there."""
    seconds = []
    for _ in range(runs):
        begun_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[2:])


def parity(setting: Setting, bench: Bench, name: str, compiler: str = "") -> Row:
    """Compare logprobs of a prompt's own tokens."""
    config = config_of(name, setting, layers=2)
    length = _CHUNK + _TAIL
    ids = torch.randint(
        0, config.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    parts = []
    for measure in (
        functools.partial(our_logprobs, config, setting, ids, compiler),
        functools.partial(_their_logprobs, config, bench, ids, torch.float32),
        functools.partial(_their_logprobs, config, bench, ids, bench.dtype),
    ):
        parts.append(measure())
        gc.collect()  # a model at a time
    ours, exact, theirs = parts
    error, their_error, control = (
        (part - exact).abs().mean().item() for part in (ours, theirs, ours.roll(1))
    )
    allowed = _ALLOWED_TIMES * their_error + _ALLOWED
    figures = {"error": error, "transformers": their_error, "allowed": allowed, "control": control}
    return Row(
        name=f"parity {_named(name, compiler)}, 2 layers",
        figures=figures,
        is_right=error <= allowed and control > 5 * allowed,
    )


def our_logprobs(config: Any, setting: Setting, ids: Sequence[int], compiler: str = "") -> Tensor:
    """Logprobs of ids[1:], each given those before: two chunks of a prompt, then tokens one by one."""
    with engine_config(
        config,
        setting,
        max_num_seqs=2,
        max_model_len=4 * BLOCK_TOKENS,
        kv_cache_bytes=1 << 28,
        compiler=compiler,
    ) as about:
        runner = assemble(about, Silent()).runner
    blocks = [3, 1, 0, 2]
    scored = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
    sequence = sequence_of(ids[: _CHUNK + 1], blocks, scored)
    found: list[float] = []
    for start in (0, _CHUNK // 2):
        item = Scheduled(sequence, start, _CHUNK // 2, False)
        sampled = runner.run(Batch([item], _CHUNK // 2, _CHUNK // 2), has_prefill=True)
        (part,) = (sampled.prompt_logprobs or {}).values()
        sequence.prompt_logprobs += part
        found += [entry.logprob for entry in part]
    for start in range(_CHUNK, len(ids) - 1):
        wanted = SamplingParams(
            max_tokens=1, temperature=0.0, num_logprobs=1, logprob_token_ids=(ids[start + 1],)
        )
        item = Scheduled(sequence_of(ids[: start + 1], blocks, wanted), start, 1, True)
        (entry,) = runner.run(Batch([item], 1, 0)).logprobs
        assert entry is not None, "asked for"
        found.append(entry.top_logprobs[entry.top_ids.index(ids[start + 1])])
    return torch.tensor(found)


@torch.inference_mode()
def _their_logprobs(config: Any, bench: Bench, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    model = transformers_model(config, bench, dtype)
    own = torch.tensor([ids], device=bench.device)
    logits: Tensor = model(input_ids=own[:, :-1]).logits[0].float()
    return logits.log_softmax(-1).gather(1, own[0, 1:, None])[:, 0].cpu()
