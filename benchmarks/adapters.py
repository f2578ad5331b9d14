"""How much slower is a decode step if its rows use LoRA adapters, and does a service pay for adapters that no row uses?

One rank decodes with Qwen3-MoE's shape and random weights that are not on disk. Adapters of attention, router and experts have random
values. Three engines' steps are timed in turn: without adapters; with places for adapters but rows without one; and with rows that
take 1 or 8 adapters in turn. Rows without an adapter are first checked to have the same bits in both engines.

Expected bound: a step's time is that of reading its weights once. An adapter of rank r adds r * (inputs + outputs) values to inputs *
outputs of a matrix, and a row's expert has other values for each adapter. `bound` is the speed that follows, relative to a step
without adapters.

Run: `python -m benchmarks.adapters [--batch 1,16] [--adapters 1,8] [--rank 16] [--dtype bfloat16] [--lora-dtype auto] [--layers 8]
[--threads 2] [--context 150] [--dense-only] [--save]`.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import config_of
from benchmarks.profile import NoDoorbell, decode
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from moe.lora.adapter_files import read_adapter
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig

SHAPE = "qwen3-moe"
_WARM_UPS, _STEPS = 5, 40
# Steps of the same kind before a timed one, so that it finds the caches as its own kind leaves them.
_ALIKE = 3
_SPREAD = 0.02
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def main(arguments: list[str] | None = None) -> int:
    """Print a table and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters", description="The cost of LoRA adapters."
    )
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--adapters", default="1,8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--lora-dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--dense-only", action="store_true", help="adapters of attention only")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/adapters-<date>-<cpu>.json"
    )
    options = parser.parse_args(arguments)
    batches, counts = (
        [int(text) for text in given.split(",")] for given in (options.batch, options.adapters)
    )
    card = environment_card()
    print_card(card)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        config = config_of(SHAPE, num_hidden_layers=options.layers)
        config.save_pretrained(root / "model")
        plain, adapted = (
            open_engine(root / "model", max(batches), options, num_places=places)
            for places in (0, max(counts))
        )
        for place in range(max(counts)):
            place_adapter(adapted, root / f"adapter{place}", config, place, options)
        print(f"\nmedian ms {'':8}{'base':>10}{'places':>10}" + "".join(f"{count:>9}a" for count in counts))
        found, bounds = {}, {}
        for batch in batches:
            check_bits(plain, adapted, batch, options.context)
            times = measure(plain, adapted, batch, options.context, counts)
            found[f"batch {batch}"] = times
            print(f"{f'batch {batch}':18}" + "".join(f"{each:10.3f}" for each in times.values()))
            bounds[f"batch {batch}"] = {
                f"{count} adapters": bound(config, options, batch, count) for count in counts
            }
            print(
                f"{'  relative, bound':38}"
                + "".join(
                    f"{times['base'] / times[name]:5.2f},{most:4.2f}"
                    for name, most in bounds[f"batch {batch}"].items()
                )
            )
    result = {"environment": card, "options": vars(options), "ms": found, "bound": bounds}
    print_tail({"benchmark": "adapters", **result})
    if options.save:
        name = "adapters-dense" if options.dense_only else "adapters"
        save_result(name, {"benchmark": "adapters", **result})
    return 0


def open_engine(directory: Path, batch: int, options: argparse.Namespace, *, num_places: int) -> Assembled:
    """Build an engine with places for adapters."""
    return assemble(
        EngineConfig(
            directory=directory, kv_cache_bytes=1 << 28, max_model_len=options.context + 2, max_num_seqs=max(batch, 16),
            threads=options.threads, load_format="dummy", enable_lora=num_places > 0, max_loras=max(num_places, 1),
            lora_dtype=options.lora_dtype, dtype=options.dtype,
        ),
        NoDoorbell(),
    )  # fmt: skip


def place_adapter(
    built: Assembled, directory: Path, config: Any, place: int, options: argparse.Namespace
) -> None:
    """Write an adapter with random values, and put it at a place."""
    write_random_adapter(directory, config, place, rank=options.rank, is_dense=options.dense_only)
    bank = built.model.adapters
    assert bank is not None, "the engine has places"
    bank.place(place, bank.load(directory, read_adapter(directory).digest, max_rank=options.rank))


