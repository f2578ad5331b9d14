"""Tiny seeded checkpoints of the supported MoE families, written to disk by `transformers` itself.

Weights are drawn wide, so that logits differ by far more than rounding. Every family keeps its special features:
node-limited groups, shared experts, sinks, sliding windows, partial rotary, QK norms, biases.
"""

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

from tests.support.models.installed import require_type

VOCABULARY = 256
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
}
# Drawn less wide: the chunked delta rule of `transformers` is further from float64 than ours, which is token by token.
GATED_DELTA: dict[str, Any] = {
    "initializer_range": 0.08,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KIMI_DELTA: dict[str, Any] = {
    **MLA,
    "initializer_range": 0.08,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
}
# Layers that keep a state per sequence, mixed with layers that keep keys and values.
RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA,
    "lara_mini": {
        **GATED_DELTA,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "sliding_window": 8,
    },
    "kimi_linear": KIMI_DELTA,
    "bailing_hybrid": KIMI_DELTA,
    "nemotron_h": {
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "moe", "attention", "mamba", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
        "num_local_experts": 8,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "mamba_expand": 2,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "conv_L_cache": 3,
    },
    "minimax": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_local_experts": 8,
        "intermediate_size": 32,
        "block_size": 16,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.2,
        "linear_attn_beta_factor": 0.9,
        "mlp_alpha_factor": 1.1,
        "mlp_beta_factor": 0.7,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 8,
        "intermediate_size": 32,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
    },
}
# Enough heads that no two tokens score exactly 0. `transformers` does not define which of two equal tokens it chooses.
INDEXED: dict[str, Any] = {
    **MLA,
    "num_local_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 16,
    "index_n_heads": 24,
    "index_head_dim": 32,
}
# Attention to tokens chosen by an index, fewer than the contexts of tests have.
SPARSE_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    "axk2": INDEXED,
    "dots3_note_text": {
        **INDEXED,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 8,
        "shared_experts_intermediate_size": 48,
        "head_dim": 32,
        "sliding_window": 8,
        # Layers with a window have other sizes than layers with an index.
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 48,
        "swa_kv_lora_rank": 64,
        "swa_head_dim": 64,
        "swa_qk_nope_head_dim": 32,
        "swa_v_head_dim": 32,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32},
    "qwen2_moe": {"num_experts": 10, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "intermediate_size": 32, "num_key_value_heads": 4},
    "deepseek_v2": MLA,
    "deepseek_v3": {**MLA, "num_experts_per_tok": 3, "topk_method": "noaux_tc"},
    "glm4_moe": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "sliding_window": 8,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 32, "rotary_dim": 8},
    "sarvam_moe": {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    "sarvam_mla": {**MLA, "q_lora_rank": None, "n_group": 2, "topk_group": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "dots1": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoe": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "tie_word_embeddings": True,
    },
}

# Further families with multi-token-prediction layers that we serve.
DRAFTING_FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {**MLA, "n_group": 1, "topk_group": 1},
    "mellum": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "hy_v3": {"num_experts": 8, "moe_intermediate_size": 32, "num_shared_experts": 1},
    "mimo_v2_flash": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "v_head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}

