"""Answers of whole models: logprobs of our engine, with eager and replayed decodes, compared with transformers'.

Two layers of each model at its real width (four of a hybrid one). Prompts run in two chunks and then token by token through our
engine. Logprobs are compared with those of transformers in float32. The mean deviation of the median prompt may be 1.5 times as
large as that of transformers in the same type. (If two experts are nearly equal, rounding chooses in any program, so neither
the worst token nor a single prompt is informative.) The run without graphs comes first, so that a failure with graphs can be
attributed to the capture. The later parts then run without graphs and report it.

Legend: N prompts, T tokens of a prompt that are scored.
"""

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.models import (
    HYBRID,
    MODELS,
    OTHER_ATTENTION,
    Silent,
    config_of,
    engine_config,
    sequence_of,
    transformers_model,
)
from benchmarks.gpu.results import Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from kvcache.states import NO_STATE, StatePiece
from scheduler.assembly import assemble
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.request import SamplingParams
from scheduler.step.runner import Runner

_PROMPTS, _TINY_PROMPTS = 5, 1
_CHUNK, _TAIL = 48, 4  # tokens of a prompt: half of them in each of two chunks, then one by one
_ALLOWED_TIMES, _ALLOWED = 1.5, 1e-3
# Experts in int8 (`--quantization int8`): rounding their weights costs more than bfloat16 does.
_INT8, _INT8_TIMES, _INT8_ALLOWED = "qwen3 int8", 10.0, 0.05
_EAGER, _REPLAYED = "eager", "replayed"
COMPILED = "qwen3"  # this model also runs with --enable-torch-compile


def units(setting: Setting) -> list[str]:
    """Return one unit per model, and one compiled."""
    return [*MODELS, *OTHER_ATTENTION, _INT8, f"{COMPILED} compiled"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Compare one model's logprobs of the prompts' own tokens."""
    name, bench = unit.partition(" ")[0], Bench.of(setting)
    config = config_of(name, setting, layers=4 if name == HYBRID else 2)
    count = _TINY_PROMPTS if setting.is_tiny else _PROMPTS
    drawn = torch.randint(
        0, config.vocab_size, (count, _CHUNK + _TAIL + 1), generator=torch.Generator().manual_seed(1)
    )
    prompts: list[list[int]] = drawn.tolist()
    quantization = "int8" if unit == _INT8 else None
    ours_with = functools.partial(
        our_logprobs, config, setting, prompts, compiler_of(setting, unit), quantization
    )
    parts = []
    for measure in (
        functools.partial(ours_with, replays=False),
        functools.partial(_their_logprobs, config, bench, prompts, torch.float32),
        functools.partial(_their_logprobs, config, bench, prompts, bench.dtype),
    ):
        parts.append(measure())
        gc.collect()  # one model at a time
    ours, exact, theirs = parts
    yield _compared(unit, _EAGER, ours, exact, theirs)
    if bench.device.type == "cuda":
        yield _compared(unit, _REPLAYED, ours_with(replays=True), exact, theirs)


def compiler_of(setting: Setting, name: str) -> str:
    """Return the compiler of "NAME compiled", or "" for a model that is not compiled."""
    compiler = "aot_eager" if setting.is_tiny else "inductor"
    return compiler if name.endswith(" compiled") else ""


def is_eager(setting: Setting, name: str) -> bool:
    """Whether this day found that a model answers correctly without graphs but not with them."""
    known = [f"parity/{name}/{name}, {words}/error" in setting.known for words in (_EAGER, _REPLAYED)]
    return known == [True, False] and not setting.is_interpreted


def _compared(name: str, words: str, ours: Tensor, exact: Tensor, theirs: Tensor) -> Row:
    """Compare logprobs [N, T]."""
    error, their_error, control = (
        (part - exact).abs().mean(1).median().item() for part in (ours, theirs, ours.roll(1, 1))
    )
    times = _INT8_TIMES if name == _INT8 else _ALLOWED_TIMES
    allowed = times * their_error + (_INT8_ALLOWED if name == _INT8 else _ALLOWED)
    figures = {"error": error, "transformers": their_error, "allowed": allowed, "control": control}
    return Row(name=f"{name}, {words}", figures=figures, is_right=error <= allowed and control > 5 * allowed)


def our_logprobs(
    config: Any,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    compiler: str = "",
    quantization: str | None = None,
    *,
    replays: bool,
) -> Tensor:
    """Return logprobs [N, T] of each prompt's tokens from the second on, each given the tokens before."""
    limits: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": 4 * BLOCK_TOKENS,
        "kv_cache_bytes": 1 << 28,
        "enable_torch_compile": bool(compiler),
        "compiler": compiler,
        "quantization": quantization,
        "enforce_eager": not replays,
    }
    with engine_config(config, setting, **limits) as about:
        runner = assemble(about, Silent()).runner
    return torch.tensor([_scored(runner, ids) for ids in prompts])


def _scored(runner: Runner, ids: Sequence[int]) -> list[float]:
    """Run one prompt in two chunks, then its last tokens one by one, and return their logprobs."""
    blocks = [3, 1, 0, 2]
    scored = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
    sequence = sequence_of(ids[: _CHUNK + 1], blocks, scored)
    found: list[float] = []
    for start in (0, _CHUNK // 2):
        item = Scheduled(sequence, start, _CHUNK // 2, False, _states(runner, start, _CHUNK // 2))
        sampled = runner.run(StepBatch([item], _CHUNK // 2, _CHUNK // 2), has_prefill=True)
        (part,) = (sampled.prompt_logprobs or {}).values()
        sequence.prompt_logprobs += part
        found += [entry.logprob for entry in part]
    for start in range(_CHUNK, len(ids) - 1):
        wanted = SamplingParams(
            max_tokens=1, temperature=0.0, num_logprobs=1, logprob_token_ids=(ids[start + 1],)
        )
        item = Scheduled(
            sequence_of(ids[: start + 1], blocks, wanted), start, 1, True, _states(runner, start, 1)
        )
        (entry,) = runner.run(StepBatch([item], 1, 0)).logprobs
        assert entry is not None, "asked for"
        found.append(entry.top_logprobs[entry.top_ids.index(ids[start + 1])])
    return found


def _states(runner: Runner, start: int, length: int) -> Sequence[StatePiece]:
    """Return the states that a step of a recurrent model reads and writes: two slots take turns."""
    if not runner.step.has_states:
        return ()
    number = start // (_CHUNK // 2) if start < _CHUNK else start - _CHUNK + 2
    return (StatePiece(NO_STATE if number == 0 else (number - 1) % 2, number % 2, length),)


@torch.inference_mode()
def _their_logprobs(
    config: Any, bench: Bench, prompts: Sequence[Sequence[int]], dtype: torch.dtype
) -> Tensor:
    model = transformers_model(config, bench, dtype)
    own = torch.tensor(prompts, device=bench.device)
    logits = torch.cat([model(input_ids=ids[None, :-1]).logits.float() for ids in own])
    return logits.log_softmax(-1).gather(2, own[:, 1:, None])[..., 0].cpu()
