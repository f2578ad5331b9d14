"""Types that transformers lacks give the logits of their architecture, or say what of them it cannot express."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe.families import UnsupportedModelError, read_config
from moe.load.checkpoint import CheckpointError
from moe.model import Skeleton
from tests.moe.test_families import check_logits
from tests.support.engines.serving import build
from tests.support.models.published_types import GROUPS, write_kimi_k2, write_mimo_v2


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


def _change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_published_sizes_of_mimo_v2_5_pro_are_built(tmp_path: Path) -> None:
    """Layers, heads and rotary bases of the published configuration; no weight is made."""
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
    "sinks in all layers": (
        {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias = True; served is False",
    ),
    "no sinks": (
        {"add_swa_attention_sink_bias": False},
        "add_swa_attention_sink_bias = False; served is True",
    ),
    "another layout": (
        {"attention_projection_layout": "x"},
        "attention_projection_layout = 'x'; served is 'fused_qkv'",
    ),
    "scaled rotary embeddings": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = .*served is None"),
    "heads of two sizes": (
        {"swa_head_dim": 16},
        "swa_head_dim = 16 and head_dim = 32; served are equal ones",
    ),
    "no pattern": (
        {"hybrid_layer_pattern": [0, 1]},
        "hybrid_layer_pattern is not a list of 3 zeros and ones",
    ),
    "another router": ({"scoring_func": "softmax"}, "scoring_func = 'softmax'; served is 'sigmoid'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_architecture_cannot_express_is_refused(case: str, tmp_path: Path) -> None:
    changes, why = REFUSED[case]
    write_mimo_v2(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"config.json cannot be served: {why}"):
        read_config(tmp_path)


def test_scales_that_are_not_by_group_are_refused(tmp_path: Path) -> None:
    write_mimo_v2(tmp_path, is_fp8=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    assert tensors[name].shape == (8, 2), "224 rows in 2 groups of 112: 4 blocks of 32 each, the last short"
    tensors[name] = torch.ones(7, 2)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight_scale_inv is \[7, 2\].*takes \[8, 2\]"):
        build(tmp_path, max_model_len=64)
