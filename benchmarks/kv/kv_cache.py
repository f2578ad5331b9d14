"""How much faster do long contexts decode with `--kv-cache-dtype fp8` or `int8`, and how much slower are prompts?

One rank decodes a batch of long contexts with random models: keys and values (Qwen3-Next's shape with attention in all
layers), latents (DeepSeek-V3's), and latents with an index of 512 tokens (V3.2's). The formats take turns in one process,
each on its own cache. Then a chunk of a prompt runs behind a long context. Before the measurement, logits are compared: those
of 8 bits must be close to the default's, but not equal.

Expected bound: a decode reads every number of its contexts once, so attention takes a quarter of the time if it is limited by
bytes alone. Prompts compute more than they read. Decoding codes can only make them slower, unless the context is long.

Run: `python -m benchmarks.kv.kv_cache [--context 8192] [--batch 16] [--threads 2] [--save]`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.contexts import engine, max_length
from benchmarks.models.random_model import ensure_random_model
from benchmarks.profile import decode
from dispatch.mode import fitting_capacity
from kvcache.codes import CODES
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.step import Span
from scheduler.assembly import Assembled

SHAPES = ("qwen3-next-attention", "deepseek-v3", "deepseek-v3.2")
_WARM_UPS, _STEPS, _CHUNK_TOKENS = 3, 21, 256
_FARTHEST = 1.0  # mean distance of logits with a standard deviation of 4


def main(arguments: list[str] | None = None) -> int:
    """Print a table per shape and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv.kv_cache", description="The speed of KV caches in 8 bits."
    )
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/kv-cache-<date>-<cpu>.json"
    )
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    result: dict[str, Any] = {"benchmark": "kv_cache", "environment": card, "options": vars(options)}
    result["shapes"] = {shape: measure(shape, options) for shape in options.shapes}
    print_tail(result)
    if options.save:
        save_result("kv-cache", result)
    return 0


def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the figures of one model."""
    directory = ensure_random_model(shape=shape, dtype=torch.bfloat16)
    context = min(options.context, max_length(directory) - _CHUNK_TOKENS)
    engines = {
        form: engine(
            directory, options.threads, max_num_seqs=options.batch, max_num_batched_tokens=512, kv_cache_dtype=form
        )
        for form in CODES
    }  # fmt: skip
    caches = {form: filled(built, options.batch, context) for form, built in engines.items()}
    distances = {form: distance(engines, caches, form, options.batch, context) for form in CODES}
    decodes = {form: decode(built, caches[form], options.batch, context) for form, built in engines.items()}
    chunks = {form: chunk(built, caches[form], context) for form, built in engines.items()}
    found: dict[str, Any] = {"context": context, "bytes_per_token": {}, "distance_of_logits": distances}
    print(f"\n{shape}, {context} tokens of context, batch {options.batch}", flush=True)
    print(
        f"  {'':6}{'bytes/token':>12}{'decode ms':>11}{'most':>9}{'tokens/s':>10}{'ratio':>7}{'prompt ms':>11}{'ratio':>7}"
    )
    decode_s, chunk_s = turn_about(decodes), turn_about(chunks)
    for form, built in engines.items():
        token_bytes = sum(shape.token_bytes for shape in built.model.skeleton.cache_shapes)
        step_s, prompt_s = statistics.median(decode_s[form]), statistics.median(chunk_s[form])
        row = {
            "decode_ms": step_s * 1e3, "decode_ms_max": max(decode_s[form]) * 1e3, "tokens_per_s": options.batch / step_s,
            "decode_ratio": statistics.median(decode_s["auto"]) / step_s, "prompt_ms": prompt_s * 1e3,
            "prompt_ratio": statistics.median(chunk_s["auto"]) / prompt_s,
        }  # fmt: skip
        found["bytes_per_token"][form], found[form] = token_bytes, row
        print(
            f"  {form:6}{token_bytes:12,}{row['decode_ms']:11.1f}{row['decode_ms_max']:9.1f}{row['tokens_per_s']:10.1f}"
            f"{row['decode_ratio']:7.2f}{row['prompt_ms']:11.1f}{row['prompt_ratio']:7.2f}",
            flush=True,
        )
    return found


def filled(built: Assembled, batch: int, context: int) -> PagedCache:
    """Return a cache with random rows in all layers, written as a step writes them."""
    shapes, step = built.model.skeleton.cache_shapes, built.runner.step
    blocks = -(-(context + _CHUNK_TOKENS) // BLOCK_TOKENS)
    cache = PagedCache(shapes, batch * blocks, 2)
    cache.step = step
    generator = torch.Generator().manual_seed(1)
    for first in range(0, batch * blocks, step.max_tokens // BLOCK_TOKENS):
        own = range(first, min(first + step.max_tokens // BLOCK_TOKENS, batch * blocks))
        step.fill([Span(0, len(own) * BLOCK_TOKENS, own)])
        for layer, shape in enumerate(shapes):
            rotary = 32 if shape.latent else 0  # of the random models' latents
            dims = (shape.key_dim - rotary, rotary) if shape.latent else (shape.key_dim, shape.value_dim)
            key, value = (
                torch.randn(1, shape.num_kv_heads, step.num_padded, dim, generator=generator) for dim in dims
            )
            cache.update(key, value, layer)
            if shape.index_dim:
                cache.update_indexer(
                    torch.randn(1, step.num_padded, shape.index_dim, generator=generator), layer
                )
    return cache


def chunk(built: Assembled, cache: PagedCache, context: int) -> Callable[[], None]:
    """Return a function that runs a chunk of a prompt behind a context."""
    tokens = torch.randint(
        built.model.lm_head.shape[0], (_CHUNK_TOKENS,), generator=torch.Generator().manual_seed(0)
    )
    span = Span(context, _CHUNK_TOKENS, range(-(-(context + _CHUNK_TOKENS) // BLOCK_TOKENS)))

    def run() -> None:
        step = built.runner.step
        step.fill([span], agreed_tokens=fitting_capacity(_CHUNK_TOKENS))
        built.model.forward(tokens[: step.num_padded], cache, torch.tensor([_CHUNK_TOKENS - 1]))

    return run


def distance(
    engines: dict[str, Assembled], caches: dict[str, PagedCache], form: str, batch: int, context: int
) -> float:
    """Return the mean distance of a decode's logits from the default's.

    Raises:
        AssertionError: It is 0, or too large for a rounding.
    """
    logits = []
    for each in ("auto", form):
        built, step = engines[each], engines[each].runner.step
        blocks = -(-context // BLOCK_TOKENS)
        step.fill(
            [Span(context - 1, 1, range(row * blocks, (row + 1) * blocks)) for row in range(batch)], batch
        )
        tokens = torch.arange(step.num_padded)
        logits.append(built.model.forward(tokens, caches[each], torch.arange(batch)).clone())
    found = float((logits[0] - logits[1]).abs().mean())
    assert (found > 0.0) == (form != "auto") and found < _FARTHEST, f"{form}: logits are {found} away"
    return found


def turn_about(runs: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Return seconds of each function's runs, without warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(_WARM_UPS + _STEPS):
        for name, run in runs.items():
            begun_s = time.perf_counter()
            run()
            if round_number >= _WARM_UPS:
                times[name].append(time.perf_counter() - begun_s)
    return times


if __name__ == "__main__":
    sys.exit(main())