# A few layers of families, of the kinds that the whole family has. For tests with a cost per layer, such as in Triton's interpreter.
SHALLOW: dict[str, dict[str, Any]] = {
    **{
        family: {"num_hidden_layers": 2}
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v32")
    },
    **{
        family: {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        for family in ("qwen3_next", "qwen3_5_moe", "kimi_linear", "minimax")
    },
    **{
        family: {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
        for family in ("glm_moe_dsa", "hy_v4")
    },
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "glm5_next": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"num_hidden_layers": 3, "layer_types": ["mamba", "moe", "attention"]},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
}

MULTIMODAL_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
# Text decoders inside models that also process images: features of the text part.
WRAPPED_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": GATED_DELTA,
    "qwen3_vl_moe": {**FAMILIES["qwen3_moe"], "rope_parameters": MULTIMODAL_ROTARY},
    "glm4v_moe": {
        **FAMILIES["glm4_moe"],
        "rope_parameters": {**MULTIMODAL_ROTARY, "partial_rotary_factor": 0.5},
    },
    "kimi_k25": {**MLA, "num_local_experts": 8, "n_group": 1, "topk_group": 1},
    "mistral_large4": INDEXED,
    "glm5_next": {
        **INDEXED,
        "initializer_range": 0.08,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "qk_rope_head_dim": 0,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "index_kpool": 4,
        "hc_mult": 2,
    },
    "mistral3": {
        **MLA,
        "model_type": "mistral4",
        "head_dim": 32,
        "num_local_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m3_vl": {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "intermediate_size": 32,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
    },
    "gemma4": {
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "enable_moe_block": True,
        "initializer_range": 0.08,
        "global_head_dim": 32,
        "num_hidden_layers": 5,
        "layer_types": [
            *("sliding_attention", "full_attention", "sliding_attention"),
            *("sliding_attention", "full_attention"),
        ],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
    },
    "llama4": LLAMA4,
    "muse_spark": {
        "num_local_experts": 8,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 48,
        "sliding_window": 8,
    },
    "ernie4_5_vl_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": [32, 16],  # of experts for text, and for images
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {**MULTIMODAL_ROTARY, "mrope_section": [3, 3, 2]},
    },
    "hy_v4_vl": {
        **SPARSE_FAMILIES["hy_v4"],
        "rope_parameters": {**MULTIMODAL_ROTARY, "mrope_section": [3, 3, 2]},
    },
    "nemotron_h_omni": RECURRENT_FAMILIES["nemotron_h"],
    "dots3_note": SPARSE_FAMILIES["dots3_note_text"],
    "aria": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32},
}
TOWER = {  # sizes of towers for images and audio
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "position_embedding_size": 8,
    "video_temporal_patch_size": 2,
    "per_layer_config": {},
    "mlp_layer_types": ["dense"],
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 64,
    # by layer
    "patch_sizes": [4],
    "hidden_sizes": [32],
    "depths": [1],
}


def tower_sizes(tower: PreTrainedConfig) -> dict[str, Any]:
    """Return small sizes for those fields of a tower that set sizes."""
    sizes = {name: size for name, size in TOWER.items() if hasattr(tower, name)}
    if getattr(tower, "_heterogeneity_spec", None) is None:
        sizes.pop("per_layer_config", None)
    return sizes


def make_config(family: str, **settings: Any) -> PreTrainedConfig:
    """Return a family's configuration. Skip the test if an installed `transformers` other than the pinned one lacks it."""
    require_type(family)
    if family in WRAPPED_FAMILIES:
        default = AutoConfig.for_model(family)
        text = {
            "model_type": default.text_config.model_type,
            **COMMON,
            **WRAPPED_FAMILIES[family],
            **settings,
        }
        tower = default.vision_config or AutoConfig.for_model(f"{family}_vision")  # Gemma has no default
        towers = {"vision_config": {**tower_sizes(tower), "model_type": tower.model_type}}
        widths = [
            name
            for name in ("out_hidden_size", "adapter_out_dim")
            if hasattr(getattr(default, "audio_config", None), name)
        ]
        if widths:
            sizes = tower_sizes(default.audio_config)
            towers["audio_config"] = {**sizes, **dict.fromkeys(widths, COMMON["hidden_size"])}
        return AutoConfig.for_model(family, text_config=text, **towers)
    own = {**FAMILIES, **RECURRENT_FAMILIES, **SPARSE_FAMILIES, **DRAFTING_FAMILIES}[family]
    return AutoConfig.for_model(family, **{**COMMON, **own, **settings})


def make_model(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Build the oracle: `transformers`' eager model in float32, with seeded weights."""
    config = make_config(family, **settings)
    torch.manual_seed(seed)
    kind = AutoModelForMultimodalLM if family in WRAPPED_FAMILIES else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    seed_special_tensors(model, seed)
    if (
        family == "llama4"
    ):  # reads it from the output of its decoder, which lacks it, and fails (transformers 5.24)
        model.get_decoder().register_forward_hook(
            lambda _module, _inputs, out: setattr(out, "image_outputs", None)
        )
    return model


def seed_special_tensors(model: PreTrainedModel, seed: int) -> None:
    """Fill tensors that `transformers` initialises to zero or leaves empty: biases, sinks, router corrections."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in name or name.endswith(("bias", "sinks")) or not tensor.isfinite().all():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


def write_checkpoint(
    family: str,
    directory: Path,
    seed: int = 0,
    *,
    vocab_size: int = VOCABULARY,
    is_shallow: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Write a family's checkpoint and return its oracle. `options` are passed to save_pretrained (max_shard_size)."""
    model = make_model(family, seed, vocab_size=vocab_size, **(SHALLOW[family] if is_shallow else {}))
    model.save_pretrained(directory, **options)
    return model
