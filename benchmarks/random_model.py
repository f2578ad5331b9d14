"""A seeded random Qwen3-MoE checkpoint with the demo model's tokenizer, made once in the cache folder.

The shape is small enough for a laptop and large enough that weights, not overhead, set the time of a step: 43 M
active parameters per decoded token. Weights are drawn so wide that activations keep their size through the layers,
routers are decided and logits have a clear maximum: with a usual initialisation (0.02) the softmax is nearly flat,
greedy tokens hang on the last bits, and no two programs agree. Random text says nothing, the time it takes does.

Run `python -m benchmarks.random_model` to make it and print its path.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe.demo_model import demo_model_path, ensure_demo_model

FOLDER_NAME = "random-qwen3-moe-v1"  # a change of shape, seed or spread gets a new one
SEED = 0
LOGIT_SPREAD = 4.0  # standard deviation of the logits
ROUTER_SPREAD = 2.0  # likewise of the router's
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,  # of dense layers, of which there are none
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def ensure_random_model(cache_root: Path | None = None) -> Path:
    """Return the checkpoint's folder, making it (and the demo model, for its tokenizer) where it is not there."""
    target = demo_model_path(cache_root).with_name(FOLDER_NAME)
    if target.exists():
        return target
    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model(cache_root))
    scratch = Path(tempfile.mkdtemp(prefix=f"{FOLDER_NAME}.", dir=target.parent))
    try:
        draw_model(Qwen3MoeConfig(**SHAPE)).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.rename(scratch, target)  # whole or not at all; fails where another process was first
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def draw_model(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """Return a float32 model with weights from `SEED`."""
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:  # the norms' gains
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=spread(name, parameter.shape[-1]), generator=generator)
    return model


def spread(name: str, fan_in: int) -> float:
    """Return a matrix's standard deviation, such that outputs have the wanted size for inputs of size 1."""
    if "embed_tokens" in name:
        return 1.0
    wanted = LOGIT_SPREAD if "lm_head" in name else ROUTER_SPREAD if name.endswith("mlp.gate.weight") else 1.0
    return float(wanted / fan_in**0.5)


if __name__ == "__main__":
    print(ensure_random_model())
