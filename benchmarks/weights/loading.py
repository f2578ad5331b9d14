"""How long does a rank take to load a checkpoint, in every published format?

Checkpoints of the same size on disk and one shape (Qwen3-MoE's, hidden 2,048, inner 768, 32 experts per layer), with as many
layers as needed for that size: a quantised one has more weights. Timed is the start of a rank after libraries are imported:
reading the configuration, checking headers, reading and packing weights, reserving the cache. Files are in the page cache.

Expected bound: reading and packing touch every byte a few times, about 1 GB/s per thread; loading uses one thread.

Run: `python -m benchmarks.weights.loading [--gigabytes 2] [--repeats 3] [--save]`.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.profile import NoDoorbell
from scheduler.assembly import assemble
from scheduler.policy.config import EngineConfig
from tests.support.models.published import PUBLISHED

HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 768, 32, 16, 4, 128, 4096
PLAIN = "bfloat16"
FORMATS = (
    "compressed-tensors FP8, a scale per output", "compressed-tensors FP8 in blocks", "compressed-tensors int8",
    "compressed-tensors int4, groups of 32", "compressed-tensors NVFP4", "compressed-tensors MXFP4", "ModelOpt NVFP4",
    "MXFP8", "AWQ", "GPTQ",
)  # fmt: skip
ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
}  # fmt: skip
EXPERT = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.loading", allow_abbrev=False)
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="size of each checkpoint (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="loads per format (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/loading-<date>-<cpu>.json"
    )
    args = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    rows: list[dict[str, Any]] = []
    for name in (PLAIN, *FORMATS):
        with tempfile.TemporaryDirectory(prefix="wideep_bench_") as directory:
            size = write(name, Path(directory), args.gigabytes * 1e9)
            times = [load(Path(directory)) for _ in range(args.repeats)]
        taken = statistics.median(times)
        rows.append({"format": name, "bytes": size, "times_s": times, "s": taken})
        of_plain = taken / rows[0]["s"] * rows[0]["bytes"] / size
        print(
            f"{name:45} {size / 1e9:5.2f} GB  {taken:6.2f} s  {size / 1e9 / taken:5.2f} GB/s  {of_plain:5.2f} x bfloat16's "
            f"time per byte",
            flush=True,
        )
    result = {"benchmark": "loading", "environment": card, "rows": rows}
    if args.save:
        save_result("loading", result)
    print_tail(result)
    return 0


def load(directory: Path) -> float:
    """Return the seconds to build one rank's engine."""
    config = EngineConfig(
        directory=directory, kv_cache_bytes=1 << 28, max_model_len=512, max_num_seqs=4, threads=2
    )  # fmt: skip
    begun = time.perf_counter()
    built = assemble(config, NoDoorbell())
    taken = time.perf_counter() - begun
    del built
    gc.collect()
    return taken


def write(name: str, directory: Path, num_bytes: float) -> int:
    """Write a checkpoint in a format of `PUBLISHED`. Return its bytes. All layers and experts are equal, which does not affect loading."""
    published = None if name == PLAIN else PUBLISHED[name]
    generator = torch.Generator().manual_seed(0)

    def drawn(shapes: Mapping[str, tuple[int, int]], encode: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for module, shape in shapes.items():
            weight = (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16()
            stored = {"weight": weight} if encode is None else encode(weight.float()).stored
            found |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        return found

    expert = drawn(EXPERT, published and published.experts)
    attention = drawn(ATTENTION, published and published.attention)
    layer = {
        **attention,
        "mlp.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16() / HIDDEN**0.5,
        **{
            f"{part}.weight": torch.ones(size).bfloat16()
            for part, size in (
                ("input_layernorm", HIDDEN),
                ("post_attention_layernorm", HIDDEN),
                ("self_attn.q_norm", HEAD_DIM),
                ("self_attn.k_norm", HEAD_DIM),
            )
        },
        **{
            f"mlp.experts.{index}.{part}": tensor
            for index in range(EXPERTS)
            for part, tensor in expert.items()
        },
    }
    num_layers = max(1, round(num_bytes / sum(tensor.nbytes for tensor in layer.values())))
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    rest = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    tensors = {
        **rest,
        **{f"model.layers.{at}.{part}": tensor for at in range(num_layers) for part, tensor in layer.items()},
    }
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # tensors must not share memory
    save_file(copies, directory / "model.safetensors", {"format": "pt"})
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_local_experts=EXPERTS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCABULARY,
        num_hidden_layers=num_layers, num_experts_per_tok=8, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        max_position_embeddings=4096,
    ).to_dict()  # fmt: skip
    if published and published.config:
        config["quantization_config"] = published.config
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3MoeForCausalLM"]}))
    return sum(tensor.nbytes for tensor in tensors.values())


if __name__ == "__main__":
    sys.exit(main())
