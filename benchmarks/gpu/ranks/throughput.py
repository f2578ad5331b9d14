"""Output tokens per second of whole models on one rank: our engine, and transformers on the same device.

A number of clients complete prompts of random tokens in one wave. The time is from the start of the first request to the end of
the last one, prompts included, without HTTP on either side. Our engine runs in a separate process, as in a service.
Transformers: its continuous batching (`continuous`), and one `generate` call on the whole batch with a static cache
(`static`), experts by grouped_mm, attention by sdpa, the same weights. `x` is our tokens/s over theirs. The goal:
at least 5 times its continuous batching at 32 clients and more.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.models import MODELS, QUANTISED, config_of, engine_config, transformers_model
from benchmarks.gpu.ranks.parity import is_eager
from benchmarks.gpu.results import Figure, Row, Setting
from benchmarks.serving.closed_loop import Latency, summarise
from benchmarks.serving.engine_alone import EngineAlone
from benchmarks.serving.transformers_worker import Peer

_CLIENTS, _PROMPT, _OUTPUT = (1, 32, 128, 256), 128, 128
_TINY_CLIENTS, _TINY_PROMPT, _TINY_OUTPUT = (2,), 6, 3
_TIMES, _TIMES_FROM = 5.0, 32
_EXPERTS = "grouped_mm"
# Transformers' continuous batching (5.23) keeps keys and values of one head size; latent attention's differ.
_UNABLE = (("deepseek", "continuous"),)
_BATCH_TOKENS = 8192  # of one step, in our engine and in the peer's


def units(setting: Setting) -> list[str]:
    """Return the units: our engine and the peer with a goal, per model; `generate` last, because its compilation takes long."""
    served = [
        f"{name} {program}"
        for name in MODELS
        for program in ("wideep", "continuous")
        if (name, program) not in _UNABLE
    ]
    quantised = [] if setting.is_tiny else [f"{name} wideep" for name in QUANTISED]
    return [*served, *quantised, *(f"{name} static" for name in MODELS)]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Measure one program with one model."""
    name, _, program = unit.partition(" ")
    if program == "wideep":
        yield from ours(setting, name)
        return
    yield from theirs(setting, Bench.of(setting), name, program)


def ours(setting: Setting, name: str) -> Iterator[Row]:
    """Measure one engine with all numbers of clients."""
    clients, prompt, output = _sizes(setting)
    config = config_of(name, setting)
    limits = {
        "max_num_seqs": max(clients),
        "max_model_len": prompt + output,
        "max_num_batched_tokens": 64 if setting.is_tiny else _BATCH_TOKENS,
        "enable_prefix_caching": False,
        "enforce_eager": is_eager(setting, name),
    }
    with engine_config(config, setting, **limits) as about, EngineAlone(about) as engine:
        engine.run(_prompts(config.vocab_size, 1, prompt, 0), output, 1)
        for count in clients:
            timings = engine.run(_prompts(config.vocab_size, count, prompt, count), output, count)
            row = _row(f"{name} {count} clients, wideep", summarise(timings))
            yield dataclasses.replace(row, note="without graphs" if is_eager(setting, name) else "")


def theirs(setting: Setting, bench: Bench, name: str, program: str) -> Iterator[Row]:
    """Measure transformers' model with all numbers of clients."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    clients, prompt, output = _sizes(setting)
    config = config_of(name, setting)
    model = transformers_model(config, bench)
    attention = "sdpa" if model._supports_sdpa else "eager"  # sdpa does not support sinks
    peer = Peer(model, max_num_seqs=max(clients), max_model_len=prompt + output)
    try:
        if program == "continuous":
            peer.configure(attention, _EXPERTS, _BATCH_TOKENS)
        _measured(peer, program, attention, _prompts(config.vocab_size, 2, prompt, 0), output)  # warms up
        for count in clients:
            prompts = _prompts(config.vocab_size, count, prompt, count)
            measured = _measured(peer, program, attention, prompts, output)
            yield _compared(setting, name, program, count, measured)
    finally:
        peer.close()


def _measured(
    peer: Peer, program: str, attention: str, prompts: list[list[int]], output: int
) -> float | Latency:
    """Run one wave. For `generate` there are no times of single tokens."""
    if program == "continuous":
        return summarise(peer.run(prompts, output, len(prompts)))
    seconds = peer.static(prompts, output, attention=attention, cache="static", experts=_EXPERTS)
    return len(prompts) * output / seconds


def _compared(setting: Setting, name: str, program: str, count: int, measured: float | Latency) -> Row:
    row = _row(f"{name} {count} clients, {program}", measured)
    own = setting.known.get(f"throughput/{name} wideep/{name} {count} clients, wideep/tokens/s")
    rate = row.figures["tokens/s"]
    times = own / rate if own is not None and isinstance(rate, float) and rate else None
    goals = {"wideep x": _TIMES} if program == "continuous" and count >= _TIMES_FROM else {}
    return dataclasses.replace(row, figures={**row.figures, "wideep x": times}, goals=goals)


def _row(name: str, measured: float | Latency) -> Row:
    figures: dict[str, Figure] = {
        "tokens/s": None,
        "TTFT p50 ms": None,
        "ITL p50 ms": None,
        "ITL p99 ms": None,
    }
    if isinstance(measured, Latency):
        figures["TTFT p50 ms"] = measured.ttft_p50_ms
        figures["ITL p50 ms"], figures["ITL p99 ms"] = measured.itl_p50_ms, measured.itl_p99_ms
        measured = measured.tokens_per_s
    return Row(name=name, figures={**figures, "tokens/s": measured, "wideep x": None})


def _prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return ids


def _sizes(setting: Setting) -> tuple[Any, int, int]:
    if setting.is_tiny:
        return _TINY_CLIENTS, _TINY_PROMPT, _TINY_OUTPUT
    return _CLIENTS, _PROMPT, _OUTPUT
