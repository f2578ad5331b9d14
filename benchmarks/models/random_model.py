"""Seeded random checkpoints with the demo model's tokenizer, created once in the cache folder.

Shapes of Qwen3-MoE, DeepSeek-V3 and, for long contexts, related models with recurrent layers and a sparse index: small enough for a
laptop, and large enough that weights, not overhead, determine the time of a step (the first: 43 M active parameters per token).
The spread of weights keeps the size of activations through the layers and gives decided routers and logits with a clear maximum.
With a usual initialisation (0.02) the softmax is nearly flat, and greedy tokens depend on the last bits and differ by program.

Run `python -m benchmarks.models.random_model` to create the first and print its path.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV32Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from moe.demo_model import demo_model_path, ensure_demo_model

SEED = 0
LOGIT_SPREAD = 4.0  # standard deviation of the logits
ROUTER_SPREAD = 2.0  # standard deviation of the router's logits
CORRECTION_SPREAD = 0.05  # of the correction that balances DeepSeek's router
_COMMON = {
    "vocab_size": 49152,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


class Architecture(NamedTuple):
    """One architecture at one size."""

    config: type[PreTrainedConfig]
    sizes: dict[str, Any]
    said: dict[str, Any]  # further fields of real checkpoints, which other programs read


_LATENTS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 1536,
}
_DEEP: dict[str, Any] = {
    "vocab_size": 4096,  # the first tokens of the tokenizer
    "hidden_size": 576,
    "num_hidden_layers": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 256,
}
_LONG = {"max_position_embeddings": 16384}

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 1024,  # of dense layers (unused)
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    **_LONG,
}

SHAPES = {
    "qwen3-moe": Architecture(
        Qwen3MoeConfig,
        {
            "num_hidden_layers": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 32,
            "intermediate_size": 1024,  # of dense layers (unused)
        },
        {},
    ),
    "deepseek-v3": Architecture(
        DeepseekV3Config,
        _LATENTS,
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "deepseek-v3-deep": Architecture(  # a layer is a small part of a step; additional rows read few more experts
        DeepseekV3Config,
        {**_LATENTS, **_DEEP},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "qwen3-next": Architecture(Qwen3NextConfig, _HYBRID, {}),
    "qwen3-next-attention": Architecture(
        Qwen3NextConfig, {**_HYBRID, "layer_types": ["full_attention"] * 8}, {}
    ),
    "deepseek-v3.2": Architecture(
        DeepseekV32Config,
        {**_LATENTS, "index_topk": 512, "index_n_heads": 8, "index_head_dim": 64, **_LONG},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}


def ensure_random_model(
    cache_root: Path | None = None, *, shape: str = "qwen3-moe", dtype: torch.dtype = torch.float32
) -> Path:
    """Return the checkpoint's folder. Create it (and the demo model, for its tokenizer) if it does not exist.

    Args:
        cache_root: Cache folder; by default the user's.
        shape: One of `SHAPES`.
        dtype: Type of its weights, float32 or bfloat16.
    """
    kind = "" if dtype is torch.float32 else "-bf16"
    # Increase the number when shape, seed or spread change.
    target = demo_model_path(cache_root).with_name(f"random-{shape}{kind}-v1")
    if target.exists():
        return target
    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model(cache_root), trust_remote_code=False)
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        draw_model(shape).to(dtype).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        config = scratch / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **SHAPES[shape].said}, indent=2))
        os.rename(scratch, target)  # atomic; fails if another process was first
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def config_of(shape: str, **sizes: Any) -> PreTrainedConfig:
    """Return a shape's configuration with other sizes."""
    return SHAPES[shape].config(**{**_COMMON, **SHAPES[shape].sizes, **sizes})


def draw_model(shape: str) -> PreTrainedModel:
    """Return a float32 model with weights from `SEED`."""
    config = config_of(shape)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:  # gains of norms
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=spread(name, parameter.shape[-1]), generator=generator)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=CORRECTION_SPREAD, generator=generator)
    return model


def spread(name: str, fan_in: int) -> float:
    """Return a matrix's standard deviation that gives outputs of the wanted size for inputs of size 1."""
    if "embed_tokens" in name:
        return 1.0
    wanted = LOGIT_SPREAD if "lm_head" in name else ROUTER_SPREAD if name.endswith("mlp.gate.weight") else 1.0
    return float(wanted / fan_in**0.5)


if __name__ == "__main__":
    print(ensure_random_model())
