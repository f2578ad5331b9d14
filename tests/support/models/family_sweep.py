"""Tiny configurations of any `transformers` model type, for sweeps. Sizes are set by name; other fields keep defaults."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.support.models.families import COMMON, VOCABULARY, seed_special_tensors

EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8)
CHOICES = dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2)
SIZES: dict[str, Any] = {
    **COMMON,
    **EXPERTS,
    **CHOICES,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 8,
}
# Sizes of image and audio towers, which we do not compute.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "audio_hidden_size": 32,
    "intermediate_size": 32,
    "mlp_dim": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "output_channels": 32,
    "downsample_channels": [16, 32],
    "global_attn_indexes": [0],
}
KEPT = ("tie_word_embeddings",)  # fields that keep the family's value


def tiny_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """Return a small configuration. `fields` override the common sizes."""
    default = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name) and name not in KEPT}
    if hasattr(default, "kv_lora_rank"):
        sizes["num_key_value_heads"] = 4  # MLA has one per query head
    return AutoConfig.for_model(model_type, **{**sizes, **fields})


def write_tiny(model_type: str, directory: Path, **fields: Any) -> PreTrainedModel:
    """Write a seeded checkpoint. Return the oracle, eager in float32. `fields` override the configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **fields), attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.set_experts_implementation("eager")
    seed_special_tensors(model, seed=0)
    model.save_pretrained(directory)
    return model


def write_tiny_wrapped(model_type: str, directory: Path, **text: Any) -> PreTrainedModel:
    """Write a seeded checkpoint of a conditional-generation class. Return the oracle, eager in float32.

    Args:
        text: Fields of the decoder's configuration. They override the common sizes.
    """
    parts = AutoConfig.for_model(model_type).to_dict()
    towers = {
        name: _shrunk(part)
        for name, part in parts.items()
        if isinstance(part, dict) and "model_type" in part and name != "text_config"
    }
    decoder = {"model_type": parts["text_config"]["model_type"], **COMMON, **text}
    config = AutoConfig.for_model(model_type, text_config=decoder, **towers)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.set_experts_implementation("eager")
    seed_special_tensors(model, seed=0)
    model.save_pretrained(directory)
    return model


def _shrunk(part: dict[str, Any]) -> dict[str, Any]:
    """Return a tower's configuration with small sizes, also in its nested configurations. Drop fields derived from sizes."""
    nested = {
        name: _shrunk(each)
        for name, each in part.items()
        if isinstance(each, dict) and name.endswith("_config")
    }
    plain = {name: each for name, each in part.items() if name not in ("id2label", "label2id", "layer_types")}
    return {**plain, **{name: size for name, size in TOWER.items() if plain.get(name) is not None}, **nested}


def prompts(*lengths: int) -> list[list[int]]:
    """Return seeded token ids, one prompt per length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