def write_random_adapter(directory: Path, config: Any, seed: int, *, rank: int, is_dense: bool) -> None:
    """Write an adapter of attention and, unless `is_dense`, of router and experts."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    tensors: dict[str, torch.Tensor] = {}

    def draw(name: str, a: tuple[int, int], b: tuple[int, int]) -> None:
        for side, shape in (("A", a), ("B", b)):
            key = f"base_model.model.model.layers.{name}.lora_{side}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * _SPREAD

    widths = {
        "q_proj": (hidden, config.num_attention_heads * config.head_dim),
        "k_proj": (hidden, config.num_key_value_heads * config.head_dim),
        "v_proj": (hidden, config.num_key_value_heads * config.head_dim),
        "o_proj": (config.num_attention_heads * config.head_dim, hidden),
    }
    for layer in range(config.num_hidden_layers):
        for name, (fan_in, fan_out) in widths.items():
            draw(f"{layer}.self_attn.{name}", (rank, fan_in), (fan_out, rank))
        if not is_dense:
            draw(f"{layer}.mlp.gate", (rank, hidden), (experts, rank))
            draw(f"{layer}.mlp.experts.base_layer", (rank * experts, hidden), (2 * inner, rank * experts))
            draw(f"{layer}.mlp.experts", (rank * experts, inner), (hidden, rank * experts))
    directory.mkdir()
    fields = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*PROJECTIONS, "gate"],
        "target_parameters": None if is_dense else ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "adapter_model.safetensors")


def bound(config: Any, options: argparse.Namespace, batch: int, num_adapters: int) -> float:
    """Return the relative speed with adapters if a step's time were that of reading its weights, with uniform routing."""
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, int(config.num_experts)
    chosen = int(config.num_experts_per_tok)
    queries, keys = (
        num * config.head_dim for num in (config.num_attention_heads, config.num_key_value_heads)
    )

    def num_read(rows: float) -> float:
        """Return the expected number of experts that rows need."""
        return float(experts * (1 - (1 - chosen / experts) ** rows))

    linears = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), (hidden, experts)]
    of_expert = [(hidden, 2 * inner), (inner, hidden)]
    base = sum(k * n for k, n in linears) + num_read(batch) * sum(k * n for k, n in of_expert)
    base = options.layers * base + hidden * config.vocab_size
    num = min(num_adapters, batch)
    low = num * sum(k + n for k, n in linears[: 4 if options.dense_only else 5])
    if not options.dense_only:
        low += num * num_read(batch / num) * sum(k + n for k, n in of_expert)
    size = {"float32": 4, "bfloat16": 2}
    low_size = size[options.dtype if options.lora_dtype == "auto" else options.lora_dtype]
    num_base: float = base * size[options.dtype]
    num_more: float = options.layers * options.rank * low * low_size
    return num_base / (num_base + num_more)


def _cache(built: Assembled, batch: int, context: int) -> PagedCache:
    return PagedCache(built.model.skeleton.cache_shapes, batch * (context // BLOCK_TOKENS + 1))


def check_bits(plain: Assembled, adapted: Assembled, batch: int, context: int) -> None:
    """Check that rows without an adapter have the same bits in both engines.

    Raises:
        RuntimeError: They have not.
    """
    logits = []
    for built in (plain, adapted):
        model, outputs = built.model, list[torch.Tensor]()
        forward = model.forward
        run = decode(built, _cache(built, batch, context), batch, context)
        model.forward = lambda *inputs, forward=forward, outputs=outputs: outputs.append(forward(*inputs))  # type: ignore[method-assign]
        run()
        model.forward = forward  # type: ignore[method-assign]
        logits.append(outputs[0])
    if not torch.equal(*logits):
        raise RuntimeError("rows without an adapter have other bits in an engine with places for adapters")


def measure(
    plain: Assembled, adapted: Assembled, batch: int, context: int, counts: list[int]
) -> dict[str, float]:
    """Return the median milliseconds of each kind of step; all are measured in turn, in random order."""
    cache = _cache(adapted, batch, context)
    runs: dict[str, Callable[[], None]] = {
        "base": decode(plain, _cache(plain, batch, context), batch, context),
        "places": decode(adapted, cache, batch, context),
        **{
            f"{count} adapters": decode(adapted, cache, batch, context, num_adapters=count)
            for count in counts
        },
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffled = random.Random(0)
    for turn in range(_WARM_UPS + _STEPS):
        for name, run in shuffled.sample(list(runs.items()), len(runs)):
            for _ in range(_ALIKE):
                run()
            begun_s = time.perf_counter()
            run()
            if turn >= _WARM_UPS:
                times[name].append((time.perf_counter() - begun_s) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    sys.exit(main())
