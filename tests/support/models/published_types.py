"""Published checkpoints of types that transformers lacks. The oracle is its class of the same architecture."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.families import make_model
from tests.support.models.family_sweep import write_tiny_wrapped
from tests.support.models.quantise import quantise_fp8

BLOCK = (32, 32)
HEADS, GROUPS, HEAD_DIM, VALUE_DIM, WINDOW = 4, 2, 32, 16, 8
PATTERN = [0, 1, 1]  # of layers: 1 is a sliding layer


def write_kimi_k2(directory: Path) -> PreTrainedModel:
    """Write DeepSeek-V3's files under Kimi-K2's type, which refers to remote code."""
    oracle = make_model("deepseek_v3")
    oracle.save_pretrained(directory)
    _rewrite_config(
        directory, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    )
    return oracle


def write_mimo_v2(
    directory: Path,
    *,
    is_fused: bool = True,
    sliding_kv_heads: int = 2 * GROUPS,
    is_fp8: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Write MiMo-V2.5's files, fused and in FP8 by groups (format from vLLM's mimo_v2.py and conversion tools).

    Args:
        is_fused: Query, key and value are one tensor.
        sliding_kv_heads: Heads of sliding layers. MiMo-V2.5-Pro has equally many in all layers; the oracle then repeats each.
        changes: Fields of config.json.
    """
    rotary = {"rope_type": "default", "partial_rotary_factor": 0.25}
    oracle = make_model(
        "mimo_v2_flash",
        sliding_window=WINDOW + 1,
        attention_value_scale=0.61,
        rms_norm_eps=1e-3,
        layer_types=["sliding_attention" if each else "full_attention" for each in PATTERN],
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={
            "full_attention": {**rotary, "rope_theta": 500.0}, "sliding_attention": {**rotary, "rope_theta": 50.0}
        },
    )  # fmt: skip
    repeats = 2 * GROUPS // sliding_kv_heads
    weights = dict(oracle.named_parameters())
    with torch.no_grad():
        for layer, slides in enumerate(PATTERN):
            for name, dim in (("k", HEAD_DIM), ("v", VALUE_DIM)) if slides else ():
                weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
                heads = weight.unflatten(0, (-1, dim))[::repeats]
                weight.copy_(heads.repeat_interleave(repeats, dim=0).flatten(0, 1))
    oracle.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    meanings = _fuse(tensors, sliding_kv_heads, is_fp8=is_fp8) if is_fused else {}
    with torch.no_grad():
        for name, meaning in meanings.items():
            weights[name].copy_(meaning)
    tensors |= {"visual.patch_embed.weight": torch.zeros(3), "audio_encoder.x": torch.zeros(2)}
    tensors |= {
        "model.mtp.layers.0.self_attn.qkv_proj.weight": torch.zeros(4, 4),
        "speech_embeddings.0.weight": torch.zeros(2),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    _write_mimo_config(
        directory, is_fused=is_fused, sliding_kv_heads=sliding_kv_heads, is_fp8=is_fp8, **changes
    )
    return oracle


def _write_mimo_config(
    directory: Path, *, is_fused: bool, sliding_kv_heads: int, is_fp8: bool, **changes: Any
) -> None:
    gone = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")
    fp8 = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [*BLOCK],
        "activation_scheme": "dynamic",
    }
    values = {
        "model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo_v2.X"},
        "hybrid_layer_pattern": PATTERN, "moe_layer_freq": [1, 0, 1], "rope_theta": 500.0, "swa_rope_theta": 50.0,
        "partial_rotary_factor": 0.25, "layernorm_epsilon": 1e-3, "sliding_window": WINDOW, "attention_value_scale": 0.61,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": sliding_kv_heads, "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": VALUE_DIM, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "attention_projection_layout": "fused_qkv" if is_fused else "split", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_shared_experts": None, "routed_scaling_factor": None, "vision_config": {"depth": 1}, "audio_config": {},
    }  # fmt: skip
    _rewrite_config(directory, *gone, **values | ({"quantization_config": fp8} if is_fp8 else {}) | changes)


