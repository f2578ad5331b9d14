"""Types that transformers lacks return the logits of their architecture, or an error names the unsupported part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from moe.families import UnsupportedModelError, read_config
from moe.load.checkpoint import CheckpointError
from moe.model import Skeleton
from tests.moe.test_families import check_logits
from tests.support.engines.serving import build
from tests.support.models.families import make_model
from tests.support.models.published_types import (
    GROUPS,
    write_bailing_moe,
    write_intern_s2,
    write_kimi_k2,
    write_mimo_v2,
    write_step,
)


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    oracle = write_kimi_k2(tmp_path)
    config = read_config(tmp_path)
    assert config.model_type == "deepseek_v3" and config.kv_lora_rank == oracle.config.kv_lora_rank
    check_logits(oracle, tmp_path)


MIMO: dict[str, dict[str, Any]] = {
    "split": {"is_fused": False},
    "fused": {},
    "fused in FP8, by groups": {"is_fp8": True},
    "the Pro's heads, in FP8": {"is_fp8": True, "sliding_kv_heads": GROUPS},
    "MiMo-V2-Flash in its published form": {"is_fused": False, "model_type": "mimo_v2_flash"},
}


@pytest.mark.parametrize("case", MIMO)
def test_mimo_v2_is_mimo_v2_flash_with_other_tensors(case: str, tmp_path: Path) -> None:
    settings = dict(MIMO[case])
    model_type = settings.pop("model_type", None)
    oracle = write_mimo_v2(tmp_path, **settings)
    if model_type is not None:
        _change(tmp_path, model_type=model_type)
    check_logits(oracle, tmp_path)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_bailing_moe_is_glm4_moe_under_other_names(is_fp8: bool, tmp_path: Path) -> None:
    check_logits(write_bailing_moe(tmp_path, is_fp8=is_fp8), tmp_path)


def test_that_glm4_moe_computes_what_bailing_moe_publishes(tmp_path: Path) -> None:
    """Compare the oracle of the test above with the published block in plain torch, on the published tensors."""
    oracle = write_bailing_moe(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    ids = torch.arange(3, 24)[None]
    with torch.inference_mode():
        wanted = oracle(ids).logits[0]
    torch.testing.assert_close(_bailing_logits(tensors, config, ids[0]), wanted, rtol=1e-4, atol=1e-4)


def _bailing_logits(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """Reimplement modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0: norms, rotary half, groups, shared experts."""
    eps, heads, kv_heads, dim = (
        config[n] for n in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * tensors[name]

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = x @ tensors[f"{name}.gate_proj.weight"].T, x @ tensors[f"{name}.up_proj.weight"].T
        gated: Tensor = functional.silu(gate) * up
        return gated @ tensors[f"{name}.down_proj.weight"].T

    rotary = int(dim * config["partial_rotary_factor"])
    angles = torch.arange(len(ids))[:, None] / config["rope_theta"] ** (torch.arange(0, rotary, 2) / rotary)
    cos, sin = angles.repeat(1, 2).cos()[:, None], angles.repeat(1, 2).sin()[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., :rotary].chunk(2, dim=-1)
        return torch.cat(
            [x[..., :rotary] * cos + torch.cat([-second, first], dim=-1) * sin, x[..., rotary:]], dim=-1
        )

    def experts(x: Tensor, name: str) -> Tensor:
        scores = (x @ tensors[f"{name}.gate.weight"].T).sigmoid()
        corrected = scores + tensors[f"{name}.gate.expert_bias"]
        groups = corrected.view(len(x), config["n_group"], -1)
        kept = groups.topk(2, dim=-1).values.sum(-1).topk(config["topk_group"]).indices
        mask = (
            torch.zeros(groups.shape[:2]).scatter(1, kept, 1.0).bool()[..., None].expand_as(groups).flatten(1)
        )
        chosen = corrected.masked_fill(~mask, float("-inf")).topk(config["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        outputs = torch.stack(
            [mlp(x, f"{name}.experts.{each}") for each in range(config["num_experts"])], dim=1
        )
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
        routed: Tensor = (picked * weights[..., None]).sum(1)
        return routed + mlp(x, f"{name}.shared_experts")

    x = tensors["model.word_embeddings.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        qkv = (
            norm(x, f"{name}.input_layernorm.weight") @ tensors[f"{name}.attention.query_key_value.weight"].T
        )
        query, key, value = qkv.view(len(ids), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        query = turned(norm(query, f"{name}.attention.query_layernorm.weight"))
        key = turned(norm(key, f"{name}.attention.key_layernorm.weight"))
        key, value = (
            each.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for each in (key, value)
        )
        attended = functional.scaled_dot_product_attention(query.transpose(0, 1), key, value, is_causal=True)
        x = x + attended.transpose(0, 1).flatten(1) @ tensors[f"{name}.attention.dense.weight"].T
        inner = norm(x, f"{name}.post_attention_layernorm.weight")
        is_dense = layer < config["first_k_dense_replace"]
        x = x + (mlp(inner, f"{name}.mlp") if is_dense else experts(inner, f"{name}.mlp"))
    logits: Tensor = norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T
    return logits


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_step_3_7_and_its_decoder_step_3_5_have_experts_that_only_lack_the_interface(
    is_wrapped: bool, tmp_path: Path
) -> None:
    check_logits(write_step(tmp_path, is_wrapped=is_wrapped), tmp_path)


@pytest.mark.slow
def test_intern_s2_preview_is_qwen3_5_moe_with_another_tower(tmp_path: Path) -> None:
    check_logits(write_intern_s2(tmp_path), tmp_path)


def _change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_published_sizes_of_mimo_v2_5_pro_are_built(tmp_path: Path) -> None:
    """Layers, heads and rotary bases of the published configuration. No weight is created."""
    write_mimo_v2(tmp_path)
    pattern = [0, *[1] * 5] * 2
    _change(
        tmp_path, hidden_size=6144, num_hidden_layers=12, num_attention_heads=128, swa_num_attention_heads=128,
        num_key_value_heads=8, swa_num_key_value_heads=8, head_dim=192, swa_head_dim=192, v_head_dim=128,
        swa_v_head_dim=128, hybrid_layer_pattern=pattern, moe_layer_freq=[0, *[1] * 11], rope_theta=10_000_000,
        swa_rope_theta=10_000, partial_rotary_factor=0.334, sliding_window=128, n_routed_experts=16,
        num_experts_per_tok=8, max_position_embeddings=1_048_576,
    )  # fmt: skip
    skeleton = Skeleton(tmp_path)
    assert {shape.num_kv_heads for shape in skeleton.cache_shapes} == {8}
    attention: Any = skeleton.model.base_model.layers[1].self_attn
    assert attention.sliding_window == 129 and attention.v_proj.out_features == 8 * 128
    assert skeleton.model.config.rope_parameters["full_attention"]["rope_theta"] == 10_000_000


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Ling 1": (
        {"architectures": ["BailingMoeForCausalLM"]},
        r"architectures = .*must be \['BailingMoeV2ForCausalLM'\]",
    ),
    "biases": ({"use_qkv_bias": True}, "use_qkv_bias = True; must be False"),
    "another router of Ling": (
        {"score_function": "softmax"},
        "score_function = 'softmax'; must be 'sigmoid'",
    ),
    "shared experts of another size": (
        {"moe_shared_expert_intermediate_size": 7},
        "moe_shared_expert_intermediate_size = 7; it must be num_shared_experts times moe_intermediate_size",
    ),
    "sinks in all layers": (
        {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias = True; must be False",
    ),
    "no sinks": (
        {"add_swa_attention_sink_bias": False},
        "add_swa_attention_sink_bias = False; must be True",
    ),
    "another layout": (
        {"attention_projection_layout": "x"},
        "attention_projection_layout = 'x'; must be 'fused_qkv'",
    ),
    "scaled rotary embeddings": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = .*must be None"),
    "heads of two sizes": (
        {"swa_head_dim": 16},
        "swa_head_dim = 16 and head_dim = 32 differ; they must be equal",
    ),
    "no pattern": (
        {"hybrid_layer_pattern": [0, 1]},
        "hybrid_layer_pattern is not a list of 3 zeros and ones",
    ),
    "another router": ({"scoring_func": "softmax"}, "scoring_func = 'softmax'; must be 'sigmoid'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_architecture_cannot_express_is_refused(case: str, tmp_path: Path) -> None:
    changes, why = REFUSED[case]
    is_ling = list(REFUSED).index(case) < 4
    (write_bailing_moe if is_ling else write_mimo_v2)(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"config.json cannot be served: {why}"):
        read_config(tmp_path)


def test_a_flat_configuration_of_step_3_7_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "step3p7", "num_hidden_layers": 45, "sliding_window": 512}'
    )
    with pytest.raises(UnsupportedModelError, match="cannot be served: it has no text_config"):
        read_config(tmp_path)


def test_ling_2_6_is_not_taken_for_ling_3_0_which_has_its_type(tmp_path: Path) -> None:
    make_model("bailing_hybrid").save_pretrained(tmp_path)
    assert read_config(tmp_path).model_type == "bailing_hybrid", "as transformers writes it"
    _change(tmp_path, architectures=["BailingMoeV3ForCausalLM"])
    assert Skeleton(tmp_path).experts, "as Ling 3.0 is published"
    _change(tmp_path, architectures=["BailingMoeV2_5ForCausalLM"])
    with pytest.raises(
        UnsupportedModelError, match=r"architectures = \['BailingMoeV2_5ForCausalLM'\]; must be"
    ):
        read_config(tmp_path)


def test_scales_that_are_not_by_group_are_refused(tmp_path: Path) -> None:
    write_mimo_v2(tmp_path, is_fp8=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    assert tensors[name].shape == (8, 2), "224 rows in 2 groups of 112: 4 blocks of 32 each, the last partial"
    tensors[name] = torch.ones(7, 2)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight_scale_inv is \[7, 2\].*needs \[8, 2\]"):
        build(tmp_path, max_model_len=64)