def _fuse(tensors: dict[str, Tensor], sliding_kv_heads: int, *, is_fp8: bool) -> dict[str, Tensor]:
    """Fuse query, key and value into one tensor by groups. Return the decoded three if in FP8."""
    meanings: dict[str, Tensor] = {}
    for layer, slides in enumerate(PATTERN):
        names = [f"model.layers.{layer}.self_attn.{each}_proj.weight" for each in "qkv"]
        parts = [tensors.pop(name) for name in names]
        kv_heads = sliding_kv_heads if slides else GROUPS
        repeats = parts[1].shape[0] // HEAD_DIM // kv_heads
        if repeats > 1:  # the oracle repeats each key and value head
            dims = (HEAD_DIM, VALUE_DIM)
            once = [
                part.unflatten(0, (-1, dim))[::repeats].flatten(0, 1)
                for part, dim in zip(parts[1:], dims, strict=True)
            ]
            parts = [parts[0], *once]
        groups = [torch.cat(group) for group in zip(*(part.chunk(GROUPS) for part in parts), strict=True)]
        fused = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        if not is_fp8:
            tensors[fused] = torch.cat(groups)
            continue
        stored = [quantise_fp8(group, BLOCK) for group in groups]
        tensors[fused] = torch.cat([each.stored[""] for each in stored])
        tensors[f"{fused}_scale_inv"] = torch.cat([each.stored["_scale_inv"] for each in stored])
        rows = [part.shape[0] // GROUPS for part in parts]
        meant = [torch.cat(each) for each in zip(*(each.meaning.split(rows) for each in stored), strict=True)]
        if repeats > 1:
            meant[1:] = [
                part.unflatten(0, (kv_heads, -1)).repeat_interleave(repeats, dim=0).flatten(0, 1)
                for part in meant[1:]
            ]
        meanings |= dict(zip(names, meant, strict=True))
    return meanings


def _rewrite_config(directory: Path, *gone: str, **changes: Any) -> None:
    path = directory / "config.json"
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in gone}
    path.write_text(json.dumps(values | changes))


def write_bailing_moe(directory: Path, *, is_fp8: bool = False, **changes: Any) -> PreTrainedModel:
    """Write GLM-4.5's weights under the names of Ling 2.0 (modeling_bailing_moe_v2.py), with fused query, key and value."""
    oracle = make_model(
        "glm4_moe", use_qk_norm=True, attention_bias=False, n_group=4, topk_group=2, routed_scaling_factor=2.5, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    weights = dict(oracle.named_parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("_norm.weight"):
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    oracle.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {_bailing_name(name): tensor for name, tensor in load_file(file).items()}
    for layer in range(oracle.config.num_hidden_layers):
        before = f"model.layers.{layer}.attention."
        parts = [tensors.pop(f"{before}{each}_proj.weight") for each in "qkv"]
        fused = f"{before}query_key_value.weight"
        tensors[fused] = torch.cat(parts)
        if is_fp8:
            stored = quantise_fp8(tensors.pop(fused), BLOCK)
            tensors |= {fused + suffix: tensor for suffix, tensor in stored.stored.items()}
            with torch.no_grad():
                meant = stored.meaning.split([len(part) for part in parts])
                for each, meaning in zip("qkv", meant, strict=True):
                    weights[f"model.layers.{layer}.self_attn.{each}_proj.weight"].copy_(meaning)
    save_file(tensors, file, metadata={"format": "pt"})
    config = oracle.config
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}
    values = {
        "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": config.n_routed_experts,
        "num_shared_experts": config.n_shared_experts, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "use_qkv_bias": False, "use_bias": False, "norm_head": False, "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        "rope_scaling": None, "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
    }  # fmt: skip
    gone = ("n_routed_experts", "n_shared_experts", "rope_parameters", "attention_bias")
    _rewrite_config(directory, *gone, **values | ({"quantization_config": fp8} if is_fp8 else {}) | changes)
    return oracle


def _bailing_name(name: str) -> str:
    for ours, theirs in (
        ("embed_tokens", "word_embeddings"), ("self_attn.o_proj", "attention.dense"), ("self_attn", "attention"),
        ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"), ("gate.e_score_correction_bias", "gate.expert_bias"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def write_step(directory: Path, *, is_wrapped: bool) -> PreTrainedModel:
    """Write Step-3.7's files, or Step-3.5's: heads by kind of layer, a gate for each head, clamped experts."""
    oracle = write_tiny_wrapped(
        "step3p7", directory, n_routed_experts=8, moe_intermediate_size=32, share_expert_dim=32, sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], num_sliding_attention_heads=8, moe_router_scaling_factor=3.0,
        swiglu_limits=[0.0, 0.0, 0.5], swiglu_limits_shared=[0.0, 0.0, 0.7],
    )  # fmt: skip
    if not is_wrapped:
        path = directory / "config.json"
        text = json.loads(path.read_text())["text_config"]
        path.write_text(json.dumps(text | {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"]}))
    return oracle


def write_intern_s2(directory: Path) -> PreTrainedModel:
    """Write Qwen3.5 MoE's files under Intern-S2-Preview's type, with a tower for time series."""
    oracle = make_model("qwen3_5_moe")
    oracle.save_pretrained(directory)
    as_intern_s2(directory)
    return oracle


def as_intern_s2(directory: Path) -> None:
    """Change a written Qwen3.5 MoE to Intern-S2-Preview's type."""
    file = directory / "model.safetensors"
    save_file(
        load_file(file) | {"model.time_series.encoder.weight": torch.zeros(3)},
        file,
        metadata={"format": "pt"},
    )
    values = json.loads((directory / "config.json").read_text())
    _rewrite_config(
        directory, model_type="intern_s2_preview", ts_config={"model_type": "interns2_preview_time_series"},
        vision_config={**values["vision_config"], "model_type": "intern_s2_preview"},
        auto_map={"AutoConfig": "configuration_interns2_preview.X"},
    )  # fmt: skip
